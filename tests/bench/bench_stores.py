"""What a session-bound ``tools/call`` over HTTP costs with each store, side by side in one run.

    python -m tests.bench.bench_stores [CALLS]

One client, one connection, one call at a time, in a session of the modern era: a call without
a key costs the store one step (to admit it), a call with a key two (and to keep its answer).
Two figures each: the server process's own CPU time per call, and the time until the client
has its answer, in which the store's round trips are. Rounds alternate between the stores, and
the median round counts. A Redis of its own is started, without persistence.
"""

from __future__ import annotations

import itertools
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

from mcp_sessions.errors import ConfigurationError
from mcp_sessions.stores.urls import open_store
from tests.bench.bench_calls import MODERN, Case, Client, Server
from tests.support.redis_server import redis_server

ROUNDS = 5
BASE = "memory"


class Figures(NamedTuple):
    """Microseconds per call."""

    cpu: float
    answer: float


def urls(directory: Path, redis: str) -> dict[str, str]:
    """Name → URL of each store that there is here."""
    wanted = {
        BASE: "memory://",
        "sqlite": f"sqlite:///{directory}/normal.db",
        "sqlite, full": f"sqlite:///{directory}/full.db?durability=full",
        "redis": redis,
    }
    found: dict[str, str] = {}
    for name, url in wanted.items():
        try:
            open_store(url)
        except ConfigurationError as missing:
            print(f"left out: {name} ({missing})")
        else:
            found[name] = url
    return found


def measure(stores: dict[str, str], calls: int) -> dict[tuple[str, bool], Figures]:
    """The figures of each store, without and with a request key: the median round."""
    servers = {name: Server("ours", url) for name, url in stores.items()}
    try:
        in_session = Case("", "ours", MODERN, session=True)
        clients = {name: Client(in_session, server.port) for name, server in servers.items()}
        keys = map(str, itertools.count())
        cases = [(name, keyed) for name in stores for keyed in (False, True)]
        rounds: dict[tuple[str, bool], list[Figures]] = {case: [] for case in cases}
        for number in range(ROUNDS + 1):
            for name, keyed in cases:
                client, server = clients[name], servers[name]
                client.wake()
                begun, before = time.perf_counter(), server.cpu()
                for _ in range(calls):
                    client.call(next(keys) if keyed else None)
                spent, took = server.cpu() - before, time.perf_counter() - begun
                if number:  # the first one warms up
                    figures = Figures(spent / calls * 1e6, took / calls * 1e6)
                    rounds[name, keyed].append(figures)
        return {
            case: Figures(*(statistics.median(column) for column in zip(*found, strict=True)))
            for case, found in rounds.items()
        }
    finally:
        for server in servers.values():
            server.stop()


def main() -> None:
    """Measure, and print a table with what each store adds to memory."""
    calls = int(sys.argv[1]) if len(sys.argv) > 1 else 1_000
    with tempfile.TemporaryDirectory() as directory, redis_server() as redis:
        figures = measure(urls(Path(directory), redis.url), calls)
    print(f"per session-bound tools/call over HTTP, {calls} calls in each of {ROUNDS} rounds")
    for (name, keyed), found in figures.items():
        base = figures[BASE, keyed]
        print(
            f"  {name + (', keyed' if keyed else ''):<22}"
            f" server CPU {found.cpu:6.0f} µs  {found.cpu / base.cpu:5.2f} x"
            f"   until the answer {found.answer:6.0f} µs  {found.answer - base.answer:+6.0f} µs"
        )


if __name__ == "__main__":
    main()
