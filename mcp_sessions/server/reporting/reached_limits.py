"""Report the limits that refuse requests: which one, how large it is, and how to raise it.

Each refusal is counted. The log has one line for each limit in :data:`QUIET` seconds at most.
"""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Callable
from typing import Final

from mcp_sessions import metrics
from mcp_sessions.errors import LimitReached
from mcp_sessions.policy import how_to_raise

logger = logging.getLogger(__name__)

QUIET: Final = 60.0
"""Seconds between two lines about the same limit."""


class ReachedLimits:
    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._refused = Counter[str]()
        """Limit → requests that it refused since the last line about it."""

        self._said_at: dict[str, float] = {}

    def reached(self, refused: LimitReached) -> None:
        metrics.limited(refused.limit)
        self._refused[refused.limit] += 1
        now = self._clock()
        if now - self._said_at.get(refused.limit, -math.inf) < QUIET:
            return
        self._said_at[refused.limit] = now
        logger.warning(
            "refused requests: %d. The limit %s (%s) is reached. To raise it, set %s",
            self._refused.pop(refused.limit),
            refused.limit,
            refused.most,
            how_to_raise(refused.limit),
        )
