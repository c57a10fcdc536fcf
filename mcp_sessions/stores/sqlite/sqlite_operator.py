from __future__ import annotations

import asyncio
import os
import sqlite3
import time
from collections.abc import Awaitable, Generator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

from mcp_sessions.core.log import UNBOUNDED
from mcp_sessions.errors import ConfigurationError, StoreInUse, StoreUnavailable
from mcp_sessions.ids import SessionId
from mcp_sessions.stores.ends_contract import end_by_operator
from mcp_sessions.stores.probe import EngineFacts, StoreSize
from mcp_sessions.stores.sqlite import file_reads, rows, schema
from mcp_sessions.stores.sqlite.file_lock import FileLock, Locked
from mcp_sessions.stores.sqlite.file_reads import FileReads
from mcp_sessions.stores.sqlite.rows import InTransaction, Transaction
from mcp_sessions.stores.sqlite.schema import committing

T = TypeVar("T")

END_WITHIN = 10.0
"""Seconds within which a serving process is expected to end a session."""


class SQLiteOperatorStore(FileReads):
    """A SQLite file, of which another process may have the lock.

    That process keeps records in memory, so no other process may end a session in the file: the
    session would still be served. It is asked to, by a row, and looks for such rows twice a second.
    If nobody serves, who holds the lock for that moment is this process.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._real_path = Path(os.path.realpath(path))

    def _ask(self, work: InTransaction[T], *, writes: bool = False) -> Awaitable[T]:
        return asyncio.to_thread(self._write if writes else self._read, work)

    async def size(self) -> StoreSize | None:
        return StoreSize(await self._ask(rows.counted))

    async def end(self, session_id: SessionId) -> bool:
        """Ask the process that serves to end the session, or end it here if none serves.

        Raises:
            StoreUnavailable: The process that serves did not do it in time. It still will.
        """
        return await asyncio.to_thread(self._end, session_id)

    async def close(self) -> None:
        """Do nothing: each call opens the file and closes it."""

    def _end(self, session_id: SessionId) -> bool:
        lock = FileLock(self._real_path.with_name(self._real_path.name + "-lock"))
        asked, until = False, time.monotonic() + END_WITHIN
        while True:
            try:
                lock.acquire()
            except Locked as held:
                if not asked:
                    if self._read(lambda tx: rows.row_of(tx, session_id)) is None:
                        return False
                    self._write(lambda tx: rows.request_end(tx, session_id))
                    asked = True
                elif self._read(lambda tx: rows.row_of(tx, session_id)) is None:
                    return True
                if time.monotonic() > until:
                    raise StoreUnavailable(
                        f"process {held.holder} serves from {self._path} and did not end the "
                        f"session within {END_WITHIN:g} s; it may still end the session"
                    ) from None
                time.sleep(0.05)
                continue
            try:
                # Nobody serves, or who did is gone. It may have done it first.
                return self._write(lambda tx: _end_here(tx, session_id)) or asked
            finally:
                lock.release()

    def _read(self, work: InTransaction[T]) -> T:
        with self._opened() as connection:
            # Reads one moment of the file, and keeps nobody from writing.
            connection.execute("BEGIN")
            return work(Transaction(connection))

    def _write(self, work: InTransaction[T]) -> T:
        with self._opened() as connection, committing(connection):
            return work(Transaction(connection))

    @contextmanager
    def _opened(self) -> Generator[sqlite3.Connection]:
        connection = schema.open_for_operator(self._real_path)
        try:
            yield connection
        except sqlite3.Error as failed:
            raise schema.unavailable(self._path, failed) from failed
        finally:
            connection.close()


def facts_of(durability: schema.Durability) -> EngineFacts:
    loses = ()
    if durability == "normal":
        loses = (
            "the last moments before a power loss: ?durability=full keeps them (durability normal)",
        )
    return EngineFacts(f"SQLite {sqlite3.sqlite_version}", f"durability {durability}", loses)


def look_at(path: Path) -> tuple[str, float | None, frozenset[str]]:
    """Report the state of a file at a path, as a server would find it, how long a read took, and
    which keys sealed something in it.

    Raises:
        ConfigurationError: It cannot be served from.
        StoreUnavailable: Another program has it locked.
    """
    real_path = Path(os.path.realpath(path))
    if not real_path.exists():
        if not real_path.parent.is_dir():
            raise ConfigurationError(
                f"{path} cannot be made: there is no folder {real_path.parent}"
            )
        if not os.access(real_path.parent, os.W_OK | os.X_OK):
            raise ConfigurationError(
                f"{path} cannot be made: {real_path.parent} is no directory that can be written"
            )
        return "a new file", None, frozenset()
    if not os.access(real_path, os.W_OK):
        raise ConfigurationError(f"{path} cannot be written: look at its permissions")
    connection = schema.open_for_operator(real_path, any_version=True)
    began = time.perf_counter()
    (version,) = connection.execute("PRAGMA user_version").fetchone()
    took = time.perf_counter() - began
    sealed_by = frozenset[str]()
    if version == schema.VERSION:
        sealed_by = file_reads.sealing_keys(Transaction(connection))
    connection.close()
    lock = FileLock(real_path.with_name(real_path.name + "-lock"))
    if lock.path.exists():
        try:
            lock.acquire()
        except Locked as held:
            raise StoreInUse(
                f"{path} is in use by {held}: one process serves from a file at a time"
            ) from None
        lock.release()
    if version not in (0, schema.VERSION):
        return (
            f"reached; a start migrates it from version {version} to {schema.VERSION}",
            took,
            sealed_by,
        )
    return "reached", took, sealed_by


def _end_here(tx: Transaction, session_id: SessionId) -> bool:
    now = time.time()
    found = rows.sessions(tx, [session_id], UNBOUNDED)
    for session in found:
        rows.remove(tx, session.row)
        if isinstance(session, rows.FileSession):
            # The next server that opens the file writes it to its log.
            end = end_by_operator(session.record, now)
            file_reads.remember(tx, [end], now=now, outside=True)
    return bool(found)
