"""Detect a SQLite file that is older than it was, such as a restored copy.

A restored copy would give out event ids again that clients have seen. So the file counts, and a
second file (``-seen``) has the count that was seen. A file with a lower count is a copy, and so is
one without the second file. A file with a higher count is not a copy: its process died between the
two writes.
"""

from __future__ import annotations

import os
import re
import sqlite3
from pathlib import Path

from mcp_sessions.security import mint_process
from mcp_sessions.stores.sqlite.schema import committing

_SEEN = re.compile(r"([0-9A-Za-z_-]{8,64}) ([0-9]{20})\n", re.ASCII)


class Seen:
    def __init__(self, file: Path) -> None:
        self.path = file.with_name(file.name + "-seen")
        self._noted_at = -1

    def begin(self, connection: sqlite3.Connection) -> bool:
        """Count on, in the caller's transaction; whether the file is a copy, or may be one.

        Raises:
            OSError: What is next to the file cannot be read.
            sqlite3.Error: The file cannot be written.
        """
        meta = dict(
            connection.execute("SELECT name, value FROM meta WHERE name IN ('file', 'count')")
        )
        seen = self._read()
        file, count = meta.get("file"), int(meta.get("count", 0))
        if file is None:
            # New, or of a version that did not count: then it is a copy if one that does was
            # here before.
            is_copy = seen is not None
        else:
            is_copy = seen is None or seen[0] != file or seen[1] > count
        count = max(count, seen[1] if seen is not None else 0) + 1
        connection.executemany(
            "INSERT OR REPLACE INTO meta (name, value) VALUES (?, ?)",
            [("file", file or mint_process()), ("count", count)],
        )
        return is_copy

    def count(self, connection: sqlite3.Connection) -> None:
        """Count on, if anything was written since: first in the file, then next to it.

        Raises:
            OSError, sqlite3.Error: One of the two cannot be written; the next time may do.
        """
        if connection.total_changes == self._noted_at:
            return
        with committing(connection):
            connection.execute("UPDATE meta SET value = value + 1 WHERE name = 'count'")
        self.note(connection)

    def note(self, connection: sqlite3.Connection) -> None:
        """Write next to the file how far its commits are.

        Raises:
            OSError: That cannot be written.
        """
        file, count = connection.execute(
            "SELECT (SELECT value FROM meta WHERE name = 'file'),"
            " (SELECT value FROM meta WHERE name = 'count')"
        ).fetchone()
        # In one piece and always as long: no moment in which there is half of it.
        descriptor = os.open(self.path, os.O_CREAT | os.O_WRONLY, 0o600)
        try:
            os.pwrite(descriptor, f"{file} {count:020d}\n".encode(), 0)
        finally:
            os.close(descriptor)
        self._noted_at = connection.total_changes

    def _read(self) -> tuple[str, int] | None:
        try:
            found = _SEEN.match(self.path.read_text("ascii", "replace"))
        except FileNotFoundError:
            return None
        # Any other text says nothing about a file.
        return (found[1], int(found[2])) if found is not None else ("", 0)
