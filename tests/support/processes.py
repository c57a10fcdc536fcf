"""Servers in processes of their own: a port for one, and when it can be called."""

import socket
import subprocess
import time
from collections.abc import Callable

WITHIN = 60.0
"""Seconds in which a server starts, also on a busy machine."""


def free_port() -> int:
    """A port of this machine that nobody listens on."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


def wait_until_it_listens(
    process: "subprocess.Popen[bytes]", port: int, said: Callable[[], str] = str
) -> None:
    """Return once the server accepts connections.

    Args:
        process: The server.
        port: Where it listens.
        said: What it said, for the error.

    Raises:
        AssertionError: It ended, or did not listen within ``WITHIN`` seconds.
    """
    until = time.monotonic() + WITHIN
    while time.monotonic() < until and process.poll() is None:
        try:
            socket.create_connection(("127.0.0.1", port), timeout=1).close()
            return
        except OSError:
            # Nothing says when it listens; this is a bounded wait on the condition.
            time.sleep(0.02)
    raise AssertionError(f"a server did not start: {said()}")
