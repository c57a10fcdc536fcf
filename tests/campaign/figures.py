"""Measure what a restart and a kill cost clients: the figures of ``docs/how-we-know.md``.

    .venv/bin/python -m tests.campaign.figures --json FILE [--clients N] [--kills N]

Two figures, each for the SDK alone with sticky sessions and for the layer with a shared store:

* A *rolling restart*: three replicas stop and start one after the other. Then each client calls a
  tool in its session. A session is lost if the answer is an error. With sticky sessions a client
  always comes to the same replica.
* A *kill*: the replica of a client gets ``kill -9`` and starts again at once. The client calls
  until a call is answered with a result. With a shared store it calls the next replica each time.
  With sticky sessions its session is lost, so it starts a new one. The time includes that.
"""

import argparse
import asyncio
import json
import statistics
import subprocess
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final

from tests.campaign.servers import fleet
from tests.support.processes import ROOT, free_port, wait_until_it_listens
from tests.support.raw import RawClient, SocketCarrier

_AGAIN: Final = 0.01
"""Seconds between two attempts of a client."""

_PATIENCE: Final = 60.0


class Servers(ABC):
    """What is measured."""

    name: str
    is_sticky: bool
    ports: list[int]

    @abstractmethod
    async def start(self, number: int) -> None: ...

    @abstractmethod
    async def stop(self, number: int) -> None: ...

    @abstractmethod
    def kill(self, number: int) -> None: ...


class Ours(Servers):
    def __init__(self, served: Any, name: str) -> None:
        self._replicas = served.replicas
        self.name = name
        self.is_sticky = False
        self.ports = [replica.port for replica in self._replicas]

    async def start(self, number: int) -> None:
        await self._replicas[number].start()

    async def stop(self, number: int) -> None:
        await self._replicas[number].stop()

    def kill(self, number: int) -> None:
        self._replicas[number].kill()


class Sdk(Servers):
    def __init__(self, replicas: int) -> None:
        self.name = "the SDK alone, three replicas, sticky sessions"
        self.is_sticky = True
        self.ports = [free_port() for _ in range(replicas)]
        self._processes: dict[int, subprocess.Popen[bytes]] = {}

    async def start(self, number: int) -> None:
        await asyncio.to_thread(self._start, number, self.ports[number])

    def _start(self, number: int, port: int) -> None:
        command = [sys.executable, str(ROOT / "tests/campaign/sdk_app.py"), str(port)]
        null = subprocess.DEVNULL
        process = subprocess.Popen(command, stdin=null, stdout=null, stderr=null)
        self._processes[number] = process
        wait_until_it_listens(process, port)

    async def stop(self, number: int) -> None:
        process = self._processes[number]
        process.terminate()
        await asyncio.to_thread(process.wait, 30)

    def kill(self, number: int) -> None:
        process = self._processes[number]
        process.kill()
        process.wait()

    def end(self) -> None:
        for process in self._processes.values():
            process.kill()
            process.wait()


class Caller:
    """A client with a session."""

    def __init__(self, servers: Servers, home: int) -> None:
        self.home = home
        self._servers = servers
        self._at = home
        self._raw = RawClient(self._carrier())

    def _carrier(self) -> SocketCarrier:
        ports = self._servers.ports
        return SocketCarrier("127.0.0.1", ports[self._at % len(ports)])

    async def begin(self) -> None:
        await self._raw.initialize()

    async def is_answered(self) -> bool:
        """Whether a call in its session has a result."""
        arguments: dict[str, Any] = {"mark": "m", "script": []}
        sent = self._raw.send("tools/call", {"name": "work", "arguments": arguments})
        await sent.reply.done()
        answer = sent.reply.answer_to(sent.id)
        return answer is not None and "result" in answer

    async def until_answered(self) -> None:
        # Nothing says when another replica answers: a client finds out by asking.
        while not await self._tries():  # noqa: ASYNC110
            await asyncio.sleep(_AGAIN)

    async def _tries(self) -> bool:
        if not self._servers.is_sticky:
            self._at += 1
            self._raw.carrier = self._carrier()
            return await self.is_answered()
        if await self.is_answered():
            return True
        try:
            await self.begin()
        except AssertionError:
            # It does not listen yet.
            return False
        return await self.is_answered()


async def lost_in_a_rolling_restart(servers: Servers, clients: int) -> int:
    callers = [Caller(servers, n % len(servers.ports)) for n in range(clients)]
    for caller in callers:
        await caller.begin()
    answered = [await caller.is_answered() for caller in callers]
    assert all(answered), "a call failed before the restart"
    for number in range(len(servers.ports)):
        await servers.stop(number)
        await servers.start(number)
    return [await caller.is_answered() for caller in callers].count(False)


async def seconds_after_a_kill(servers: Servers, kills: int) -> list[float]:
    seconds: list[float] = []
    for n in range(kills):
        caller = Caller(servers, n % len(servers.ports))
        await caller.begin()
        servers.kill(caller.home)
        began = time.monotonic()
        starting = asyncio.create_task(servers.start(caller.home))
        await asyncio.wait_for(caller.until_answered(), _PATIENCE)
        seconds.append(time.monotonic() - began)
        await starting
    return seconds


@asynccontextmanager
async def _ours(kind: str, name: str) -> AsyncGenerator[Servers]:
    async with fleet(kind) as served:
        yield Ours(served, name)


@asynccontextmanager
async def _sdk() -> AsyncGenerator[Servers]:
    servers = Sdk(3)
    try:
        yield servers
    finally:
        servers.end()


async def _measured(
    opened: Any, work: Callable[[Servers], Awaitable[dict[str, Any]]]
) -> dict[str, Any]:
    async with opened as servers:
        for number in range(len(servers.ports)):
            await servers.start(number)
        found = {"servers": servers.name, **await work(servers)}
        print(found, flush=True)
        return found


async def measure(clients: int, kills: int) -> dict[str, Any]:
    async def restart(servers: Servers) -> dict[str, Any]:
        return {"clients": clients, "lost": await lost_in_a_rolling_restart(servers, clients)}

    async def kill(servers: Servers) -> dict[str, Any]:
        seconds = await seconds_after_a_kill(servers, kills)
        middle, worst = statistics.median(seconds), max(seconds)
        return {"kills": kills, "median": round(middle, 3), "longest": round(worst, 3)}

    three = "the layer, three replicas, Redis"
    one = "the layer, one process, a SQLite file"
    return {
        "restart": [
            await _measured(_sdk(), restart),
            await _measured(_ours("redis", three), restart),
            await _measured(_ours("normal", one), restart),
        ],
        "kill": [
            await _measured(_sdk(), kill),
            await _measured(_ours("redis", three), kill),
            await _measured(_ours("normal", one), kill),
        ],
    }


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser("python -m tests.campaign.figures", description=__doc__)
    parser.add_argument("--clients", type=int, default=60, help="of a rolling restart (60)")
    parser.add_argument("--kills", type=int, default=15, help="of each kind of server (15)")
    parser.add_argument("--json", type=Path, required=True, help="where they are written")
    options = parser.parse_args(arguments)
    measured = asyncio.run(measure(options.clients, options.kills))
    options.json.write_text(json.dumps(measured, indent=1) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
