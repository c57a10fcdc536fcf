"""Full garbage collections while 100,000 sessions start.

    python -m bench.bench_collections [SESSIONS]

Python's garbage collector sometimes looks at all objects of the process. The server answers nobody
meanwhile. ``serve`` takes measures to keep these collections short. In this bench sessions start in
one process, without a network, as fast as they can. The figure is the CPU time of the collections
with these measures. The ratio compares it with a run without them.
"""

from __future__ import annotations

import asyncio
import gc
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import uvloop

from bench.bench_core import Loopback, in_a_layer
from bench.rows import Row, report
from mcp_sessions import SessionLayer
from mcp_sessions.serve.garbage import Collections, set_aside_everything

SESSIONS = 100_000
TICK = 0.1
"""Seconds; how often the server that runs us looks."""


class Watch:
    def __init__(self) -> None:
        self.longest, self.total, self.count = 0.0, 0.0, 0
        self._begun = 0.0
        gc.callbacks.append(self._see)

    def _see(self, phase: str, info: dict[str, int]) -> None:
        if info["generation"] < 2:
            return
        if phase == "start":
            self._begun = time.thread_time()
        else:
            took = time.thread_time() - self._begun
            self.longest, self.total = max(self.longest, took), self.total + took
            self.count += 1


async def ticks(tick: Callable[[], object]) -> None:
    while True:
        tick()
        await asyncio.sleep(TICK)


async def measure(count: int, tick: Callable[[], object]) -> tuple[float, float, int, float]:
    """Seconds of the longest, of all, their number, and starts a second."""

    async def started(layer: SessionLayer, client: Loopback) -> float:
        connection = await client.initialize()
        begun = time.perf_counter()
        for _ in range(count):
            await client.start()
            await asyncio.sleep(0)
        took = time.perf_counter() - begun
        await client.start(connection)
        return count / took

    set_aside_everything()
    watch = Watch()
    ticking = asyncio.create_task(ticks(tick))
    rate = await in_a_layer(started)
    ticking.cancel()
    return watch.longest, watch.total, watch.count, rate


def rows(count: int) -> Iterator[Row]:
    found: dict[str, list[float]] = {}
    for how in ("serve", "nothing"):
        command = [sys.executable, "-m", "bench.bench_collections", how, str(count)]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, timeout=200)
        found[how] = [float(word) for word in done.stdout.split()]
    longest, total, number, rate = found["serve"]
    bare, bare_total, _, _ = found["nothing"]
    yield Row(
        name=f"the longest of {count:,} starts",
        measured=longest * 1e3,
        unit="ms",
        most=50,
        ratio=bare / longest,
        basis="times shorter than with the collector left alone",
        includes=f"{rate:,.0f} starts a second",
    )
    yield Row(
        name="all of them",
        measured=total * 1e3,
        unit="ms",
        ratio=bare_total / total,
        basis="times shorter than with the collector left alone",
        includes=f"{number:.0f} collections",
    )


def main() -> None:
    if sys.argv[1:2] and sys.argv[1] in ("serve", "nothing"):
        tick: dict[str, Callable[[], Any]] = {"serve": Collections().look, "nothing": lambda: None}
        print(*uvloop.run(measure(int(sys.argv[2]), tick[sys.argv[1]])))
    else:
        report(rows(int(sys.argv[1]) if len(sys.argv) > 1 else SESSIONS))


if __name__ == "__main__":
    main()
