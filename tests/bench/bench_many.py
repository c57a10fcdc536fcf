"""Many sessions with open streams in one process: 100,000, and 10,000 of them with a stream.

    python -m tests.bench.bench_many [--sessions N] [--streams N] [--calls N] [--idle SECONDS]

Over the memory store, all on loopback. Each session is of a stock client of the 2025 era that
shook hands; some have a GET stream open and are subscribed to nine resources. The server, these
clients, and who calls meanwhile (100 others, one call each 10 ms in turn) are a process each.
Then all streams are cut at once: the sockets are reset, while an update is on its way to all of
them. Their clients come back together a second later, as the server tells them to, while three
updates are told that they are away for, and two more while they come. Each stream has to hear of
each of these exactly once. A stall is the time for which the server's loop served nobody, in
CPU of its own thread, so that what others do on the machine is not in it; a call's time is by
the clock, and everything is in that.
"""

from __future__ import annotations

import argparse
import asyncio
import http.client
import json
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import uvloop

from tests.bench.bench_calls import Server
from tests.bench.crowd import BUSY, TOLD
from tests.bench.rows import Row, report
from tests.bench.stores import cpu_of
from tests.bench.wire import Connection

STALL = 50.0
"""Milliseconds."""

CALLERS = 100
BETWEEN = 0.01
ECHO = {"name": "echo", "arguments": {"text": "hello"}}


class Crowd:
    """The process of the clients."""

    def __init__(self, port: int, sessions: int, streams: int) -> None:
        command = [sys.executable, "-m", "tests.bench.crowd", str(port), str(sessions)]
        self._process = subprocess.Popen(
            [*command, str(streams)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def does(self, *step: str) -> dict[str, Any]:
        """One step.

        Raises:
            SystemExit: It failed.
        """
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(" ".join(step) + "\n")
        self._process.stdin.flush()
        said = json.loads(self._process.stdout.readline() or '{"failed": "the clients died"}')
        if "failed" in said:
            raise SystemExit(said["failed"])
        return said

    async def meanwhile(self, *step: str) -> dict[str, Any]:
        """The same, without keeping anybody waiting."""
        return await asyncio.to_thread(self.does, *step)

    def stop(self) -> None:
        """End it."""
        self._process.kill()
        self._process.wait()


@dataclass(frozen=True)
class Process:
    """The server's."""

    server: Server

    @property
    def cpu(self) -> float:
        """Seconds that it used so far."""
        return cpu_of(self.server.process.pid)

    @property
    def resident(self) -> int:
        """Bytes of it in memory."""
        pages = Path(f"/proc/{self.server.process.pid}/statm").read_text().split()[1]
        return int(pages) * resource.getpagesize()

    def stalls(self, *, watch: bool = True) -> dict[str, float]:
        """See :class:`~tests.bench.stalls.Stalls`."""
        connection = http.client.HTTPConnection("127.0.0.1", self.server.port, timeout=60)
        connection.request("POST", "/stalls", b"on" if watch else b"off")
        answer = connection.getresponse()
        assert answer.status == 200, answer.status
        found = json.loads(answer.read())
        connection.close()
        return found


class Callers:
    """Clients that call a trivial tool; how long each call took, in ms."""

    def __init__(self, connections: list[Connection]) -> None:
        self._connections = connections

    @staticmethod
    async def to(port: int) -> Callers:
        """As many as there are, each in a session of its own."""
        connections = [await Connection.to(port) for _ in range(CALLERS)]
        for connection in connections:
            await connection.initialize()
        return Callers(connections)

    async def call(self, until: Callable[[int], bool]) -> list[float]:
        """One after the other, until that is so of their number."""
        took: list[float] = []
        while not until(len(took)):
            connection = self._connections[len(took) % CALLERS]
            request = connection.request("tools/call", ECHO)
            begun = time.perf_counter()
            connection.result(*await connection.send(request))
            took.append((time.perf_counter() - begun) * 1e3)
            await asyncio.sleep(BETWEEN)
        return took

    async def beside(self, work: Awaitable[Any]) -> list[float]:
        """Until that is done."""
        doing = asyncio.ensure_future(work)
        took = await self.call(lambda _: doing.done())
        await doing
        return took

    async def touch(self, *uris: str) -> None:
        """Change resources, one after the other; each answer comes when all were told."""
        for uri in uris:
            connection = await Connection.to(self._connections[0].port)
            connection.session = self._connections[0].session
            await connection.ask("tools/call", {"name": "touch", "arguments": {"uri": uri}})
            connection.close()


def p99(took: list[float]) -> float:
    """Of a hundred calls, the time of the slowest but one."""
    return sorted(took)[int(len(took) * 0.99) - 1]


async def measure(
    process: Process, crowd: Crowd, sessions: int, streams: int, calls: int, idle: float
) -> list[Row]:
    """All of it."""
    rows: list[Row] = []
    stalls: dict[str, dict[str, float]] = {}
    callers = await Callers.to(process.server.port)
    process.stalls()
    base, cpu = process.resident, process.cpu
    crowd.does("start")
    cpu, held = process.cpu - cpu, process.resident - base
    rows += [
        Row(name="a session begins: CPU", measured=cpu / sessions * 1e6, unit="µs",
            includes="initialize and initialized, a request each"),
        Row(name="a session: memory", measured=held / sessions / 1024, unit="KiB",
            includes="resident, all that the process has for it"),
    ]  # fmt: skip
    stalls["while sessions begin"] = process.stalls()
    base = process.resident
    crowd.does("subscribe")
    subscribed = process.resident - base
    stalls["while they subscribe"] = process.stalls()
    base, cpu = process.resident, process.cpu
    crowd.does("listen")
    cpu, held = process.cpu - cpu, process.resident - base
    rows += [
        Row(name="nine subscriptions: memory", measured=subscribed / streams / 1024, unit="KiB",
            includes="resident"),
        Row(name="a stream: memory", measured=held / streams / 1024, unit="KiB",
            includes="resident, without the system's buffers"),
        Row(name="a stream opens: CPU", measured=cpu / streams * 1e6, unit="µs",
            includes="its connection, too"),
        Row(name="all sessions and streams: memory", measured=process.resident / 2**20, unit="MiB",
            includes="resident, the whole process"),
    ]  # fmt: skip
    stalls["while streams open"] = process.stalls(watch=False)

    await asyncio.sleep(2)
    cpu = process.cpu
    await asyncio.sleep(idle)
    rows.append(
        Row(name="idle, all of them: CPU", measured=(process.cpu - cpu) / idle * 100, unit="%",
            includes=f"of a core, {idle:g} s, without a call")
    )  # fmt: skip

    process.stalls()
    took = await callers.call(lambda done: done >= calls)
    rows.append(
        Row(name="a call, nothing else: p99", measured=p99(took), unit="ms",
            includes=f"of {len(took)}; half take {statistics.median(took):.2f} ms, "
            f"the slowest {max(took):.1f}")
    )  # fmt: skip
    stalls["while some call"] = process.stalls()

    cpu, rounds, delays = process.cpu, 0, list[float]()

    async def updates() -> None:
        nonlocal rounds
        while rounds < 5:
            rounds += 1
            begun = time.monotonic()
            await callers.touch(BUSY)
            heard = await crowd.meanwhile("hear", BUSY, str(rounds))
            delays.append(heard["at"] - begun)

    took = await callers.beside(updates())
    cpu = process.cpu - cpu
    rows += [
        Row(name="an update to all streams, for each: CPU", measured=cpu / rounds / streams * 1e6,
            unit="µs", includes="calls beside it, too"),
        Row(name="an update: until all heard of it", measured=min(delays), unit="s",
            includes=f"the least of {rounds}"),
        Row(name="a call beside updates: p99", measured=p99(took), unit="ms",
            includes=f"of {len(took)}; the slowest {max(took):.1f}"),
    ]  # fmt: skip
    stalls["while all streams are told"] = process.stalls()

    cpu = process.cpu
    on_its_way = asyncio.ensure_future(callers.touch(TOLD[0]))
    await asyncio.sleep(0.05)
    cut = crowd.does("cut")["at"]
    back_at = caught_up_at = 0.0

    async def come_back() -> None:
        nonlocal back_at, caught_up_at
        await on_its_way
        await callers.touch(*TOLD[1:4])
        back = asyncio.ensure_future(crowd.meanwhile("back"))
        await callers.touch(*TOLD[4:6])
        back_at = (await back)["at"]
        for uri in TOLD[:6]:
            caught_up_at = max(caught_up_at, (await crowd.meanwhile("hear", uri, "1"))["at"])

    took = await callers.beside(come_back())
    cpu = process.cpu - cpu
    rows += [
        Row(name="cut: until all streams are open again", measured=back_at - cut, unit="s",
            includes="the second that all wait for is in it"),
        Row(name="cut: until all have what they missed", measured=caught_up_at - cut, unit="s",
            includes="with what was told while they came"),
        Row(name="cut: CPU for each", measured=cpu / streams * 1e6, unit="µs",
            includes="the end of a stream, a new one, six updates"),
        Row(name="cut: a call meanwhile, p99", measured=p99(took), unit="ms",
            includes=f"of {len(took)}; the slowest {max(took):.1f}"),
    ]  # fmt: skip
    stalls["while all come back"] = process.stalls()

    await callers.touch(*TOLD[6:])
    for uri in TOLD[6:]:
        await crowd.meanwhile("hear", uri, "1")
    judged = crowd.does("judge", *TOLD)
    told = f"of {len(TOLD) * streams:,}, in {judged['open']:,} streams that are open after it"
    rows += [
        Row(name="events lost", measured=judged["lost"], most=0, includes=told),
        Row(name="events told twice", measured=judged["twice"], most=0, includes=told),
        Row(name="streams that did not come back", measured=streams - judged["open"], most=0),
    ]
    stalls["while all are told again"] = process.stalls()
    return rows + list(_stalls(stalls))


def _stalls(found: dict[str, dict[str, float]]) -> Iterator[Row]:
    for when, each in found.items():
        yield Row(
            name=f"longest stall {when}",
            measured=each["stall"],
            unit="ms",
            most=STALL,
            includes=f"{each['by_clock']:.0f} ms by the clock; longest collection "
            f"{each['collection']:.0f} ms",
        )
    yield Row(
        name="most memory at any time",
        measured=max(each["peak"] for each in found.values()),
        unit="MiB",
        includes="resident, the whole process",
    )


def rows(sessions: int, streams: int, calls: int, idle: float) -> Iterator[Row]:
    """Of one run."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < streams + 1_000:
        raise SystemExit(f"{streams} streams need as many open files; {hard} are allowed")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, streams + 1_000), hard))
    server = Server("many")
    crowd = Crowd(server.port, sessions, streams)
    try:
        found = measure(Process(server), crowd, sessions, streams, calls, idle)
        yield from uvloop.run(found)
    finally:
        crowd.stop()
        server.stop()


def main() -> None:
    """Measure, and print."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--sessions", type=int, default=100_000)
    parser.add_argument("--streams", type=int, default=10_000)
    parser.add_argument("--calls", type=int, default=2_000)
    parser.add_argument("--idle", type=float, default=30)
    asked = parser.parse_args()
    report(rows(asked.sessions, asked.streams, asked.calls, asked.idle))


if __name__ == "__main__":
    main()
