"""The clients of `bench_many`, a process of its own.

    python -m bench.crowd PORT SESSIONS STREAMS

Each is a stock client of the 2025 era: it shakes hands, and some open a GET stream and
subscribe to the resources of :data:`NOTES`. It does what the lines of its input say, one after
the other, and answers each with a line of JSON. What ``cut`` cuts comes back by itself, as
a stock client does: all at once, when the time has passed that the server named (``retry``), with
the id of the last event it had.
"""

from __future__ import annotations

import asyncio
import json
import re
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import uvloop

from bench.wire import Connection, Refused, Stream, until

BUSY = "note://busy"
"""Changes all the time; the newest change replaces what is not sent yet."""

NOTES = [f"note://{number}" for number in range(8)]
"""Each changes once, so that each stream learns of each exactly once."""

AT_ONCE = 32
"""Connections on which clients shake hands."""

RETRY = 1.0
"""Seconds, as the server says."""

WITHIN = 240.0

_URI = re.compile(rb'"uri":"([^"]+)"')


@dataclass
class Crowd:
    port: int
    sessions: int
    wanted: int
    """Streams."""

    streams: list[Stream] = field(default_factory=list[Stream])
    received: list[Counter[str]] = field(default_factory=list[Counter[str]])
    in_all: Counter[str] = field(default_factory=Counter[str])
    """How many streams learned of a resource, the same stream twice if it did."""

    refused: int = 0
    """Connections that the system did not make."""

    _coming: set[asyncio.Task[None]] = field(default_factory=set[asyncio.Task[None]])
    last_at: float = 0.0
    """When the last event came."""

    async def start(self) -> dict[str, Any]:
        numbers = iter(range(self.sessions))
        await asyncio.gather(*(self._shake_hands(numbers) for _ in range(AT_ONCE)))
        return {}

    async def _shake_hands(self, numbers: Iterator[int]) -> None:
        connection = await Connection.to(self.port)
        every = self.sessions // self.wanted
        for number in numbers:
            connection.session = None
            await connection.initialize()
            if number % every == 0 and len(self.streams) < self.wanted:
                assert connection.session is not None
                self.streams.append(self._stream(connection.session))
        connection.close()

    def _stream(self, session: str) -> Stream:
        received = Counter[str]()
        self.received.append(received)

        def receive(event: bytes) -> None:
            found = _URI.search(event)
            if found is None:
                raise Refused(f"no update: {event[:200]!r}")
            uri = found[1].decode()
            received[uri] += 1
            self.in_all[uri] += 1
            self.last_at = time.monotonic()

        return Stream(session, receive, self._comes_back)

    async def subscribe(self) -> dict[str, Any]:
        streams = iter(self.streams)

        async def those() -> None:
            connection = await Connection.to(self.port)
            for stream in streams:
                connection.session = stream.session
                for uri in (BUSY, *NOTES):
                    await connection.ask("resources/subscribe", {"uri": uri})
            connection.close()

        await asyncio.gather(*(those() for _ in range(AT_ONCE)))
        return {}

    async def listen(self) -> dict[str, Any]:
        for start in range(0, len(self.streams), 500):
            some = self.streams[start : start + 500]
            await asyncio.gather(*(stream.open(self.port) for stream in some))
            await self._until_open(some)
        return {}

    async def _until_open(self, some: list[Stream]) -> None:
        await until(lambda: all(stream.is_open for stream in some), "the streams open", WITHIN)

    async def receive(self, uri: str, times: str) -> dict[str, Any]:
        wanted = len(self.streams) * int(times)
        await until(lambda: self.in_all[uri] >= wanted, f"all hear of {uri}", WITHIN)
        return {"at": self.last_at}

    async def receives(self, uri: str) -> dict[str, Any]:
        await until(lambda: self.in_all[uri] > 0, f"one hears of {uri}", WITHIN)
        return {}

    async def cut(self) -> dict[str, Any]:
        at = time.monotonic()
        for stream in self.streams:
            stream.cut()
        return {"at": at}

    def _comes_back(self, stream: Stream) -> None:
        """Reconnect a stream, also if the other side cut it or the system had no room for it."""
        coming = asyncio.create_task(self._come_back(stream))
        self._coming.add(coming)
        coming.add_done_callback(self._coming.discard)

    async def _come_back(self, stream: Stream) -> None:
        while True:
            await asyncio.sleep(RETRY)
            try:
                return await stream.open(self.port)
            except OSError:
                self.refused += 1

    async def back(self) -> dict[str, Any]:
        await self._until_open(self.streams)
        return {"at": time.monotonic()}

    async def judge(self, *notified: str) -> dict[str, Any]:
        """How many events were lost, and how many came twice, of the resources that changed
        once each; and whether all streams are open.
        """
        lost = sum(received[uri] == 0 for received in self.received for uri in notified)
        twice = sum(max(0, received[uri] - 1) for received in self.received for uri in notified)
        is_open = sum(stream.is_open for stream in self.streams)
        return {"lost": lost, "twice": twice, "open": is_open}


async def serve(crowd: Crowd) -> None:
    loop = asyncio.get_running_loop()
    steps: dict[str, Callable[..., Any]] = {
        "start": crowd.start,
        "subscribe": crowd.subscribe,
        "listen": crowd.listen,
        "hear": crowd.receive,
        "hears": crowd.receives,
        "cut": crowd.cut,
        "back": crowd.back,
        "judge": crowd.judge,
    }
    while line := await loop.run_in_executor(None, sys.stdin.readline):
        step, *arguments = line.split()
        try:
            said = await steps[step](*arguments)
        except (Refused, OSError, TimeoutError) as failed:
            said = {"failed": f"{step}: {failed!r}"}
        print(json.dumps(said), flush=True)


def main() -> None:
    port, sessions, streams = map(int, sys.argv[1:])
    uvloop.run(serve(Crowd(port, sessions, streams)))


if __name__ == "__main__":
    main()
