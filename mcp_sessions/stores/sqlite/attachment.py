"""Who is attached to a session, and whose events a connection's GET stream takes, as rows."""

from __future__ import annotations

from mcp_sessions.core.log import Draft, LoggedEvent, Window
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
from mcp_sessions.stores.records import Attached, Attachment, Relayed, SessionRecord
from mcp_sessions.stores.sqlite import logs, sessions
from mcp_sessions.stores.sqlite.transaction import Transaction, text_of


def attach(
    tx: Transaction,
    session_id: SessionId,
    connection_id: ConnectionId | None,
    *,
    now: float,
    position: str | None,
    only_if_free: bool,
    window: Window,
) -> Attached | None:
    """See :meth:`SessionStore.attach`.

    Args:
        window: Of what is not kept whole.
    """
    session = sessions.brief(tx, session_id)
    if session is None or now >= session.ends_at:
        return None
    if only_if_free and session.attachment is not None:
        return None
    log = logs.opened(tx, session.sid, EVENTS)
    window = sessions.window_of(session, EVENTS, window)
    replay, refusal = logs.since_id(tx, log, position, window, now=now)
    scopes, waits_from = tx.execute(
        "SELECT scopes, waits_from FROM sessions WHERE sid = ?", (session.sid,)
    ).fetchone()
    waits_from = SessionEventId(text_of(waits_from)) if waits_from is not None else None
    if connection_id is None:
        kept, waits_from = waits_from, None
    else:
        kept = None
    (epoch,) = tx.execute(
        "UPDATE sessions SET fencing_epoch = fencing_epoch + 1, connection_id = ?,"
        " waits_from = ? WHERE sid = ? RETURNING fencing_epoch",
        (connection_id, kept, session.sid),
    ).fetchone()
    fencing_epoch = FencingEpoch(epoch)

    def apply(record: SessionRecord) -> None:
        _attach(record, connection_id, fencing_epoch)
        record.waits_from = kept

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
        frozenset(sessions.load_json(scopes)),
        waits_from,
    )


def detach(tx: Transaction, session_id: SessionId, fencing_epoch: FencingEpoch) -> bool:
    """See :meth:`SessionStore.detach`."""
    cursor = tx.execute(
        "UPDATE sessions SET connection_id = NULL WHERE session_id = ?"
        " AND fencing_epoch = ? AND connection_id IS NOT NULL",
        (session_id, fencing_epoch),
    )
    if not cursor.rowcount:
        return False
    tx.changes.append((session_id, lambda record: _attach(record, None, fencing_epoch)))
    return True


def carry(
    tx: Transaction,
    connection: SessionId,
    origin: SessionId,
    fencing_epoch: FencingEpoch,
    after: Position,
) -> bool:
    """See :meth:`SessionStore.carry`."""
    session = sessions.brief(tx, connection)
    if session is None:
        return False
    known = _carried(tx, session.sid, origin)
    if known is not None and known[0] >= fencing_epoch:
        return known[0] == fencing_epoch
    log = logs.find(tx, session.sid, GET_STREAM)
    if log is not None:
        logs.drop_origin(tx, log, origin)
    tx.execute(
        "INSERT OR REPLACE INTO carried (sid, origin, fencing_epoch, log_epoch, number)"
        " VALUES (?, ?, ?, ?, ?)",
        (session.sid, origin, fencing_epoch, after.log_epoch, after.number),
    )
    tx.changes.append((connection, lambda record: _carry(record, origin, fencing_epoch)))
    return True


def relay(
    tx: Transaction,
    connection: SessionId,
    origin: SessionId,
    fencing_epoch: FencingEpoch,
    event: LoggedEvent,
    *,
    now: float,
    skips: bool,
    window: Window,
) -> Relayed:
    """See :meth:`SessionStore.relay`."""
    session = sessions.brief(tx, connection)
    known = _carried(tx, session.sid, origin) if session is not None else None
    if session is None or now >= session.ends_at:
        return Relayed()
    if known is None or known[0] != fencing_epoch or event.number <= known[1].number:
        return Relayed()
    last = known[1]
    if event.number > last.number + 1 and not skips:
        return Relayed(missing_after=last)
    tx.execute(
        "UPDATE carried SET number = ? WHERE sid = ? AND origin = ?",
        (event.number, session.sid, origin),
    )
    log = logs.opened(tx, session.sid, GET_STREAM)
    key = event.key[1] if event.key is not None else None
    draft = Draft(event.payload, None, key, origin)
    return Relayed(logs.append(tx, log, draft, window, now=now)[0])


def drop_origin(
    tx: Transaction,
    session_id: SessionId,
    origin: SessionId,
    *,
    stream: StreamName,
    fencing_epoch: FencingEpoch | None,
) -> None:
    """See :meth:`SessionStore.drop_origin`."""
    session = sessions.brief(tx, session_id)
    if session is None:
        return
    known = _carried(tx, session.sid, origin)
    if fencing_epoch is not None and known is not None and known[0] > fencing_epoch:
        return
    log = logs.find(tx, session.sid, stream)
    if log is not None:
        logs.drop_origin(tx, log, origin)
    if stream == GET_STREAM and known is not None:
        values = (session.sid, origin)
        tx.execute("DELETE FROM carried WHERE sid = ? AND origin = ?", values)
        tx.changes.append((session_id, lambda record: _carry(record, origin, None)))


def _attach(
    record: SessionRecord, connection_id: ConnectionId | None, fencing_epoch: FencingEpoch
) -> None:
    record.fencing_epoch = fencing_epoch
    record.attachment = None if connection_id is None else Attachment(connection_id, fencing_epoch)


def _carry(record: SessionRecord, origin: SessionId, fencing_epoch: FencingEpoch | None) -> None:
    carried = {each: epoch for each, epoch in record.carried.items() if each != origin}
    if fencing_epoch is not None:
        carried[origin] = fencing_epoch
    record.carried = carried


def _carried(tx: Transaction, sid: int, origin: SessionId) -> tuple[int, Position] | None:
    """The fencing epoch with which a GET stream takes a session's events, and the last one
    that it took.
    """
    row = tx.execute(
        "SELECT fencing_epoch, log_epoch, number FROM carried WHERE sid = ? AND origin = ?",
        (sid, origin),
    ).fetchone()
    return (row[0], Position(LogEpoch(row[1]), row[2])) if row is not None else None
