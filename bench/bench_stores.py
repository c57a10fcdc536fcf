"""Cost of a ``tools/call`` in a session, with each store.

    python -m bench.bench_stores [CALLS]

One client has one connection and makes one call at a time, in a session. The stores take turns, and
the median round counts. The figure is the CPU time of the server's process for a call. The last
column has the time until the client has its answer.

*Key* is a request key, with which a call runs only once. A call without a key uses the store once:
the store checks the session. A call with a key uses the store twice, since the store also keeps the
answer. Before the bench begins, the session keeps as many answers as it can. So each new answer
replaces an old one.

*sqlite, full* is SQLite with ``durability=full``. The bench starts its own Redis server, without
persistence. Rows with *scripts* have the number of Redis scripts that a call runs. It starts its
own Postgres server as well, with ``synchronous_commit`` off. Rows with *times Redis* have the time
until the client has its answer, on Postgres by that on Redis.
"""

from __future__ import annotations

import itertools
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from typing import NamedTuple

from bench.bench_calls import ERAS, Case, Client, Server
from bench.rows import Row, report
from bench.stores import WITH_POSTGRES
from bench.stores import stores as all_stores

Scripts = Callable[[], int]
"""How many ran in Redis so far."""

ROUNDS = 5
BASE = "memory"
SCRIPTS_AIM = {False: 1.05, True: 2.05}
"""By whether there is a key; what a server does now and then is within the rest."""

TIMES_REDIS = 2.5
CPU_AIM = {False: 520.0, True: 650.0}
"""Microseconds, on Redis."""


class OfStore(NamedTuple):
    store: str
    era: str
    keyed: bool


class Figures(NamedTuple):
    """Microseconds per call."""

    cpu: float
    answer: float
    scripts: float


def measure(stores: dict[str, str], calls: int, scripts: Scripts) -> dict[OfStore, Figures]:
    """The figures of each store, without and with a request key: the median round."""
    servers = {name: Server("ours", url) for name, url in stores.items()}
    try:
        clients = {
            (name, era): Client(Case("", "ours", era, session=True), server.port)
            for name, server in servers.items()
            for era in ERAS
        }
        keys = map(str, itertools.count())
        cases = [OfStore(*client, keyed) for client in clients for keyed in (False, True)]
        rounds: dict[OfStore, list[Figures]] = {case: [] for case in cases}
        for number in range(ROUNDS + 1):
            for case in cases:
                client, server = clients[case[:2]], servers[case.store]
                client.wake()
                begun, before, ran = time.perf_counter(), server.cpu(), scripts()
                for _ in range(calls):
                    client.call(next(keys) if case.keyed else None)
                spent, took = server.cpu() - before, time.perf_counter() - begun
                if number:  # the first one warms up
                    each = (scripts() - ran) / calls
                    rounds[case].append(Figures(spent / calls * 1e6, took / calls * 1e6, each))
        return {
            case: Figures(*(statistics.median(column) for column in zip(*found, strict=True)))
            for case, found in rounds.items()
        }
    finally:
        for server in servers.values():
            server.stop()


def rows(calls: int) -> Iterator[Row]:
    with all_stores(WITH_POSTGRES) as each:
        urls = {name: each.url(name, "calls") for name in each.names}
        urls["sqlite, full"] = f"{each.url('sqlite', 'full')}?durability=full"
        figures = measure(urls, calls, lambda: each.executed("EVALSHA"))
        for case, found in figures.items():
            key = "with a key" if case.keyed else "without a key"
            name, is_redis = f"{case.store}, {ERAS[case.era]}, {key}", case.store == "redis"
            base = figures[case._replace(store=BASE)].cpu
            yield Row(
                name=name,
                measured=found.cpu,
                unit="µs",
                ratio=None if case.store == BASE else found.cpu / base,
                basis="times memory",
                most=CPU_AIM[case.keyed] if is_redis else None,
                includes=f"{found.answer:.0f} µs until the answer",
            )
            redis = figures.get(case._replace(store="redis"))
            if case.store == "postgres" and redis is not None:
                times = found.answer / redis.answer
                yield Row(name=f"{name}: times Redis", measured=times, most=TIMES_REDIS)
            if is_redis:
                most = SCRIPTS_AIM[case.keyed]
                yield Row(name=f"{name}: scripts", measured=found.scripts, most=most)
        yield from each.missing()


def main() -> None:
    report(rows(int(sys.argv[1]) if len(sys.argv) > 1 else 1_000))


if __name__ == "__main__":
    main()
