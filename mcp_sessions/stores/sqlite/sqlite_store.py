"""Sessions in a file: they survive the process, and the machine if you ask for it.

One process serves from one file; an operating system's lock says which, and is gone when
that process is. So the sessions that are used are in its memory, in a store of ``memory/``, which
does each step. The file is the journal: what a step changed is written (``rows.py``), and the call
returns when that is committed. An event is in the file before anybody learns of it. Calls that come
at the same time share one commit (``writer.py``: a thread, or the event loop itself while the
thread has nothing to do). If a write fails, its session goes out of memory, and is read again.

``durability`` defines ``committed``:

========== ============================================ ==============================
           what is on disk when a call returns          lost
========== ============================================ ==============================
``normal`` handed to the operating system: written to   by ``kill -9`` or a crash of
           the write-ahead log, synced at checkpoints   the process: nothing. By a
                                                        power loss: the last moments,
                                                        and that is noticed (below)
``full``   on the medium: the log is synced (fsync)     nothing
           before each commit returns
========== ============================================ ==============================

Memory is bounded: it has the sessions used last. Another one is read when it is used, and its
events, keys and data when a step needs them. Of logs without a bound no event stays in memory.

The one thing that may be in memory only is how far a session's idle deadline was moved: it is
written when it moved by a hundredth of the idle timeout, and when the store closes. So a
crash can make a session expire up to 1 % early, which ``SessionPolicy.idle_timeout`` allows.

After a start:

* Connections of the process before are gone, and their sessions wait, but for those of
  transport-mode sessions: such a connection is in the file, and its client comes back to it.
* What had a request key and was running has no outcome that anybody could know. Its key is
  kept, and answers so.
* A file that is not the one that was served from here last gives event ids out again: a copy
  was restored. ``-seen`` next to it tells (``seen.py``), and every log is made anew, as below.
  So move the file with its ``-seen``; and whoever restores a whole directory leaves it out.
* After a power loss in ``normal`` mode events may be missing that clients have seen, and
  their ids would be given out again. So every log is made anew: its positions are refused
  (``log_replaced``), and clients read again what they follow. (Where the operating system
  does not name its runs this cannot be noticed: use ``full``.)
"""

from __future__ import annotations

import asyncio
import copy
import itertools
import logging
import math
import sys
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Collection, Coroutine, Mapping, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, TypeVar, cast

from mcp_sessions.argument_types import checked
from mcp_sessions.core.life import (
    asleep_by,
    has_come,
)
from mcp_sessions.core.log import Draft
from mcp_sessions.core.messages import encode
from mcp_sessions.core.request_keys import KeyUse
from mcp_sessions.core.states import Mode
from mcp_sessions.errors import SessionsError, StoreRefused, StoreUnavailable
from mcp_sessions.ids import EVENTS, GET_STREAM, FencingEpoch, SessionId, StreamName
from mcp_sessions.locks import Locks
from mcp_sessions.policy import SessionPolicy
from mcp_sessions.principal import Principal
from mcp_sessions.security import mint_session_id
from mcp_sessions.stores.exchange import Exchange
from mcp_sessions.stores.limits import check_peer, check_sessions, most_of_one
from mcp_sessions.stores.memory.tables import MemorySession, new_session
from mcp_sessions.stores.records import (
    Admitted,
    Appended,
    AppendedChange,
    Audience,
    CurrentUse,
    Peer,
    ServerChange,
    SessionRecord,
    StreamHead,
)
from mcp_sessions.stores.sql.session_rows import Wanted, loads, owner_of, text_bytes
from mcp_sessions.stores.sql.sql_store import unreadable
from mcp_sessions.stores.sql.steps import (
    NOTHING,
    Due,
    Steps,
    Unused,
    Working,
    append_wants,
)
from mcp_sessions.stores.sqlite import rows
from mcp_sessions.stores.sqlite.rows import (
    FileSession,
    Statement,
    Transaction,
    Unreadable,
)
from mcp_sessions.stores.sqlite.schema import Durability
from mcp_sessions.stores.sqlite.served_file import SMALL, ServedFile
from mcp_sessions.stores.sqlite.writer import Write
from mcp_sessions.stores.whole_sessions import WholeSession

logger = logging.getLogger(__name__)

T = TypeVar("T")

MAX_BYTES = 64 * 1_024 * 1_024
"""Bytes of the sessions that are kept in memory, about."""

_COARSE = 0.01
"""Share of the idle timeout by which a deadline moves in memory before the file gets it."""

_ENDED_AT_ONCE = 256
"""Sessions that one transaction ends for their bytes. Others write in between."""

_ASLEEP_AT_ONCE = 256

_AUDIENCE = 128
"""Sessions asked for at once while a change is sent: a fraction of a millisecond."""

FEW = 64
"""Statements that the event loop runs itself, at the most."""

DUE = "expires_at <= ?"
"""``core/life.py``'s ``has_come`` as SQL, so that an index finds the sessions."""

_IDLE_ENDS_FIRST = "expires_at < ends_at"
"""The opposite of ``lifetime_ends_first`` as SQL."""


class SessionsInMemory(Working):
    """The sessions used last, of all that are in the file. The one used last is at the end."""

    def __init__(self) -> None:
        super().__init__()
        self._recent: OrderedDict[SessionId, MemorySession] = OrderedDict()
        self._sessions = self._recent
        self.bytes = 0
        """Of them all, see :meth:`FileSession.measured`."""

    def find(self, session_id: SessionId) -> FileSession | None:
        return cast("FileSession | None", self._sessions.get(session_id))

    def used(self, session_id: SessionId) -> None:
        self._recent.move_to_end(session_id)

    def take(self, session: FileSession) -> None:
        self.hold(session, session.carried)
        self.measure(session)

    def drop(self, session: FileSession) -> None:
        if self._sessions.get(session.record.session_id) is session:
            self._forget(session)

    def oldest(self) -> FileSession:
        return cast("FileSession", next(iter(self._recent.values())))

    def measure(self, session: FileSession) -> None:
        if self._sessions.get(session.session_id) is not session:
            # A write failed meanwhile.
            return
        size = session.measured()
        self.bytes += size - session.size
        session.size = size

    def sessions(self) -> list[FileSession]:
        return cast("list[FileSession]", list(self._recent.values()))

    def _forget(self, session: MemorySession) -> None:
        self.bytes -= cast("FileSession", session).size
        super()._forget(session)

    def __len__(self) -> int:
        return len(self._sessions)

    def __contains__(self, session_id: SessionId) -> bool:
        return session_id in self._sessions


class SQLiteStore(Steps, ServedFile):
    """A :class:`~mcp_sessions.stores.contract.SessionStore` in one SQLite file."""

    name = "sqlite"
    survives_process = True
    remembers = True
    exchange: Exchange | None = None

    @checked()
    def __init__(self, path: str | Path, durability: Durability = "normal") -> None:
        super().__init__(path, durability)
        self._memory = SessionsInMemory()
        self._turns = Locks[SessionId]()
        self._new_log = itertools.count(1)
        self._slept_by = -math.inf

    async def open(self, policy: SessionPolicy) -> None:
        await self._memory.open(policy)
        await super().open(policy)
        (last,) = await self._writer.call(
            lambda tx: tx.execute("SELECT ifnull(max(log), 0) FROM logs").fetchone()
        )
        self._new_log = itertools.count(last + 1)
        # Who was asked for while nobody served ends before anybody is served.
        await self._end_asked()

    async def close(self) -> None:
        try:
            moved = self._moved()
            if moved:
                await self._writer.call(lambda tx: rows.move_deadlines(tx, moved))
        except StoreUnavailable as failed:
            logger.warning("idle deadlines are up to 1%% early: %s", failed)
        finally:
            await super().close()
            await self._memory.close()

    # --- steps -----------------------------------------------------------------------------------

    async def _step(
        self,
        session_id: SessionId,
        work: Callable[[Working], Awaitable[T]],
        *,
        wanted: Wanted = NOTHING,
        now: float = 0.0,
    ) -> T:
        """Do a step in memory, and return its result when it is in the file.

        The result of a step that changes nothing is returned when what it has seen is in the file.
        """
        session = self._memory.find(session_id)
        if session is None or session.is_taken or session.lacks(wanted) or self._watch.is_lost:
            async with self._turns.of(session_id):
                session = await self._fetched(session_id, wanted)
                result, written = self._done(session, work, wanted)
        else:
            result, written = self._done(session, work, wanted)
        if written is not None:
            await written
        return result

    _look = _step

    def _done(
        self, session: FileSession | None, work: Callable[[Working], Awaitable[T]], wanted: Wanted
    ) -> tuple[T, asyncio.Future[None] | None]:
        if session is None:
            return _at_once(work(self._memory)), None
        self._memory.used(session.record.session_id)
        try:
            result = _at_once(work(self._memory))
            streams = None if wanted is NOTHING else (wanted.stream,) if wanted.stream else ()
            changes = self._changes(session, streams)
        except SessionsError:
            # It is raised before anything is changed.
            raise
        except BaseException:
            self._memory.drop(session)
            raise
        written = self._write([session], changes)
        self._memory.measure(session)
        if self._memory.bytes > MAX_BYTES:
            self._trim()
        return result, written

    def _changes(
        self, session: FileSession, streams: Collection[StreamName] | None
    ) -> list[Statement]:
        carried = self._memory.carried(session.record.session_id)
        return rows.changes_of(session, carried, streams, self._new_log.__next__)

    def _write(
        self, sessions: Sequence[FileSession], changes: Sequence[Statement]
    ) -> asyncio.Future[None] | None:
        """Write what is done in memory; None: it is in the file."""
        if not changes and not any(session.pending for session in sessions):
            return None
        for session in sessions:
            session.pending += 1
        size = sum(len(each) for _, values in changes for each in values if type(each) is bytes)
        is_short = len(changes) <= FEW and size <= SMALL
        return self._writer.call(Write(sessions, changes), short=is_short)

    def _on_done(self, write: Write, failed: BaseException | None) -> None:
        for session in write.sessions:
            session.pending -= 1
            if failed is not None:
                self._memory.drop(session)

    async def _fetched(self, session_id: SessionId, wanted: Wanted) -> FileSession | None:
        """A session with what a step needs. Its turn is held, so no other step changes it
        meanwhile.
        """
        while True:
            session = self._memory.find(session_id)
            if session is None:
                session = await self._ask(
                    lambda tx: self._found(tx, session_id, wanted), short=True
                )
                if session is None:
                    return None
                self._memory.take(session)
                self._trim()
            elif session.is_made_here:
                # The file has nothing of it that is not here.
                session.is_made_here = False
                session.data_is_read = True
                session.keys = rows.request_keys((), self._policy)
            elif session.lacks(wanted):
                session.is_taken = True
                try:
                    await self._ask(
                        lambda tx, session=session: self._read(tx, session, wanted), short=True
                    )
                finally:
                    session.is_taken = False
            elif self._watch.is_lost:
                # Nothing is served from a file that is gone.
                await self._writer.call(Write([]))
            else:
                return session

    def _found(self, tx: Transaction, session_id: SessionId, wanted: Wanted) -> FileSession | None:
        for found in rows.sessions(tx, [session_id], self._window):
            if isinstance(found, Unreadable):
                raise unreadable(found.failed) from found.failed
            if found.lacks(wanted):
                self._read(tx, found, wanted)
            return found
        return None

    def _read(self, tx: Transaction, session: FileSession, wanted: Wanted) -> None:
        try:
            rows.events(tx, session, wanted)
            if wanted.request_key is not None and session.keys is None:
                rows.keys(tx, session, self._policy)
            if wanted.data and not session.data_is_read:
                rows.data(tx, session)
        except rows.UNREADABLE as failed:
            raise unreadable(failed) from failed

    def _trim(self) -> None:
        """Memory has a bound. What goes is read again when it is used."""
        memory = self._memory
        for _ in range(len(memory) - 1):
            if memory.bytes <= MAX_BYTES:
                return
            oldest = memory.oldest()
            session_id = oldest.record.session_id
            if oldest.pending or self._turns.is_held(session_id):
                memory.used(session_id)
                continue
            if oldest.record.life.expires_at != oldest.deadline:
                self._write_deadline(oldest)
            memory.drop(oldest)

    # --- idle deadlines --------------------------------------------------------------------------

    def _deadline_moved(self, session: FileSession) -> None:
        """Its idle deadline is in memory, and in the file if it moved by a hundredth."""
        moved_by = abs(session.record.life.expires_at - session.deadline)
        if moved_by >= _COARSE * self._policy.idle_timeout:
            self._write_deadline(session)

    def _write_deadline(self, session: FileSession) -> None:
        session.deadline = session.record.life.expires_at
        moved = {session.row: session.deadline}
        written = self._writer.call(lambda tx: rows.move_deadlines(tx, moved), short=True)
        written.add_done_callback(lambda done: _deadline_written(session, done))

    def _moved(self, *, by: float = math.inf) -> dict[int, float]:
        """The deadlines that the file does not have as they are, those that in the file are no
        later.
        """
        return {
            session.row: session.record.life.expires_at
            for session in self._memory.sessions()
            if session.record.life.expires_at != session.deadline and has_come(session.deadline, by)
        }

    def _were_written(self, moved: Mapping[int, float]) -> None:
        for session in self._memory.sessions() if moved else ():
            if session.row in moved:
                session.deadline = moved[session.row]

    # --- lives -----------------------------------------------------------------------------------

    async def create(
        self,
        mode: Mode,
        principal: Principal,
        *,
        peer: Peer | None,
        now: float,
        session_id: SessionId | None = None,
    ) -> SessionRecord:
        check_peer(peer, self._policy)
        is_named, session_id = session_id is not None, session_id or mint_session_id()
        async with self._turns.of(session_id):
            known = await self._fetched(session_id, NOTHING) if is_named else None
            if known is not None and not has_come(known.record.life.expires_at, now):
                known.record.is_new = False
                return known.record
            new = new_session(session_id, mode, principal, peer, now, self._policy)
            session = FileSession(new.record, None, is_made_here=True)
            if new.events is not None:
                session.put_new_log(EVENTS, new.events, next(self._new_log))
            if known is not None:
                self._memory.drop(known)
            session.row = await self._writer.call(
                lambda tx: self._make(tx, session, known), short=True
            )
            session.is_as_stored()
            self._memory.take(session)
            self._trim()
        return session.record

    def _make(self, tx: Transaction, session: FileSession, instead_of: FileSession | None) -> int:
        if instead_of is not None:
            rows.remove(tx, instead_of.row)
        record = session.record
        count, most, owned = rows.counted(tx), most_of_one(record.mode, self._policy), 0
        if most is not None and count >= most:
            owner = owner_of(record.principal)
            (owned,) = tx.execute(
                "SELECT count(*) FROM sessions WHERE owner = ?", (owner,)
            ).fetchone()
        check_sessions(count, owned, self._policy, record.mode)
        return rows.make(tx, session)

    async def load(self, session_id: SessionId, *, now: float) -> SessionRecord | None:
        session = self._memory.find(session_id)
        if session is None or session.pending or self._watch.is_lost:
            return await super().load(session_id, now=now)
        self._memory.used(session_id)
        record = session.record
        return None if has_come(record.life.expires_at, now) else record

    async def admit(
        self,
        session_id: SessionId,
        principal: Principal,
        *,
        mode: Mode,
        now: float,
        held: bool = False,
        fencing_epoch: FencingEpoch | None = None,
        key: KeyUse | None = None,
        current: CurrentUse | None = None,
    ) -> Admitted | None:
        session = self._memory.find(session_id)
        if key is None and session is not None and not session.pending and not self._watch.is_lost:
            # Nothing suspends here: most requests come by.
            self._memory.used(session_id)
            admitted = self._memory.admitted(session_id, principal, mode, now, held, fencing_epoch)
        else:
            # The current one is admitted in a step of its own.
            admitted = await super().admit(
                session_id, principal, mode=mode, now=now, held=held,
                fencing_epoch=fencing_epoch, key=key,
            )  # fmt: skip
            session = self._memory.find(session_id)
        if session is not None and session.record.life.expires_at != session.deadline:
            self._deadline_moved(session)
        return admitted

    async def touch(self, session_ids: Collection[SessionId], *, now: float) -> None:
        for session_id in session_ids:
            try:
                await self._step(
                    session_id, lambda working, of=session_id: working.touch([of], now=now)
                )
            except StoreRefused:
                if self._watch.is_lost:
                    raise
                # The others are in use, too. Its own requests say why.
            session = self._memory.find(session_id)
            if session is not None:
                self._deadline_moved(session)

    async def end(self, session_id: SessionId) -> SessionRecord | None:
        async with self._turns.of(session_id):
            try:
                session = await self._fetched(session_id, NOTHING)
            except StoreRefused:
                # It cannot be read. It is over all the same.
                await self._writer.call(lambda tx: rows.remove(tx, rows.row_of(tx, session_id)))
                raise
            if session is None:
                return None
            self._memory.drop(session)
            is_gone = await self._writer.call(lambda tx: rows.remove(tx, session.row), short=True)
        return session.record if is_gone else None

    async def _end_asked(self) -> None:
        """End the sessions that an operator asked this process to end."""
        for session_id in await self._ask(rows.requested_ends):
            try:
                record = await self.end(session_id)
            except StoreRefused as failed:
                logger.error("a session that was to end: %s", failed)
                record = None
            if record is not None:
                self._ended_outside.append(record)
            await self._writer.call(
                lambda tx, session_id=session_id: rows.forget_request(tx, session_id)
            )

    async def _on_many(
        self,
        which: Sequence[Due | Unused],
        work: Callable[[Working, int], Coroutine[Any, Any, Sequence[SessionRecord]]],
        *,
        now: float,
        limit: int,
        more: int,
    ) -> list[SessionRecord]:
        conditions: list[str] = []
        values: list[Any] = []
        latest = -math.inf
        for each in which:
            match each:
                case Due(by):
                    conditions.append(DUE)
                    values.append(by)
                    latest = by
                case Unused(by_mode, owner):
                    modes = " OR ".join([f"mode = ? AND {DUE}"] * len(by_mode))
                    conditions.append(f"{_IDLE_ENDS_FIRST} AND ({modes})")
                    if owner is not None:
                        conditions[-1] = f"owner = ? AND {conditions[-1]}"
                        values.append(owner)
                    for mode, by in by_mode.items():
                        values += [mode.value, by]
                        latest = max(latest, by)
        where = " OR ".join(f"({each})" for each in conditions)
        return await self._on_some(
            f"{DUE} AND ({where}) ORDER BY expires_at LIMIT ?",
            (latest, *values, limit + more),
            lambda working: work(working, limit),
            now=now,
            latest=latest,
        )

    async def evict_heavy(
        self, *, now: float, most: int, held: Collection[SessionId], limit: int
    ) -> Sequence[SessionRecord]:
        size, spared = 0, frozenset(held)
        at: tuple[float, int] | None = (asleep_by(now, self._policy), sys.maxsize)
        # Sleeping sessions are a part of the file.
        if await self._ask(_in_use) <= most:
            return []
        while at is not None and size <= most:
            size, at = await self._ask(lambda tx, size=size, at=at: _add_asleep(tx, at, size, most))
        gone: list[SessionRecord] = []
        while at is not None and len(gone) < limit:
            wanted = min(_ENDED_AT_ONCE, limit - len(gone))
            try:
                some = await self._on_some(
                    f"{_IDLE_ENDS_FIRST} AND (expires_at, sid) <= (?, ?)"
                    " ORDER BY expires_at, sid LIMIT ?",
                    (*at, wanted + len(spared)),
                    # All that the file found.
                    lambda working, wanted=wanted: working.evict_heavy(
                        now=now, most=-1, held=spared, limit=wanted
                    ),
                    now=now,
                    latest=at[0],
                )
            except StoreUnavailable:
                if not gone:
                    raise
                # Those have ended, and nobody is notified of them a second time.
                break
            gone += some
            if len(some) < wanted:
                break
        return gone

    async def sleep(self, *, now: float) -> None:
        since, by = self._slept_by, asleep_by(now, self._policy)
        after: tuple[float, int] | None = (since, sys.maxsize)
        while after is not None:
            page: list[tuple[float, int]] = []

            async def work(working: Working) -> Sequence[SessionRecord]:
                working.slept(since)
                await working.sleep(now=now)
                return ()

            await self._on_some(
                f"(expires_at, sid) > (?, ?) AND {DUE} ORDER BY expires_at, sid LIMIT ?",
                (*after, by, _ASLEEP_AT_ONCE),
                work,
                now=now,
                latest=by,
                page=page,
            )
            after = page[-1] if len(page) == _ASLEEP_AT_ONCE else None
        self._slept_by = by

    async def _on_some(
        self,
        which: str,
        values: Sequence[float | str | bytes],
        work: Callable[[Working], Coroutine[Any, Any, Sequence[SessionRecord]]],
        *,
        now: float,
        latest: float,
        page: list[tuple[float, int]] | None = None,
    ) -> list[SessionRecord]:
        """Do a step of some sessions, of which it ends some: the records of those, as they were.

        Those that somebody uses meanwhile stay as they are.

        Args:
            which: The sessions, and their order, as SQL.
            values: Its values.
            latest: None has an idle deadline later than that.
            page: Gets deadline and row of each.
        """
        moved = self._moved(by=latest)

        def find(tx: Transaction) -> tuple[list[_Place], dict[SessionId, rows.Found]]:
            rows.move_deadlines(tx, moved)
            found = tx.execute(
                f"SELECT expires_at, sid, session_id FROM sessions WHERE {which}", values
            ).fetchall()
            away = [session_id for *_, session_id in found if session_id not in self._memory]
            read = rows.sessions(tx, away, self._window)
            return found, {each.session_id: each for each in read}

        found, read = await self._writer.call(find)
        self._were_written(moved)
        some, held, broken = Working(self._memory), list[FileSession](), list[Unreadable]()
        for deadline, row, session_id in found:
            if page is not None:
                page.append((deadline, row))
            session = self._memory.find(session_id) or read.get(session_id)
            if session is None or self._turns.is_held(session_id):
                # Somebody uses it now.
                continue
            if isinstance(session, Unreadable):
                # A newer version's, or not ours. It expires all the same, and stops no other.
                logger.error("a session could not be read: %s", type(session.failed).__name__)
                if has_come(deadline, now):
                    broken.append(session)
                continue
            some.hold(session, self._memory.carried(session_id) or session.carried)
            held.append(session)
        ended = {record.session_id for record in _at_once(work(some))}
        going = [each for each in held if each.session_id in ended]
        changes: list[Statement] = []
        kept = [each for each in held if each.session_id not in ended]
        for each in kept:
            changes += rows.changes_of(
                each, some.carried(each.session_id), None, self._new_log.__next__
            )
            if each.session_id not in self._memory and each.record.life.expires_at != each.deadline:
                changes.append(rows.deadline_of(each))
        in_memory = [each for each in kept if each.session_id in self._memory]
        # Who is in memory may have a later deadline than the file.
        sure = {each.row: each.session_id in self._memory for each in going}
        for each in going:
            self._memory.drop(each)

        def remove(tx: Transaction) -> list[SessionRecord]:
            for each in broken:
                rows.remove(tx, each.row)
            return [
                each.record
                for each in going
                if rows.remove(tx, each.row, None if sure[each.row] else each.deadline)
            ]

        async with AsyncExitStack() as turns:
            # So that nobody reads one from the file just before it goes. In the order of all who
            # take several turns.
            for session_id in sorted(each.session_id for each in going):
                await turns.enter_async_context(self._turns.of(session_id))
            going = [each for each in going if each.session_id not in self._memory]
            if changes:
                for each in in_memory:
                    each.pending += 1
                await self._writer.call(Write(in_memory, changes))
            return await self._writer.call(remove) if going or broken else []

    # --- many sessions ---------------------------------------------------------------------------

    def _newest(self, session: FileSession) -> SessionRecord:
        # One in memory has its deadline as it really is.
        return (self._memory.find(session.session_id) or session).record

    async def add_whole(self, whole: WholeSession) -> bool:
        new_log = self._new_log.__next__
        return await self._writer.call(lambda tx: rows.add_whole(tx, whole, self._policy, new_log))

    async def audience(self, change: ServerChange, after: str | None) -> Audience:
        find = "SELECT sid, session_id FROM sessions WHERE sid > ? ORDER BY sid LIMIT ?"
        values: list[Any] = [int(after or 0), _AUDIENCE]
        if change.uri is not None:
            find = find.replace("WHERE", "JOIN subscriptions USING (sid) WHERE uri = ? AND")
            values.insert(0, text_bytes(change.uri))
        found = await self._ask(lambda tx: tx.execute(find, values).fetchall())
        following = str(found[-1][0]) if len(found) == _AUDIENCE else None
        return Audience([session_id for _, session_id in found], following)

    async def append_change(
        self,
        session_ids: Sequence[SessionId],
        change: ServerChange,
        *,
        now: float,
        again: bool = False,
    ) -> Sequence[AppendedChange]:
        async with AsyncExitStack() as turns:
            if self._watch.is_lost or any(map(self._lacks_events, session_ids)):
                for session_id in sorted(session_ids):
                    await turns.enter_async_context(self._turns.of(session_id))
                    try:
                        await self._fetched(session_id, _EVENTS)
                    except StoreRefused as failed:
                        if self._watch.is_lost:
                            raise
                        # The others get the change all the same.
                        logger.error("a change is not in a session's log: %s", failed)
            found = [self._memory.find(session_id) for session_id in session_ids]
            sessions = {each.session_id: each for each in found if each is not None}
            changes: list[Statement] = []
            try:
                appended = _at_once(
                    self._memory.append_change(session_ids, change, now=now, again=again)
                )
                for each in appended:
                    changes += self._changes(sessions[each.session_id], (each.stream,))
            except BaseException:
                for session in sessions.values():
                    self._memory.drop(session)
                raise
            written = self._write(list(sessions.values()), changes)
            for session in sessions.values():
                self._memory.measure(session)
        if written is not None:
            await written
        return appended

    def _lacks_events(self, session_id: SessionId) -> bool:
        session = self._memory.find(session_id)
        return session is None or session.is_taken or session.lacks(_EVENTS)

    async def heads(self, streams: Sequence[tuple[SessionId, StreamName]]) -> Sequence[StreamHead]:
        heads: list[StreamHead] = []
        for session_id, stream in streams:
            try:
                heads += await self._step(
                    session_id,
                    lambda working, of=(session_id, stream): working.heads([of]),
                    wanted=Wanted(stream=stream),
                )
            except StoreRefused:
                if self._watch.is_lost:
                    raise
                # The others' are asked for in the same call. Its own requests say why.
                heads.append(StreamHead(True, None))
        return heads

    async def append(
        self, session_id: SessionId, draft: Draft, *, now: float, stream: StreamName = EVENTS
    ) -> Appended | None:
        # As the inherited one, with fewer calls: most steps that write come by.
        appended = await self._step(
            session_id,
            lambda working: working.append(session_id, draft, now=now, stream=stream),
            wanted=append_wants(draft, stream=stream),
        )
        is_first = appended is not None and appended.event.number == 1
        if is_first and stream not in (EVENTS, GET_STREAM):
            await self._evict_responses(session_id, stream, now - self._policy.max_age, now)
        return appended

    async def _evict_responses(
        self, session_id: SessionId, stream: StreamName, before: float, now: float
    ) -> None:
        """Take what is too old to be replayed out of a session's response streams but one: of
        those whose process died nobody else does. A few of them each time, so that no event costs
        more than others because of how many there are.
        """
        found = await self._ask(
            lambda tx: tx.execute(
                "SELECT stream FROM logs JOIN sessions USING (sid) WHERE session_id = ?"
                " AND stream NOT IN (?, ?, ?) AND events > 0 AND ? >"
                " (SELECT at FROM events WHERE events.log = logs.log ORDER BY number LIMIT 1)"
                " LIMIT ?",
                (session_id, EVENTS, GET_STREAM, stream, before, _RESPONSES),
            ).fetchall(),
            short=True,
        )
        for (name,) in found:

            async def read(working: Working, name: StreamName = name) -> None:
                head = await working.head(session_id, stream=name)
                if head is not None:
                    await working.read(session_id, head.event_id(), now=now, stream=name)

            await self._step(session_id, read, wanted=Wanted(stream=name, log=True))

    # --- values that a file can hold -------------------------------------------------------------

    async def change_state(
        self,
        session_id: SessionId,
        changed: Mapping[str, Any],
        removed: Collection[str],
        *,
        expected_version: int | None = None,
    ) -> SessionRecord | None:
        """Change the state.

        Raises:
            TypeError: A value cannot be JSON. Nothing was stored.
        """
        plain = loads(encode(dict(changed)))

        async def work(working: Working) -> SessionRecord | None:
            record = await working.change_state(
                session_id, plain, removed, expected_version=expected_version
            )
            # Others may change it before this caller goes on.
            return copy.copy(record)

        return await self._step(session_id, work)

    async def replace_data(
        self, session_id: SessionId, value: Mapping[str, Any], *, expected_version: int
    ) -> bool:
        """Replace the data.

        Raises:
            TypeError: A value cannot be JSON. Nothing was stored.
        """
        plain = loads(encode(dict(value)))
        return await super().replace_data(session_id, plain, expected_version=expected_version)


_Place = tuple[float, int, SessionId]
"""Deadline, row and id of a session."""

_EVENTS = Wanted(log=True)

_RESPONSES = 16
"""Response streams that the first event of another one gives back the room of."""

_AT_ONCE = 256

_SIZE = (
    "length(state) + ifnull(length(peer), 0)"
    " + ifnull((SELECT length(value) FROM data WHERE sid = s.sid), 0)"
    " + (SELECT total(length(uri)) FROM subscriptions WHERE sid = s.sid)"
    " + (SELECT total(bytes) FROM logs WHERE sid = s.sid)"
    " + (SELECT total(length(key) + ifnull(length(outcome), 0)) FROM keys WHERE sid = s.sid)"
)


def _in_use(tx: Transaction) -> int:
    """Return the bytes of the file that are in use. All other sizes here are a part of them."""
    pages = [
        tx.execute(f"PRAGMA {name}").fetchone()[0]
        for name in ("page_count", "freelist_count", "page_size")
    ]
    return (pages[0] - pages[1]) * pages[2]


def _add_asleep(
    tx: Transaction, before: tuple[float, int], size: int, most: int
) -> tuple[int, tuple[float, int] | None]:
    """Add the bytes of some sessions to ``size``, the latest idle deadline first, until it is more
    than ``most``.

    Args:
        before: Deadline and row of the session that these come before.

    Returns:
        The sum; and deadline and row of the last session, or None if all have room.
    """
    found = tx.execute(
        f"SELECT expires_at, sid, {_SIZE} FROM sessions AS s WHERE (expires_at, sid) < (?, ?)"
        f" AND {_IDLE_ENDS_FIRST} ORDER BY expires_at DESC, sid DESC LIMIT ?",
        (*before, _AT_ONCE),
    ).fetchall()
    for deadline, sid, held in found:
        size += int(held)
        if size > most:
            return size, (deadline, sid)
    return size, found[-1][:2] if len(found) == _AT_ONCE else None


def _at_once(step: Awaitable[T]) -> T:
    """The result of a step of the store in memory, which waits for nothing."""
    try:
        cast("Coroutine[Any, Any, T]", step).send(None)
    except StopIteration as done:
        return done.value
    raise AssertionError("the store in memory waits for nothing")


def _deadline_written(session: FileSession, done: asyncio.Future[None]) -> None:
    if done.cancelled() or done.exception() is None:
        return
    logger.warning("an idle deadline could not be stored: %s", done.exception())
    # The next use tries again.
    session.deadline = -math.inf
