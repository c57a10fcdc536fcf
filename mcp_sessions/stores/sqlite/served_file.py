"""A SQLite file that this process serves from: locked, open, with its writer."""

from __future__ import annotations

import asyncio
import logging
import os
import sqlite3
from collections.abc import Sequence
from pathlib import Path
from typing import TypeVar, get_args

from mcp_sessions.argument_types import checked
from mcp_sessions.core.ends import SessionEnd
from mcp_sessions.core.log import window_of
from mcp_sessions.errors import (
    ConfigurationError,
    StoreInUse,
    StoreRefused,
)
from mcp_sessions.policy import SessionPolicy
from mcp_sessions.stores.ends_contract import EndedOutside, end_by_operator
from mcp_sessions.stores.probe import StoreSize
from mcp_sessions.stores.records import SessionRecord
from mcp_sessions.stores.sqlite.checkpointing import WriteAheadLog, committed_length
from mcp_sessions.stores.sqlite.cleaning import shut_down, start_up
from mcp_sessions.stores.sqlite.file_lock import FileLock, Locked
from mcp_sessions.stores.sqlite.file_reads import FileReads, ends_of, remember, sealing_keys
from mcp_sessions.stores.sqlite.rows import InTransaction, Transaction, counted
from mcp_sessions.stores.sqlite.schema import (
    Durability,
    check_no_directory,
    open_again,
    open_file,
)
from mcp_sessions.stores.sqlite.seen import Seen
from mcp_sessions.stores.sqlite.watch import Watch
from mcp_sessions.stores.sqlite.writer import Write, Writer
from mcp_sessions.unopened import reason_of

logger = logging.getLogger(__name__)

T = TypeVar("T")

ROOM = 1_048_576
"""Bytes that are free on a disk that is not full any more; less on a disk below 16 MiB."""

SMALL = 65_536
"""Bytes of a value that is written in no time."""


class ServedFile(FileReads):
    _looks_for_rows = True
    """Whether there may be ends that an operator's process wrote. It can while nobody serves."""

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
        self._files = tuple(
            self._real_path.with_name(self._real_path.name + each) for each in ("", "-wal", "-shm")
        )
        self._watch = Watch(self.path, (*self._files, self._lock.path))
        self._writer = Writer(
            self.path,
            WriteAheadLog(
                self.path,
                self._real_path.with_name(self._real_path.name + "-wal"),
                lambda: open_again(self._real_path, durability),
            ),
            self._watch,
            open_file=self._open_file,
            rest=self._seen.count,
            shut_down=lambda connection: shut_down(connection, self._seen),
            chore=self._end_asked,
            on_done=self._on_done,
            syncs=durability == "full",
        )
        self.outage = self._writer.outage
        self._ended_outside: list[SessionRecord] = []
        self._known_refusals = 0
        """Writes refused for want of space, before the last probe that found some."""

    async def open(self, policy: SessionPolicy) -> None:
        """Serve from the file, within the limits of ``policy``.

        Raises:
            ConfigurationError: The file is no session store, or damaged, or newer than this
                version.
            StoreInUse: Another process serves from it.
            StoreUnavailable: The disk is full, or another program has the file locked.
        """
        self._policy = policy
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
        await self._writer.stop()
        self._watch.end()
        self._lock.release()

    async def size(self) -> StoreSize:
        """Its sessions, and the bytes of its files."""
        sessions = await self._ask(counted, short=True)
        return StoreSize(
            sessions, sum(each.stat().st_size for each in self._files if each.exists())
        )

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

    async def remember_ends(
        self, ends: Sequence[SessionEnd], *, now: float, outside: bool = False
    ) -> Sequence[SessionEnd]:
        self._looks_for_rows |= outside
        return await self._writer.call(lambda tx: remember(tx, ends, now=now, outside=outside))

    async def ended_outside(self, *, now: float) -> Sequence[EndedOutside]:
        found: list[EndedOutside] = []
        if self._looks_for_rows:
            rows = await self._writer.call(_take_outside)
            self._looks_for_rows = False
            found = [EndedOutside(end) for end in ends_of(rows)]
        records, self._ended_outside = self._ended_outside, []
        return [*found, *(EndedOutside(end_by_operator(each, now), each) for each in records)]

    async def sealing_keys(self, *, add: str | None = None) -> frozenset[str]:
        return await self._writer.call(lambda tx: sealing_keys(tx, add))

    def _ask(
        self, work: InTransaction[T], *, writes: bool = False, short: bool = False
    ) -> asyncio.Future[T]:
        return self._writer.call(work, short=short, reads=not writes)

    def _open_file(self) -> sqlite3.Connection:
        connection = open_file(self._real_path, self.durability)
        try:
            start_up(connection, self.path, self.durability, self._seen)
            self._watch.begin(committed_length(connection))
        except BaseException:
            connection.close()
            raise
        return connection

    async def _end_asked(self) -> None:
        """End the sessions that an operator asked this process to end."""
        raise NotImplementedError

    def _on_done(self, write: Write, failed: BaseException | None) -> None:
        raise NotImplementedError


def _has_room(folder: Path) -> bool:
    try:
        disk = os.statvfs(folder)
    except OSError:
        # If the system does not say it, the larger write shows it.
        return False
    return disk.f_bavail * disk.f_frsize >= min(ROOM, disk.f_blocks * disk.f_frsize // 16)


def _take_outside(tx: Transaction) -> list[tuple[bytes]]:
    found = tx.execute("SELECT value FROM ends WHERE is_beside ORDER BY number").fetchall()
    if found:
        tx.execute("UPDATE ends SET is_beside = 0 WHERE is_beside")
    return found
