"""What a session-bound ``tools/call`` over HTTP costs with each store, side by side in one run.

    python -m tests.bench.bench_stores [CALLS]

One client, one connection, one call at a time, in a session of the modern era: a call without
a key costs the store one step (to admit it), a call with a key two (and to keep its answer).
Two figures each: the server process's own CPU time per call, and the time until the client
has its answer, in which the store's round trips are. The session has had more calls than it keeps
answers, so that for each new one an old one is dropped. Rounds alternate between the stores, and
the median round counts. A Redis of its own is started, without persistence.
"""

from __future__ import annotations

import itertools
import statistics
import sys
import time
from collections.abc import Iterator
from typing import NamedTuple

from tests.bench.bench_calls import MODERN, Case, Client, Server
from tests.bench.rows import Row, report
from tests.bench.stores import stores as all_stores

ROUNDS = 5
BASE = "memory"


class Figures(NamedTuple):
    """Microseconds per call."""

    cpu: float
    answer: float


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


def rows(calls: int) -> Iterator[Row]:
    """With the ratio to memory."""
    with all_stores() as each:
        urls = {name: each.url(name, "calls") for name in each.names}
        urls["sqlite, full"] = f"{each.url('sqlite', 'full')}?durability=full"
        figures = measure(urls, calls)
        for (name, keyed), found in figures.items():
            yield Row(
                name=f"{name}, {'with a key' if keyed else 'without a key'}",
                measured=found.cpu,
                unit="µs",
                ratio=None if name == BASE else found.cpu / figures[BASE, keyed].cpu,
                beside="times memory",
                includes=f"{found.answer:.0f} µs until the answer",
            )
        yield from each.missing()


def main() -> None:
    """Measure, and print."""
    report(rows(int(sys.argv[1]) if len(sys.argv) > 1 else 1_000))


if __name__ == "__main__":
    main()
