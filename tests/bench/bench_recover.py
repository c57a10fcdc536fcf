"""Clients that are cut at once come back, all of them, and not all at once.

    python -m tests.bench.bench_recover [CLIENTS]

Each is ``mcp.Client`` on `resumable`, with the limits it has by default, behind one proxy that
cuts every connection in the same moment. While all are away a resource changes. A client has
failed when it raises, when it lost its session, when it heard of either change not exactly
once, or when a call after that is not answered. The figures: seconds from the cut until the
application is told that the session was resumed. Ends with status 1 if a client failed.
"""

from __future__ import annotations

import asyncio
import resource
import statistics
import sys
import time
from dataclasses import dataclass, field
from typing import Any

import anyio
from mcp import Client

from mcp_sessions.client.outcome import ResumeOutcome
from mcp_sessions.client_transport import resumable
from tests.support.proxy import TcpProxy
from tests.support.resuming import Heard, serving, subscribe, text_of

CLIENTS = 200
WITHIN = 120.0
"""Seconds that one run may take."""

BEFORE, DURING = "note://before", "note://during"
STEP = 0.1
"""Seconds in which the reconnects are counted, for the most of them at once."""


class Barrier:
    """Opens once so many have come; one that failed has come too."""

    def __init__(self, count: int) -> None:
        self._missing = count
        self._open = asyncio.Event()

    def arrive(self) -> None:
        """One more."""
        self._missing -= 1
        if not self._missing:
            self._open.set()

    async def wait(self) -> None:
        """Return once all have come."""
        await self._open.wait()


@dataclass
class One:
    """A client, and how it fared."""

    number: int
    heard: Heard = field(default_factory=Heard)
    resumed_at: list[float] = field(default_factory=list[float])
    failed: str | None = None

    def on_resume(self, outcome: ResumeOutcome) -> None:
        """For ``on_resume``."""
        self.resumed_at.append(time.monotonic())
        self.heard.on_resume(outcome)

    async def hears(self, uri: str) -> None:
        """Return once it was told of a change."""
        board = self.heard.board
        await board.until(
            lambda: uri in self.heard.updates, what=f"{uri} at client {self.number}", within=WITHIN
        )

    async def run(self, url: str, subscribed: Barrier, ready: Barrier) -> None:
        """Connect, be cut, come back."""
        waiting = [subscribed, ready]
        try:
            transport = resumable(url, on_resume=self.on_resume)
            async with Client(
                transport, mode="legacy", message_handler=self.heard.on_message
            ) as client:
                session = await client.call_tool("session_id", {})
                await subscribe(client, BEFORE)
                await subscribe(client, DURING)
                waiting.pop(0).arrive()
                await self.hears(BEFORE)
                waiting.pop(0).arrive()
                await self.hears(DURING)
                self.failed = self.judge(session, await client.call_tool("session_id", {}))
        except Exception as error:
            # Whatever a client raises is a figure of this run.
            self.failed = repr(error)
            for barrier in waiting:
                barrier.arrive()

    def judge(self, before: Any, after: Any) -> str | None:
        """What is wrong with it after all, if anything is."""
        if text_of(before) != text_of(after):
            return f"session {text_of(before)} became {text_of(after)}"
        if self.heard.updates != [BEFORE, DURING]:
            return f"heard {self.heard.updates}"
        if not self.heard.outcomes or not all(o.recovered for o in self.heard.outcomes):
            return f"was told {self.heard.outcomes}"
        return None


async def cut_at_once(scheme: str, count: int) -> tuple[list[One], int, float]:
    """The clients, how many connections were cut, and when."""
    clients = [One(number) for number in range(count)]
    subscribed, ready = Barrier(count), Barrier(count)
    with serving() as (_, layer, server):
        async with TcpProxy(server.host, server.port) as proxy:
            with anyio.fail_after(WITHIN):
                async with anyio.create_task_group() as tasks:
                    for one in clients:
                        url = proxy.url(scheme=scheme)
                        tasks.start_soon(one.run, url, subscribed, ready)
                    await subscribed.wait()
                    # Who hears of it has a connection that events come on.
                    await server.call(layer.notify_resource_updated, BEFORE)
                    await ready.wait()
                    cut_at, cut = time.monotonic(), proxy.cut_all()
                    await server.call(layer.notify_resource_updated, DURING)
    return clients, cut, cut_at


def report(scheme: str, clients: list[One], cut: int, cut_at: float) -> int:
    """Print the figures of one run; how many clients failed."""
    failed = [one for one in clients if one.failed is not None]
    print(f"{scheme}: {len(clients)} clients, {cut} connections cut at once")
    print(f"  recovered {len(clients) - len(failed)}, failed {len(failed)}")
    for one in failed[:10]:
        print(f"    client {one.number}: {one.failed}")
    delays = sorted(one.resumed_at[0] - cut_at for one in clients if one.resumed_at)
    if delays:
        most = max(sum(start <= d < start + STEP for d in delays) for start in delays)
        print(
            f"  seconds until resumed: min {delays[0]:.3f}, median"
            f" {statistics.median(delays):.3f}, max {delays[-1]:.3f};"
            f" at most {most} in any {STEP:g} s"
        )
    return len(failed)


def main() -> None:
    """Cut them over HTTP, then over WebSocket."""
    count = int(sys.argv[1]) if len(sys.argv) > 1 else CLIENTS
    # A client, both ends of the proxy and the server, two connections each, are one process.
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    failed = 0
    for scheme in ("http", "ws"):
        failed += report(scheme, *asyncio.run(cut_at_once(scheme, count)))
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    raise SystemExit(1 if failed else 0)


if __name__ == "__main__":
    main()
