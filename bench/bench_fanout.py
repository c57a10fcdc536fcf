"""One update to many subscribed sessions: its cost, and how long other clients wait.

    python -m bench.bench_fanout [--stores memory,sqlite,redis] [--rounds N] [--most N]

The subscribed sessions are not connected. The bench runs in one process, without a network, with
more and more sessions. *CPU of each* is the CPU of this process for each session. The last column
has the time of the whole update, and the CPU of Redis itself. Meanwhile another client makes one
call after the other. *Slowest call* is the longest of them. The ratio compares it with the longest
of as many calls without an update.
"""

from __future__ import annotations

import argparse
import asyncio
import time
from collections.abc import Callable, Iterator
from typing import NamedTuple

import uvloop
from mcp.server import MCPServer

from bench.bench_core import Loopback
from bench.rows import Row, growth, report
from bench.stores import STORES, stores
from mcp_sessions import SessionLayer, SessionPolicy
from mcp_sessions.core.states import Mode
from mcp_sessions.principal import ANONYMOUS
from mcp_sessions.serve.garbage import Collections, set_aside_everything

URI = "note://1"
SIZES = {"memory": (3_125, 12_500, 50_000), "sqlite": (5_000, 20_000), "redis": (2_000, 8_000)}
MOST = {"memory": (8.0, 30.0), "sqlite": (40.0, 50.0), "redis": (60.0, 50.0)}
"""Microseconds for each subscriber, and milliseconds that a call waits at the most."""


class Found(NamedTuple):
    cpu: float
    """Microseconds of this process for each subscriber; the least of all rounds."""

    store_cpu: float
    took: float
    """Seconds."""

    alone: float
    """Milliseconds of the slowest call."""

    with_noise: float


async def slowest(client: Loopback, session: bytes, until: Callable[[int], bool]) -> float:
    """Milliseconds of the slowest of some calls."""
    slowest, calls = 0.0, 0
    while not until(calls):
        begun = time.perf_counter()
        await client.post({"jsonrpc": "2.0", "id": 1, "method": "tools/list"}, session)
        slowest = max(slowest, time.perf_counter() - begun)
        calls += 1
        await asyncio.sleep(0.001)
    return slowest * 1_000


async def measure(store: str, count: int, rounds: int, store_cpu: Callable[[], float]) -> Found:
    server: MCPServer[None] = MCPServer("bench", log_level="ERROR")
    policy = SessionPolicy(max_sessions=1_000_000, max_sessions_per_principal=None)
    layer = SessionLayer(server, store=store, policy=policy)
    client = Loopback(layer.asgi_app())
    async with layer.lifespan():
        for _ in range(count):
            session = await layer.store.create(Mode.PROTOCOL, ANONYMOUS, peer=None, now=time.time())
            await layer.store.subscribe(session.session_id, URI)
        # As the process of ``serve`` does when it begins, and ten times a second.
        set_aside_everything()
        looking = asyncio.create_task(look())
        bystander = await client.initialize()
        cpu, store_used, took = list[float](), list[float](), list[float]()
        alone, with_noise = list[float](), list[float]()
        for _ in range(rounds):
            begun, used, its = time.perf_counter(), time.process_time(), store_cpu()
            await layer.notify_resource_updated(URI)
            cpu.append((time.process_time() - used) / count * 1e6)
            store_used.append((store_cpu() - its) / count * 1e6)
            took.append(time.perf_counter() - begun)
            notified = asyncio.create_task(layer.notify_resource_updated(URI))
            with_noise.append(
                await slowest(client, bystander, lambda _, notified=notified: notified.done())
            )
            await notified
            alone.append(await slowest(client, bystander, lambda calls: calls >= 200))
        looking.cancel()
        return Found(min(cpu), min(store_used), min(took), min(alone), min(with_noise))


async def look() -> None:
    collections = Collections()
    while True:
        await asyncio.sleep(0.1)
        collections.look()


def rows(wanted: str, rounds: int, most: int) -> Iterator[Row]:
    with stores(wanted) as each:
        for store in each.names:
            totals: dict[int, float] = {}
            most_cpu, most_wait = MOST[store]
            for count in (size for size in SIZES[store] if size <= most):
                url = each.url(store, f"{count}")
                found = uvloop.run(measure(url, count, rounds, lambda store=store: each.cpu(store)))
                totals[count] = found.cpu * count
                name = f"{store}, {count:,} sessions"
                yield Row(
                    name=f"{name}: CPU of each",
                    measured=found.cpu,
                    unit="µs",
                    most=most_cpu,
                    includes=f"{found.took:.2f} s for all"
                    + (f"; Redis itself {found.store_cpu:.0f} µs more" if store == "redis" else ""),
                )
                yield Row(
                    name=f"{name}: slowest call",
                    measured=found.with_noise,
                    unit="ms",
                    most=most_wait,
                    ratio=found.with_noise / found.alone,
                    basis="times the slowest without an update",
                )
            if len(totals) > 1:
                yield growth(f"{store}, CPU of all", totals)
        yield from each.missing()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--stores", default=STORES)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--most", type=int, default=1_000_000, help="no more sessions than this")
    asked = parser.parse_args()
    report(rows(asked.stores, asked.rounds, asked.most))


if __name__ == "__main__":
    main()
