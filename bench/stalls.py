from __future__ import annotations

import asyncio
import gc
import resource
import time
from collections.abc import Mapping

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

EVERY = 0.01
"""Seconds between two looks at the clock."""


class Stalls:
    """The longest stalls since the last question. A late timer shows them. On a machine that others
    use it is late as well when they have the core. So the CPU time of the loop's own thread counts;
    the time by the clock is there, too.
    """

    def __init__(self) -> None:
        self._due = 0.0
        self._used = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self._longest = self._longest_by_clock = self._longest_collection = 0.0
        self._collects_since = 0.0
        gc.callbacks.append(self._collects)

    async def respond(self, request: Request) -> Response:
        """Return the figures since the last request, in ms. Watch the clock from now on, unless the
        body is ``off``.
        """
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if await request.body() != b"off":
            self._wait()
        return JSONResponse(self._taken())

    def _taken(self) -> Mapping[str, float]:
        taken = {
            "stall": round(self._longest * 1e3, 3),
            "by_clock": self._longest_by_clock * 1e3,
            "collection": self._longest_collection * 1e3,
            "peak": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        }
        self._longest = self._longest_by_clock = self._longest_collection = 0.0
        return taken

    def _wait(self) -> None:
        loop = asyncio.get_running_loop()
        self._due, self._used = loop.time() + EVERY, time.thread_time()
        self._timer = loop.call_at(self._due, self._look)

    def _look(self) -> None:
        late = asyncio.get_running_loop().time() - self._due
        used = time.thread_time() - self._used
        self._longest = max(self._longest, min(late, used))
        self._longest_by_clock = max(self._longest_by_clock, late)
        self._wait()

    def _collects(self, phase: str, info: Mapping[str, int]) -> None:
        if phase == "start":
            self._collects_since = time.thread_time()
        else:
            took = time.thread_time() - self._collects_since
            self._longest_collection = max(self._longest_collection, took)
