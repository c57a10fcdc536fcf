"""Event logs as rows: :class:`~mcp_sessions.core.log.EventLog`, rule by rule.

A log is not rebuilt in memory for each event: a window is a thousand events, and the log of an
ACP agent's session has no end. The tests hold the two next to each other
(``tests/stores/sqlite/test_log_rows.py``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mcp_sessions.core.log import UNBOUNDED, Draft, LoggedEvent, Window, page_of, refusal_of
from mcp_sessions.errors import Refusal
from mcp_sessions.ids import (
    EVENTS,
    GET_STREAM,
    NUMBER_WIDTH,
    LogEpoch,
    Position,
    SessionEventId,
    SessionId,
    StreamName,
    parse_position,
)
from mcp_sessions.security import mint_log_epoch
from mcp_sessions.stores.sqlite.transaction import Transaction, text_bytes, text_of

_LAST_NUMBER = 10**NUMBER_WIDTH - 1


@dataclass(slots=True)
class LogRow:
    log: int
    log_epoch: LogEpoch
    head: int
    floor: int
    evicted: int
    """The newest number that space took; see ``Refusal.EVICTED``."""

    events: int
    bytes: int

    @property
    def position(self) -> Position:
        return Position(self.log_epoch, self.head)

    def write(self, tx: Transaction) -> None:
        tx.execute(
            "UPDATE logs SET head = ?, floor = ?, evicted = ?, events = ?, bytes = ? WHERE log = ?",
            (self.head, self.floor, self.evicted, self.events, self.bytes, self.log),
        )


def find(tx: Transaction, sid: int, stream: StreamName) -> LogRow | None:
    row = tx.execute(
        "SELECT log, log_epoch, head, floor, evicted, events, bytes FROM logs"
        " WHERE sid = ? AND stream = ?",
        (sid, stream),
    ).fetchone()
    return LogRow(*row) if row is not None else None


def opened(tx: Transaction, sid: int, stream: StreamName) -> LogRow:
    known = find(tx, sid, stream)
    if known is not None:
        return known
    epoch = mint_log_epoch()
    cursor = tx.execute(
        "INSERT INTO logs (sid, stream, log_epoch, head, floor, evicted, events, bytes)"
        " VALUES (?, ?, ?, 0, 0, 0, 0, 0)",
        (sid, stream, epoch),
    )
    if cursor.lastrowid is None:
        raise AssertionError("an INSERT has a row id")
    return LogRow(cursor.lastrowid, epoch, 0, 0, 0, 0, 0)


def drop(tx: Transaction, sid: int, stream: StreamName | None = None) -> None:
    which, values = ("sid = ?", (sid,)) if stream is None else (_ONE, (sid, stream))
    tx.execute(f"DELETE FROM events WHERE log IN (SELECT log FROM logs WHERE {which})", values)
    tx.execute(f"DELETE FROM logs WHERE {which}", values)


def fall_asleep(tx: Transaction, sid: int) -> None:
    streams = tx.execute("SELECT stream FROM logs WHERE sid = ?", (sid,)).fetchall()
    for (stream,) in streams:
        if stream not in (EVENTS, GET_STREAM):
            drop(tx, sid, stream)
            continue
        log = find(tx, sid, stream)
        if log is not None and log.events:
            tx.execute("DELETE FROM events WHERE log = ?", (log.log,))
            log.floor = log.evicted = log.head
            log.events = log.bytes = 0
            log.write(tx)


_ONE = "sid = ? AND stream = ?"

_AT_ONCE = 16
"""Response streams that the first event of another one gives back the room of."""


def stored(tx: Transaction, log: LogRow, draft: Draft) -> LoggedEvent | None:
    """Return the event that a call before made of a draft, if its answer was lost."""
    if draft.since is None:
        return None
    row = tx.execute(
        "SELECT number, at, key, origin, payload FROM events WHERE log = ? AND name = ?"
        " ORDER BY number DESC LIMIT 1",
        (log.log, draft.name),
    ).fetchone()
    return _event(log.log_epoch, *row) if row is not None else None


def append(
    tx: Transaction, log: LogRow, draft: Draft, window: Window, *, now: float
) -> tuple[LoggedEvent, bool]:
    """Append an event, unless the log has it; and say whether an older one is gone for it."""
    known = stored(tx, log, draft)
    if known is not None:
        return known, False
    number = log.head + 1
    if number > _LAST_NUMBER:
        raise OverflowError("this event log has issued its last id")
    event_id = SessionEventId(f"{log.log_epoch}-{number:0{NUMBER_WIDTH}d}")
    payload = draft.encode(event_id)
    key, replaced = None, None
    if draft.key is not None:
        key = text_bytes(draft.key)
        replaced = tx.execute(
            "SELECT number, length(payload) FROM events WHERE log = ? AND key = ? AND origin IS ?",
            (log.log, key, draft.origin),
        ).fetchone()
        if replaced is not None:
            _forget(tx, log, *replaced)
    tx.execute(
        "INSERT INTO events (log, number, at, key, origin, payload, name)"
        " VALUES (?, ?, ?, ?, ?, ?, ?)",
        (log.log, number, now, key, draft.origin, payload, draft.name),
    )
    log.events += 1
    log.bytes += len(payload)
    log.head = number
    _evict(tx, log, window, now)
    log.write(tx)
    identity = None if draft.key is None else (draft.origin, draft.key)
    event = LoggedEvent(event_id, number, payload, now, identity, draft.origin)
    return event, replaced is not None


def evict_responses(
    tx: Transaction, sid: int, stream: StreamName, window: Window, *, now: float
) -> None:
    """Take what is too old to be replayed out of a session's response streams but one: of
    those whose process died nobody else does. A few of them each time, so that no event costs
    more than others because of how many there are.
    """
    if window.max_age is None:
        return
    rows = tx.execute(
        "SELECT log, log_epoch, head, floor, evicted, events, bytes FROM logs"
        " WHERE sid = ? AND stream NOT IN (?, ?, ?) AND events > 0 AND ? >"
        " (SELECT at FROM events WHERE events.log = logs.log ORDER BY number LIMIT 1)"
        " LIMIT ?",
        (sid, EVENTS, GET_STREAM, stream, now - window.max_age, _AT_ONCE),
    ).fetchall()
    for row in rows:
        log = LogRow(*row)
        if _evict(tx, log, window, now):
            log.write(tx)


def since_id(
    tx: Transaction,
    log: LogRow,
    event_id: str | None,
    window: Window,
    *,
    now: float,
    limit: int | None = None,
) -> tuple[Sequence[LoggedEvent], Refusal | None]:
    position = parse_position(event_id) if event_id is not None else None
    if position is None and event_id is not None:
        return (), Refusal.UNKNOWN_POSITION
    return replay(tx, log, position, window, now=now, limit=limit)


def replay(
    tx: Transaction,
    log: LogRow,
    position: Position | None,
    window: Window,
    *,
    now: float,
    limit: int | None = None,
) -> tuple[Sequence[LoggedEvent], Refusal | None]:
    if position is None:
        return (), Refusal.NO_POSITION
    if _evict(tx, log, window, now):
        log.write(tx)
    refusal = refusal_of(
        position,
        log_epoch=log.log_epoch,
        head=log.head,
        floor=log.floor,
        evicted=log.evicted,
    )
    if refusal is not None:
        return (), refusal
    rows = tx.execute(
        "SELECT number, at, key, origin, payload FROM events WHERE log = ? AND number > ?"
        " ORDER BY number LIMIT ?",
        (log.log, position.number, -1 if limit is None else limit),
    )
    events = (_event(log.log_epoch, *row) for row in rows)
    return tuple(events) if limit is None else page_of(events, limit), None


def drop_origin(tx: Transaction, log: LogRow | None, origin: SessionId) -> None:
    if log is None:
        return
    gone = tx.execute(
        "SELECT count(*), total(length(payload)) FROM events WHERE log = ? AND origin = ?",
        (log.log, origin),
    ).fetchone()
    if gone[0]:
        tx.execute("DELETE FROM events WHERE log = ? AND origin = ?", (log.log, origin))
        log.events -= gone[0]
        log.bytes -= int(gone[1])
        log.write(tx)


def _evict(tx: Transaction, log: LogRow, window: Window, now: float) -> bool:
    evicted = False
    while log.events and window is not UNBOUNDED:
        number, at, size = tx.execute(
            "SELECT number, at, length(payload) FROM events WHERE log = ? ORDER BY number LIMIT 1",
            (log.log,),
        ).fetchone()
        lost = window.loses(at, log.events, log.bytes, now)
        if lost is None:
            break
        if lost is Refusal.EVICTED:
            log.evicted = number
        log.floor = number
        _forget(tx, log, number, size)
        evicted = True
    return evicted


def _forget(tx: Transaction, log: LogRow, number: int, size: int) -> None:
    tx.take_out()
    tx.execute("DELETE FROM events WHERE log = ? AND number = ?", (log.log, number))
    log.events -= 1
    log.bytes -= size


def _event(
    epoch: LogEpoch,
    number: int,
    at: float,
    key: bytes | None,
    stored_origin: str | bytes | None,
    payload: bytes,
) -> LoggedEvent:
    origin = SessionId(text_of(stored_origin)) if stored_origin is not None else None
    event_id = SessionEventId(f"{epoch}-{number:0{NUMBER_WIDTH}d}")
    identity = None if key is None else (origin, key.decode("utf-8", "surrogatepass"))
    return LoggedEvent(event_id, number, payload, at, identity, origin)
