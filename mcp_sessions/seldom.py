from __future__ import annotations

import logging
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
    """Bound the lines of each kind that a client can cause, so that a flood does not fill the log.

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
