"""How much time has passed, also while the machine slept.

A promise of a server for so many seconds ends when they have passed at the server. Its clock does
not stand still while a client's machine is suspended. ``time.monotonic`` does, on Linux and macOS.

Rules that must hold, and that ``tests/client/test_elapsed.py`` owns:

1. It never goes back, and never stands still while one of its clocks goes on.
2. If the clocks disagree, the longer time is believed: a wall clock that is set forward makes a
   promise end early, which costs an answer; believed too long, a call runs twice.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence


def _since_boot() -> float:
    """Return seconds on a clock that counts suspend, if the system has one."""
    if sys.platform == "linux":
        return time.clock_gettime(time.CLOCK_BOOTTIME)
    if sys.platform == "darwin":
        # There it counts sleep, which what Python calls monotonic does not.
        return time.clock_gettime(time.CLOCK_MONOTONIC)
    return time.monotonic()


def _wall() -> float:
    return time.time()


class Elapsed:
    """Seconds since it was made: of each step between two readings, the longest that a clock
    shows.

    Args:
        clocks: By default the one that counts suspend, and the wall clock, which also sees that a
            virtual machine was paused.
    """

    __slots__ = ("_clocks", "_last", "_total")

    def __init__(self, clocks: Sequence[Callable[[], float]] = (_since_boot, _wall)) -> None:
        self._clocks = clocks
        self._last = [clock() for clock in clocks]
        self._total = 0.0

    def __call__(self) -> float:
        now = [clock() for clock in self._clocks]
        steps = (new - old for new, old in zip(now, self._last, strict=True))
        self._total += max(0.0, *steps)
        self._last = now
        return self._total
