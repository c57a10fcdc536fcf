"""Report the limits that refuse requests: which one, how large it is, and how to raise it.

Each refusal is counted. The log has one line for each limit in a minute at most.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Callable

from mcp_sessions import metrics
from mcp_sessions.errors import LimitReached
from mcp_sessions.policy import how_to_raise
from mcp_sessions.seldom import OnceAMinute

logger = logging.getLogger(__name__)


class ReachedLimits:
    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._refused = defaultdict[str, OnceAMinute](OnceAMinute)
        """By the name of the limit."""

    def reached(self, refused: LimitReached) -> None:
        metrics.limited(refused.limit)
        if count := self._refused[refused.limit].due(self._clock()):
            logger.warning(
                "refused requests: %d. The limit %s (%s) is reached. To raise it, set %s",
                count,
                refused.limit,
                refused.most,
                how_to_raise(refused.limit),
            )
