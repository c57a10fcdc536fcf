"""Server CPU of a subscribed WebSocket that closes, if all close at once.

    python -m bench.bench_closing [--most N]

Each WebSocket has no session, and two subscriptions: one resource that all share, and one of its
own. The figure is the server's CPU from the moment when all close until the last one is removed,
for each WebSocket.
"""

from __future__ import annotations

import argparse
import os
import resource
import time
from collections.abc import Iterator

from bench.bench_calls import Server
from bench.rows import Row, growth, report
from bench.sockets import WITHIN, RawSocket

SIZES = (250, 500, 1_000, 2_000)
ROUNDS = 3


def descriptors(server: Server) -> int:
    return len(os.listdir(f"/proc/{server.process.pid}/fd"))


def closed(server: Server, count: int) -> float:
    """Seconds of CPU to close so many."""
    sockets = [RawSocket(server.port)]
    before = descriptors(server) - 1
    sockets += [RawSocket(server.port) for _ in range(count - 1)]
    for number, each in enumerate(sockets):
        each.ask("resources/subscribe", {"uri": "note://shared"})
        each.ask("resources/subscribe", {"uri": f"note://{number}"})
    used, until = server.cpu(), time.monotonic() + WITHIN
    for each in sockets:
        each.close()
    while descriptors(server) > before:
        assert time.monotonic() < until, "the server keeps sockets that were closed"
        time.sleep(0.02)
    time.sleep(0.2)
    return server.cpu() - used


def rows(most: int) -> Iterator[Row]:
    server = Server("noisy", "memory://")
    try:
        closed(server, 100)
        found = {
            count: min(closed(server, count) for _ in range(ROUNDS))
            for count in SIZES
            if count <= most
        }
    finally:
        server.stop()
    for count, spent in found.items():
        yield Row(name=f"{count:,} WebSockets, each", measured=spent / count * 1e6, unit="µs")
    yield growth("closing all", found)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--most", type=int, default=2_000)
    asked = parser.parse_args()
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    report(rows(asked.most))


if __name__ == "__main__":
    main()
