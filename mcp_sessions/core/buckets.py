"""Bound how many requests a second each of many senders may send.

Each sender has a bucket of requests. It holds the requests of :data:`BURST` seconds, and fills up
again as time passes. So a client that was quiet may send many requests at once, and still
sends no more than the rate on average.

A full bucket is as good as none, so it is forgotten. At most :data:`MOST` buckets are kept.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Final

BURST: Final = 10.0
"""Seconds whose requests a sender may send at once."""

MOST: Final = 10_000
"""Buckets that are kept."""


class Buckets:
    """The buckets of all senders. Times are in seconds, on one clock that never goes back.

    Args:
        rate: Requests a second of one sender.
    """

    def __init__(self, rate: float) -> None:
        self.rate = rate
        self._size = max(1.0, rate * BURST)
        self._full_at: dict[Hashable, float] = {}
        """Sender → when its bucket is full again. The sender that sent last is the last one."""

    def __len__(self) -> int:
        return len(self._full_at)

    def take(self, sender: Hashable, now: float) -> float:
        """Take one request out of the bucket of a sender.

        Returns:
            0, or the seconds until there is a request in it. Then nothing was taken.
        """
        full_at = max(now, self._full_at.pop(sender, now))
        missing = (full_at - now) * self.rate
        wait = (missing + 1 - self._size) / self.rate
        # Rounding must not make a client wait for a billionth of a second.
        if wait > 1e-6:
            self._full_at[sender] = full_at
            return wait
        self._full_at[sender] = full_at + 1 / self.rate
        if len(self._full_at) > MOST:
            self._forget(now)
        return 0.0

    def _forget(self, now: float) -> None:
        """Forget full buckets, and then those of the senders that were quiet for longest."""
        full = [sender for sender, full_at in self._full_at.items() if full_at <= now]
        for sender in full:
            del self._full_at[sender]
        # A tenth at once: so the next senders need no look at all buckets.
        while len(self._full_at) > MOST * 9 // 10:
            del self._full_at[next(iter(self._full_at))]
