"""What open streams cost while nothing happens: CPU of the server, and of Redis.

    python -m tests.bench.bench_idle [--streams N] [--seconds S] [--stores memory,sqlite,redis]

GET streams of as many 2025 clients, over real sockets. The clients only read.
"""

from __future__ import annotations

import argparse
import resource
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack

from tests.bench.bench_calls import Server
from tests.bench.bench_noise import Client
from tests.bench.rows import Row, report
from tests.bench.stores import STORES, stores

MOST = {"memory": 0.3, "sqlite": 0.3, "redis": 0.5}
"""Percent of a core for a thousand streams."""


def opened(port: int) -> socket.socket:
    """A client's GET stream; what else it had is closed."""
    client = Client(port)
    client.initialize()
    stream = client.raw("GET", None)
    stream.recv(1_024)
    client.wake()
    return stream


def rows(wanted: str, count: int, seconds: float) -> Iterator[Row]:
    """For each store."""
    with stores(wanted) as each:
        for store in each.names:
            server = Server("noisy", each.url(store, "idle"))
            with ExitStack() as streams:
                streams.callback(server.stop)
                for _ in range(count):
                    streams.enter_context(opened(server.port))
                time.sleep(3)
                before, its = server.cpu(), each.cpu(store)
                time.sleep(seconds)
                scale = 100 * 1_000 / count / seconds
                used, store_used = (server.cpu() - before) * scale, (each.cpu(store) - its) * scale
            yield Row(name=f"{store}: server", measured=used, unit="%", most=MOST[store])
            if store == "redis":
                yield Row(name="redis: Redis", measured=store_used, unit="%", most=MOST[store])
        yield from each.missing()


def main() -> None:
    """Measure, and print."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--streams", type=int, default=1_000)
    parser.add_argument("--seconds", type=float, default=20)
    parser.add_argument("--stores", default=STORES)
    asked = parser.parse_args()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(hard, asked.streams + 1_000)), hard))
    report(rows(asked.stores, asked.streams, asked.seconds))


if __name__ == "__main__":
    main()
