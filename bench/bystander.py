"""Somebody who has nothing to do with the clients of `bench_outage`, and asks the same server.

    python -m bench.bystander PORT

Asks for a page ten times a second until a line comes on its input. Then it writes the seconds that
each answer took.
"""

from __future__ import annotations

import json
import select
import socket
import sys
import time

EVERY = 0.1
"""Seconds between two questions."""

WITHIN = 30.0
"""Seconds that an answer may take."""


def ask(port: int) -> float:
    """Seconds until the answer begins; ``WITHIN`` if there is none."""
    begun = time.monotonic()
    try:
        with socket.create_connection(("127.0.0.1", port), WITHIN) as asking:
            asking.sendall(b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n\r\n")
            if not asking.recv(1):
                return WITHIN
    except OSError:
        return WITHIN
    return time.monotonic() - begun


def main() -> None:
    port, found = int(sys.argv[1]), list[float]()
    while not select.select([sys.stdin], [], [], EVERY)[0]:
        found.append(ask(port))
    print(json.dumps(found))


if __name__ == "__main__":
    main()
