"""Define the tables of the SQLite file, bring an older file to this version, and explain SQLite's
errors to an operator.
"""

from __future__ import annotations

import os
import sqlite3
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from mcp_sessions.errors import ConfigurationError, StoreRefused, StoreUnavailable
from mcp_sessions.unopened import no_such_file

Durability = Literal["normal", "full"]

APPLICATION_ID = 0x6D637073
"""``mcps``: what marks a SQLite file as ours."""

LEAST_SQLITE = (3, 35, 5)
"""``RETURNING``, and a ``DROP COLUMN`` that damages no file."""

BUSY_TIMEOUT = 5.0
"""Seconds that a write waits for another program to release the file."""

LOG_SIZE = 16 * 1_024 * 1_024
"""Bytes of the write-ahead log from which on it is copied into the file. A copy waits for the disk
some times, so it is done less often than SQLite would.
"""

MIGRATIONS: Sequence[str] = (
    # 0 to 1: the first.
    """
    CREATE TABLE meta (name TEXT PRIMARY KEY, value) WITHOUT ROWID;
    INSERT INTO meta (name, value) VALUES ('sessions', 0);

    CREATE TABLE sessions (
        sid INTEGER PRIMARY KEY,
        session_id TEXT NOT NULL UNIQUE,
        mode TEXT NOT NULL,
        owner BLOB NOT NULL,           -- [client id, issuer, subject]
        scopes BLOB NOT NULL,          -- those it was made with
        credential_expires_at REAL,
        created_at REAL NOT NULL,
        expires_at REAL NOT NULL,      -- up to a hundredth of the idle timeout behind
        ends_at REAL NOT NULL,
        fencing_epoch INTEGER NOT NULL,
        connection_id TEXT,            -- attached with fencing_epoch; NULL: nobody is
        current_id TEXT,
        current_epoch INTEGER,
        stream_opened INTEGER NOT NULL,
        lists BLOB,
        waits_from TEXT,
        state_version INTEGER NOT NULL,
        key_bytes INTEGER NOT NULL,
        key_answers INTEGER NOT NULL,
        peer BLOB,
        state BLOB NOT NULL
    );
    CREATE INDEX sessions_by_owner ON sessions (owner);
    CREATE INDEX sessions_by_deadline ON sessions (expires_at);

    CREATE TABLE data (sid INTEGER PRIMARY KEY, value BLOB NOT NULL, version INTEGER NOT NULL);

    CREATE TABLE subscriptions (
        sid INTEGER NOT NULL, uri BLOB NOT NULL, PRIMARY KEY (sid, uri)
    ) WITHOUT ROWID;
    CREATE INDEX subscriptions_by_uri ON subscriptions (uri, sid);

    CREATE TABLE carried (             -- whose events a GET stream takes, and how far it is
        sid INTEGER NOT NULL,
        origin TEXT NOT NULL,
        fencing_epoch INTEGER NOT NULL,
        log_epoch TEXT NOT NULL,
        number INTEGER NOT NULL,
        PRIMARY KEY (sid, origin)
    ) WITHOUT ROWID;

    CREATE TABLE logs (
        log INTEGER PRIMARY KEY,
        sid INTEGER NOT NULL,
        stream TEXT NOT NULL,
        log_epoch TEXT NOT NULL,
        head INTEGER NOT NULL,
        floor INTEGER NOT NULL,
        evicted INTEGER NOT NULL,
        events INTEGER NOT NULL,
        bytes INTEGER NOT NULL,
        UNIQUE (sid, stream)
    );

    CREATE TABLE events (
        log INTEGER NOT NULL,
        number INTEGER NOT NULL,
        at REAL NOT NULL,
        key BLOB,                      -- the coalescing key
        origin TEXT,
        payload BLOB NOT NULL,
        PRIMARY KEY (log, number)
    ) WITHOUT ROWID;
    CREATE INDEX events_by_key ON events (log, key) WHERE key IS NOT NULL;

    CREATE TABLE keys (
        sid INTEGER NOT NULL,
        key BLOB NOT NULL,
        digest BLOB NOT NULL,
        runner TEXT NOT NULL,
        scopes BLOB NOT NULL,
        at REAL NOT NULL,
        finished INTEGER,              -- in this order; NULL: it runs
        outcome BLOB,                  -- NULL and finished: dropped
        PRIMARY KEY (sid, key)
    ) WITHOUT ROWID;
    CREATE INDEX keys_by_end ON keys (sid, finished) WHERE finished IS NOT NULL;
    """,
    # 1 to 2: what an operator asks of the process that serves.
    """
    CREATE TABLE end_requests (session_id TEXT PRIMARY KEY) WITHOUT ROWID;
    """,
    # 2 to 3: what the keys of a session come to is known to the process that serves.
    """
    ALTER TABLE sessions DROP COLUMN key_bytes;
    ALTER TABLE sessions DROP COLUMN key_answers;
    """,
    # 3 to 4: what a server that begins anew gets again.
    """
    ALTER TABLE sessions ADD COLUMN log_level TEXT;
    """,
    # 4 to 5: how sessions ended, and when the file was made.
    """
    CREATE TABLE ends (
        number INTEGER PRIMARY KEY,
        at REAL NOT NULL,
        value BLOB NOT NULL UNIQUE,
        is_beside INTEGER NOT NULL     -- no server wrote it to its log yet
    );
    """,
    # 5 to 6: modes have other names.
    """
    UPDATE sessions SET mode = CASE mode
        WHEN 'conversation' THEN 'agent' WHEN 'bound' THEN 'conversation' ELSE mode END;
    """,
    # 6 to 7: a writer that got no answer finds what it wrote.
    """
    ALTER TABLE events ADD COLUMN name TEXT;
    """,
    # 7 to 8: what happened to each session.
    """
    ALTER TABLE sessions ADD COLUMN story TEXT NOT NULL DEFAULT '';
    """,
)
"""The steps from version N of a file to N + 1. A released entry never changes."""

VERSION = len(MIGRATIONS)


def check_no_directory(path: Path) -> None:
    """SQLite would say no more than that it cannot be opened.

    Raises:
        ConfigurationError: It is one.
    """
    if path.is_dir():
        raise ConfigurationError(f"{path} is a directory, not a file")


def open_file(path: Path, durability: Durability) -> sqlite3.Connection:
    """A connection to the file, made or migrated if needed; for who holds its lock.

    Raises:
        ConfigurationError: It is no file of ours, of a newer version, or cannot be opened
            or made; or this Python's SQLite is too old.
        StoreUnavailable: Another program has it locked, or the disk is full.
    """
    if sqlite3.sqlite_version_info < LEAST_SQLITE:
        least = ".".join(map(str, LEAST_SQLITE))
        raise ConfigurationError(
            f"this Python has SQLite {sqlite3.sqlite_version}, and {least} is needed"
        )
    try:
        if not path.exists():
            # Session ids are in it, which are credentials on a server without
            # authentication. SQLite gives the files next to it the same permissions.
            os.close(os.open(path, os.O_CREAT | os.O_RDWR, 0o600))
        connection = _connect(path)
    except (OSError, sqlite3.Error) as failed:
        raise ConfigurationError(f"{path} cannot be opened: {_reason(path, failed)}") from failed
    try:
        _check_kind(connection, path)
        _pragmas(connection, durability)
        migrate(connection)
    except sqlite3.Error as failed:
        connection.close()
        raise opening_failed(path, failed) from failed
    except BaseException:
        connection.close()
        raise
    return connection


def open_for_operator(path: Path, *, any_version: bool = False) -> sqlite3.Connection:
    """Open the file without its lock. It has to be there, and of this version, or of an older one
    if ``any_version``.

    Raises:
        ConfigurationError: It is not.
        StoreUnavailable: Another program has it locked.
    """
    if not path.is_file():
        check_no_directory(path)
        raise no_such_file(path)
    try:
        connection = _connect(path)
        try:
            found = _check_kind(connection, path)
        except BaseException:
            connection.close()
            raise
    except sqlite3.Error as failed:
        raise opening_failed(path, failed) from failed
    if found != VERSION and not any_version:
        connection.close()
        raise ConfigurationError(
            f"{path} is of schema version {found}, not {VERSION}: "
            "it is migrated when a server of this version opens it"
        )
    return connection


def open_again(path: Path, durability: Durability) -> sqlite3.Connection:
    connection = _connect(path)
    try:
        _sync(connection, durability)
        # SQLite before 3.41 does not know of the log until something was read.
        connection.execute("SELECT 1 FROM sqlite_schema").fetchone()
    except BaseException:
        connection.close()
        raise
    return connection


def migrate(connection: sqlite3.Connection) -> None:
    """Bring a file to this version, whole or not at all."""
    (found,) = connection.execute("PRAGMA user_version").fetchone()
    if found == VERSION:
        return
    with committing(connection):
        for migration in MIGRATIONS[found:]:
            for statement in statements(migration):
                connection.execute(statement)
        connection.execute(f"PRAGMA application_id = {APPLICATION_ID}")
        connection.execute(f"PRAGMA user_version = {VERSION}")


class committing:
    """A transaction: whole when the block ends, undone if it raises."""

    # A class, since one of ``contextlib``'s generators costs as much as a statement does.
    __slots__ = ("_begin", "_connection")

    def __init__(self, connection: sqlite3.Connection, *, writes: bool = True) -> None:
        self._connection = connection
        # Immediate: who begins by reading and writes then would be refused if somebody wrote
        # in between.
        self._begin = "BEGIN IMMEDIATE" if writes else "BEGIN"

    def __enter__(self) -> None:
        self._connection.execute(self._begin)

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            if kind is None:
                self._connection.execute("COMMIT")
        finally:
            # Some errors have undone it already.
            if self._connection.in_transaction:
                self._connection.execute("ROLLBACK")


def statements(script: str) -> list[str]:
    """The statements of a script; ``executescript`` would commit before the first."""
    found: list[str] = []
    statement = ""
    for line in script.splitlines(keepends=True):
        statement += line
        if sqlite3.complete_statement(statement):
            found.append(statement)
            statement = ""
    return found


def error_code(failed: sqlite3.Error) -> int | None:
    """Return SQLite's own code; None: Python's module refused the call by itself."""
    code = getattr(failed, "sqlite_errorcode", None)
    return code & 0xFF if isinstance(code, int) else None


def opening_failed(path: Path, failed: sqlite3.Error) -> ConfigurationError | StoreUnavailable:
    match error_code(failed):
        case sqlite3.SQLITE_NOTADB:
            return ConfigurationError(f"{path} is not a SQLite file")
        case sqlite3.SQLITE_CORRUPT:
            return ConfigurationError(
                f"{path} is damaged: {failed}; put a copy in its place, or remove it"
            )
        case sqlite3.SQLITE_BUSY | sqlite3.SQLITE_LOCKED:
            return StoreUnavailable(f"{path} is locked by another program")
        case sqlite3.SQLITE_FULL:
            return StoreRefused(f"no space left for {path}. Free some", "full")
        case sqlite3.SQLITE_READONLY | sqlite3.SQLITE_PERM:
            return ConfigurationError(
                f"{path} cannot be written: look at its permissions and its file system"
            )
        case _:
            return ConfigurationError(f"{path} cannot be opened: {_reason(path, failed)}")


def unavailable(path: Path, failed: sqlite3.Error) -> StoreUnavailable:
    """Return the error for a failed call: it names the fault of the file, nothing else."""
    match error_code(failed):
        case sqlite3.SQLITE_FULL:
            cause, why = "no space left on its disk. Free some", "full"
        case sqlite3.SQLITE_BUSY | sqlite3.SQLITE_LOCKED:
            cause, why = "locked by another program. End that program", "locked"
        case sqlite3.SQLITE_CORRUPT | sqlite3.SQLITE_NOTADB | sqlite3.SQLITE_CONSTRAINT:
            cause, why = "the file is damaged. Put a copy in its place", "damaged"
        case sqlite3.SQLITE_READONLY | sqlite3.SQLITE_CANTOPEN | sqlite3.SQLITE_PERM:
            cause = "the file cannot be written. Look at its permissions and its file system"
            why = "read-only"
        case _:
            # After an I/O error it is unknown what the disk stored.
            return StoreUnavailable(f"{path}: {failed}; unknown whether the call was stored")
    return StoreRefused(f"{path}: {cause}. Nothing of the call was stored", why)


def boot_id() -> str | None:
    """Names this run of the operating system: a power loss ends it, ``kill -9`` does not.
    None: this system does not tell.
    """
    try:
        if sys.platform == "darwin":
            command = ["/usr/sbin/sysctl", "-n", "kern.bootsessionuuid"]
            done = subprocess.run(command, capture_output=True, text=True, timeout=5, check=True)
            return done.stdout.strip() or None
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip() or None
    except (OSError, subprocess.SubprocessError):
        return None


def _connect(path: Path) -> sqlite3.Connection:
    connection = sqlite3.connect(
        path,
        timeout=BUSY_TIMEOUT,
        isolation_level=None,
        check_same_thread=False,
        # Those of every call stay prepared.
        cached_statements=256,
    )
    # The serving process copies the write-ahead log into the file, when no call waits for it.
    # SQLite would do it in whatever commit makes the log too long, an operator's command too.
    connection.execute("PRAGMA wal_autocheckpoint = 0")
    return connection


def _check_kind(connection: sqlite3.Connection, path: Path) -> int:
    (application,) = connection.execute("PRAGMA application_id").fetchone()
    (found,) = connection.execute("PRAGMA user_version").fetchone()
    if application != APPLICATION_ID:
        (tables,) = connection.execute("SELECT count(*) FROM sqlite_schema").fetchone()
        if tables or application or found:
            raise ConfigurationError(f"{path} is a SQLite file of another program")
    if found > VERSION:
        raise ConfigurationError(
            f"{path} is of schema version {found}, newer than this mcp-sessions, which knows "
            f"up to {VERSION}: use the version that wrote it, or a newer one"
        )
    return found


def _pragmas(connection: sqlite3.Connection, durability: Durability) -> None:
    # Before the first table: a later change of mode would need a full VACUUM.
    connection.execute("PRAGMA auto_vacuum = INCREMENTAL")
    (mode,) = connection.execute("PRAGMA journal_mode = WAL").fetchone()
    if mode != "wal":
        raise ConfigurationError(
            f"SQLite cannot keep a write-ahead log here (journal_mode is {mode}): "
            "the file must be on a local disk"
        )
    _sync(connection, durability)
    connection.execute(f"PRAGMA journal_size_limit = {LOG_SIZE}")
    # Deleted rows are overwritten if that costs no write of its own.
    connection.execute("PRAGMA secure_delete = FAST")


def _sync(connection: sqlite3.Connection, durability: Durability) -> None:
    connection.execute(f"PRAGMA synchronous = {'FULL' if durability == 'full' else 'NORMAL'}")
    # macOS: else the disk's own cache may still hold what fsync was asked for.
    connection.execute(f"PRAGMA fullfsync = {'ON' if durability == 'full' else 'OFF'}")


def _reason(path: Path, failed: OSError | sqlite3.Error) -> str:
    if (
        isinstance(failed, sqlite3.Error)
        and error_code(failed) == sqlite3.SQLITE_CANTOPEN
        and not os.access(path, os.R_OK | os.W_OK)
    ):
        # SQLite would say no more than that it cannot open the file.
        return "permission denied"
    return (failed.strerror if isinstance(failed, OSError) else None) or str(failed)
