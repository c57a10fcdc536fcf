"""A server process is killed and comes back: when its clients are answered again.

    python -m bench.bench_outage [--clients N] [--rounds N] [--outages S,S] [--ways W,W] [--apart N]

The server is ``mcp-sessions serve`` with a SQLite store, killed by SIGKILL. The clients are
``mcp.Client`` on `resumable`, with the limits that they have by default; all of them share one
process. Each has a session, and makes one call just after the kill. The figures are seconds from
the moment when the new server process accepts a TCP connection until a client has the answer of
that call. A client has failed if its call raises, or if it is answered in another session. The
clients of all ways share one outage, and the CPU of one process.

With ``--apart``, one more outage of 8 s has so many HTTP clients. A process of its own asks the
server for a page ten times a second meanwhile. A server that is overloaded answers that late.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import resource
import sys
import tempfile
import time
import warnings
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path

import anyio
from mcp import Client

from bench.rows import Row, report
from mcp_sessions.client.reports import ResumeOutcome
from mcp_sessions.client_transport import resumable
from tests.support import apps
from tests.support.processes import KilledServer
from tests.support.resuming import text_of

WAYS = {"HTTP 2025": ("http", "legacy"), "HTTP 2026": ("http", "auto"), "WebSocket": ("ws", "auto")}
WITHIN = 240.0
"""Seconds that one outage may take."""

AT_ONCE = 20
"""Clients that connect at the same time."""

APART = 8.0
"""Seconds of the outage of ``--apart``."""

APART_WITHIN = 540.0
"""Seconds that this may take: the clients of one process share its CPU."""


@dataclass
class One:
    way: str
    client: Client
    outcomes: list[ResumeOutcome] = field(default_factory=list[ResumeOutcome])
    answered_at: float = 0.0
    failed: str | None = None

    async def call(self, word: str) -> None:
        try:
            said = text_of(await self.client.call_tool("remember", {"word": word}))
        except Exception as error:
            # Each error of a client is a figure of this run.
            self.failed = repr(error)
            return
        self.answered_at = time.monotonic()
        if not said.endswith(word) or not said.startswith("before"):
            self.failed = f"another session: {said}"


@dataclass
class Outage:
    seconds: float
    delays: dict[str, list[float]] = field(default_factory=dict[str, list[float]])
    notified: dict[str, int] = field(default_factory=dict[str, int])
    failed: list[str] = field(default_factory=list[str])
    cpu: float = 0.0
    """Seconds of the server's, from its start until all are answered."""

    def count(self, one: One, back_at: float) -> None:
        self.notified[one.way] = self.notified.get(one.way, 0) + bool(one.outcomes)
        if one.failed is not None:
            self.failed.append(f"{one.way}: {one.failed}")
        else:
            self.delays.setdefault(one.way, []).append(max(0.0, one.answered_at - back_at))

    def rows(self) -> Iterator[Row]:
        for way, delays in self.delays.items():
            name = f"{way}, {self.seconds:g} s away, {len(delays)} clients"
            notified = f"on_resume told {self.notified[way]}"
            yield Row(
                name=f"{name}: p50", measured=at(delays, 0.5), unit="s", most=1, includes=notified
            )
            yield Row(name=f"{name}: p90", measured=at(delays, 0.9), unit="s")
            yield Row(name=f"{name}: p99", measured=at(delays, 0.99), unit="s", most=5)
            yield Row(
                name=f"{name}: the last",
                measured=max(delays),
                unit="s",
                includes=f"at most {most_in(delays)} answered in any second",
            )
        yield Row(
            name=f"{self.seconds:g} s away: failed",
            measured=len(self.failed),
            most=0,
            includes="; ".join(self.failed[:5])
            or f"the server used {self.cpu:.2f} s of CPU until all were answered",
        )


def at(delays: Sequence[float], share: float) -> float:
    ordered = sorted(delays)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def most_in(delays: Sequence[float], window: float = 1.0) -> int:
    return max(sum(start <= delay < start + window for delay in delays) for start in delays)


async def run(outage: Outage, ways: Sequence[str], count: int) -> None:
    with tempfile.TemporaryDirectory() as position:
        served = KilledServer(Path(position))
        await asyncio.to_thread(served.start)
        try:
            async with asyncio.timeout(WITHIN), AsyncExitStack() as stack:
                clients = [
                    await connect(stack, served.port, way) for way in ways for _ in range(count)
                ]
                back_at = 0.0
                await asyncio.to_thread(served.kill)
                async with anyio.create_task_group() as tasks:
                    for one in clients:
                        tasks.start_soon(one.call, "after")
                    await asyncio.sleep(outage.seconds)
                    await asyncio.to_thread(served.start)
                    back_at = time.monotonic()
                outage.cpu = max(outage.cpu, served.cpu)
                await asyncio.sleep(1)
                for one in clients:
                    outage.count(one, back_at)
        finally:
            await asyncio.to_thread(served.kill)


@dataclass
class Crowd:
    count: int
    clients: list[One] = field(default_factory=list[One])
    connected: anyio.Event = field(default_factory=anyio.Event)
    killed: anyio.Event = field(default_factory=anyio.Event)
    answered: anyio.Event = field(default_factory=anyio.Event)
    finished: anyio.Event = field(default_factory=anyio.Event)
    left: int = field(init=False)
    """Clients that wait for their answer."""

    def __post_init__(self) -> None:
        self.left = self.count

    async def one(self, port: int, number: int, room: anyio.Semaphore) -> None:
        async with AsyncExitStack() as stack:
            async with room:
                # An address of its own: clients of one address return one after the other.
                one = await connect(stack, port, "HTTP 2025", f"?client={number}")
            self.clients.append(one)
            if len(self.clients) == self.count:
                self.connected.set()
            await self.killed.wait()
            await one.call("after")
            self.left -= 1
            if not self.left:
                self.answered.set()
            await self.finished.wait()


async def run_apart(count: int) -> list[Row]:
    outage, crowd, room = Outage(APART), Crowd(count), anyio.Semaphore(AT_ONCE)
    waited: list[float] = []
    back_at = 0.0
    with tempfile.TemporaryDirectory() as position:
        served = KilledServer(Path(position))
        await asyncio.to_thread(served.start)
        try:
            async with asyncio.timeout(APART_WITHIN), anyio.create_task_group() as tasks:
                for number in range(count):
                    tasks.start_soon(crowd.one, served.port, number, room)
                await crowd.connected.wait()
                await asyncio.to_thread(served.kill)
                crowd.killed.set()
                await asyncio.sleep(APART)
                await asyncio.to_thread(served.start)
                back_at, started = time.monotonic(), served.cpu
                async with bystander(served.port, waited):
                    await crowd.answered.wait()
                    outage.cpu = served.cpu - started
                crowd.finished.set()
            for one in crowd.clients:
                outage.count(one, back_at)
        finally:
            await asyncio.to_thread(served.kill)
    name = f"{count} clients apart, {APART:g} s away"
    delays = outage.delays.get("HTTP 2025", [APART_WITHIN])
    cpu = 1_000 * outage.cpu / count
    slowest = f"the slowest of {len(waited)}: {max(waited, default=APART_WITHIN):.2f} s"
    failed, why = len(outage.failed), "; ".join(outage.failed[:5])
    return [
        Row(name=f"{name}: p50", measured=at(delays, 0.5), unit="s", includes="all in one process"),
        Row(name=f"{name}: the last", measured=max(delays), unit="s"),
        Row(name=f"{name}: CPU of the server for each", measured=cpu, unit="ms"),
        Row(name=f"{name}: failed", measured=failed, most=0, includes=why),
        Row(
            name=f"{name}: somebody else's page, p99",
            measured=at(waited or [APART_WITHIN], 0.99),
            unit="s",
            most=1,
            includes=slowest,
        ),
    ]


@asynccontextmanager
async def bystander(port: int, waited: list[float]) -> AsyncGenerator[None]:
    """Run an uninvolved client in a process of its own. At the end its seconds are in
    ``waited``.
    """
    asking = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "bench.bystander", str(port)),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    try:
        yield
        said, _ = await asyncio.wait_for(asking.communicate(b"\n"), 60)
        waited += json.loads(said)
    finally:
        if asking.returncode is None:
            asking.kill()
            await asking.wait()


async def connect(stack: AsyncExitStack, port: int, way: str, query: str = "") -> One:
    """One more client, with a session."""
    scheme, mode = WAYS[way]
    outcomes: list[ResumeOutcome] = []
    transport = resumable(f"{scheme}://127.0.0.1:{port}/mcp{query}", on_resume=outcomes.append)
    client = await stack.enter_async_context(Client(transport, mode=mode))
    one = One(way, client, outcomes)
    await client.call_tool("remember", {"word": "before"})
    return one


def rows(outages: Sequence[float], ways: Sequence[str], count: int, rounds: int) -> Iterator[Row]:
    for seconds in outages:
        outage = Outage(seconds)
        for _ in range(rounds):
            asyncio.run(run(outage, ways, count))
        yield from outage.rows()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--clients", type=int, default=10)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--outages", default="4,12,60")
    parser.add_argument("--ways", default=",".join(WAYS))
    parser.add_argument("--apart", type=int, default=0)
    options = parser.parse_args()
    logging.disable(logging.ERROR)
    warnings.filterwarnings("ignore", apps.DEPRECATED.removeprefix("ignore:"))
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    outages = [float(seconds) for seconds in options.outages.split(",") if seconds]
    found = rows(outages, options.ways.split(","), options.clients, options.rounds)
    apart = asyncio.run(run_apart(options.apart)) if options.apart else ()
    report(chain(found, apart))


if __name__ == "__main__":
    main()
