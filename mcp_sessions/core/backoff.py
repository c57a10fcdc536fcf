"""How long a client waits before it tries again: exponential, with full jitter.

Rules that must hold, and that ``tests/core/test_backoff.py`` owns:

1. The random number is an argument: nothing here draws one, nothing here reads a clock.
2. Full jitter: a delay is anything from zero to the bound of this attempt, so that clients
   that were cut at once do not come back at once (CLI2).
3. Only progress resets the count. A connection that opens and breaks again is none: else a
   server that accepts and dies is asked as fast as the client can.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True, eq=False, kw_only=True)
class Backoff:
    base: float
    """Seconds that the first delay has at the most."""

    cap: float
    """Seconds that any delay has at the most."""

    failures: int = 0
    """Attempts that failed since the last progress."""

    def failed(self, random: float) -> float:
        """Count a failed attempt.

        Args:
            random: From 0 to 1, equally distributed.

        Returns:
            Seconds to wait before the next attempt.
        """
        # The exponent is bounded as well: a client may be offline for weeks.
        bound = min(self.cap, self.base * 2.0 ** min(self.failures, 62))
        self.failures += 1
        return bound * random

    def progressed(self) -> None:
        self.failures = 0


def spread(seconds: float, random: float) -> float:
    """When to come back, of a server that asked its clients to spread over ``seconds``.

    Args:
        random: From 0 to 1, equally distributed.
    """
    return max(0.0, seconds) * random
