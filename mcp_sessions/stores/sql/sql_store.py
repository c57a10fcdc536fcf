"""The steps of a store that keeps its sessions in the rows of a database.

A step reads the rows that it needs, in one statement. The store in memory, with nothing in it but
these sessions, does the step: so the rules are the same. Then one statement writes what changed, if
nobody changed the sessions meanwhile. If somebody did, nothing is written, and the step begins
anew. No lock is held while a process thinks, and a step is two round trips.

A step that needs no more than the session's own row and the oldest events of a log begins with what
this process knows of them since its last step. If that is still the row, the step is one round
trip. If not, the statement that writes nothing answers with the row. Whatever such a step does not
write is decided from a row that was read.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import AsyncExitStack
from typing import Protocol, TypeVar

from mcp_sessions.core.life import (
    asleep_by,
    has_come,
    idle_time,
)
from mcp_sessions.core.states import Mode
from mcp_sessions.errors import StoreRefused, StoreUnavailable
from mcp_sessions.ids import (
    EVENTS,
    GET_STREAM,
    SessionId,
    StreamName,
)
from mcp_sessions.locks import Locks
from mcp_sessions.policy import SessionPolicy
from mcp_sessions.principal import Principal
from mcp_sessions.stores.limits import check_peer, check_sessions
from mcp_sessions.stores.memory.tables import MemorySession, new_session, session_of
from mcp_sessions.stores.records import (
    AppendedChange,
    Audience,
    Peer,
    ServerChange,
    SessionClient,
    SessionPage,
    SessionRecord,
    StreamHead,
)
from mcp_sessions.stores.sql.partly_read import NotRead
from mcp_sessions.stores.sql.session_rows import (
    COARSE,
    Change,
    Counts,
    Found,
    KeyRow,
    SessionRow,
    Stored,
    Wanted,
    change_of,
    found_again,
    keyed,
    new_row,
    owner_of,
    record_of,
    stored,
    tag_of,
    text_bytes,
)
from mcp_sessions.stores.sql.steps import NOTHING, Due, Steps, Unused, Working
from mcp_sessions.stores.whole_sessions import WholeSession, whole_log

logger = logging.getLogger(__name__)

T = TypeVar("T")

PAGE = 256
"""Sessions that one statement reads, of many."""

TRIES = 50
"""How often a step begins anew because somebody else was first. Each time somebody else's step was
done."""

KNOWN = 1_024
"""Rows that a process knows: those of the sessions that it used last."""

Broken = tuple[SessionRow, Exception]
"""A row that cannot be read, and why."""

_BUSY = "other processes change the same rows all the time"


class Engine(Protocol):
    """Reads and writes rows. Each method is one statement, or one transaction.

    Raises (each method):
        StoreUnavailable: Unknown whether it was done.
    """

    async def read(self, session_ids: Collection[SessionId], wanted: Wanted) -> list[Found]: ...

    async def write(self, changes: Sequence[Change]) -> set[SessionId]:
        """Write the changes of those sessions that are as they were read; which ones."""
        ...

    async def write_one(self, change: Change) -> tuple[bool, SessionRow | None]:
        """Write it if the session is as it was read. Whether it is written, and the row as it is
        now; None: it is gone, or has to be read.
        """
        ...

    async def count(self, owner: bytes) -> Counts: ...

    async def add(self, row: SessionRow, made: int) -> bool:
        """Add a session. False: more than ``made`` were made by now, or its id is there."""
        ...

    async def remove(self, rows: Sequence[tuple[SessionId, int | None]]) -> list[SessionRow]:
        """Remove sessions, those that still have that version (None: whichever)."""
        ...

    async def due(
        self, by: float, limit: int, *, after: tuple[float, str] | None = None
    ) -> list[Found]:
        """Sessions whose ``due_at`` is at most ``by``, by that and by their ids."""
        ...

    async def unused(
        self, owner: bytes | None, latest: Mapping[Mode, float], limit: int
    ) -> list[Found]:
        """Sessions of those modes, and of an owner if one is named, earliest ``due_at`` first.

        Args:
            latest: The latest idle deadline for each mode. Whose lifetime ends first is left out.
        """
        ...

    async def heavy(self, by: float, most: int, limit: int) -> list[Found]:
        """Sessions that are due by then, earliest first: without those that were used latest and
        have no more than ``most`` bytes together.
        """
        ...

    async def audience(self, tag: int | None, after: str, limit: int) -> list[SessionId]:
        """Sessions that have that tag, in order of their ids; without one, those of the modes that
        the server's changes are for.
        """
        ...

    async def every(self, owner: bytes | None, after: str, limit: int) -> list[SessionRow]: ...

    async def keys(self, session_id: SessionId) -> list[KeyRow]:
        """All of a session: those that finished, in that order, and then those that run."""
        ...


class SqlStore(Steps):
    """A :class:`~mcp_sessions.stores.contract.SessionStore` over an :class:`Engine`."""

    remembers = True
    survives_process = True

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._policy = SessionPolicy()
        self._memory = Working()
        self._turns = Locks[SessionId]()
        self._creating = Locks[None]()
        self._known = OrderedDict[SessionId, Found]()
        self._slept_by = float("-inf")

    async def open(self, policy: SessionPolicy) -> None:
        self._policy = policy
        await self._memory.open(policy)

    # --- steps ---------------------------------------------------------------------------------

    def _working(
        self, found: Sequence[Found], wanted: Wanted, broken: list[Broken] | None = None
    ) -> tuple[Working, list[Stored]]:
        """These sessions, for a step.

        Args:
            broken: Takes those that cannot be read, in a step of many: the others go on.

        Raises:
            StoreRefused: One cannot be read.
        """
        working = Working(self._memory)
        held: list[Stored] = []
        for each in found:
            stream = wanted.stream
            if stream is None:
                stream = GET_STREAM if each.row.mode == Mode.TRANSPORT.value else EVENTS
            try:
                before = stored(each, stream, self._policy, working.window)
            except (ValueError, TypeError, LookupError) as failed:
                if broken is None:
                    raise unreadable(failed) from failed
                broken.append((each.row, failed))
                continue
            working.hold(before.session, before.carried)
            held.append(before)
        return working, held

    async def _read(
        self,
        session_ids: Collection[SessionId],
        wanted: Wanted,
        broken: list[Broken] | None = None,
    ) -> tuple[Working, list[Stored]]:
        """Read sessions. Logs that are made anew are so in the rows before anything else is."""
        while True:
            found = await self._engine.read(session_ids, wanted)
            working, held = self._working(found, wanted, broken)
            renewed = [each for each in held if each.is_renewed]
            if not renewed:
                return working, held
            await self._write(_changes(working, renewed, 0.0))

    async def _step(
        self,
        session_id: SessionId,
        work: Callable[[Working], Awaitable[T]],
        *,
        wanted: Wanted = NOTHING,
        now: float = 0.0,
    ) -> T:
        """Do a step of one session."""
        async with self._turns.of(session_id):
            known = self._known.get(session_id)
            stream = wanted.stream or (known.stream if known is not None else None)
            known = known if known is not None and known.may_do(wanted) else None
            is_old = known is not None
            for _ in range(TRIES):
                working, held = self._working([known] if known is not None else [], NOTHING)
                is_read = known is None or held[0].is_renewed
                if is_read:
                    working, held = await self._read([session_id], wanted)
                    is_old = False
                known = None
                try:
                    result = await work(working)
                except NotRead:
                    wanted = wanted.more() if is_read else wanted
                    continue
                except Exception:
                    if not is_old:
                        raise
                    continue
                changes = _changes(working, held, now)
                if not changes:
                    if not is_old:
                        return result
                    continue
                (change,) = changes
                is_written, row = await self._engine.write_one(change)
                if is_written:
                    known = found_again(change.written(), held[0].session, stream)
                elif row is not None and Found(row).may_do(wanted):
                    known = Found(row)
                self._note(session_id, known)
                if is_written:
                    return result
                is_old = False
        raise StoreUnavailable(_BUSY)

    def _note(self, session_id: SessionId, known: Found | None) -> None:
        """Know a session until others were used since."""
        self._known.pop(session_id, None)
        if known is not None:
            self._known[session_id] = known
            if len(self._known) > KNOWN:
                self._known.popitem(last=False)

    async def _write(self, changes: Sequence[Change]) -> set[SessionId]:
        """Write what a step of many changed. Return those that somebody changed meanwhile."""
        ids = {SessionId(each.row.sid) for each in changes}
        for session_id in ids:
            # What this process knows of it is old now.
            self._note(session_id, None)
        return ids - await self._engine.write(changes) if changes else ids

    async def _look(
        self,
        session_id: SessionId,
        work: Callable[[Working], Awaitable[T]],
        *,
        wanted: Wanted = NOTHING,
    ) -> T:
        """Do a step that only reads."""
        while True:
            working, _ = await self._read([session_id], wanted)
            try:
                return await work(working)
            except NotRead:
                wanted = wanted.more()

    async def _on_many(
        self,
        which: Sequence[Due | Unused],
        work: Callable[[Working, int], Awaitable[Sequence[SessionRecord]]],
        *,
        now: float,
        limit: int,
        more: int,
    ) -> list[SessionRecord]:
        async def find(left: int) -> list[Found]:
            found: list[Found] = []
            for each in which:
                match each:
                    case Due(by):
                        found += await self._engine.due(by, left + more)
                    case Unused(latest, owner):
                        found += await self._engine.unused(owner, latest, left + more)
            return list({each.row.sid: each for each in found}.values())

        return await self._end_some(find, work, now, limit)

    async def _end_some(
        self,
        find: Callable[[int], Awaitable[Sequence[Found]]],
        work: Callable[[Working, int], Awaitable[Sequence[SessionRecord]]],
        now: float,
        limit: int,
    ) -> list[SessionRecord]:
        """If somebody changed one of them meanwhile, the rows are read again, and the step decides
        anew.

        Args:
            find: The rows, for a step that ends so many.
        """
        done: list[SessionRecord] = []
        for _ in range(TRIES):
            left = limit - len(done)
            broken: list[Broken] = []
            working, held = self._working(await find(left), NOTHING, broken)
            ended = {record.session_id: record for record in await work(working, left)}
            changes = _changes(working, held, now)
            await self._write(changes)
            rows = [each.row for each in held if each.session.record.session_id in ended]
            _log_broken(broken)
            rows += [row for row, _ in broken if has_come(row.expires_at, now)]
            going = [(SessionId(row.sid), row.version) for row in rows]
            gone = await self._engine.remove(going) if going else []
            removed = {row.sid for row in gone}
            done += [record for session_id, record in ended.items() if session_id in removed]
            if len(gone) == len(going):
                break
        return done

    async def _on_each(
        self, found: Sequence[Found], work: Callable[[Working], Awaitable[None]], now: float
    ) -> None:
        """Do a step of many sessions, of which it ends none. It is done anew for those that
        somebody changed meanwhile.
        """
        for _ in range(TRIES):
            broken: list[Broken] = []
            working, held = self._working(found, NOTHING, broken)
            _log_broken(broken)
            await work(working)
            changes = _changes(working, held, now)
            lost = await self._write(changes)
            if not lost:
                return
            found = await self._engine.read(lost, NOTHING)
        raise StoreUnavailable(_BUSY)

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
        now = await self._now(now)
        check_peer(peer, self._policy)
        async with self._creating.of(None):
            for _ in range(TRIES):
                if session_id is not None:
                    known = await self._engine.read([session_id], NOTHING)
                    if known and not has_come(known[0].row.expires_at, now):
                        return self._record(known[0].row)
                    if known:
                        await self._engine.remove([(session_id, known[0].row.version)])
                counts = await self._engine.count(owner_of(principal))
                check_sessions(counts.sessions, counts.owned, self._policy, mode)
                session = new_session(session_id, mode, principal, peer, now, self._policy)
                if await self._engine.add(new_row(session, counts.line), counts.made):
                    return session.record
        raise StoreUnavailable(_BUSY)

    def _record(self, row: SessionRow) -> SessionRecord:
        try:
            return record_of(row)
        except (ValueError, TypeError, LookupError) as failed:
            raise unreadable(failed) from failed

    async def touch(self, session_ids: Collection[SessionId], *, now: float) -> None:
        now = await self._now(now)
        ids = list(session_ids)
        for start in range(0, len(ids), PAGE):
            some = ids[start : start + PAGE]
            found = await self._engine.read(some, NOTHING)
            await self._on_each(found, lambda working: working.touch(ids, now=now), now)

    async def end(self, session_id: SessionId) -> SessionRecord | None:
        gone = await self._engine.remove([(session_id, None)])
        return self._record(gone[0]) if gone else None

    async def evict_heavy(
        self, *, now: float, most: int, held: Collection[SessionId], limit: int
    ) -> Sequence[SessionRecord]:
        now = await self._now(now)
        by = asleep_by(now, self._policy)
        return await self._end_some(
            lambda left: self._engine.heavy(by, most, left + len(held)),
            # All that the database found.
            lambda working, left: working.evict_heavy(now=now, most=-1, held=held, limit=left),
            now,
            limit,
        )

    async def sleep(self, *, now: float) -> None:
        now = await self._now(now)
        since, by = self._slept_by, asleep_by(now, self._policy)
        # A session's ``due_at`` may be earlier than its deadline.
        earlier = COARSE * idle_time(Mode.TRANSPORT, self._policy)
        after = (since - earlier, "")

        async def sleeps(working: Working) -> None:
            working.slept(since)
            await working.sleep(now=now)

        while found := await self._engine.due(by, PAGE, after=after):
            await self._on_each(found, sleeps, now)
            after = (found[-1].row.due_at, found[-1].row.sid)
        self._slept_by = by

    # --- events ------------------------------------------------------------------------------

    async def audience(self, change: ServerChange, after: str | None) -> Audience:
        tag = tag_of(text_bytes(change.uri)) if change.uri is not None else None
        ids = await self._engine.audience(tag, after or "", PAGE)
        return Audience(ids, ids[-1] if len(ids) == PAGE else None)

    async def append_change(
        self,
        session_ids: Sequence[SessionId],
        change: ServerChange,
        *,
        now: float,
        again: bool = False,
    ) -> Sequence[AppendedChange]:
        now = await self._now(now)
        # Of both kinds of drafts, key and name are the same.
        key = (None, change.event.key) if change.event.key is not None else None
        wanted = Wanted(log=True, key=key, name=change.id if again else None)
        done: dict[SessionId, AppendedChange] = {}
        left: list[SessionId] = list(session_ids)
        broken: list[Broken] = []
        async with AsyncExitStack() as turns:
            for session_id in sorted(session_ids):
                await turns.enter_async_context(self._turns.of(session_id))
            for _ in range(TRIES):
                if not left:
                    break
                working, held = await self._read(left, wanted, broken)
                try:
                    appended = await working.append_change(left, change, now=now, again=again)
                except NotRead:
                    wanted = wanted.more()
                    continue
                changes = _changes(working, held, now)
                lost = await self._write(changes)
                done |= {each.session_id: each for each in appended if each.session_id not in lost}
                left = [session_id for session_id in left if session_id in lost]
        for failed in {row.sid: failed for row, failed in broken}.values():
            logger.error("a change is not in a session's log: %s", unreadable(failed))
        if left:
            raise StoreUnavailable(_BUSY)
        return [done[session_id] for session_id in session_ids if session_id in done]

    async def heads(self, streams: Sequence[tuple[SessionId, StreamName]]) -> Sequence[StreamHead]:
        heads: list[StreamHead] = []
        for start in range(0, len(streams), PAGE):
            some = streams[start : start + PAGE]
            broken: list[Broken] = []
            working, _ = await self._read({each for each, _ in some}, NOTHING, broken)
            # The others' are asked for in the same call. Its own requests say why.
            lost = {row.sid for row, _ in broken}
            for (session_id, _), head in zip(some, await working.heads(some), strict=True):
                heads.append(StreamHead(True, None) if session_id in lost else head)
        return heads

    async def claim(
        self, session_id: SessionId, holder: str | None, *, instead_of: str | None = None
    ) -> str | None:
        """See :meth:`~mcp_sessions.stores.exchange.Exchange.claim`."""

        async def work(working: Working) -> str | None:
            session = working.session(session_id)
            if session is not None and holder is not None and session.holder in (None, instead_of):
                session.holder = holder
            return session.holder if session is not None else None

        return await self._step(session_id, work)

    # --- belongings ------------------------------------------------------------------------------

    async def all_sessions(self, principal: Principal | None = None) -> Sequence[SessionRecord]:
        owner = owner_of(principal) if principal is not None else None
        return self._readable(await self._rows(owner))

    async def _rows(self, owner: bytes | None) -> list[SessionRow]:
        found: list[SessionRow] = []
        while rows := await self._engine.every(owner, found[-1].sid if found else "", PAGE):
            found += rows
        return found

    async def some_sessions(self, after: str | None, limit: int) -> SessionPage:
        rows = await self._engine.every(None, after or "", limit)
        return SessionPage(self._readable(rows), rows[-1].sid if len(rows) == limit else None)

    def _readable(self, rows: Sequence[SessionRow]) -> list[SessionRecord]:
        records: list[SessionRecord] = []
        for row in rows:
            try:
                records.append(self._record(row))
            except StoreRefused as failed:
                logger.error("a session is left out of a list: %s", failed)
        return records

    # --- whole sessions --------------------------------------------------------------------------

    async def session_ids(self) -> Sequence[SessionId]:
        return [SessionId(row.sid) for row in await self._rows(None)]

    async def whole(self, session_id: SessionId) -> WholeSession | None:
        for _ in range(TRIES):
            _, held = await self._read([session_id], Wanted(data=True))
            if not held:
                return None
            (before,) = held
            names = [name for name, log in before.logs.items() if len(log)]
            keys = await self._engine.keys(session_id)
            logs = dict(before.logs)
            # The last of them says that nothing has changed since the first.
            for name in names or [EVENTS]:
                _, again = await self._read([session_id], Wanted(stream=name, after=-1))
                if not again or again[0].row.version != before.row.version:
                    break
                logs |= {name: again[0].logs[name]} if name in names else {}
            else:
                return WholeSession(
                    before.session.record,
                    before.data,
                    {name: whole_log(log) for name, log in logs.items()},
                    [keyed(row) for row in keys],
                    before.carried,
                )
        raise StoreUnavailable(_BUSY)

    async def add_whole(self, whole: WholeSession) -> bool:
        record = whole.record
        session_id = record.session_id
        session = session_of(whole, self._memory.window, self._policy)
        client = SessionClient(record.client.peer)
        bare = SessionRecord(session_id, record.mode, record.principal, record.life, client)
        for _ in range(TRIES):
            async with self._creating.of(None):
                # No limit counts here, so nobody's own are counted.
                counts = await self._engine.count(b"")
                # Until all of it is there its time is over: nobody gets a part of it.
                row = new_row(MemorySession(bare, None), counts.line)._replace(
                    expires_at=_OVER, due_at=_OVER
                )
                is_added = await self._engine.add(row, counts.made)
            if not is_added:
                known = await self._engine.read([session_id], NOTHING)
                if known and known[0].row.expires_at != _OVER:
                    return False
                if known:
                    await self._engine.remove([(session_id, known[0].row.version)])
                continue
            _, held = self._working(await self._engine.read([session_id], NOTHING), NOTHING)
            # Somebody else who adds it may have taken the row away, and be done with its own.
            mine = (each for each in held if each.row.expires_at == _OVER)
            changes = [change_of(each, session, whole.carried, 0.0) for each in mine]
            written = [each for each in changes if each is not None]
            if written and await self._engine.write(written):
                return True
        raise StoreUnavailable(_BUSY)


_OVER = 0.0
"""The deadline of a session that is not whole yet."""


def unreadable(failed: Exception) -> StoreRefused:
    return StoreRefused(
        f"a row of the database cannot be read ({type(failed).__name__}): another program wrote "
        "it, or another release"
    )


def _log_broken(broken: Sequence[Broken]) -> None:
    for _, failed in broken:
        logger.error("a session could not be read: %s", type(failed).__name__)


def _changes(working: Working, held: Sequence[Stored], now: float) -> list[Change]:
    """What a step changed of the sessions that it did not end."""
    changes: list[Change] = []
    for before in held:
        session_id = before.session.record.session_id
        session = working.session(session_id)
        if session is not None:
            change = change_of(before, session, working.carried(session_id), now)
            if change is not None:
                changes.append(change)
    return changes
