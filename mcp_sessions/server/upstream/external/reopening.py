"""When a stream of a server's is opened again after it ended."""

from __future__ import annotations

import asyncio
import random
from typing import Final

from mcp_sessions.core.backoff import Backoff

LEAST: Final = 0.1
"""Seconds, whatever the server says: zero would be a loop."""

LONGEST: Final = 30.0
"""Seconds at the most."""

_LASTED: Final = 5.0
"""Seconds after which a stream that brought nothing was no failure, either."""


class Reopening:
    """Of one stream: as soon as its server says, if it brought something or lasted; later and
    later, as long as it ends at once.

    Args:
        base: Seconds before the first time, at the most, if the server does not say.
    """

    def __init__(self, base: float) -> None:
        self._backoff = Backoff(base=base, cap=LONGEST)
        self._opened_at = 0.0

    def opened(self) -> None:
        """It is opened now."""
        self._opened_at = asyncio.get_running_loop().time()

    def progressed(self) -> None:
        """It brought something."""
        self._backoff.progressed()

    def delay(self, retry: float | None) -> float:
        """It ended: the seconds before it is opened again.

        Args:
            retry: As the server says; None: it does not.
        """
        if asyncio.get_running_loop().time() - self._opened_at >= _LASTED:
            self._backoff.progressed()
        is_first = not self._backoff.failures
        later = self._backoff.failed(random.random())
        if retry is None:
            return later
        wanted = min(max(retry, LEAST), LONGEST)
        return wanted if is_first else max(wanted, later)
