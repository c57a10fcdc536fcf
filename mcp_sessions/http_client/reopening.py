from __future__ import annotations

import asyncio
import random
from typing import Final

from mcp_sessions.core.backoff import Backoff

LEAST: Final = 0.1
"""Seconds, whatever the server says: zero would be a loop."""

LONGEST: Final = 30.0
"""Seconds, at most."""

_LASTED: Final = 5.0
"""Seconds after which a stream without messages was no failure either."""


class Reopening:
    """Time the next try of one stream. If it brought a message or lasted, the server's delay
    counts. If it ends at once, each delay is longer.

    Args:
        base: Seconds before the first time, at the most, if the server does not say.
    """

    def __init__(self, base: float) -> None:
        self._backoff = Backoff(base=base, cap=LONGEST)
        self._opened_at = 0.0

    def opened(self) -> None:
        self._opened_at = asyncio.get_running_loop().time()

    def progressed(self) -> None:
        self._backoff.progressed()

    def delay(self, retry: float | None) -> float:
        """Return the seconds before an ended stream is opened again.

        Args:
            retry: Seconds that the server named. None: it named none.
        """
        if asyncio.get_running_loop().time() - self._opened_at >= _LASTED:
            self._backoff.progressed()
        is_first = not self._backoff.failures
        later = self._backoff.failed(random.random())
        if retry is None:
            return later
        wanted = min(max(retry, LEAST), LONGEST)
        return wanted if is_first else max(wanted, later)
