"""A whole session as rows of the file (:class:`~mcp_sessions.stores.whole_sessions.WholeSession`).

It is read and added in one transaction, whose statements are run by ``execute``.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Sequence
from typing import Any

from mcp_sessions.core.life import Life
from mcp_sessions.core.log import LogCounts, LoggedEvent
from mcp_sessions.core.messages import encode
from mcp_sessions.core.request_keys import KeyedRequest, KeyState
from mcp_sessions.core.states import Mode
from mcp_sessions.ids import (
    ConnectionId,
    FencingEpoch,
    LogEpoch,
    Position,
    RequestKey,
    SessionEventId,
    SessionId,
    StreamName,
)
from mcp_sessions.principal import Principal
from mcp_sessions.stores.records import (
    CurrentSession,
    Data,
    Peer,
    SessionClient,
    SessionRecord,
    StoredState,
    attachment_of,
)
from mcp_sessions.stores.sql.session_rows import loads, owner_of, text_bytes
from mcp_sessions.stores.whole_sessions import WholeLog, WholeSession

Execute = Callable[[str, Sequence[Any]], sqlite3.Cursor]
"""Runs a statement. A text of a peer that is none in UTF-8 is stored all the same."""

_COLUMNS = (
    "session_id, mode, owner, scopes, credential_expires_at, created_at, expires_at, ends_at,"
    " fencing_epoch, connection_id, current_id, current_epoch, stream_opened, lists, waits_from,"
    " log_level, state_version, peer, state"
)


def _text(stored: str | bytes) -> str:
    return stored if isinstance(stored, str) else stored.decode("utf-8", "surrogatepass")


def session_ids(execute: Execute) -> list[SessionId]:
    rows = execute("SELECT session_id FROM sessions ORDER BY sid", ()).fetchall()
    return [SessionId(_text(session_id)) for (session_id,) in rows]


def whole(execute: Execute, session_id: SessionId) -> WholeSession | None:
    """Raises:
    ValueError, TypeError, LookupError: Another program wrote a row of it, or another release.
    """
    row = execute(
        f"SELECT sid, {_COLUMNS} FROM sessions WHERE session_id = ?", (session_id,)
    ).fetchone()
    if row is None:
        return None
    sid: int = row[0]
    read = execute
    carried = {
        SessionId(_text(origin)): (FencingEpoch(fence), Position(LogEpoch(epoch), number))
        for origin, fence, epoch, number in read(
            "SELECT origin, fencing_epoch, log_epoch, number FROM carried WHERE sid = ?", (sid,)
        )
    }
    uris = read("SELECT uri FROM subscriptions WHERE sid = ?", (sid,))
    record = _record(row[1:], frozenset(_text(uri) for (uri,) in uris))
    record.client.carried = {origin: fence for origin, (fence, _) in carried.items()}
    data = read("SELECT value, version FROM data WHERE sid = ?", (sid,)).fetchone()
    logs = read(
        "SELECT stream, log, log_epoch, head, floor, evicted, events, bytes FROM logs"
        " WHERE sid = ?",
        (sid,),
    ).fetchall()
    keys = read(
        "SELECT key, digest, runner, scopes, at, finished, outcome FROM keys WHERE sid = ?"
        " ORDER BY finished IS NULL, finished",
        (sid,),
    )
    return WholeSession(
        record,
        Data(loads(data[0]), data[1]) if data is not None else None,
        {StreamName(_text(stream)): _log(execute, *rest) for stream, *rest in logs},
        [_key(*each) for each in keys],
        {origin: position for origin, (_, position) in carried.items()},
    )


def add_whole(execute: Execute, session: WholeSession, new_log: Callable[[], int]) -> bool:
    """Args:
    new_log: Returns the number of a new log.
    """
    record = session.record
    session_id, client, principal = record.session_id, record.client, record.principal
    read, peer, current = execute, record.client.peer, record.client.current
    known = read("SELECT 1 FROM sessions WHERE session_id = ?", (session_id,)).fetchone()
    if known is not None:
        return False
    values = (
        *(session_id, record.mode.value, owner_of(principal), encode(sorted(principal.scopes))),
        *(principal.expires_at, record.life.created_at, record.life.expires_at),
        *(record.life.ends_at, record.fencing_epoch),
        record.attachment.connection_id if record.attachment is not None else None,
        current.session_id if current is not None else None,
        current.fencing_epoch if current is not None else None,
        client.stream_opened,
        encode(sorted(client.lists)) if client.lists is not None else None,
        *(client.waits_from, client.log_level, record.state.version),
        encode([peer.protocol_version, peer.initialize_params, peer.modern]) if peer else None,
        encode(dict(record.state.values)),
    )
    marks = ", ".join("?" for _ in values)
    sid = read(f"INSERT INTO sessions ({_COLUMNS}) VALUES ({marks})", values).lastrowid
    read("UPDATE meta SET value = value + 1 WHERE name = 'sessions'", ())

    def many(statement: str, rows: Sequence[Sequence[Any]]) -> None:
        for values in rows:
            execute(statement, values)

    many(
        "INSERT INTO subscriptions (sid, uri) VALUES (?, ?)",
        [(sid, text_bytes(uri)) for uri in client.subscriptions],
    )
    many(
        "INSERT INTO carried (sid, origin, fencing_epoch, log_epoch, number)"
        " VALUES (?, ?, ?, ?, ?)",
        [
            (sid, origin, client.carried[origin], position.log_epoch, position.number)
            for origin, position in session.carried.items()
        ],
    )
    if session.data is not None:
        value = encode(session.data.value)
        read(
            "INSERT INTO data (sid, value, version) VALUES (?, ?, ?)",
            (sid, value, session.data.version),
        )
    for name, log in session.logs.items():
        epoch, head, floor, evicted, kept, size = log.counts
        row = new_log()
        read(
            "INSERT INTO logs (log, sid, stream, log_epoch, head, floor, evicted, events, bytes)"
            " VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)",
            (row, sid, name, epoch, head, floor, evicted, kept, size),
        )
        many(
            "INSERT INTO events (log, number, at, key, origin, payload, name)"
            " VALUES (?, ?, ?, ?, ?, ?, ?)",
            [
                (
                    *(row, event.number, event.at),
                    text_bytes(event.key[1]) if event.key is not None else None,
                    *(event.origin, event.payload, log.names.get(event.number)),
                )
                for event in log.events
            ],
        )
    many(
        "INSERT INTO keys (sid, key, digest, runner, scopes, at, finished, outcome)"
        " VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
        [
            (
                *(sid, text_bytes(key), entry.digest, f"{entry.run}@{entry.runner}"),
                *(encode(sorted(entry.scopes)), entry.at),
                None if entry.state is KeyState.RUNNING else number,
                bytes(entry.outcome) if entry.state is KeyState.ANSWERED else None,
            )
            for number, (key, entry) in enumerate(session.keys, 1)
        ],
    )
    return True


def _record(row: Sequence[Any], uris: frozenset[str]) -> SessionRecord:
    (
        session_id, mode, owner, scopes, credential_expires_at, created_at, expires_at, ends_at,
        fence, connection_id, current_id, current_epoch, opened, lists, waits_from, level,
        state_version, peer, state,
    ) = row  # fmt: skip
    client_id, issuer, subject = loads(owner)
    current = None
    if current_id is not None:
        current = CurrentSession(SessionId(_text(current_id)), FencingEpoch(current_epoch))
    connection = ConnectionId(_text(connection_id)) if connection_id is not None else None
    return SessionRecord(
        SessionId(_text(session_id)),
        Mode(mode),
        Principal(client_id, issuer, subject, frozenset(loads(scopes)), credential_expires_at),
        Life(created_at, expires_at, ends_at),
        SessionClient(
            Peer(*loads(peer)) if peer is not None else None,
            current,
            stream_opened=bool(opened),
            subscriptions=uris,
            lists=frozenset(loads(lists)) if lists is not None else None,
            waits_from=SessionEventId(_text(waits_from)) if waits_from is not None else None,
            log_level=_text(level) if level is not None else None,
        ),
        fencing_epoch=FencingEpoch(fence),
        attachment=attachment_of(connection, FencingEpoch(fence)),
        state=StoredState(loads(state), state_version),
    )


def _log(
    execute: Execute,
    log: int,
    epoch: LogEpoch,
    head: int,
    floor: int,
    evicted: int,
    kept: int,
    size: int,
) -> WholeLog:
    events: list[LoggedEvent] = []
    names: dict[int, str] = {}
    for number, at, key, stored_origin, payload, name in execute(
        "SELECT number, at, key, origin, payload, name FROM events WHERE log = ? ORDER BY number",
        (log,),
    ):
        origin = SessionId(_text(stored_origin)) if stored_origin is not None else None
        identity = (origin, _text(key)) if key is not None else None
        event_id = Position(epoch, number).event_id()
        events.append(LoggedEvent(event_id, number, payload, at, identity, origin))
        if name is not None:
            names[number] = name
    return WholeLog(LogCounts(LogEpoch(epoch), head, floor, evicted, kept, size), events, names)


def _key(
    key: bytes,
    digest: bytes,
    ran_by: str,
    scopes: bytes,
    at: float,
    finished: int | None,
    outcome: bytes | None,
) -> tuple[RequestKey, KeyedRequest]:
    state = KeyState.RUNNING
    if finished is not None:
        state = KeyState.DROPPED if outcome is None else KeyState.ANSWERED
    # An older version wrote the runner alone.
    run, _, runner = ran_by.rpartition("@")
    entry = KeyedRequest(digest, runner, at, state, outcome or b"", frozenset(loads(scopes)), run)
    return RequestKey(_text(key)), entry
