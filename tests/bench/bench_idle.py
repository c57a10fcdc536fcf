"""What open streams cost while nothing happens: CPU of the server, and of Redis.

    python -m tests.bench.bench_idle [--streams N] [--seconds S] [--stores memory,sqlite,redis]

GET streams of as many 2025 clients, over real sockets. The clients only read.
"""

from __future__ import annotations

import argparse
import resource
import socket
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

from tests.bench.bench_calls import Server
from tests.bench.bench_fanout import cpu_of
from tests.bench.bench_noise import Client
from tests.support.redis_server import redis_server

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


def main() -> None:
    """Measure, and print a line for each store."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--streams", type=int, default=1_000)
    parser.add_argument("--seconds", type=float, default=20)
    parser.add_argument("--stores", default="memory,sqlite,redis")
    asked = parser.parse_args()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(hard, asked.streams + 1_000)), hard))
    failed = False
    with tempfile.TemporaryDirectory() as directory, redis_server() as redis:
        urls = {
            "memory": "memory://",
            "sqlite": f"sqlite:///{Path(directory)}/idle.db",
            "redis": redis.url,
        }
        for store in asked.stores.split(","):
            server = Server("noisy", urls[store])
            with ExitStack() as streams:
                streams.callback(server.stop)
                for _ in range(asked.streams):
                    streams.enter_context(opened(server.port))
                time.sleep(3)
                before, its = server.cpu(), cpu_of(redis.pid)
                time.sleep(asked.seconds)
                scale = 100 * 1_000 / asked.streams / asked.seconds
                used, store_used = (
                    (server.cpu() - before) * scale,
                    (cpu_of(redis.pid) - its) * scale,
                )
            is_over = used > MOST[store] or (store == "redis" and store_used > MOST[store])
            failed = failed or is_over
            print(
                f"  {store:<7} {asked.streams} streams   {used:5.2f} % of a core for each 1,000"
                f"   Redis {store_used:5.2f} %{'   TOO MUCH' if is_over else ''}",
                flush=True,
            )
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
