"""CPU of open streams while nothing happens.

    python -m bench.bench_idle [--streams N] [--stores memory,sqlite,redis]

The figure is the percent of a core for 1,000 open streams, each of another 2025 client, over real
sockets. The CPU of the same server without streams is taken off. The rest keeps the streams open: a
comment on each stream every 15 seconds, or a ping and its pong on a WebSocket. The ratio compares
it with a bare ASGI application that writes as many comments. A ``subscriptions/listen`` stream is
kept open as a GET stream is.
"""

from __future__ import annotations

import argparse
import resource
import subprocess
import sys
import time
from collections.abc import Iterator

from bench.bench_calls import Server
from bench.rows import Row, report
from bench.stores import STORES, Stores, stores
from mcp_sessions_transports.http.sse import KEEP_ALIVE

MOST = {"memory": 0.3, "sqlite": 0.3, "redis": 0.5}
"""Percent of a core for a thousand streams."""

PERIODS = {"GET": 2 * KEEP_ALIVE, "WebSocket": 40.0}
"""Seconds that are measured: in them each stream has two comments, or pings."""


def measure(each: Stores, store: str, way: str, count: int, seconds: float) -> tuple[float, float]:
    """Percent of a core, of the server and of the store's process, for 1,000 streams."""
    server = (
        Server("comments", str(KEEP_ALIVE))
        if way == "bare"
        else Server("noisy", each.url(store, way))
    )

    def used(seconds: float) -> tuple[float, float]:
        before, its = server.cpu(), each.cpu(store)
        time.sleep(seconds)
        return (server.cpu() - before) / seconds, (each.cpu(store) - its) / seconds

    clients: subprocess.Popen[str] | None = None
    try:
        time.sleep(1)
        nothing = used(5)
        clients = subprocess.Popen(
            [sys.executable, "-m", "bench.idlers", way, str(server.port), str(count)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert clients.stdout is not None and clients.stdin is not None
        if clients.stdout.readline() != "ready\n":
            raise SystemExit(f"the clients of {way} could not begin")
        time.sleep(3)
        all_of_them = used(seconds)
        assert clients.poll() is None, "the clients ended"
    finally:
        if clients is not None:
            clients.kill()
            clients.communicate()
        server.stop()
    of_server, of_store = (
        100 * 1_000 / count * (now - before)
        for now, before in zip(all_of_them, nothing, strict=True)
    )
    return of_server, of_store


def rows(wanted: str, most: int) -> Iterator[Row]:
    with stores(wanted) as each:
        floor, _ = measure(each, "memory", "bare", most, PERIODS["GET"])
        yield Row(name="bare application, comments", measured=floor, unit="%")
        for store in each.names:
            for way in ("GET", "WebSocket") if store == "memory" else ("GET",):
                count = most if store == "memory" else min(most, 1_000)
                server, its = measure(each, store, way, count, PERIODS[way])
                yield Row(
                    name=f"{store}, {way}",
                    measured=server,
                    unit="%",
                    ratio=server / floor,
                    basis="times the bare application",
                    most=MOST[store],
                    includes=f"measured with {count:,}",
                )
                if store == "redis":
                    yield Row(name="redis, GET: Redis", measured=its, unit="%", most=MOST[store])
        yield from each.missing()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--streams", type=int, default=4_000, help="in memory; else 1,000")
    parser.add_argument("--stores", default=STORES)
    asked = parser.parse_args()
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    report(rows(asked.stores, asked.streams))


if __name__ == "__main__":
    main()
