"""The write-ahead log of a file that is served: copied into the file, and begun anew.

To copy it (SQLite's checkpoint) is to wait for the disk, for tens of milliseconds where it is
long. So a thread of its own does it, by a connection of its own, next to whoever writes; only
the little that was written meanwhile is copied while they wait.
"""

from __future__ import annotations

import logging
import os
import sqlite3
import threading
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from mcp_sessions.background import report
from mcp_sessions.stores.sqlite import schema
from mcp_sessions.stores.sqlite.schema import committing

logger = logging.getLogger(__name__)

_LOOK = 16
"""Commits between two looks at how long it is."""

_FEW = 64
"""Pages of the log that are copied while others wait."""

_PASSES = 4
"""Over what came since the pass before: whoever writes faster than the disk is not followed."""

_ROOM = 1.25
"""Times ``LOG_SIZE``: a log of this length grows no more, and who writes waits for the copy."""


@dataclass(eq=False, repr=False)
class WriteAheadLog:
    _path: Path
    _log_file: Path
    _connect: Callable[[], sqlite3.Connection]
    _copying: threading.Thread | None = None
    _is_due: bool = False
    _commits: int = 0

    @property
    def is_due(self) -> bool:
        """Whether the writer's thread is to begin it anew: it is copied but for a little, or it
        becomes too long meanwhile.
        """
        return self._is_due

    def look(self) -> None:
        """Copy the log if it is long: after each commit, one caller at a time."""
        self._commits += 1
        if self._copying is None and self._commits % _LOOK:
            return
        size = self._size()
        if self._copying is None and size > schema.LOG_SIZE:
            self._copying = threading.Thread(
                target=self._copy, name="mcp-sessions-sqlite-checkpoint", daemon=True
            )
            self._copying.start()
        elif size > schema.LOG_SIZE * _ROOM:
            self._is_due = True

    def begin_anew(self, connection: sqlite3.Connection) -> None:
        """Copy the rest and begin the log anew, by the connection that writes to the file."""
        self.join()
        try:
            checkpoint(connection)
        except sqlite3.Error as failed:
            # The log's content is as safe as before; the next look tries again.
            logger.warning("%s: %s", self._path, failed)

    def join(self) -> None:
        if self._copying is not None:
            self._copying.join()
        self._copying, self._is_due = None, False

    def _size(self) -> int:
        # A log that was begun anew is cut to LOG_SIZE: a longer one is one that is in use.
        try:
            return os.stat(self._log_file).st_size
        except OSError:
            # It is not there before the first commit.
            return 0

    def _copy(self) -> None:
        try:
            with closing(self._connect()) as connection:
                copied = 0
                for _ in range(_PASSES):
                    row = connection.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchone()
                    _, length, now_copied = row
                    if length - copied <= _FEW:
                        break
                    copied = now_copied
        except sqlite3.Error as failed:
            logger.warning("%s: %s", self._path, failed)
        except Exception as failed:
            # The boundary to a thread that nobody awaits.
            report("copying the write-ahead log", failed)
        finally:
            # Also where it failed: whoever begins it anew copies what is left, or says why not.
            self._is_due = True


def checkpoint(connection: sqlite3.Connection) -> None:
    """Copy the write-ahead log into the file, and begin it anew unless somebody reads it."""
    connection.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchall()
    # The next writer begins the log anew, and waits for the disk. This write makes sure that it is
    # not a writer that must not wait.
    with committing(connection):
        connection.execute("UPDATE meta SET value = value WHERE name = 'sessions'")


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
