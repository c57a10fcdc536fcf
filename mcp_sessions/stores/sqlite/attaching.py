"""Attach sessions in a SQLite file to connections, and relay events to their GET streams.

Each call is one transaction.
"""

from __future__ import annotations

from mcp_sessions.core import attachment, relaying
from mcp_sessions.core.log import Draft, LoggedEvent
from mcp_sessions.core.relaying import Carry, RelayStep
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
from mcp_sessions.stores.records import Attached, Relayed, SessionRecord, attachment_of
from mcp_sessions.stores.sqlite import log_rows, session_rows
from mcp_sessions.stores.sqlite.served_file import ServedFile, is_small
from mcp_sessions.stores.sqlite.session_rows import Brief
from mcp_sessions.stores.sqlite.transaction import Transaction, text_of


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
            carries = relaying.carry(_carried(tx, session.sid, origin)[0], fencing_epoch)
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
            relays, last = relaying.relay(
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
            if not relaying.may_drop(carried, fencing_epoch):
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
