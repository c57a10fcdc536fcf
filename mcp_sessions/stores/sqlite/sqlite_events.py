"""Event logs in a SQLite file: what is stored, and who gets it; which connection a session is
attached to, and what its GET stream gets. Each call is one transaction. What it does to the rows
of a log is in ``log_rows.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from mcp_sessions.core import attachment
from mcp_sessions.core.attachment import Carry, RelayStep
from mcp_sessions.core.entitlement import is_entitled
from mcp_sessions.core.life import has_come
from mcp_sessions.core.log import Draft, LoggedEvent
from mcp_sessions.core.states import Mode
from mcp_sessions.errors import Refusal
from mcp_sessions.ids import (
    EVENTS,
    GET_STREAM,
    ConnectionId,
    FencingEpoch,
    LogEpoch,
    Position,
    SessionEventId,
    SessionId,
    StreamName,
)
from mcp_sessions.stores.records import (
    Appended,
    AppendedChange,
    Attached,
    Audience,
    Relayed,
    ServerChange,
    SessionRecord,
    StreamHead,
    attachment_of,
)
from mcp_sessions.stores.sqlite import log_rows, session_rows
from mcp_sessions.stores.sqlite.log_rows import LogRow
from mcp_sessions.stores.sqlite.served_file import SMALL, ServedFile, is_small
from mcp_sessions.stores.sqlite.session_rows import Brief
from mcp_sessions.stores.sqlite.transaction import Transaction, text_bytes, text_of


class AttachmentsInFile(ServedFile):
    async def attach(
        self,
        session_id: SessionId,
        connection_id: ConnectionId | None,
        *,
        now: float,
        position: Position | None = None,
        only_if_free: bool = False,
    ) -> Attached | None:

        def work(tx: Transaction, session: Brief) -> Attached | None:
            scopes, stored = tx.execute(
                "SELECT scopes, waits_from FROM sessions WHERE sid = ?", (session.sid,)
            ).fetchone()
            attached = attachment.attach(
                attachment.state_of(is_attached=session.attachment is not None),
                connection_id,
                fencing_epoch=session.fencing_epoch,
                waits_from=SessionEventId(text_of(stored)) if stored is not None else None,
                only_if_free=only_if_free,
            )
            if attached is None:
                return None
            log = log_rows.opened(tx, session.sid, EVENTS)
            window = session_rows.window_of_stream(session, EVENTS, self._window)
            replay, refusal = log_rows.replay(tx, log, position, window, now=now)
            attached_to, fencing_epoch = attached.connection_id, attached.fencing_epoch
            tx.execute(
                "UPDATE sessions SET fencing_epoch = ?, connection_id = ?, waits_from = ?"
                " WHERE sid = ?",
                (fencing_epoch, attached_to, attached.waits_from, session.sid),
            )

            def apply(record: SessionRecord) -> None:
                record.fencing_epoch = fencing_epoch
                record.client.waits_from = attached.waits_from
                record.attachment = attachment_of(attached_to, fencing_epoch)

            tx.changes.append((session_id, apply))
            counts = tx.recall(session_id)
            if counts is not None:
                counts.fencing_epoch = fencing_epoch
                tx.learn(session_id, counts)
            return Attached(
                fencing_epoch,
                log.position.event_id(),
                session.attachment,
                replay,
                refusal,
                frozenset(session_rows.load_json(scopes)),
                attached.listens_from,
            )

        return await self._within(session_id, work, None, now=now)

    async def detach(self, session_id: SessionId, fencing_epoch: FencingEpoch) -> bool:

        def work(tx: Transaction, session: Brief) -> bool:
            if not attachment.detaches(
                attachment.state_of(is_attached=session.attachment is not None),
                fencing_epoch=session.fencing_epoch,
                attached_with=fencing_epoch,
            ):
                return False
            tx.execute("UPDATE sessions SET connection_id = NULL WHERE sid = ?", (session.sid,))
            tx.changes.append((session_id, _detach))
            return True

        return await self._within(session_id, work, False, short=True)

    async def carry(
        self, connection: SessionId, origin: SessionId, fencing_epoch: FencingEpoch, after: Position
    ) -> bool:

        def work(tx: Transaction, session: Brief) -> bool:
            carries = attachment.carry(_carried(tx, session.sid, origin)[0], fencing_epoch)
            if carries is not Carry.BEGINS:
                return carries is Carry.CONTINUES
            log_rows.drop_origin(tx, log_rows.find(tx, session.sid, GET_STREAM), origin)
            tx.execute(
                "INSERT OR REPLACE INTO carried (sid, origin, fencing_epoch, log_epoch, number)"
                " VALUES (?, ?, ?, ?, ?)",
                (session.sid, origin, fencing_epoch, after.log_epoch, after.number),
            )
            tx.changes.append((connection, lambda record: _carry(record, origin, fencing_epoch)))
            return True

        return await self._within(connection, work, False)

    async def relay(
        self,
        connection: SessionId,
        origin: SessionId,
        fencing_epoch: FencingEpoch,
        event: LoggedEvent,
        *,
        now: float,
        skips: bool = False,
    ) -> Relayed:

        def work(tx: Transaction, session: Brief) -> Relayed:
            carried, last = _carried(tx, session.sid, origin)
            position = event.position
            relays, last = attachment.relay(
                carried, last, position, fencing_epoch=fencing_epoch, skips=skips
            )
            if relays is not RelayStep.STORED:
                return Relayed(missing_after=last if relays is RelayStep.TOO_EARLY else None)
            tx.execute(
                "UPDATE carried SET log_epoch = ?, number = ? WHERE sid = ? AND origin = ?",
                (position.log_epoch, position.number, session.sid, origin),
            )
            log = log_rows.opened(tx, session.sid, GET_STREAM)
            key = event.key[1] if event.key is not None else None
            draft = Draft(event.payload, None, key, origin)
            return Relayed(log_rows.append(tx, log, draft, self._window, now=now)[0])

        small = is_small(event.payload)
        return await self._within(connection, work, Relayed(), now=now, short=small)

    async def drop_origin(
        self,
        session_id: SessionId,
        origin: SessionId,
        *,
        stream: StreamName = GET_STREAM,
        fencing_epoch: FencingEpoch | None = None,
    ) -> None:

        def work(tx: Transaction, session: Brief) -> None:
            carried, _ = _carried(tx, session.sid, origin)
            if not attachment.may_drop(carried, fencing_epoch):
                return
            log_rows.drop_origin(tx, log_rows.find(tx, session.sid, stream), origin)
            if stream == GET_STREAM and carried is not None:
                values = (session.sid, origin)
                tx.execute("DELETE FROM carried WHERE sid = ? AND origin = ?", values)
                tx.changes.append((session_id, lambda record: _carry(record, origin, None)))

        await self._within(session_id, work, None)


def _carry(record: SessionRecord, origin: SessionId, fencing_epoch: FencingEpoch | None) -> None:
    carried = {each: epoch for each, epoch in record.client.carried.items() if each != origin}
    if fencing_epoch is not None:
        carried[origin] = fencing_epoch
    record.client.carried = carried


def _carried(tx: Transaction, sid: int, origin: SessionId) -> tuple[FencingEpoch | None, Position]:
    """The fencing epoch with which a GET stream takes a session's events (None: it does not),
    and the last one that it took.
    """
    row = tx.execute(
        "SELECT fencing_epoch, log_epoch, number FROM carried WHERE sid = ? AND origin = ?",
        (sid, origin),
    ).fetchone()
    if row is None:
        return None, Position(LogEpoch(""), 0)
    return FencingEpoch(row[0]), Position(LogEpoch(row[1]), row[2])


def _detach(record: SessionRecord) -> None:
    record.attachment = None


_AUDIENCE = 128
"""Sessions asked for at once while a change is sent: a fraction of a millisecond."""


class EventsInFile(ServedFile):
    async def append(
        self, session_id: SessionId, draft: Draft, *, now: float, stream: StreamName = EVENTS
    ) -> Appended | None:

        def work(tx: Transaction, session: Brief) -> Appended | None:
            log = log_rows.opened(tx, session.sid, stream)
            window = session_rows.window_of_stream(session, stream, self._window)
            event, replaced = log_rows.append(tx, log, draft, window, now=now)
            if event.number == 1 and stream not in (EVENTS, GET_STREAM):
                log_rows.evict_responses(tx, session.sid, stream, window, now=now)
            return Appended(event, session.attachment, replaced)

        return await self._within(session_id, work, None, now=now, short=is_small(draft.before))

    async def audience(self, change: ServerChange, after: str | None) -> Audience:
        page = int(after) if after is not None else 0

        def work(tx: Transaction) -> Audience:
            if change.uri is not None:
                rows = tx.execute(
                    "SELECT sid, session_id FROM subscriptions JOIN sessions USING (sid)"
                    " WHERE uri = ? AND sid > ? ORDER BY sid LIMIT ?",
                    (text_bytes(change.uri), page, _AUDIENCE),
                ).fetchall()
            else:
                rows = tx.execute(
                    "SELECT sid, session_id FROM sessions WHERE sid > ? ORDER BY sid LIMIT ?",
                    (page, _AUDIENCE),
                ).fetchall()
            following = str(rows[-1][0]) if len(rows) == _AUDIENCE else None
            return Audience([SessionId(session_id) for _, session_id in rows], following)

        return await self._writer.call(work)

    async def append_change(
        self,
        session_ids: Sequence[SessionId],
        change: ServerChange,
        *,
        now: float,
        again: bool = False,
    ) -> Sequence[AppendedChange]:
        uri = text_bytes(change.uri) if change.uri is not None else None
        marks = ",".join("?" * len(session_ids))

        def work(tx: Transaction) -> Sequence[AppendedChange]:
            rows = tx.execute(
                "SELECT session_id, sid, mode, ends_at, connection_id, fencing_epoch, lists,"
                " EXISTS (SELECT 1 FROM subscriptions AS s WHERE s.sid = sessions.sid"
                " AND s.uri = ?),"
                " EXISTS (SELECT 1 FROM carried AS c WHERE c.sid = sessions.sid)"
                f" FROM sessions WHERE session_id IN ({marks})",
                (uri, *session_ids),
            ).fetchall()
            found = {row[0]: row for row in rows}
            changes = [
                self._append_change(tx, found[each], change, now, again)
                for each in session_ids
                if each in found
            ]
            return [each for each in changes if each is not None]

        return await self._writer.call(
            work, short=len(change.bare.before) * len(session_ids) <= SMALL
        )

    def _append_change(
        self, tx: Transaction, row: Sequence[Any], change: ServerChange, now: float, again: bool
    ) -> AppendedChange | None:
        session_id, sid, stored_mode, ends_at, *attached, lists, subscribes, carries = row
        mode = Mode(stored_mode)
        if has_come(ends_at, now) or not is_entitled(
            mode,
            uri=change.uri,
            listed=change.listed,
            is_subscribed=bool(subscribes),
            lists=session_rows.load_json(lists) if lists is not None else None,
            carries=bool(carries),
        ):
            return None
        stream, draft = change.draft_for(mode, session_id, again=again)
        log = log_rows.opened(tx, sid, stream)
        event, replaced = log_rows.append(tx, log, draft, self._window, now=now)
        attachment = session_rows.stored_attachment(*attached)
        return AppendedChange(session_id, stream, event, attachment, replaced)

    async def read(
        self,
        session_id: SessionId,
        after: str | None,
        *,
        now: float,
        stream: StreamName = EVENTS,
        limit: int | None = None,
    ) -> tuple[Sequence[LoggedEvent], Refusal | None]:

        unknown: tuple[Sequence[LoggedEvent], Refusal | None] = (), Refusal.UNKNOWN_POSITION

        def work(tx: Transaction, session: Brief) -> tuple[Sequence[LoggedEvent], Refusal | None]:
            log = log_rows.find(tx, session.sid, stream)
            if log is None:
                return unknown
            window = session_rows.window_of_stream(session, stream, self._window)
            return log_rows.since_id(tx, log, after, window, now=now, limit=limit)

        return await self._within(session_id, work, unknown)

    async def head(self, session_id: SessionId, *, stream: StreamName = EVENTS) -> Position | None:
        return await self._position(session_id, stream, log_rows.find)

    async def heads(self, streams: Sequence[tuple[SessionId, StreamName]]) -> Sequence[StreamHead]:
        def work(tx: Transaction) -> list[StreamHead]:
            heads: list[StreamHead] = []
            for session_id, stream in streams:
                session = session_rows.brief(tx, session_id)
                if session is None:
                    heads.append(StreamHead(False, None))
                    continue
                log = log_rows.find(tx, session.sid, stream)
                carried = tx.execute("SELECT 1 FROM carried WHERE sid = ?", (session.sid,))
                position = log.position if log is not None else None
                heads.append(StreamHead(True, position, carried.fetchone() is not None))
            return heads

        return await self._writer.call(work)

    async def open_stream(self, session_id: SessionId, stream: StreamName) -> Position | None:
        return await self._position(session_id, stream, log_rows.opened)

    async def _position(
        self,
        session_id: SessionId,
        stream: StreamName,
        log_of: Callable[[Transaction, int, StreamName], LogRow | None],
    ) -> Position | None:
        def work(tx: Transaction, session: Brief) -> Position | None:
            log = log_of(tx, session.sid, stream)
            return log.position if log is not None else None

        return await self._within(session_id, work, None, short=True)

    async def drop_stream(self, session_id: SessionId, stream: StreamName) -> None:
        await self._within(session_id, lambda tx, s: log_rows.drop(tx, s.sid, stream), None)
