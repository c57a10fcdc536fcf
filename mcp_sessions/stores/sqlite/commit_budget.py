"""How much of the event loop's time is spent on commits.

A commit that the loop does itself is a wait for everybody else that it serves. So the loop turns
to them after a few, and they are short; where one was not (the machine is busy, or the disk),
the thread does them all for a while.
"""

from __future__ import annotations

import asyncio
from time import monotonic

AT_ONCE = 16
"""Commits between two looks of the loop at whom else it serves. Other calls meanwhile share a
commit of the thread.
"""

SHARE = 0.005
"""Seconds for them all."""

PAUSE = 0.5
"""Seconds without any, after one that took longer than all are to take."""


class CommitBudget:
    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._done = 0
        self._spent = 0.0
        self._is_turn_asked = False
        self._paused_until = 0.0
        self._began = 0.0

    def begin(self) -> bool:
        """Whether there is time for one more commit. If so, it begins."""
        # To learn of the loop's next turn costs a turn. So it is asked for when half of what
        # there is to give is given, and who comes alone pays for it now and then.
        if not self._is_turn_asked and (self._done >= AT_ONCE // 2 or self._spent >= SHARE):
            self._is_turn_asked = True
            self._loop.call_soon(self._next)
        if self._done >= AT_ONCE or self._spent >= SHARE:
            return False
        self._began = monotonic()
        if self._began < self._paused_until:
            return False
        self._done += 1
        return True

    def end(self) -> None:
        now = monotonic()
        took = now - self._began
        self._spent += took
        if took >= SHARE:
            self._paused_until = now + PAUSE

    def _next(self) -> None:
        self._done, self._spent, self._is_turn_asked = 0, 0.0, False
