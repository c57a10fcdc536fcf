"""Clean a SQLite file when a process starts to serve: end everything that the last one left."""

from __future__ import annotations

import logging
import sqlite3
from pathlib import Path

from mcp_sessions.errors import ConfigurationError
from mcp_sessions.ids import LogEpoch
from mcp_sessions.security import log_epoch_after
from mcp_sessions.stores.sqlite.schema import Durability, boot_id, committing, opening_failed
from mcp_sessions.stores.sqlite.seen import Seen

logger = logging.getLogger(__name__)

# A connection that was no transport-mode session is gone with its process.
_DETACH = """
    UPDATE sessions SET connection_id = NULL
    WHERE connection_id IS NOT NULL
      AND connection_id NOT IN (SELECT session_id FROM sessions WHERE mode = 'transport')
"""

# Its runner is gone. From now on it is known for the lifetime of a key after it began: no
# client sends an older one.
_DROP_RUNNING = """
    UPDATE keys SET outcome = NULL, finished =
        (SELECT ifnull(max(finished), 0) + 1 FROM keys AS others
         WHERE others.sid = keys.sid AND others.finished IS NOT NULL)
    WHERE finished IS NULL
"""


def start_up(
    connection: sqlite3.Connection, path: Path, durability: Durability, seen: Seen
) -> None:
    """Make the file this process's, whole or not at all.

    Raises:
        ConfigurationError, StoreUnavailable: It cannot be written, or what is next to it not be
            read or written.
    """
    try:
        boot = boot_id()
        with committing(connection):
            connection.execute(_DETACH)
            connection.execute(_DROP_RUNNING)
            is_copy = seen.begin(connection)
            if _lost_power(connection, boot):
                logger.warning("%s: every event log starts anew after a power loss", path)
                _replace_logs(connection)
            elif is_copy and connection.execute("SELECT 1 FROM logs LIMIT 1").fetchone():
                logger.warning(
                    "%s is a copy, or %s is missing: every event log starts anew",
                    path,
                    seen.path.name,
                )
                _replace_logs(connection)
            elif is_copy and _is_new(connection):
                logger.warning(
                    "%s is a new file, and %s belongs to an older one: the sessions of the older "
                    "file are gone",
                    path,
                    seen.path.name,
                )
            _remember(connection, boot, durability)
        seen.note(connection)
    except sqlite3.Error as failed:
        raise opening_failed(path, failed) from failed
    except OSError as failed:
        reason = failed.strerror or str(failed)
        raise ConfigurationError(f"{seen.path} cannot be used: {reason}") from failed


def shut_down(connection: sqlite3.Connection, seen: Seen) -> None:
    """Say that everything is on the medium, after it is, and how far the file came.

    Raises:
        sqlite3.Error: It is not.
    """
    try:
        seen.count(connection)
    except OSError as failed:
        logger.warning("%s: %s", seen.path, failed.strerror)
    connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
    connection.execute("DELETE FROM meta WHERE name = 'boot'")
    connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()


def _is_new(connection: sqlite3.Connection) -> bool:
    found = "SELECT 1 FROM meta WHERE name = 'made' UNION ALL SELECT 1 FROM sessions LIMIT 1"
    return connection.execute(found).fetchone() is None


def _lost_power(connection: sqlite3.Connection, boot: str | None) -> bool:
    """Whether writes of the process before may be missing: it was not closed, its machine
    ran anew since, and its commits were not synced.
    """
    row = connection.execute("SELECT value FROM meta WHERE name = 'boot'").fetchone()
    return row is not None and boot is not None and row[0] != boot


def _remember(connection: sqlite3.Connection, boot: str | None, durability: Durability) -> None:
    if boot is not None and durability == "normal":
        connection.execute("INSERT OR REPLACE INTO meta VALUES ('boot', ?)", (boot,))
    else:
        connection.execute("DELETE FROM meta WHERE name = 'boot'")


# The log of an agent's session is kept whole: no other copy of it exists. Its positions are
# refused too, since its next entry may have the number of one that was lost.
_OF_AGENTS = """
    SELECT log FROM logs JOIN sessions USING (sid)
    WHERE mode = 'agent' AND stream = 'events'
"""


def _replace_logs(connection: sqlite3.Connection) -> None:
    kept = {log for (log,) in connection.execute(_OF_AGENTS).fetchall()}
    connection.execute(f"DELETE FROM events WHERE log NOT IN ({_OF_AGENTS})")
    for log, old in connection.execute("SELECT log, log_epoch FROM logs").fetchall():
        epoch = log_epoch_after(LogEpoch(old))
        if log in kept:
            connection.execute("UPDATE logs SET log_epoch = ? WHERE log = ?", (epoch, log))
            continue
        connection.execute(
            "UPDATE logs SET log_epoch = ?, head = 0, floor = 0, evicted = 0, events = 0,"
            " bytes = 0 WHERE log = ?",
            (epoch, log),
        )
    connection.execute("UPDATE sessions SET waits_from = NULL")
    connection.execute("DELETE FROM carried")
