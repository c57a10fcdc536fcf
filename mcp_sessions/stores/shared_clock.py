from __future__ import annotations

import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

logger = logging.getLogger(__name__)

SKEW = 5.0
"""Seconds that the clocks of a process and of the server may differ; less is not corrected."""

FRESH = 5.0
"""Seconds for which a comparison is good, if the process's clock does not jump meanwhile."""

_JUMP = 1.0
"""Seconds that the process's clock may move more, or less, than time passes."""


@dataclass(slots=True, eq=False, repr=False)
class SharedClock:
    """Compares this process's clock to the server's ``TIME`` now and then.

    Every process passes its own clock's time into the store, and other processes judge by it. A
    clock that is ahead would end every session and forget every request key. If the two differ by
    more than clocks do, the process corrects the time that it passes.

    Args:
        ask: Asks the server for its time, in seconds since 1970.
        wall: The process's clock, which ``now`` is read from, in seconds since 1970.
        steady: A clock that is never set, in seconds.
    """

    _ask: Callable[[], Awaitable[float]]
    _wall: Callable[[], float] = time.time
    _steady: Callable[[], float] = time.monotonic
    _compared: tuple[float, float] | None = None
    """The two clocks of this process when it asked last."""

    _ahead: float = 0.0
    """Seconds that its clock is ahead of the server's; 0: as far as clocks differ."""

    async def at(self, now: float) -> float:
        """``now``, a time of this process, as the server has it.

        Raises:
            StoreUnavailable: It had to be asked, and did not answer.
        """
        compared = self._compared
        # A process that was stopped, a machine that slept, a clock that was set.
        if (
            compared is None
            or (passed := self._steady() - compared[1]) >= FRESH
            or abs(self._wall() - compared[0] - passed) >= _JUMP
        ):
            await self._compare()
        return now - self._ahead

    @property
    def ahead(self) -> float:
        """Seconds that this process's clock is ahead of the server's, as it was compared last."""
        return self._ahead

    async def now(self) -> float:
        return await self.at(self._wall())

    async def _compare(self) -> None:
        before, steady = self._wall(), self._steady()
        there = await self._ask()
        after = before + self._steady() - steady
        # It was asked at some moment in between: the least that explains the difference.
        ahead = max(before - there, 0.0) + min(after - there, 0.0)
        ahead = ahead if abs(ahead) > SKEW else 0.0
        self._compared = (before, steady)
        if abs(ahead - self._ahead) > _JUMP:
            logger.warning(
                "this process's clock is %.0f s %s the store's; the store's clock counts",
                abs(ahead),
                "behind" if ahead < 0 else "ahead of",
            )
        self._ahead = ahead
