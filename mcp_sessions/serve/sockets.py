from __future__ import annotations

import errno
import os
import socket

LISTEN_BACKLOG = 65_535
"""Connections that the system accepts before we do, if it has no smaller bound of its own (Linux:
``net.core.somaxconn``, 4,096). A client that is not accepted tries again after 1, 2, 4, 8 s. When
thousands of clients reconnect at once, the last ones would be away for that long.
"""


def listen_on(host: str, port: int) -> socket.socket:
    """A socket that takes connections, so that whoever connects early waits and is not refused.

    Raises:
        OSError: The address cannot be listened on.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # Not `socket.create_server`: it replaces the texts of errors by its own. Said to be TCP:
    # asyncio switches Nagle's delay off for such sockets only, and an answer written in two steps
    # would wait for it.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        if os.name == "posix":
            # Otherwise a port is taken for minutes after its last connection. (On Windows the same
            # option would let two servers share a port.)
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen(LISTEN_BACKLOG)
    except OSError:
        listener.close()
        raise
    return listener


def accept_some(
    listener: socket.socket, most: int = LISTEN_BACKLOG
) -> tuple[list[socket.socket], OSError | None]:
    """Accept the connections that wait, and no more than ``most``. Return them, and why the rest
    could not be accepted.
    """
    accepted: list[socket.socket] = []
    listener.setblocking(False)
    while len(accepted) < most:
        try:
            connection, _ = listener.accept()
        except BlockingIOError:
            break
        except OSError as failed:
            if failed.errno == errno.ECONNABORTED:
                continue
            return accepted, failed
        connection.setblocking(False)
        accepted.append(connection)
    return accepted, None
