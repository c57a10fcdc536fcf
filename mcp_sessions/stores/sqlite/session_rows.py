from __future__ import annotations

import json
import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from mcp_sessions.core.life import SLEEPERS as SLEEPING_MODES
from mcp_sessions.core.life import Life, deadline_of, has_come, idle_deadline, idle_time
from mcp_sessions.core.log import UNBOUNDED, Window
from mcp_sessions.core.messages import decode, encode
from mcp_sessions.core.states import UNNAMED, Mode
from mcp_sessions.ids import (
    EVENTS,
    ConnectionId,
    FencingEpoch,
    SessionEventId,
    SessionId,
    StreamName,
)
from mcp_sessions.policy import SessionPolicy
from mcp_sessions.principal import Principal
from mcp_sessions.stores.limits import check_sessions, check_sizes, most_of_one
from mcp_sessions.stores.records import (
    Attachment,
    CurrentSession,
    Peer,
    SessionClient,
    SessionRecord,
    StoredState,
    attachment_of,
)
from mcp_sessions.stores.sqlite import log_rows
from mcp_sessions.stores.sqlite.transaction import Transaction, text_bytes, text_of

logger = logging.getLogger(__name__)

_COLUMNS = (
    "sid, session_id, mode, owner, scopes, credential_expires_at, created_at, expires_at,"
    " ends_at, fencing_epoch, connection_id, current_id, current_epoch, stream_opened, lists,"
    " waits_from, log_level, state_version, peer, state"
)
_NAMES = _COLUMNS.split(", ")

DUE = "expires_at <= ?"
"""``core/life.py``'s ``has_come`` as SQL, so that an index finds the sessions."""

IDLE_ENDS_FIRST = "expires_at < ends_at"
"""The opposite of ``lifetime_ends_first`` as SQL."""


@dataclass(slots=True)
class Brief:
    sid: int
    mode: Mode
    ends_at: float
    attachment: Attachment | None
    fencing_epoch: FencingEpoch


def owner_bytes(principal: Principal) -> bytes:
    return encode([principal.client_id, principal.issuer, principal.subject])


def brief(tx: Transaction, session_id: SessionId) -> Brief | None:
    row = tx.execute(
        "SELECT sid, mode, ends_at, connection_id, fencing_epoch FROM sessions"
        " WHERE session_id = ?",
        (session_id,),
    ).fetchone()
    if row is None:
        return None
    sid, mode, ends_at, connection_id, fencing_epoch = row
    attachment = stored_attachment(connection_id, fencing_epoch)
    return Brief(sid, Mode(mode), ends_at, attachment, FencingEpoch(fencing_epoch))


def window_of_stream(session: Brief, stream: StreamName, window: Window) -> Window:
    return UNBOUNDED if session.mode is Mode.AGENT and stream == EVENTS else window


def record_of(tx: Transaction, session_id: SessionId) -> tuple[int, SessionRecord] | None:
    row = tx.execute(
        f"SELECT {_COLUMNS} FROM sessions WHERE session_id = ?", (session_id,)
    ).fetchone()
    return (row[0], _record(tx, row)) if row is not None else None


def load(tx: Transaction, session_id: SessionId) -> SessionRecord | None:
    found = record_of(tx, session_id)
    if found is None:
        return None
    tx.changes.append((session_id, found[1]))
    return found[1]


def counted(tx: Transaction) -> int:
    """Return the number of sessions, without reading all rows."""
    row = tx.execute("SELECT value FROM meta WHERE name = 'sessions'").fetchone()
    return row[0]


def records(
    tx: Transaction, principal: Principal | None = None, *, after: int = 0, limit: int = -1
) -> tuple[list[SessionRecord], int]:
    """Sessions, or those of a principal, oldest first; and where the next page begins.

    Args:
        after: The start of this page.
        limit: How many; below 0: all.
    """
    query, values = f"SELECT {_COLUMNS} FROM sessions WHERE sid > ?", [after]
    if principal is not None:
        query, values = f"{query} AND owner = ?", [after, owner_bytes(principal)]
    rows = tx.execute(f"{query} ORDER BY sid LIMIT ?", (*values, limit)).fetchall()
    return [_record(tx, row) for row in rows], rows[-1][0] if rows else after


def create(tx: Transaction, record: SessionRecord, policy: SessionPolicy) -> SessionRecord:
    known = record_of(tx, record.session_id)
    if known is not None and not has_come(known[1].life.expires_at, record.life.created_at):
        tx.changes.append((record.session_id, known[1]))
        return known[1]
    if known is not None:
        forget(tx, known[0], record.session_id)
    principal = record.principal
    owner = owner_bytes(principal)
    count, most, owned = counted(tx), most_of_one(record.mode, policy), 0
    if most is not None and count >= most:
        (owned,) = tx.execute("SELECT count(*) FROM sessions WHERE owner = ?", (owner,)).fetchone()
    check_sessions(count, owned, policy, record.mode)
    peer = record.client.peer
    values = (
        record.session_id,
        record.mode.value,
        owner,
        encode(sorted(principal.scopes)),
        principal.expires_at,
        record.life.created_at,
        record.life.expires_at,
        record.life.ends_at,
        encode([peer.protocol_version, peer.initialize_params, peer.modern]) if peer else None,
    )
    cursor = tx.execute(
        "INSERT INTO sessions (session_id, mode, owner, scopes, credential_expires_at,"
        " created_at, expires_at, ends_at, peer, fencing_epoch, stream_opened, state_version,"
        " state) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, 0, 0, 0, CAST('{}' AS BLOB))",
        values,
    )
    if cursor.lastrowid is None:
        raise AssertionError("an INSERT has a row id")
    tx.execute("UPDATE meta SET value = value + 1 WHERE name = 'sessions'")
    if record.mode not in UNNAMED:
        # No client knows of such a session, and few have events: it is one row.
        log_rows.opened(tx, cursor.lastrowid, EVENTS)
    tx.changes.append((record.session_id, record))
    return record


def forget(tx: Transaction, sid: int, session_id: SessionId) -> None:
    """Remove every trace of a session (END2)."""
    log_rows.drop(tx, sid)
    for table in ("keys", "data", "subscriptions", "carried", "sessions"):
        tx.execute(f"DELETE FROM {table} WHERE sid = ?", (sid,))
    tx.execute("UPDATE meta SET value = value - 1 WHERE name = 'sessions'")
    tx.changes.append((session_id, None))
    tx.learn(session_id, None)


def end(tx: Transaction, session_id: SessionId) -> SessionRecord | None:
    found = record_of(tx, session_id)
    if found is None:
        return None
    sid, record = found
    forget(tx, sid, session_id)
    return record


def request_end(tx: Transaction, session_id: SessionId) -> None:
    tx.execute("INSERT OR IGNORE INTO end_requests (session_id) VALUES (?)", (session_id,))


def end_requested(tx: Transaction) -> list[SessionRecord]:
    ended: list[SessionRecord] = []
    for (session_id,) in tx.execute("SELECT session_id FROM end_requests").fetchall():
        record = end(tx, SessionId(session_id))
        if record is not None:
            ended.append(record)
    tx.execute("DELETE FROM end_requests")
    return ended


def expire(
    tx: Transaction,
    *,
    now: float,
    held: Collection[SessionId],
    deadlines: Mapping[SessionId, float],
    policy: SessionPolicy,
    limit: int,
) -> list[SessionRecord]:
    """Do :meth:`SessionStore.expire` in a transaction.

    Args:
        deadlines: Deadlines that were moved, but are not yet in the file.
    """
    move_deadlines(tx, deadlines)
    expired: list[SessionRecord] = []
    rows = tx.execute(
        f"SELECT sid, session_id, mode, expires_at, ends_at FROM sessions WHERE {DUE}"
        " ORDER BY expires_at LIMIT ?",
        (now, limit + len(held)),
    ).fetchall()
    for sid, session_id, mode, expires_at, ends_at in rows:
        if len(expired) >= limit:
            break
        if not has_come(deadline_of(expires_at, ends_at, held=session_id in held), now):
            idle_timeout = idle_time(Mode(mode), policy)
            later = idle_deadline(now=now, idle_timeout=idle_timeout, ends_at=ends_at)
            move_deadlines(tx, {session_id: later})
            tx.changes.append((session_id, partial(_extend, later)))
            continue
        try:
            found = record_of(tx, session_id)
        except (ValueError, TypeError, LookupError) as failed:
            # A newer version's, or not ours. It is over all the same, and stops no other.
            logger.error("an expired session could not be read: %s", type(failed).__name__)
            found = None
        forget(tx, sid, session_id)
        if found is not None:
            expired.append(found[1])
    return expired


SLEEPERS = ", ".join(f"'{mode.value}'" for mode in SLEEPING_MODES)
"""The modes of the sessions that sleep, as SQL."""

_ASLEEP_AT_ONCE = 256


def fall_asleep(
    tx: Transaction, after: tuple[float, int], by: float, deadlines: Mapping[SessionId, float]
) -> tuple[float, int] | None:
    """Do :meth:`SessionStore.sleep` for some sessions.

    Args:
        after: Deadline and row of the last one before these.
        by: The latest deadline.
        deadlines: Deadlines that were moved, but are not yet in the file.

    Returns:
        Deadline and row of the last one, if there may be more.
    """
    move_deadlines(tx, deadlines)
    rows = tx.execute(
        f"SELECT expires_at, sid, {IDLE_ENDS_FIRST} AND mode IN ({SLEEPERS}) FROM sessions"
        f" WHERE (expires_at, sid) > (?, ?) AND {DUE} ORDER BY expires_at, sid LIMIT ?",
        (*after, by, _ASLEEP_AT_ONCE),
    ).fetchall()
    for _, sid, sleeps in rows:
        if sleeps:
            log_rows.fall_asleep(tx, sid)
    return rows[-1][:2] if len(rows) == _ASLEEP_AT_ONCE else None


def move_deadlines(tx: Transaction, deadlines: Mapping[SessionId, float]) -> None:
    for session_id, deadline in deadlines.items():
        tx.execute(
            "UPDATE sessions SET expires_at = ? WHERE session_id = ?", (deadline, session_id)
        )


def subscribe(tx: Transaction, sid: int, uri: str, policy: SessionPolicy) -> None:
    name = text_bytes(uri)
    known = tx.execute("SELECT 1 FROM subscriptions WHERE sid = ? AND uri = ?", (sid, name))
    if known.fetchone() is not None:
        return
    count, total = tx.execute(
        "SELECT count(*), ifnull(sum(length(uri)), 0) FROM subscriptions WHERE sid = ?", (sid,)
    ).fetchone()
    check_sizes(count + 1, len(name), total + len(name), policy)
    tx.execute("INSERT INTO subscriptions (sid, uri) VALUES (?, ?)", (sid, name))


def unsubscribe(tx: Transaction, sid: int, uri: str) -> None:
    tx.execute("DELETE FROM subscriptions WHERE sid = ? AND uri = ?", (sid, text_bytes(uri)))


def replace_subscriptions(tx: Transaction, sid: int, uris: Collection[str]) -> None:
    tx.execute("DELETE FROM subscriptions WHERE sid = ?", (sid,))
    for uri in uris:
        tx.execute("INSERT INTO subscriptions (sid, uri) VALUES (?, ?)", (sid, text_bytes(uri)))


def load_json(value: bytes) -> Any:
    try:
        return decode(value)
    except ValueError:
        # A lone surrogate: JSON has it, orjson does not read it.
        return json.loads(value)


def _subscriptions(tx: Transaction, sid: int) -> set[str]:
    rows = tx.execute("SELECT uri FROM subscriptions WHERE sid = ?", (sid,))
    return {uri.decode("utf-8", "surrogatepass") for (uri,) in rows}


def stored_attachment(connection_id: str | bytes | None, fencing_epoch: int) -> Attachment | None:
    connection = ConnectionId(text_of(connection_id)) if connection_id is not None else None
    return attachment_of(connection, FencingEpoch(fencing_epoch))


def _record(tx: Transaction, values: Sequence[Any]) -> SessionRecord:
    row = dict(zip(_NAMES, values, strict=True))
    carried = tx.execute("SELECT origin, fencing_epoch FROM carried WHERE sid = ?", (row["sid"],))
    client_id, issuer, subject = load_json(row["owner"])
    scopes = frozenset(load_json(row["scopes"]))
    peer, lists, waits_from = row["peer"], row["lists"], row["waits_from"]
    current = None
    if row["current_id"] is not None:
        epoch = FencingEpoch(row["current_epoch"])
        current = CurrentSession(SessionId(text_of(row["current_id"])), epoch)
    return SessionRecord(
        SessionId(row["session_id"]),
        Mode(row["mode"]),
        Principal(client_id, issuer, subject, scopes, row["credential_expires_at"]),
        Life(row["created_at"], row["expires_at"], row["ends_at"]),
        SessionClient(
            Peer(*load_json(peer)) if peer is not None else None,
            current,
            stream_opened=bool(row["stream_opened"]),
            carried={SessionId(text_of(origin)): FencingEpoch(epoch) for origin, epoch in carried},
            subscriptions=frozenset(_subscriptions(tx, row["sid"])),
            lists=frozenset(load_json(lists)) if lists is not None else None,
            waits_from=SessionEventId(text_of(waits_from)) if waits_from is not None else None,
            log_level=row["log_level"],
        ),
        fencing_epoch=FencingEpoch(row["fencing_epoch"]),
        attachment=stored_attachment(row["connection_id"], row["fencing_epoch"]),
        state=StoredState(load_json(row["state"]), row["state_version"]),
    )


def _extend(expires_at: float, record: SessionRecord) -> None:
    record.life.expires_at = expires_at
