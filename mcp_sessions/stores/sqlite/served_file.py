"""A SQLite file that this process serves from: locked, open, with its writer and the records
that are in memory.

The records in memory are those of the sessions used last. They are never newer than the file, and
never older than an answer that somebody has: the writer tells of each commit here before anybody
else learns of it. Only an idle deadline may be ahead of the file, by a hundredth of the idle
timeout; then the file is written.
"""

from __future__ import annotations

import asyncio
import logging
import math
import os
import sqlite3
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar, get_args

from mcp_sessions.argument_types import checked
from mcp_sessions.core.life import has_come, idle_deadline, idle_time
from mcp_sessions.core.log import window_of
from mcp_sessions.core.states import Mode
from mcp_sessions.errors import (
    ConfigurationError,
    StoreInUse,
    StoreRefused,
    StoreUnavailable,
)
from mcp_sessions.ids import SessionId
from mcp_sessions.policy import SessionPolicy
from mcp_sessions.stores.records import SessionRecord
from mcp_sessions.stores.sqlite import session_rows
from mcp_sessions.stores.sqlite.checkpointing import WriteAheadLog, committed_length
from mcp_sessions.stores.sqlite.cleaning import shut_down, start_up
from mcp_sessions.stores.sqlite.file_lock import FileLock, Locked
from mcp_sessions.stores.sqlite.schema import (
    Durability,
    check_no_directory,
    open_again,
    open_file,
)
from mcp_sessions.stores.sqlite.seen import Seen
from mcp_sessions.stores.sqlite.session_rows import Brief
from mcp_sessions.stores.sqlite.transaction import Changes, Transaction
from mcp_sessions.stores.sqlite.watch import Watch
from mcp_sessions.stores.sqlite.writer import Chore, Upkeep, Writer
from mcp_sessions.unopened import reason_of

logger = logging.getLogger(__name__)


MAX_RECORDS = 10_000
"""Records kept in memory."""

_COALESCED = 0.01
"""Share of the idle timeout by which a deadline moves in memory before the file gets it."""


@dataclass(slots=True)
class _Entry:
    record: SessionRecord
    written: float
    """The deadline that the file has."""


class RecordCache:
    def __init__(self, writer: Writer, watch: Watch) -> None:
        self._writer = writer
        self._watch = watch
        self._policy = SessionPolicy()
        # The one used last is at the end.
        self._entries: OrderedDict[SessionId, _Entry] = OrderedDict()

    def serve(self, policy: SessionPolicy) -> None:
        self._policy = policy

    def on_commit(self, changes: Changes) -> None:
        for session_id, change in changes:
            entry = self._entries.get(session_id)
            if change is None:
                self._entries.pop(session_id, None)
            elif isinstance(change, SessionRecord):
                # One that is there already has got every change since.
                if entry is None:
                    self._keep(session_id, change)
            elif entry is not None:
                before = entry.record.life.expires_at
                change(entry.record)
                if entry.record.life.expires_at != before:
                    entry.written = entry.record.life.expires_at

    def _keep(self, session_id: SessionId, record: SessionRecord) -> None:
        self._entries[session_id] = _Entry(record, record.life.expires_at)
        while len(self._entries) > MAX_RECORDS:
            oldest, entry = self._entries.popitem(last=False)
            if entry.record.life.expires_at != entry.written:
                # Before whatever reads that session next.
                self._write({oldest: entry.record.life.expires_at})

    def known(self, session_id: SessionId) -> SessionRecord | None:
        entry = self._entries.get(session_id)
        return entry.record if entry is not None else None

    async def find(self, session_id: SessionId) -> SessionRecord | None:
        entry = self._entries.get(session_id)
        if entry is None or self._watch.is_lost:
            # Nothing is served from a file that is gone.
            found = await self._writer.call(
                lambda tx: session_rows.load(tx, session_id), short=True
            )
            # Not there any more: ended in that same commit, or pushed out by newer ones.
            return self.known(session_id) or found
        self._entries.move_to_end(session_id)
        return entry.record

    def clear(self) -> None:
        self._entries.clear()

    # --- idle deadlines --------------------------------------------------------------------

    def deadline(self, mode: Mode, now: float, ends_at: float) -> float:
        return idle_deadline(now=now, idle_timeout=idle_time(mode, self._policy), ends_at=ends_at)

    def move_deadline(self, session_id: SessionId, record: SessionRecord, now: float) -> None:
        """Note that a session was used, without a write to the file."""
        record.life.expires_at = self.deadline(record.mode, now, record.life.ends_at)
        entry = self._entries.get(session_id)
        if entry is None or entry.record is not record:
            self._write({session_id: record.life.expires_at})
            return
        moved_by = abs(record.life.expires_at - entry.written)
        if moved_by >= _COALESCED * self._policy.idle_timeout:
            entry.written = record.life.expires_at
            self._write({session_id: record.life.expires_at})

    def moved(self, *, written_by: float = math.inf) -> dict[SessionId, float]:
        """The deadlines that the file does not have as they are.

        Args:
            written_by: Those only which in the file are no later.
        """
        return {
            session_id: entry.record.life.expires_at
            for session_id, entry in self._entries.items()
            if entry.record.life.expires_at != entry.written and has_come(entry.written, written_by)
        }

    def were_written(self, deadlines: Mapping[SessionId, float]) -> None:
        for session_id, deadline in deadlines.items():
            entry = self._entries.get(session_id)
            if entry is not None:
                entry.written = deadline

    def _write(self, deadlines: Mapping[SessionId, float]) -> None:
        # A deadline on its way to the file is in memory all the same.
        written = self._writer.call(
            lambda tx: session_rows.move_deadlines(tx, deadlines), short=True
        )
        written.add_done_callback(lambda done: self._deadlines_written(deadlines, done))

    def _deadlines_written(
        self, deadlines: Mapping[SessionId, float], done: asyncio.Future[None]
    ) -> None:
        if done.cancelled() or done.exception() is None:
            return
        logger.warning("an idle deadline could not be stored: %s", done.exception())
        # The next use tries again.
        self.were_written(dict.fromkeys(deadlines, -math.inf))


T = TypeVar("T")

ROOM = 1_048_576
"""Bytes that are free on a disk that is not full any more; less on a disk below 16 MiB."""

SMALL = 65_536
"""Bytes of a value that is written in no time."""


class ServedFile:
    @checked()
    def __init__(self, path: str | Path, durability: Durability = "normal") -> None:
        """Nothing is opened yet.

        Args:
            path: The file, on a local disk; made when the store opens, if it is not there.
                Next to it are ``-wal``, ``-shm`` (SQLite's), ``-lock``, ``-seen`` and ``-key``.
            durability: ``normal`` survives a killed process, ``full`` a power loss too.

        Raises:
            ConfigurationError: ``durability`` is neither.
        """
        if durability not in get_args(Durability):
            raise ConfigurationError(f"durability is 'normal' or 'full', not {durability!r}")
        self.path = Path(path)
        # Two names of one file are one file, and have one lock.
        self._real_path = Path(os.path.realpath(path))
        self.key_path = self._real_path.with_name(self._real_path.name + "-key")
        """Of a server's sealing key, if nobody gives it one."""

        self.durability: Durability = durability
        self._policy = SessionPolicy()
        self._window = window_of(self._policy)
        self._lock = FileLock(self._real_path.with_name(self._real_path.name + "-lock"))
        self._seen = Seen(self._real_path)
        files = (
            self._real_path.with_name(self._real_path.name + each) for each in ("", "-wal", "-shm")
        )
        self._watch = Watch(self.path, (*files, self._lock.path))
        self._writer = Writer(
            self.path,
            WriteAheadLog(
                self.path,
                self._real_path.with_name(self._real_path.name + "-wal"),
                lambda: open_again(self._real_path, durability),
            ),
            self._watch,
            upkeep=Upkeep(
                open=self._open_file,
                rest=self._seen.count,
                close=lambda connection: shut_down(connection, self._seen),
            ),
            chore=Chore(session_rows.end_requested, self._on_ended_outside),
            on_commit=self._on_commit,
            syncs=durability == "full",
        )
        self._ended_outside: list[SessionRecord] = []
        self._cache = RecordCache(self._writer, self._watch)
        self._known_refusals = 0
        """Writes refused for want of space, before the last probe that found some."""

        self._slept = (-math.inf, 0)
        """Deadline and row of the last session that :meth:`sleep` looked at."""

    async def open(self, policy: SessionPolicy) -> None:
        """Serve from the file, within the limits of ``policy``.

        Raises:
            ConfigurationError: The file is no session store, or damaged, or newer than this
                version.
            StoreInUse: Another process serves from it.
            StoreUnavailable: The disk is full, or another program has the file locked.
        """
        self._policy = policy
        self._cache.serve(policy)
        self._window = window_of(policy)
        check_no_directory(self.path)
        try:
            await self._lock.acquire_patiently(self.path)
        except Locked as held:
            raise StoreInUse(
                f"{self.path} is in use by {held}: one process serves from a file at a time"
            ) from None
        except OSError as failed:
            reason = reason_of(failed, self.path)
            raise ConfigurationError(f"{self.path} cannot be opened: {reason}") from failed
        try:
            await self._writer.start()
        except BaseException:
            # Also where nobody waits for it any more: the thread closes the file first.
            await self._writer.stop()
            self._lock.release()
            raise

    async def close(self) -> None:
        moved = self._cache.moved()
        try:
            if moved:
                await self._writer.call(lambda tx: session_rows.move_deadlines(tx, moved))
        except StoreUnavailable as failed:
            logger.warning("idle deadlines are up to 1%% early: %s", failed)
        finally:
            await self._writer.stop()
            self._cache.clear()
            self._watch.end()
            self._lock.release()

    async def probe(self) -> None:
        """Write to the file.

        A small write may fit on a full disk: a larger one that was refused has lengthened the
        write-ahead log first. So the probe writes more, if the disk is full or was.
        """
        refusals = self._writer.refused_as_full
        was_full, has_room = refusals != self._known_refusals, _has_room(self._real_path.parent)
        if was_full and not has_room:
            raise StoreRefused(f"{self.path}: no space left on its disk. Free some", "full")
        if has_room and not was_full:
            await self._writer.call(
                lambda tx: tx.execute("UPDATE meta SET value = value WHERE name = 'sessions'"),
                short=True,
            )
            return
        await self._writer.call(
            lambda tx: tx.execute(
                "INSERT OR REPLACE INTO meta (name, value) VALUES ('probe', zeroblob(?))", (SMALL,)
            )
        )
        await self._writer.call(lambda tx: tx.execute("DELETE FROM meta WHERE name = 'probe'"))
        # One that came meanwhile counts the next time.
        self._known_refusals = refusals

    def _open_file(self) -> sqlite3.Connection:
        connection = open_file(self._real_path, self.durability)
        try:
            start_up(connection, self.path, self.durability, self._seen)
            self._watch.begin(committed_length(connection))
        except BaseException:
            connection.close()
            raise
        return connection

    def _on_commit(self, changes: Changes) -> None:
        self._cache.on_commit(changes)

    def _on_ended_outside(self, records: Sequence[SessionRecord]) -> None:
        self._ended_outside += records

    async def _within(
        self,
        session_id: SessionId,
        work: Callable[[Transaction, Brief], T],
        otherwise: T,
        *,
        now: float = -math.inf,
        short: bool = False,
    ) -> T:
        """Run ``work`` on a session, in one transaction, and return its result.

        Args:
            otherwise: The answer if the session does not exist, or has ended by ``now``.
            short: See :meth:`Writer.call`.
        """

        def whole(tx: Transaction) -> T:
            session = session_rows.brief(tx, session_id)
            if session is None or has_come(session.ends_at, now):
                return otherwise
            return work(tx, session)

        return await self._writer.call(whole, short=short)

    async def _set(
        self,
        session_id: SessionId,
        assignment: str,
        values: tuple[Any, ...],
        apply: Callable[[SessionRecord], None],
        condition: str = "",
    ) -> bool:
        def work(tx: Transaction) -> bool:
            statement = f"UPDATE sessions SET {assignment} WHERE session_id = ?{condition}"
            cursor = tx.execute(statement, (*values, session_id))
            tx.changes.append((session_id, apply))
            return bool(cursor.rowcount)

        return await self._writer.call(work, short=True)


def _has_room(folder: Path) -> bool:
    try:
        disk = os.statvfs(folder)
    except OSError:
        # If the system does not say it, the larger write shows it.
        return False
    return disk.f_bavail * disk.f_frsize >= min(ROOM, disk.f_blocks * disk.f_frsize // 16)


def is_small(value: bytes | None) -> bool:
    return value is None or len(value) <= SMALL
