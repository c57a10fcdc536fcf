"""Many sessions in one process, some of them with an open stream.

    python -m bench.bench_many [--sessions N] [--streams N] [--calls N] [--idle SECONDS]

All sessions use the memory store, on loopback. ``--sessions`` says how many there are, and
``--streams`` how many of them have an open GET stream and nine subscriptions. Each belongs to a
stock client of the 2025 era that initialized. 100 other clients make one call each 10 ms, in turn.
The server, the clients and the callers have a process each.

Then all streams are cut at once: the sockets are reset, while an update is on its way to all of
them. The clients reconnect together a second later, as the server asks them to. Three updates
happen while they are away, and two more while they reconnect. Each stream has to get each of these
exactly once. A stall is a time in which the server's loop serves nobody. It is measured in CPU of
the loop's thread, so other work of the machine is not in it. The time of a call is by the clock,
and includes everything.
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
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import uvloop

from bench.bench_calls import Server
from bench.crowd import BUSY, NOTES
from bench.rows import Row, report
from bench.stores import cpu_of
from bench.wire import Connection

STALL = 50.0
"""Milliseconds."""

CALLERS = 100
BETWEEN = 0.01
UPDATES = 5
ECHO = {"name": "echo", "arguments": {"text": "hello"}}


class Crowd:
    def __init__(self, port: int, sessions: int, streams: int) -> None:
        command = [sys.executable, "-m", "bench.crowd", str(port), str(sessions)]
        self._process = subprocess.Popen(
            [*command, str(streams)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def does(self, *step: str) -> dict[str, Any]:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(" ".join(step) + "\n")
        self._process.stdin.flush()
        said = json.loads(self._process.stdout.readline() or '{"failed": "the clients died"}')
        if "failed" in said:
            raise SystemExit(said["failed"])
        return said

    async def meanwhile(self, *step: str) -> dict[str, Any]:
        return await asyncio.to_thread(self.does, *step)

    def stop(self) -> None:
        self._process.kill()
        self._process.wait()


@dataclass(frozen=True)
class Process:
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
        connection = http.client.HTTPConnection("127.0.0.1", self.server.port, timeout=60)
        connection.request("POST", "/stalls", b"on" if watch else b"off")
        answer = connection.getresponse()
        assert answer.status == 200, answer.status
        found = json.loads(answer.read())
        connection.close()
        return found


class Callers:
    """Clients that call a trivial tool, with the time of each call in ms."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._sessions: list[str] = []

    async def start(self) -> None:
        for _ in range(CALLERS):
            async with self._connected() as connection:
                await connection.initialize()
                assert connection.session is not None
                self._sessions.append(connection.session)

    @asynccontextmanager
    async def _connected(self) -> AsyncGenerator[Connection]:
        connection = await Connection.to(self._port)
        try:
            yield connection
        finally:
            connection.close()

    async def call(self, until: Callable[[int], bool]) -> list[float]:
        took: list[float] = []
        async with self._connected() as connection:
            while not until(len(took)):
                connection.session = self._sessions[len(took) % CALLERS]
                request = connection.request("tools/call", ECHO)
                begun = time.perf_counter()
                connection.result(*await connection.send(request))
                took.append((time.perf_counter() - begun) * 1e3)
                await asyncio.sleep(BETWEEN)
        return took

    async def during(self, work: Awaitable[Any]) -> list[float]:
        doing = asyncio.ensure_future(work)
        took = await self.call(lambda _: doing.done())
        await doing
        return took

    async def touch(self, *uris: str) -> None:
        """Change resources, one after the other; each answer comes when all have the change."""
        async with self._connected() as connection:
            # Not the first, which is called with the same request id at the same moment.
            connection.session = self._sessions[-1]
            for uri in uris:
                await connection.ask("tools/call", {"name": "touch", "arguments": {"uri": uri}})


def p99(took: list[float]) -> float:
    return sorted(took)[int(len(took) * 0.99) - 1]


@dataclass
class Run:
    process: Process
    crowd: Crowd
    callers: Callers
    sessions: int
    streams: int
    runner: asyncio.Runner
    stalls: dict[str, dict[str, float]] = field(default_factory=dict[str, dict[str, float]])

    def begins(self) -> Iterator[Row]:
        self.runner.run(self.callers.start())
        self.process.stalls()
        cpu, held = self._used(self.crowd.does, "start")
        yield Row(
            name="a session begins: CPU",
            measured=cpu / self.sessions * 1e6,
            unit="µs",
            includes="`initialize` and `notifications/initialized`, a request each",
        )
        yield Row(
            name="a session: memory",
            measured=held / self.sessions / 1024,
            unit="KiB",
            includes="resident, all that the process has for it",
        )
        self.stalls["while sessions begin"] = self.process.stalls()
        _, held = self._used(self.crowd.does, "subscribe")
        yield Row(
            name="nine subscriptions: memory",
            measured=held / self.streams / 1024,
            unit="KiB",
            includes="resident",
        )
        self.stalls["while they subscribe"] = self.process.stalls()
        cpu, held = self._used(self.crowd.does, "listen")
        yield Row(
            name="a stream: memory",
            measured=held / self.streams / 1024,
            unit="KiB",
            includes="resident, with its connection, without the system's buffers",
        )
        yield Row(
            name="a stream opens: CPU",
            measured=cpu / self.streams * 1e6,
            unit="µs",
            includes="its connection, too",
        )
        yield Row(
            name="all sessions and streams: memory",
            measured=self.process.resident / 2**20,
            unit="MiB",
            includes="resident, the whole process",
        )
        self.stalls["while streams open"] = self.process.stalls(watch=False)

    def _used(self, do: Callable[..., object], *arguments: str) -> tuple[float, int]:
        """Seconds of CPU, and bytes."""
        cpu, held = self.process.cpu, self.process.resident
        do(*arguments)
        return self.process.cpu - cpu, self.process.resident - held

    def idles(self, seconds: float) -> Iterator[Row]:
        time.sleep(2)
        cpu, _ = self._used(lambda: time.sleep(seconds))
        yield Row(
            name="idle, all of them: CPU",
            measured=cpu / seconds * 100,
            unit="%",
            includes=f"of a core, {seconds:g} s without a call",
        )

    def calls(self, count: int) -> Iterator[Row]:
        self.process.stalls()
        took = self.runner.run(self.callers.call(lambda done: done >= count))
        yield Row(
            name="a call: p99",
            measured=p99(took),
            unit="ms",
            includes=f"of {len(took)}, nothing else happens; half take "
            f"{statistics.median(took):.2f} ms, the slowest {max(took):.1f}",
        )
        self.stalls["while some call"] = self.process.stalls()

    def updates(self) -> Iterator[Row]:
        """Change a resource that all streams are subscribed to, again and again."""
        delays: list[float] = []

        async def updates() -> None:
            for number in range(1, UPDATES + 1):
                begun = time.monotonic()
                await self.callers.touch(BUSY)
                received = await self.crowd.meanwhile("hear", BUSY, str(number))
                delays.append(received["at"] - begun)

        cpu = self.process.cpu
        took = self.runner.run(self.callers.during(updates()))
        cpu = self.process.cpu - cpu
        yield Row(
            name="an update to all streams, for each: CPU",
            measured=cpu / UPDATES / self.streams * 1e6,
            unit="µs",
            includes=f"{len(took)} calls meanwhile, too",
        )
        yield Row(
            name="an update to all streams: until the last has it",
            measured=min(delays),
            unit="s",
            includes=f"the least of {UPDATES}",
        )
        yield Row(
            name="a call during updates: p99",
            measured=p99(took),
            unit="ms",
            includes=f"of {len(took)}; the slowest {max(took):.1f}",
        )
        self.stalls["while all streams get an update"] = self.process.stalls()

    def is_cut(self) -> Iterator[Row]:
        cut = back = caught_up = 0.0

        async def come_back() -> None:
            nonlocal cut, back, caught_up
            on_its_way = asyncio.ensure_future(self.callers.touch(NOTES[0]))
            # The first streams have it, the last do not.
            await self.crowd.meanwhile("hears", NOTES[0])
            cut = (await self.crowd.meanwhile("cut"))["at"]
            await on_its_way
            await self.callers.touch(*NOTES[1:4])
            coming = asyncio.ensure_future(self.crowd.meanwhile("back"))
            await self.callers.touch(*NOTES[4:6])
            back = (await coming)["at"]
            for uri in NOTES[:6]:
                caught_up = max(caught_up, (await self.crowd.meanwhile("hear", uri, "1"))["at"])

        cpu = self.process.cpu
        took = self.runner.run(self.callers.during(come_back()))
        cpu = self.process.cpu - cpu
        yield Row(
            name="cut: until all streams are open again",
            measured=back - cut,
            unit="s",
            includes="includes the second that all clients wait",
        )
        yield Row(
            name="cut: until all have what they missed",
            measured=caught_up - cut,
            unit="s",
            includes="with the updates that happened while they reconnected",
        )
        yield Row(
            name="cut: CPU for each stream",
            measured=cpu / self.streams * 1e6,
            unit="µs",
            includes="the end of the old stream, a new one, six updates",
        )
        yield Row(
            name="cut: a call meanwhile, p99",
            measured=p99(took),
            unit="ms",
            includes=f"of {len(took)}; the slowest {max(took):.1f}",
        )
        self.stalls["while all reconnect"] = self.process.stalls()

    def is_whole(self) -> Iterator[Row]:
        """Whether each stream received each event once."""
        self.runner.run(self.callers.touch(*NOTES[6:]))
        for uri in NOTES[6:]:
            self.crowd.does("hear", uri, "1")
        judged = self.crowd.does("judge", *NOTES)
        notified = f"of {len(NOTES) * self.streams:,}, in {judged['open']:,} streams that are open"
        yield Row(name="events lost", measured=judged["lost"], most=0, includes=notified)
        yield Row(
            name="events delivered twice", measured=judged["twice"], most=0, includes=notified
        )
        away = self.streams - judged["open"]
        yield Row(name="streams that did not come back", measured=away, most=0)
        self.stalls["while all get an update again"] = self.process.stalls()


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
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < streams + 1_000:
        raise SystemExit(f"{streams} streams need as many open files; {hard} are allowed")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, streams + 1_000), hard))
    server = Server("many")
    crowd = Crowd(server.port, sessions, streams)
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            callers = Callers(server.port)
            run = Run(Process(server), crowd, callers, sessions, streams, runner)
            yield from run.begins()
            yield from run.idles(idle)
            yield from run.calls(calls)
            yield from run.updates()
            yield from run.is_cut()
            yield from run.is_whole()
            yield from _stalls(run.stalls)
    finally:
        crowd.stop()
        server.stop()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--sessions", type=int, default=100_000)
    parser.add_argument("--streams", type=int, default=10_000)
    parser.add_argument("--calls", type=int, default=2_000)
    parser.add_argument("--idle", type=float, default=30)
    asked = parser.parse_args()
    report(rows(asked.sessions, asked.streams, asked.calls, asked.idle))


if __name__ == "__main__":
    main()
