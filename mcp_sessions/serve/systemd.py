"""Tell systemd that the process serves, reloads or stops, as ``Type=notify`` asks for.

This is the protocol of ``sd_notify(3)``: a datagram to the socket that ``NOTIFY_SOCKET`` names.
Without that variable nothing is sent.
"""

from __future__ import annotations

import logging
import os
import socket
import time

logger = logging.getLogger(__name__)

VARIABLE = "NOTIFY_SOCKET"

READY = "READY=1"
STOPPING = "STOPPING=1"


def notify(state: str) -> None:
    """Send a state, and never wait for it."""
    address = os.environ.get(VARIABLE)
    if not address:
        return
    if address.startswith("@"):
        # An abstract name: it is in no folder.
        address = f"\0{address[1:]}"
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
            sender.setblocking(False)
            sender.sendto(state.encode(), address)
    except OSError as failed:
        logger.warning("systemd was not notified of %s: %s", state.splitlines()[0], failed)


def reloading() -> str:
    return f"RELOADING=1\nMONOTONIC_USEC={time.monotonic_ns() // 1000}"
