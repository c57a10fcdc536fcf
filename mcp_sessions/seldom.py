from __future__ import annotations

import logging
import math
from dataclasses import dataclass
from typing import Final

MOST: Final = 10
"""Lines of a kind that are logged in :data:`QUIET` seconds."""

QUIET: Final = 60.0


@dataclass(slots=True)
class _Kind:
    since: float
    lines: int = 0


class Seldom(logging.Filter):
    """Bound the lines of each kind that a peer can cause, so that a flood does not fill the log.

    A kind is one text of the source. The next line that is logged says how many were left out.
    """

    def __init__(self) -> None:
        super().__init__()
        self._kinds: dict[str, _Kind] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        kind = self._kinds.setdefault(record.msg, _Kind(record.created))
        if abs(record.created - kind.since) >= QUIET:
            left_out = max(kind.lines - MOST, 0)
            kind.since, kind.lines = record.created, 0
            if left_out:
                record.msg = f"{record.msg} ({left_out} more such lines were left out)"
        kind.lines += 1
        return kind.lines <= MOST


class OnceAMinute:
    """Counts what happens, and says when the log may have a line about it."""

    def __init__(self) -> None:
        self._count, self._said_at = 0, -math.inf

    def due(self, now: float) -> int:
        """Count one more. Return how many there were since the last line. 0: no line is due.

        Args:
            now: Seconds of any clock.
        """
        self._count += 1
        if 0 <= now - self._said_at < QUIET:
            return 0
        count, self._count, self._said_at = self._count, 0, now
        return count
