"""All clients are cut at once: when they are connected again.

    python -m bench.bench_recover [CLIENTS]

Each client is ``mcp.Client`` on ``resumable``, with its default limits. All are behind one proxy.
The proxy cuts every connection at the same moment. While all are away, a resource changes. A client
*failed* in any of four cases: it raised an error, it lost its session, it did not get each change
exactly once, or a later call was not answered. *Reconnected* is the time from the cut until the
proxy accepts the client's new connection. *Caught up* is the time until the client has the events
that it missed. Clients, proxy and server share one process, so they wait for each other.
"""

from __future__ import annotations

import asyncio
import logging
import resource
import statistics
import sys
import time
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field

import anyio
from mcp import Client

from bench.rows import Row, report
from mcp_sessions.client_transport import resumable
from tests.support import apps
from tests.support.proxy import TcpProxy
from tests.support.resuming import Received, serving, subscribe, text_of

CLIENTS = 200
WITHIN = 120.0
"""Seconds that one run may take."""

BEFORE, DURING = "note://before", "note://during"
STEP = 0.1
"""Seconds in which the reconnects are counted, for the most of them at once."""


class Barrier:
    """Opens once when so many have come, failed ones included."""

    def __init__(self, count: int) -> None:
        self._missing = count
        self._open = asyncio.Event()

    def arrive(self) -> None:
        self._missing -= 1
        if not self._missing:
            self._open.set()

    async def wait(self) -> None:
        await self._open.wait()


@dataclass
class One:
    number: int
    received: Received = field(default_factory=Received)
    received_at: float | None = None
    """When it learned of the change that it was away for."""
    failed: str | None = None

    async def receives(self, uri: str) -> None:
        board = self.received.board
        await board.until(
            lambda: uri in self.received.updates,
            what=f"{uri} at client {self.number}",
            within=WITHIN,
        )

    async def run(self, url: str, barriers: list[Barrier]) -> None:
        ahead = list(barriers)
        try:
            transport = resumable(url, on_resume=self.received.on_resume)
            async with Client(
                transport, mode="legacy", message_handler=self.received.on_message
            ) as client:
                session = text_of(await client.call_tool("session_id", {}))
                await subscribe(client, BEFORE)
                await subscribe(client, DURING)
                ahead.pop(0).arrive()
                await self.receives(BEFORE)
                ahead.pop(0).arrive()
                await self.receives(DURING)
                self.received_at = time.monotonic()
                # Until all are back, every new connection is one that was lost.
                back = ahead.pop(0)
                back.arrive()
                await back.wait()
                again = text_of(await client.call_tool("session_id", {}))
                self.failed = self.judge(session, again)
        except Exception as error:
            # Each error of a client is a figure of this run.
            self.failed = repr(error)
            for barrier in ahead:
                barrier.arrive()

    def judge(self, before: str, after: str) -> str | None:
        if before != after or before == "none":
            return f"session {before} became {after}"
        if self.received.updates != [BEFORE, DURING]:
            return f"heard {self.received.updates}"
        # Over HTTP only the stream is opened anew, and the application is sent nothing.
        if not all(outcome.recovered for outcome in self.received.outcomes):
            return f"was told {self.received.outcomes}"
        return None


@dataclass
class Run:
    clients: list[One]
    cut: int = 0
    cut_at: float = 0.0
    accepted_at: list[float] = field(default_factory=list[float])
    """When the proxy took the first connections after the cut, one for each client."""

    async def watch(self, proxy: TcpProxy) -> None:
        before = proxy.accepted
        for number in range(1, len(self.clients) + 1):
            await proxy.accepted_total(before + number, within=WITHIN)
            self.accepted_at.append(time.monotonic())

    async def go(self, scheme: str) -> None:
        count = len(self.clients)
        barriers = [Barrier(count), Barrier(count), Barrier(count)]
        subscribed, ready, back = barriers
        with serving() as (_, layer, server):
            async with TcpProxy(server.host, server.port) as proxy:
                with anyio.fail_after(WITHIN):
                    async with anyio.create_task_group() as tasks:
                        for one in self.clients:
                            tasks.start_soon(one.run, proxy.url(scheme=scheme), barriers)
                        await subscribed.wait()
                        # A client that learns of it has a connection for events.
                        await server.call(layer.notify_resource_updated, BEFORE, within=WITHIN)
                        await ready.wait()
                        self.cut_at, self.cut = time.monotonic(), proxy.cut_all()
                        async with anyio.create_task_group() as watching:
                            watching.start_soon(self.watch, proxy)
                            publish = layer.notify_resource_updated
                            await server.call(publish, DURING, within=WITHIN)
                            await back.wait()
                            watching.cancel_scope.cancel()

    def rows(self, scheme: str) -> Iterator[Row]:
        failed = [one for one in self.clients if one.failed is not None]
        said = "; ".join(f"client {one.number}: {one.failed}" for one in failed[:10])
        yield Row(
            name=f"{scheme}: failed of {len(self.clients)}",
            measured=len(failed),
            most=0,
            includes=said or f"{self.cut} connections cut at once",
        )
        received = [one.received_at for one in self.clients if one.received_at is not None]
        for name, moments in (
            ("until reconnected", self.accepted_at),
            ("until caught up", received),
        ):
            delays = sorted(moment - self.cut_at for moment in moments)
            if not delays:
                continue
            most = max(sum(start <= d < start + STEP for d in delays) for start in delays)
            yield Row(
                name=f"{scheme}: {name}, the last",
                measured=delays[-1],
                unit="s",
                includes=f"the first {delays[0]:.3f}, median {statistics.median(delays):.3f}; "
                f"at most {most} in any {STEP:g} s",
            )


def rows(count: int) -> Iterator[Row]:
    for scheme in ("http", "ws"):
        run = Run([One(number) for number in range(count)])
        asyncio.run(run.go(scheme))
        yield from run.rows(scheme)


def main() -> None:
    count = int(sys.argv[1]) if len(sys.argv) > 1 else CLIENTS
    # The server under test is in this process, and says what becomes of every session.
    logging.disable(logging.INFO)
    # The SDK warns that `subscribe` is deprecated.
    warnings.filterwarnings("ignore", apps.DEPRECATED.removeprefix("ignore:"))
    # A client, both ends of the proxy and the server, two connections each, are one process.
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    report(rows(count))


if __name__ == "__main__":
    main()
