"""Calls a second with ``serve --workers N``, and the cost of a shared session.

    python -m bench.bench_workers [--calls N] [--events N] [--rounds N] [--most-workers N]

The workers share a Redis server on a Unix socket. 16 connections call a trivial tool, each one call
at a time. Each worker has the same number of them. The best round of each figure counts. Each
worker, the Redis server and the clients need a core each. On a machine with fewer cores, the ratio
of calls a second is less than the workers could reach. So there is also the CPU of a call.

*A session of their own* means that each connection has its session, so one worker serves it. *One
session* means that all connections call in the same session, so each worker serves some calls. An
event goes to an open GET stream. A call causes it, at the worker of the stream or at another. The
time is from the call until the client of the stream has the event. The CPU is that of such a call,
less the CPU of a call that causes no event.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncGenerator, Generator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

import uvloop

from bench.bench_servers import STORE
from bench.rows import Row, report
from bench.stores import cpu_of, is_there
from bench.wire import Connection, Stream, until
from tests.support.processes import free_port, wait_until_it_listens
from tests.support.redis_server import RedisServer, redis_server

CONNECTIONS = 16
URI = "note://shared"
ECHO = {"name": "echo", "arguments": {"text": "hello"}}


class Sessions(Enum):
    """In which sessions the connections call; the value is how a row names it."""

    NONE = "no session"
    EACH = "a session of their own"
    ONE = "one session"


@dataclass(frozen=True)
class Workers:
    port: int
    pids: tuple[int, ...]
    redis: RedisServer

    def cpu(self) -> tuple[float, float]:
        """Seconds that the workers used so far, and Redis."""
        return sum(map(cpu_of, self.pids)), cpu_of(self.redis.pid)

    async def connection(self) -> tuple[int, Connection]:
        """A client of 2026 without a session, and the worker that serves it."""
        connection = await Connection.to(self.port)
        connection.be_modern()
        result = await connection.ask("tools/call", {"name": "process", "arguments": {}})
        return int(result["content"][0]["text"]), connection

    @asynccontextmanager
    async def connections(self, each: int) -> AsyncGenerator[dict[int, list[Connection]]]:
        found: dict[int, list[Connection]] = {pid: [] for pid in self.pids}
        try:
            while any(len(those) < each for those in found.values()):
                # Together, as many clients that come at once.
                new = await asyncio.gather(*(self.connection() for _ in range(CONNECTIONS)))
                for pid, connection in new:
                    if len(found[pid]) < each:
                        found[pid].append(connection)
                    else:
                        connection.close()
            yield found
        finally:
            for those in found.values():
                for connection in those:
                    connection.close()


@contextmanager
def serving(number: int, redis: RedisServer, store: str) -> Generator[Workers]:
    port = free_port()
    target = Path(__file__).with_name("served.py")
    options = ["--workers", str(number), "--port", str(port), "--log-level", "error"]
    command = [sys.executable, "-m", "mcp_sessions.cli", "serve", *options, str(target)]
    environment = {
        **os.environ,
        STORE: f"{store}?namespace=workers{number}",
        "MCP_SESSIONS_KEYS": "k" * 43,
        "PYTHONPATH": str(Path(__file__).parents[1]),
    }
    keeper = subprocess.Popen(command, env=environment)
    try:
        wait_until_it_listens(keeper, port)
        pids = asyncio.run(_pids(number, port))
        yield Workers(port, pids, redis)
    finally:
        keeper.send_signal(signal.SIGTERM)
        keeper.wait(timeout=60)


async def _pids(number: int, port: int) -> tuple[int, ...]:
    found: set[int] = set()
    end = time.monotonic() + 60
    while len(found) < number:
        assert time.monotonic() < end, f"{len(found)} of {number} workers serve"
        workers = Workers(port, (), None)  # pyright: ignore[reportArgumentType]
        for pid, connection in await asyncio.gather(*(workers.connection() for _ in range(8))):
            found.add(pid)
            connection.close()
    return tuple(sorted(found))


@dataclass(frozen=True)
class Calls:
    a_second: float
    cpu: float
    """Microseconds of all workers for each."""

    redis: float
    client: float
    answer: float
    """Milliseconds until half of them were answered."""


async def calls(workers: Workers, sessions: Sessions, count: int) -> Calls:
    async with workers.connections(CONNECTIONS // len(workers.pids)) as at:
        connections = [connection for those in at.values() for connection in those]
        if sessions is not Sessions.NONE:
            shared = await connections[0].ask("sessions/create", {})
            for connection in connections:
                own = await connection.ask("sessions/create", {})
                created = shared if sessions is Sessions.ONE else own
                connection.be_modern(created["session"])
        times: list[float] = []
        left = count

        async def keep_calling(connection: Connection) -> None:
            nonlocal left
            request = connection.request("tools/call", ECHO)
            connection.result(*await connection.send(request))
            while left > 0:
                left -= 1
                begun = time.perf_counter()
                head, _ = await connection.send(request)
                times.append(time.perf_counter() - begun)
                assert head.startswith(b"HTTP/1.1 200"), head

        begun, client, (cpu, redis) = time.perf_counter(), time.process_time(), workers.cpu()
        await asyncio.gather(*map(keep_calling, connections))
        took = time.perf_counter() - begun
        client = time.process_time() - client
        after, its = workers.cpu()
        done = len(times) + len(connections)
        return Calls(
            done / took,
            (after - cpu) / done * 1e6,
            (its - redis) / done * 1e6,
            client / done * 1e6,
            statistics.median(times) * 1e3,
        )


@dataclass(frozen=True)
class Events:
    answer: float
    """Milliseconds, the median: until the call that caused it was answered."""

    received: float
    cpu: float
    """Microseconds of all workers for each, without the call that caused it."""

    redis: float


async def events(workers: Workers, count: int, *, held_by_another: bool) -> Events:
    async with workers.connections(3) as at:
        holder = workers.pids[0]
        caller = workers.pids[-1] if held_by_another else holder
        client, carries = at[holder][:2]
        calling = at[caller][2]
        for connection in (client, calling):
            connection.meta = {}
        await client.initialize()
        await client.ask("resources/subscribe", {"uri": URI})
        assert client.session is not None
        received: list[float] = []
        arrived = asyncio.Event()

        def receive(_: bytes) -> None:
            received.append(time.perf_counter())
            arrived.set()

        stream = Stream(client.session, receive)
        carries.meta = {}
        stream.open_on(carries)
        await until(lambda: stream.is_open, "the stream is open")
        await calling.initialize()
        params = {"name": "touch", "arguments": {"uri": URI}}
        request = calling.request("tools/call", params)
        # The first finds its way.
        await calling.send(request)
        await until(lambda: len(received) == 1, "the first event")
        received.clear()
        echo = calling.request("tools/call", ECHO)
        before, store_before = workers.cpu()
        for _ in range(count):
            await calling.send(echo)
        answers: list[float] = []
        delays: list[float] = []
        cpu, redis = workers.cpu()
        for _ in range(count):
            arrived.clear()
            begun = time.perf_counter()
            await calling.send(request)
            answers.append(time.perf_counter() - begun)
            await arrived.wait()
            delays.append(received[-1] - begun)
        after, its = workers.cpu()
        assert len(received) == count, f"{len(received)} events of {count}"
        return Events(
            statistics.median(answers) * 1e3,
            statistics.median(delays) * 1e3,
            (after - cpu - (cpu - before)) / count * 1e6,
            (its - redis - (redis - store_before)) / count * 1e6,
        )


async def spread(workers: Workers, count: int) -> float:
    new = await asyncio.gather(*(workers.connection() for _ in range(count)))
    for _, connection in new:
        connection.close()
    return Counter(pid for pid, _ in new).most_common(1)[0][1] / count * 100


def rows(count: int, events_count: int, rounds: int, most: int) -> Iterator[Row]:
    if not is_there("redis"):
        yield Row(name="workers", absent="no redis-server, no valkey-server")
        return
    with tempfile.TemporaryDirectory(prefix="mcp-sessions-bench-") as directory:
        path = f"{directory}/redis.sock"
        with (
            redis_server("--unixsocket", path, "--unixsocketperm", "700") as redis,
            serving(1, redis, f"unix://{path}") as one,
            serving(most, redis, f"unix://{path}") as several,
        ):
            yield from _calls(one, several, count, rounds)
            share = min(uvloop.run(spread(several, 64)) for _ in range(rounds))
            yield Row(
                name=f"{most} workers: the one with most of 64 connections that come at once",
                measured=share,
                unit="%",
                includes="as the system spreads them; the least of all rounds",
            )
            yield from _events(several, events_count, rounds)


def _calls(one: Workers, several: Workers, count: int, rounds: int) -> Iterator[Row]:
    for sessions in Sessions:
        found: dict[int, list[Calls]] = {1: [], len(several.pids): []}
        for _ in range(rounds):
            for workers in (one, several):
                found[len(workers.pids)].append(uvloop.run(calls(workers, sessions, count)))
        base = max(each.a_second for each in found[1])
        base_cpu = min(each.cpu for each in found[1])
        for number, those in found.items():
            name = f"{sessions.value}, {number} worker{'s' if number > 1 else ''}"
            best = max(those, key=lambda each: each.a_second)
            yield Row(
                name=name,
                measured=best.a_second,
                unit="calls/s",
                ratio=best.a_second / base if number > 1 else None,
                basis="times one worker",
                includes=f"an answer in {best.answer:.1f} ms, the median",
            )
            cpu = min(each.cpu for each in those)
            redis, client = min(each.redis for each in those), min(each.client for each in those)
            yield Row(
                name=f"{name}: CPU of a call",
                measured=cpu,
                unit="µs",
                ratio=cpu / base_cpu if number > 1 else None,
                basis="times with one worker",
                includes=f"all workers; Redis takes {redis:.0f} µs, the client {client:.0f} µs",
            )


def _events(workers: Workers, count: int, rounds: int) -> Iterator[Row]:
    found: dict[bool, list[Events]] = {False: [], True: []}
    for _ in range(rounds):
        for is_other, those in found.items():
            those.append(uvloop.run(events(workers, count, held_by_another=is_other)))
    here = min(each.received for each in found[False])
    here_cpu = min(each.cpu for each in found[False])
    for is_other, those in found.items():
        name = f"an event, its stream at {'another' if is_other else 'the same'} worker"
        received, answer = min(each.received for each in those), min(each.answer for each in those)
        yield Row(
            name=name,
            measured=received,
            unit="ms",
            ratio=received / here if is_other else None,
            basis="times at the same worker",
            includes=f"from the call on; its answer takes {answer:.2f} ms; the median",
        )
        cpu, redis = min(each.cpu for each in those), min(each.redis for each in those)
        yield Row(
            name=f"{name}: CPU",
            measured=cpu,
            unit="µs",
            ratio=cpu / here_cpu if is_other else None,
            basis="times at the same worker",
            includes=f"all workers, less a call that causes no event; Redis takes {redis:.0f} µs",
        )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--calls", type=int, default=6_000)
    parser.add_argument("--events", type=int, default=500)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--most-workers", type=int, default=2)
    asked = parser.parse_args()
    report(rows(asked.calls, asked.events, asked.rounds, asked.most_workers))


if __name__ == "__main__":
    main()
