"""Clients that hold streams open and do nothing: a process of its own, which answers pings.

    python -m bench.idlers WAY PORT COUNT

WAY is ``GET``, ``WebSocket``, or ``bare``: a GET that nobody initialized for. It says ``ready``
when all are open, and ends with its input.
"""

from __future__ import annotations

import resource
import selectors
import socket
import sys
import threading

from bench.bench_noise import Client
from bench.sockets import RawSocket

PING, PONG = 0x89, 0x8A


def opened(way: str, port: int) -> socket.socket:
    if way == "WebSocket":
        return RawSocket(port).socket
    client = Client(port)
    if way == "GET":
        client.initialize()
    stream = client.raw("GET", None)
    stream.recv(1_024)
    client.wake()
    return stream


def main() -> None:
    way, port, count = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    selector = selectors.DefaultSelector()

    def read() -> None:
        while True:
            for key, _ in selector.select():
                stream = key.fileobj
                assert isinstance(stream, socket.socket)
                data = stream.recv(65_536)
                assert data, "the server closed a stream"
                if way == "WebSocket" and data[0] == PING:
                    # With a mask that changes nothing.
                    stream.sendall(bytes([PONG, 0x80 | data[1]]) + bytes(4) + data[2:])

    for number in range(count):
        selector.register(opened(way, port), selectors.EVENT_READ)
        if not number:
            threading.Thread(target=read, daemon=True).start()
    print("ready", flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    main()
