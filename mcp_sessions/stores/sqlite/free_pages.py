from __future__ import annotations

import sqlite3
from collections.abc import Callable

from mcp_sessions.stores.sqlite.checkpointing import checkpoint

_KEPT = 64
"""Pages that an idle file keeps for later writes. All other free pages are given back."""

_STEP = 1_024
"""Pages given back at once, so that no caller waits long."""


def give_back_space(connection: sqlite3.Connection, shrinks_to: Callable[[int], None]) -> None:
    """Return free pages to the file system.

    Args:
        shrinks_to: Takes the bytes that the file will have, before it becomes shorter.
    """
    (free,) = connection.execute("PRAGMA freelist_count").fetchone()
    if free > _KEPT:
        step = min(free - _KEPT, _STEP)
        # ``execute`` would do one step of this statement, which gives back one page a step.
        connection.executescript(f"PRAGMA incremental_vacuum({step})")
        shrinks_to(committed_length(connection))
        # The file itself becomes shorter when the write-ahead log is copied into it.
        checkpoint(connection)


def committed_length(connection: sqlite3.Connection) -> int:
    """Bytes that the committed pages take, in the file or in its write-ahead log."""
    (pages,) = connection.execute("PRAGMA page_count").fetchone()
    (size,) = connection.execute("PRAGMA page_size").fetchone()
    return pages * size
