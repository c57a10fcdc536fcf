"""Rows of the file, as the objects of the store in memory, and what changed of them, as statements.

It decides nothing. A session is one row, and rows of its own for subscriptions, carried sessions,
logs, events, keys and data. Events, keys and data are read when a step needs them.
"""

from __future__ import annotations

import sqlite3
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from mcp_sessions.core.life import Life
from mcp_sessions.core.log import (
    PAGE_BYTES,
    UNBOUNDED,
    EventLog,
    LogCounts,
    LoggedEvent,
    Window,
)
from mcp_sessions.core.messages import encode
from mcp_sessions.core.request_keys import KEY_COST, KeyedRequest, KeyState, RequestKeys
from mcp_sessions.core.states import Mode
from mcp_sessions.errors import StoreUnavailable
from mcp_sessions.ids import (
    EVENTS,
    GET_STREAM,
    ConnectionId,
    FencingEpoch,
    LogEpoch,
    Position,
    RequestKey,
    SessionEventId,
    SessionId,
    StreamName,
)
from mcp_sessions.policy import SessionPolicy
from mcp_sessions.principal import Principal
from mcp_sessions.stores.memory.tables import MemorySession, session_of, whole_of, window_for
from mcp_sessions.stores.records import (
    CurrentSession,
    Data,
    Peer,
    SessionClient,
    SessionRecord,
    StoredState,
    attachment_of,
)
from mcp_sessions.stores.sql.partly_read import NotedEvents, NotedKeys, changed_events
from mcp_sessions.stores.sql.session_rows import Wanted, loads, owner_of, text_bytes
from mcp_sessions.stores.whole_sessions import WholeSession

T = TypeVar("T")

Statement = tuple[str, Sequence[Any]]

UNREADABLE = (ValueError, TypeError, LookupError)
"""What a row raises that a newer version wrote, or another program."""

_BARE = 2_048
"""Bytes of a session without events and keys in memory."""

_MANY = 256
"""Sessions that one statement asks for."""


def storable(value: Any) -> Any:
    """A peer's text may be none in UTF-8 (half a surrogate pair). Then it is stored as bytes."""
    if not isinstance(value, str):
        return value
    try:
        value.encode()
    except UnicodeEncodeError:
        return text_bytes(value)
    return value


def text_of(stored: str | bytes) -> str:
    return stored if isinstance(stored, str) else stored.decode("utf-8", "surrogatepass")


class Transaction:
    """One transaction of the file."""

    __slots__ = ("_execute", "connection")

    def __init__(self, connection: sqlite3.Connection) -> None:
        self.connection = connection
        self._execute = connection.execute

    def execute(self, statement: str, values: Sequence[Any] = ()) -> sqlite3.Cursor:
        """Run one statement. A text that is none in UTF-8 goes as :func:`storable` has it: it
        equals no text that is stored.
        """
        try:
            return self._execute(statement, values)
        except UnicodeEncodeError:
            return self._execute(statement, [storable(each) for each in values])


InTransaction = Callable[[Transaction], T]
"""Runs in the writer's thread, or in the event loop (``writer.py``, rule 5). It may run twice
(rule 3), so it changes nothing but the file; what it raises of ``SessionsError`` it raises before
its first write."""


@dataclass(slots=True)
class _StoredLog:
    row: int
    log: EventLog
    counts: LogCounts


@dataclass(slots=True, eq=False)
class FileSession(MemorySession):
    """A session, with what the file has of it."""

    row: int = 0
    carried: Mapping[SessionId, Position] = field(default_factory=dict[SessionId, Position])
    """The sessions whose events its GET stream takes, and the last one of each."""

    deadline: float = 0.0
    """That the file has: the one in memory may be later."""

    stored: tuple[Any, ...] = ()
    """The columns of its row that steps change."""

    stored_state: StoredState | None = None
    stored_uris: frozenset[str] = frozenset()
    stored_carried: dict[SessionId, tuple[Any, ...]] = field(
        default_factory=dict[SessionId, tuple[Any, ...]]
    )
    stored_data: Data | None = None
    stored_logs: dict[StreamName, _StoredLog] = field(default_factory=dict[StreamName, _StoredLog])
    data_is_read: bool = False
    finished: int = 0
    """The number of the key that finished last."""

    size: int = 0
    """See :meth:`measured`."""

    is_made_here: bool = False
    """It was made by this process, and had no data and no key yet."""

    is_taken: bool = False
    """A step reads more of it."""

    pending: int = 0
    """Its writes that are under way."""

    undone: StoreUnavailable | None = None
    """A write of it failed. What came later is not written either, and it is read anew."""

    def lacks(self, wanted: Wanted) -> bool:
        """Whether a step needs what was not read."""
        if wanted.request_key is not None and self.keys is None:
            return True
        if wanted.data and not self.data_is_read:
            return True
        return bool(self.logs_to_read(wanted))

    def logs_to_read(self, wanted: Wanted) -> list[tuple[StreamName, EventLog]]:
        """The logs whose events a step needs, and that were not read."""
        lacking: list[tuple[StreamName, EventLog]] = []
        if wanted.log or wanted.origin is not None:
            for name in (EVENTS, GET_STREAM) if wanted.stream is None else (wanted.stream,):
                log = self.log_of(name)
                if log is not None and self._lacks_events(log, wanted):
                    lacking.append((name, log))
        return lacking

    def _lacks_events(self, log: EventLog, wanted: Wanted) -> bool:
        events = log.events
        if not isinstance(events, NotedEvents) or events.is_read:
            return False
        if log.window is not UNBOUNDED:
            return True
        # Its events are never kept in memory: who appends needs none of them.
        return bool(wanted.after is not None or wanted.key or wanted.name or wanted.origin)

    def log_of(self, name: StreamName) -> EventLog | None:
        if name == EVENTS:
            return self.events
        return self.streams.get(name) if self.streams is not None else None

    def columns(self) -> tuple[Any, ...]:
        record = self.record
        client, attachment = record.client, record.attachment
        current = client.current
        return (
            record.fencing_epoch,
            attachment.connection_id if attachment is not None else None,
            current.session_id if current is not None else None,
            current.fencing_epoch if current is not None else None,
            client.stream_opened,
            client.lists,
            client.waits_from,
            client.log_level,
            record.story,
        )

    def is_as_stored(self) -> None:
        """All of it but logs and keys is in the file as it is here."""
        self.stored, self.stored_state = self.columns(), self.record.state
        self.stored_uris = self.record.client.subscriptions
        self.deadline = self.record.life.expires_at

    @property
    def session_id(self) -> SessionId:
        return self.record.session_id

    def measured(self) -> int:
        """Bytes that it has in memory, about: its events and answers, and what each has."""
        size = _BARE + (self.keys.size if self.keys is not None else 0)
        for log in (self.events, *(self.streams or {}).values()):
            if log is not None and log.window is not UNBOUNDED:
                size += log.size
        return size

    def put_new_log(self, name: StreamName, log: EventLog, row: int) -> None:
        log = EventLog.restored(log.counts, log.window, NotedEvents(), {})
        self.set_log(name, log)
        self.stored_logs[name] = _StoredLog(row, log, log.counts)

    def put_log(self, name: StreamName, log: EventLog) -> None:
        """Hold a log as the file has it."""
        self.set_log(name, log)
        self.stored_logs[name].log = log

    def set_log(self, name: StreamName, log: EventLog) -> None:
        if name == EVENTS:
            self.events = log
        else:
            self.streams = {**(self.streams or {}), name: log}


# --- from rows -----------------------------------------------------------------------------------

_COLUMNS = (
    "sid, session_id, mode, owner, scopes, credential_expires_at, created_at, expires_at,"
    " ends_at, fencing_epoch, connection_id, current_id, current_epoch, stream_opened, lists,"
    " waits_from, log_level, state_version, peer, state, story"
)
_NAMES = _COLUMNS.split(", ")

_EVENT = "number, at, key, origin, payload, name"


def _in(values: Collection[Any]) -> str:
    return f"IN ({','.join('?' * len(values))})"


@dataclass(frozen=True, slots=True)
class Unreadable:
    """A session whose row cannot be read."""

    session_id: SessionId
    row: int
    deadline: float
    failed: Exception


Found = FileSession | Unreadable


def sessions(tx: Transaction, session_ids: Sequence[SessionId], window: Window) -> list[Found]:
    """Sessions without events, keys and data, in no order."""
    found: list[Found] = []
    for start in range(0, len(session_ids), _MANY):
        some = [storable(each) for each in session_ids[start : start + _MANY]]
        where = f"session_id {_in(some)}"
        found += _sessions(tx, where, some, window)
    return found


def page(
    tx: Transaction, principal: Principal | None, *, after: int, limit: int, window: Window
) -> tuple[list[Found], int]:
    """Sessions, or those of a principal, oldest first; and where the next page begins.

    Args:
        after: The start of this page.
        limit: How many.
    """
    where, values = "sid > ?", [after]
    if principal is not None:
        where, values = f"{where} AND owner = ?", [after, owner_of(principal)]
    found = _sessions(tx, f"{where} ORDER BY sid LIMIT ?", [*values, limit], window)
    return found, found[-1].row if found else after


def _sessions(tx: Transaction, where: str, values: Sequence[Any], window: Window) -> list[Found]:
    rows = tx.execute(f"SELECT {_COLUMNS} FROM sessions WHERE {where}", values).fetchall()
    if not rows:
        return []
    belongs = [row[0] for row in rows]
    carried: dict[int, dict[SessionId, tuple[Any, ...]]] = {}
    uris: dict[int, list[str]] = {}
    logs: dict[int, list[tuple[Any, ...]]] = {}
    theirs = f"WHERE sid {_in(belongs)}"
    for sid, origin, *position in tx.execute(
        f"SELECT sid, origin, fencing_epoch, log_epoch, number FROM carried {theirs}", belongs
    ):
        carried.setdefault(sid, {})[SessionId(text_of(origin))] = tuple(position)
    for sid, uri in tx.execute(f"SELECT sid, uri FROM subscriptions {theirs}", belongs):
        uris.setdefault(sid, []).append(text_of(uri))
    for sid, *log in tx.execute(
        "SELECT sid, stream, log, log_epoch, head, floor, evicted, events, bytes FROM logs"
        f" {theirs}",
        belongs,
    ):
        logs.setdefault(sid, []).append(tuple(log))
    found: list[Found] = []
    for values in rows:
        row: dict[str, Any] = dict(zip(_NAMES, values, strict=True))
        sid = row["sid"]
        try:
            found.append(
                _session(row, carried.get(sid, {}), uris.get(sid, ()), logs.get(sid, ()), window)
            )
        except UNREADABLE as failed:
            session_id = SessionId(text_of(row["session_id"]))
            found.append(Unreadable(session_id, sid, row["expires_at"], failed))
    return found


def _session(
    row: Mapping[str, Any],
    carried: dict[SessionId, tuple[Any, ...]],
    uris: Collection[str],
    logs: Iterable[tuple[Any, ...]],
    window: Window,
) -> FileSession:
    client_id, issuer, subject = loads(row["owner"])
    scopes = frozenset(loads(row["scopes"]))
    peer, lists, waits_from = row["peer"], row["lists"], row["waits_from"]
    level = row["log_level"]
    current = connection = None
    if row["current_id"] is not None:
        epoch = FencingEpoch(row["current_epoch"])
        current = CurrentSession(SessionId(text_of(row["current_id"])), epoch)
    if row["connection_id"] is not None:
        connection = ConnectionId(text_of(row["connection_id"]))
    client = SessionClient(
        Peer(*loads(peer)) if peer is not None else None,
        current,
        stream_opened=bool(row["stream_opened"]),
        subscriptions=frozenset(uris),
        lists=frozenset(loads(lists)) if lists is not None else None,
        waits_from=SessionEventId(text_of(waits_from)) if waits_from is not None else None,
        log_level=text_of(level) if level is not None else None,
    )
    if carried:
        client.carried = {origin: FencingEpoch(each[0]) for origin, each in carried.items()}
    fencing_epoch = FencingEpoch(row["fencing_epoch"])
    record = SessionRecord(
        SessionId(text_of(row["session_id"])),
        Mode(row["mode"]),
        Principal(client_id, issuer, subject, scopes, row["credential_expires_at"]),
        Life(row["created_at"], row["expires_at"], row["ends_at"]),
        client,
        fencing_epoch=fencing_epoch,
        attachment=attachment_of(connection, fencing_epoch),
        state=StoredState(loads(row["state"]), row["state_version"]),
        story=row["story"],
    )
    session = FileSession(record, None, row=row["sid"])
    for name, number, log_epoch, *counts in logs:
        kept = window_for(record.mode, name, window)
        of_log = LogCounts(LogEpoch(log_epoch), *counts)
        log = EventLog.restored(of_log, kept, NotedEvents(is_read=not of_log.kept), {})
        stream = StreamName(text_of(name))
        session.set_log(stream, log)
        session.stored_logs[stream] = _StoredLog(number, log, of_log)
    session.carried = {
        origin: Position(LogEpoch(each[1]), each[2]) for origin, each in carried.items()
    }
    session.uri_bytes = sum(len(text_bytes(uri)) for uri in uris)
    session.is_as_stored()
    session.stored_carried = carried
    return session


def events(tx: Transaction, session: FileSession, wanted: Wanted) -> None:
    """Read what a step lacks of a session's logs."""
    for name, log in session.logs_to_read(wanted):
        stored = session.stored_logs[name]
        rows: list[tuple[Any, ...]] = []
        if log.window is not UNBOUNDED:
            rows = _events(tx, stored.row, "1 ORDER BY number")
        else:
            if wanted.after is not None:
                limit = -1 if wanted.limit is None else wanted.limit
                rows += _page(tx, stored.row, wanted.after, limit, wanted.limit is not None)
            if wanted.key is not None:
                origin, text = wanted.key
                rows += _events(tx, stored.row, "key = ? AND origin IS ?", text_bytes(text), origin)
            if wanted.name is not None:
                rows += _events(tx, stored.row, "name = ?", wanted.name)
            if wanted.origin is not None:
                rows += _events(tx, stored.row, "origin = ?", wanted.origin)
        ordered = sorted({row[0]: row for row in rows}.values())
        session.put_log(name, _log_of(log, ordered))


def _log_of(log: EventLog, rows: Sequence[tuple[Any, ...]]) -> EventLog:
    read = NotedEvents((_event(log.log_epoch, *row[:5]) for row in rows), is_read=True)
    names = {row[0]: row[5] for row in rows if row[5] is not None}
    return EventLog.restored(log.counts, log.window, read, names)


def _events(tx: Transaction, log: int, where: str, *values: Any) -> list[tuple[Any, ...]]:
    statement = f"SELECT {_EVENT} FROM events WHERE log = ? AND {where}"
    return tx.execute(statement, [log, *map(storable, values)]).fetchall()


def _page(
    tx: Transaction, log: int, after: int, limit: int, is_page: bool
) -> Iterator[tuple[Any, ...]]:
    size = 0
    for row in tx.execute(
        f"SELECT {_EVENT} FROM events WHERE log = ? AND number > ? ORDER BY number LIMIT ?",
        (log, after, limit),
    ):
        yield row
        size += len(row[4])
        if is_page and size >= PAGE_BYTES:
            break


def _event(
    epoch: LogEpoch,
    number: int,
    at: float,
    key: bytes | None,
    stored_origin: str | bytes | None,
    payload: bytes,
) -> LoggedEvent:
    origin = SessionId(text_of(stored_origin)) if stored_origin is not None else None
    identity = None if key is None else (origin, key.decode("utf-8", "surrogatepass"))
    event_id = Position(epoch, number).event_id()
    return LoggedEvent(event_id, number, payload, at, identity, origin)


def keys(tx: Transaction, session: FileSession, policy: SessionPolicy) -> None:
    """Read a session's request keys."""
    rows = tx.execute(
        "SELECT key, digest, runner, at, finished, outcome, scopes FROM keys WHERE sid = ?"
        " ORDER BY finished",
        (session.row,),
    ).fetchall()
    session.keys = request_keys(rows, policy)
    session.finished = max((row[4] for row in rows if row[4] is not None), default=0)


def request_keys(rows: Sequence[tuple[Any, ...]], policy: SessionPolicy) -> RequestKeys:
    known = NotedKeys((_key(row[0]), _known(*row[1:])) for row in rows)
    finished = [_key(row[0]) for row in rows if row[4] is not None]
    answered = [_key(row[0]) for row in rows if row[5] is not None]
    answers = sum(len(row[5]) for row in rows if row[5] is not None)
    return RequestKeys.restored(
        max_bytes=policy.request_key_bytes,
        lifetime=policy.request_key_lifetime,
        size=answers + sum(len(row[0]) + KEY_COST for row in rows),
        answers=answers,
        known=known,
        finished=deque(finished),
        answered=deque(answered),
    )


def _key(stored: bytes) -> RequestKey:
    return RequestKey(stored.decode("utf-8", "surrogatepass"))


def _known(
    digest: bytes,
    ran_by: str | bytes,
    at: float,
    finished: int | None,
    outcome: bytes | None,
    scopes: bytes,
) -> KeyedRequest:
    if finished is None:
        state = KeyState.RUNNING
    else:
        state = KeyState.DROPPED if outcome is None else KeyState.ANSWERED
    # An older version wrote the runner alone.
    run, _, runner = text_of(ran_by).rpartition("@")
    return KeyedRequest(digest, runner, at, state, outcome or b"", frozenset(loads(scopes)), run)


def data(tx: Transaction, session: FileSession) -> None:
    row = tx.execute("SELECT value, version FROM data WHERE sid = ?", (session.row,)).fetchone()
    session.data = session.stored_data = Data(loads(row[0]), row[1]) if row is not None else None
    session.data_is_read = True


def whole(tx: Transaction, session_id: SessionId, policy: SessionPolicy) -> WholeSession | None:
    """Raises:
    ValueError, TypeError, LookupError: Another program wrote a row of it, or another release.
    """
    for session in sessions(tx, [session_id], UNBOUNDED):
        if isinstance(session, Unreadable):
            raise session.failed
        for name, stored in session.stored_logs.items():
            session.set_log(name, _log_of(stored.log, _events(tx, stored.row, "1 ORDER BY number")))
        keys(tx, session, policy)
        data(tx, session)
        return whole_of(session, session.carried)
    return None


# --- to rows -------------------------------------------------------------------------------------

_NEW_LOG = (
    "INSERT INTO logs (log_epoch, head, floor, evicted, events, bytes, log, sid, stream)"
    " VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)"
)
_SET_LOG = (
    "UPDATE logs SET log_epoch = ?, head = ?, floor = ?, evicted = ?, events = ?, bytes = ?"
    " WHERE log = ?"
)
_NEW_EVENT = (
    "INSERT INTO events (log, number, at, key, origin, payload, name) VALUES (?, ?, ?, ?, ?, ?, ?)"
)
_DROP_EVENT = "DELETE FROM events WHERE log = ? AND number = ?"
_WIPE = "DELETE FROM events WHERE log = ?"


def changes_of(
    session: FileSession,
    carried: Mapping[SessionId, Position],
    streams: Collection[StreamName] | None,
    new_row: Callable[[], int],
) -> list[Statement]:
    """What changed of a session since it was written. From now on that is written.

    Args:
        carried: The last event of each session that it carries.
        streams: The logs that may have changed; None: each.
        new_row: Gives the number of a new log.
    """
    record, sid = session.record, session.row
    client = record.client
    changes: list[Statement] = []
    columns = session.columns()
    if columns != session.stored:
        session.stored = columns
        *plain, lists, waits_from, log_level, story = columns
        stored_lists = encode(sorted(lists)) if lists is not None else None
        changes.append((_SET, (*plain, stored_lists, waits_from, log_level, story, sid)))
    if record.state is not session.stored_state:
        session.stored_state = record.state
        values = encode(dict(record.state.values)), record.state.version, sid
        changes.append(("UPDATE sessions SET state = ?, state_version = ? WHERE sid = ?", values))
    if client.subscriptions is not session.stored_uris:
        before, session.stored_uris = session.stored_uris, client.subscriptions
        changes += [
            ("DELETE FROM subscriptions WHERE sid = ? AND uri = ?", (sid, text_bytes(uri)))
            for uri in before - client.subscriptions
        ]
        changes += [
            ("INSERT INTO subscriptions (sid, uri) VALUES (?, ?)", (sid, text_bytes(uri)))
            for uri in client.subscriptions - before
        ]
    if client.carried or session.stored_carried:
        changes += _carried(session, carried)
    if session.data is not session.stored_data:
        session.stored_data = session.data
        if session.data is not None:
            values = sid, encode(session.data.value), session.data.version
            changes.append(("INSERT OR REPLACE INTO data VALUES (?, ?, ?)", values))
    if streams is None:
        streams = {*session.stored_logs, *(session.streams or ()), EVENTS}
    for name in streams:
        _log(changes, session, name, new_row)
    if session.keys is not None:
        changes += _keys(session, session.keys.known)
    return changes


_SET = (
    "UPDATE sessions SET fencing_epoch = ?, connection_id = ?, current_id = ?, current_epoch = ?,"
    " stream_opened = ?, lists = ?, waits_from = ?, log_level = ?, story = ? WHERE sid = ?"
)


def _carried(session: FileSession, relayed: Mapping[SessionId, Position]) -> Iterator[Statement]:
    before = session.stored_carried
    session.stored_carried = {
        origin: (epoch, relayed[origin].log_epoch, relayed[origin].number)
        for origin, epoch in session.record.client.carried.items()
    }
    for origin in before.keys() - session.stored_carried:
        yield "DELETE FROM carried WHERE sid = ? AND origin = ?", (session.row, origin)
    for origin, position in session.stored_carried.items():
        if before.get(origin) != position:
            yield "INSERT OR REPLACE INTO carried VALUES (?, ?, ?, ?, ?)", (
                session.row, origin, *position,
            )  # fmt: skip


def _log(
    changes: list[Statement], session: FileSession, name: StreamName, new_row: Callable[[], int]
) -> None:
    log, stored = session.log_of(name), session.stored_logs.get(name)
    if log is None:
        if stored is not None:
            del session.stored_logs[name]
            changes.append((_WIPE, (stored.row,)))
            changes.append(("DELETE FROM logs WHERE log = ?", (stored.row,)))
        return
    noted = log.events
    if stored is None:
        stored = session.stored_logs[name] = _StoredLog(new_row(), log, log.counts)
        changes.append((_NEW_LOG, (*stored.counts, stored.row, session.row, name)))
    elif log is not stored.log or not isinstance(noted, NotedEvents):
        # Made anew, or emptied.
        changes.append((_WIPE, (stored.row,)))
    added, removed = changed_events(noted)
    for number in removed:
        changes.append((_DROP_EVENT, (stored.row, number)))
    for number in added:
        event = noted[number]
        key = text_bytes(event.key[1]) if event.key is not None else None
        values = stored.row, number, event.at, key, event.origin, event.payload
        changes.append((_NEW_EVENT, (*values, log.name_of(number))))
    if isinstance(noted, NotedEvents):
        noted.added, noted.removed = [], []
    else:
        names = {number: named for number in noted if (named := log.name_of(number)) is not None}
        noted = NotedEvents(noted.values())
        log = EventLog.restored(log.counts, log.window, noted, names)
        session.set_log(name, log)
    stored.log = log
    if log.counts != stored.counts:
        stored.counts = log.counts
        changes.append((_SET_LOG, (*stored.counts, stored.row)))
    if log.window is UNBOUNDED and (noted or noted.is_read):
        # The events of a log without a bound are not kept in memory.
        unread = NotedEvents(is_read=not stored.counts.kept)
        session.put_log(name, EventLog.restored(stored.counts, UNBOUNDED, unread, {}))


def _keys(session: FileSession, known: Mapping[RequestKey, KeyedRequest]) -> Iterator[Statement]:
    for key in known.changed if isinstance(known, NotedKeys) else known:
        entry, name = known.get(key), text_bytes(key)
        if entry is None:
            yield "DELETE FROM keys WHERE sid = ? AND key = ?", (session.row, name)
            continue
        outcome = bytes(entry.outcome) if entry.state is KeyState.ANSWERED else None
        has_finished = entry.state is not KeyState.RUNNING
        session.finished += has_finished
        yield _SET_KEY, (
            session.row, name, entry.digest, f"{entry.run}@{entry.runner}",
            encode(sorted(entry.scopes)), entry.at, outcome,
            session.finished if has_finished else None,
        )  # fmt: skip
    if isinstance(known, NotedKeys):
        known.changed.clear()


_SET_KEY = (
    "INSERT INTO keys (sid, key, digest, runner, scopes, at, outcome, finished)"
    " VALUES (?, ?, ?, ?, ?, ?, ?, ?) ON CONFLICT (sid, key) DO UPDATE SET"
    " digest = excluded.digest, runner = excluded.runner, scopes = excluded.scopes,"
    " at = excluded.at, outcome = excluded.outcome, finished ="
    # One that runs was forgotten in the same step, and is a new one.
    " iif(excluded.finished IS NULL, NULL, ifnull(finished, excluded.finished))"
)


def make(tx: Transaction, session: FileSession) -> int:
    """Add a session that has nothing yet but a log; the number of its row."""
    record = session.record
    principal, peer = record.principal, record.client.peer
    values = (
        record.session_id,
        record.mode.value,
        owner_of(principal),
        encode(sorted(principal.scopes)),
        principal.expires_at,
        record.life.created_at,
        record.life.expires_at,
        record.life.ends_at,
        encode([peer.protocol_version, peer.initialize_params, peer.modern]) if peer else None,
    )
    row = tx.execute(
        "INSERT INTO sessions (session_id, mode, owner, scopes, credential_expires_at,"
        " created_at, expires_at, ends_at, peer, fencing_epoch, stream_opened, state_version,"
        " state) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, 0, 0, 0, CAST('{}' AS BLOB))",
        values,
    ).lastrowid
    if row is None:
        raise AssertionError("an INSERT has a row id")
    tx.execute("UPDATE meta SET value = value + 1 WHERE name = 'sessions'")
    for name, stored in session.stored_logs.items():
        tx.execute(_NEW_LOG, (*stored.counts, stored.row, row, name))
    return row


def add_whole(
    tx: Transaction, whole: WholeSession, policy: SessionPolicy, new_row: Callable[[], int]
) -> bool:
    """Add a session with all that it has; whether it was not there.

    Args:
        new_row: Gives the number of a new log.
    """
    if row_of(tx, whole.record.session_id) is not None:
        return False
    there = session_of(whole, UNBOUNDED, policy)
    session = FileSession(there.record, there.events, there.streams, there.keys, there.data)
    session.row = make(tx, session)
    for statement, values in changes_of(session, whole.carried, None, new_row):
        tx.execute(statement, values)
    return True


def counted(tx: Transaction) -> int:
    """The number of sessions, without reading all rows."""
    return tx.execute("SELECT value FROM meta WHERE name = 'sessions'").fetchone()[0]


def remove(tx: Transaction, row: int | None, deadline: float | None = None) -> bool:
    """Remove every trace of a session (END2); whether it was there.

    Args:
        deadline: Only if that is its deadline.
    """
    gone = tx.execute(
        "DELETE FROM sessions WHERE sid = ? AND (? IS NULL OR expires_at = ?)",
        (row, deadline, deadline),
    )
    if not gone.rowcount:
        return False
    tx.execute("DELETE FROM events WHERE log IN (SELECT log FROM logs WHERE sid = ?)", (row,))
    for table in ("logs", "keys", "data", "subscriptions", "carried"):
        tx.execute(f"DELETE FROM {table} WHERE sid = ?", (row,))
    tx.execute("UPDATE meta SET value = value - 1 WHERE name = 'sessions'")
    return True


def row_of(tx: Transaction, session_id: SessionId) -> int | None:
    found = tx.execute("SELECT sid FROM sessions WHERE session_id = ?", (session_id,)).fetchone()
    return found[0] if found is not None else None


def deadline_of(session: FileSession) -> Statement:
    session.deadline = session.record.life.expires_at
    return _MOVE, (session.deadline, session.row)


_MOVE = "UPDATE sessions SET expires_at = ? WHERE sid = ?"


def move_deadlines(tx: Transaction, deadlines: Mapping[int, float]) -> None:
    for row, deadline in deadlines.items():
        tx.execute(_MOVE, (deadline, row))


# --- what an operator asks of the process that serves ---------------------------------------------


def request_end(tx: Transaction, session_id: SessionId) -> None:
    tx.execute("INSERT OR IGNORE INTO end_requests (session_id) VALUES (?)", (session_id,))


def requested_ends(tx: Transaction) -> list[SessionId]:
    rows = tx.execute("SELECT session_id FROM end_requests").fetchall()
    return [SessionId(session_id) for (session_id,) in rows]


def forget_request(tx: Transaction, session_id: SessionId) -> None:
    """Unless the session is still there."""
    if row_of(tx, session_id) is None:
        tx.execute("DELETE FROM end_requests WHERE session_id = ?", (session_id,))
