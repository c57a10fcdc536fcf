"""How much of the event loop's time is spent on commits.

A commit that the loop does itself is a wait for everybody else that it serves. So in one turn
of the loop there are few of them, and they are short; where one was not (the machine is busy,
or the disk), the thread does them all for a while.
"""

from __future__ import annotations

import asyncio
from time import monotonic

AT_ONCE = 16
"""Commits in one turn of the loop. Whoever else comes in it shares one of the thread's."""

SHARE = 0.005
"""Seconds of one turn of the loop for them all."""

PAUSE = 0.5
"""Seconds without any, after one that took longer than all are to take."""


class Turns:
    """One event loop's turns."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._done = 0
        self._spent = 0.0
        self._paused_until = 0.0
        self._began = 0.0

    def begin(self) -> bool:
        """Whether there is time for one more; then it begins."""
        if self._done >= AT_ONCE or self._spent >= SHARE:
            return False
        self._began = monotonic()
        if self._began < self._paused_until:
            return False
        if not self._done:
            self._loop.call_soon(self._next)
        self._done += 1
        return True

    def end(self) -> None:
        """It is over."""
        now = monotonic()
        took = now - self._began
        self._spent += took
        if took >= SHARE:
            self._paused_until = now + PAUSE

    def _next(self) -> None:
        self._done, self._spent = 0, 0.0
