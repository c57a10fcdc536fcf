"""Copy a file while another process may serve from it, by SQLite's own online backup."""

from __future__ import annotations

import contextlib
import os
import sqlite3
import tempfile
from collections.abc import Generator
from pathlib import Path

from mcp_sessions.errors import ConfigurationError
from mcp_sessions.stores.new_file import new_file
from mcp_sessions.stores.sqlite import schema
from mcp_sessions.stores.sqlite.seen import Seen
from mcp_sessions.unopened import reason_of


def back_up(path: Path, target: Path) -> None:
    """Copy the file as it is at one moment. It needs no lock, and holds up nobody.

    Raises:
        ConfigurationError: It is no file of ours, or the target is there, or cannot be made.
        StoreUnavailable: The file is locked or damaged, or there is no space left.
    """
    source = schema.open_for_operator(Path(os.path.realpath(path)), any_version=True)
    with contextlib.closing(source), new_file(target) as (_, temporary):
        try:
            with contextlib.closing(sqlite3.connect(temporary)) as copy:
                source.backup(copy)
        except sqlite3.Error as failed:
            full = schema.error_code(failed) == sqlite3.SQLITE_FULL
            raise schema.unavailable(target if full else path, failed) from failed


@contextlib.contextmanager
def copied(path: Path) -> Generator[Path]:
    """A copy to read from, which is gone afterwards. The file itself stays as it is.

    Raises:
        ConfigurationError, StoreUnavailable: See :func:`back_up`.
    """
    try:
        made = tempfile.TemporaryDirectory(
            prefix=".mcp-sessions-", dir=Path(os.path.realpath(path)).parent
        )
    except OSError as failed:
        raise ConfigurationError(f"{path}: {reason_of(failed, path)}") from failed
    with made as folder:
        copy = Path(folder) / "copy.db"
        back_up(path, copy)
        with contextlib.closing(sqlite3.connect(copy, isolation_level=None)) as connection:
            damaged = [line for (line,) in connection.execute("PRAGMA integrity_check(1)")]
            if damaged != ["ok"]:
                raise ConfigurationError(f"{path} is damaged: {damaged[0]}")
            if connection.execute("SELECT 1 FROM meta WHERE name = 'file'").fetchone():
                # It is that very file: its logs do not begin anew.
                Seen(copy).note(connection)
        yield copy
