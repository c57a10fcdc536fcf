"""Rows of a session, as objects of ``core/`` and back.

A session is one row, a row for each event that it keeps, and one for each request key. What
changes with nearly each step is in ``body``. What rarely changes, or may be long, has a column of
its own.
"""

from __future__ import annotations

import hashlib
import json
import secrets
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, NamedTuple

import orjson

from mcp_sessions.core.life import Life
from mcp_sessions.core.log import UNBOUNDED, EventLog, LogCounts, LoggedEvent, Window
from mcp_sessions.core.messages import decode, encode
from mcp_sessions.core.request_keys import KeyedRequest, KeyState, RequestKeys
from mcp_sessions.core.states import Mode
from mcp_sessions.ids import (
    EVENTS,
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
from mcp_sessions.security import log_epoch_after
from mcp_sessions.stores.memory.tables import MemorySession, window_for
from mcp_sessions.stores.records import (
    NO_STATE,
    CurrentSession,
    Data,
    Peer,
    SessionClient,
    SessionRecord,
    StoredState,
    attachment_of,
)
from mcp_sessions.stores.sql.partly_read import (
    LeftOut,
    NotedEvents,
    NotedKeys,
    Oldest,
    ReadEvents,
    changed_events,
)

COARSE = 0.01
"""Share of the time that a session has left by which its ``due_at`` may be too early. A column with
an index that changes with each request would make each request slower."""


MOST_LOST = 1_000
"""More fencing epochs of a session than a failover can lose."""

KNOWN_EVENTS = 16
"""The oldest events of a log that a process knows of a session: in a full log each new event takes
one out."""


class Wanted(NamedTuple):
    """The rows that a step reads of a session, besides its own."""

    stream: StreamName | None = None
    """The log; None: the one that takes a change of the server (:class:`ServerChange`)."""

    log: bool = False
    """The oldest events of that log, for those that go."""

    key: tuple[SessionId | None, str] | None = None
    """The event with that coalescing key."""

    name: str | None = None
    """The event of that name."""

    after: int | None = None
    """The events after that number, whole."""

    limit: int | None = None
    """Of these, a page."""

    origin: SessionId | None = None
    """The events of that session."""

    request_key: RequestKey | None = None
    data: bool = False
    oldest: int = 2

    def more(self) -> Wanted:
        return self._replace(oldest=self.oldest * 16)


class EventRow(NamedTuple):
    number: int
    at: float
    size: int
    key: bytes | None
    origin: bytes | None
    name: bytes | None
    payload: bytes | None
    """None: left out."""


class KeyRow(NamedTuple):
    key: bytes
    digest: bytes
    runner: str
    run: str
    scopes: bytes
    at: float
    state: str
    size: int
    outcome: bytes | None
    """None: left out."""


class SessionRow(NamedTuple):
    line: str
    """Names the line of the database's history. Another one: its last moments may be lost."""

    sid: str
    version: int
    mode: str
    owner: bytes
    created_at: float
    expires_at: float
    ends_at: float
    due_at: float
    facts: bytes
    body: bytes
    state: bytes | None
    uris: bytes | None


class Counts(NamedTuple):
    sessions: int
    owned: int
    """Of these, one owner's."""

    made: int
    """The number of sessions that were made so far, in all."""

    line: str
    """See :attr:`SessionRow.line`."""


@dataclass(slots=True)
class Found:
    """The rows that a step read of one session."""

    row: SessionRow
    data: bytes | None = None
    events: list[EventRow] = field(default_factory=list[EventRow])
    read: list[tuple[int, int]] = field(default_factory=list[tuple[int, int]])
    """See :class:`ReadEvents`."""

    asked_key: KeyRow | None = None
    finished: list[KeyRow] = field(default_factory=list[KeyRow])
    answered: list[KeyRow] = field(default_factory=list[KeyRow])
    oldest: int = 0
    """How many of each were asked for."""

    stream: StreamName | None = None
    log: ReadEvents | None = None
    """The oldest events of that log, from the step before."""

    is_whole: bool = False
    """It has no others."""

    def may_do(self, wanted: Wanted) -> bool:
        """Whether a step may begin with what the step before knew. It raises :class:`NotRead` if
        it needs an older event that is not here.
        """
        knows_keys = self.is_whole and self.stream == wanted.stream
        key = wanted.key if knows_keys else None
        return wanted == Wanted(wanted.stream, wanted.log, key, oldest=wanted.oldest)


class Stored(NamedTuple):
    """A session as a step found it."""

    row: SessionRow
    session: MemorySession
    carried: dict[SessionId, Position]
    data: Data | None
    logs: dict[StreamName, EventLog]
    finished: int
    """The number of keys that finished so far, in all."""

    state: StoredState
    uris: frozenset[str]
    is_renewed: bool
    """Its logs are made anew, and no row says so yet."""


class AddedEvent(NamedTuple):
    stream: StreamName
    event: LoggedEvent
    name: str | None


class StoredKey(NamedTuple):
    key: RequestKey
    entry: KeyedRequest
    finished: int | None
    """Its number among those that finished, if it has none yet."""


@dataclass(slots=True)
class Change:
    """What a step changes of one session. ``None`` for a column: it stays."""

    row: SessionRow
    """As it was read: whoever changed it since comes first."""

    expires_at: float
    due_at: float
    weight: int
    """Bytes of its events and keys."""

    body: bytes
    state: bytes | None = None
    uris: tuple[bytes, list[int]] | None = None
    data: bytes | None = None
    added: list[AddedEvent] = field(default_factory=list[AddedEvent])
    removed: list[tuple[StreamName, int]] = field(default_factory=list[tuple[StreamName, int]])
    wiped: list[StreamName] = field(default_factory=list[StreamName])
    """Logs whose events all go. None of ``added`` is of one."""

    keys: list[StoredKey] = field(default_factory=list[StoredKey])
    gone_keys: list[RequestKey] = field(default_factory=list[RequestKey])
    attachment: tuple[str | None, int] = (None, 0)

    def written(self) -> SessionRow:
        """The row, once this is written."""
        row = self.row
        return row._replace(
            version=row.version + 1,
            expires_at=self.expires_at,
            due_at=self.due_at,
            body=self.body,
            state=self.state if self.state is not None else row.state,
            uris=self.uris[0] if self.uris is not None else row.uris,
        )


def loads(value: bytes) -> Any:
    try:
        return decode(value)
    except ValueError:
        # A lone surrogate: JSON has it, orjson does not read it.
        return json.loads(value)


def _body_of(row: SessionRow) -> dict[str, Any]:
    # No integer in it is a large one. But an epoch looks like one, which `decode` reads slowly.
    try:
        return orjson.loads(row.body)
    except ValueError:
        return json.loads(row.body)


def owner_of(principal: Principal) -> bytes:
    return encode([principal.client_id, principal.issuer, principal.subject])


def facts_of(principal: Principal, peer: Peer | None) -> bytes:
    client = [peer.protocol_version, peer.initialize_params, peer.modern] if peer else None
    return encode([sorted(principal.scopes), principal.expires_at, client])


@lru_cache(maxsize=1_024)
def _facts(owner: bytes, facts: bytes) -> tuple[Principal, Peer | None]:
    client_id, issuer, subject = loads(owner)
    scopes, expires_at, client = loads(facts)
    principal = Principal(client_id, issuer, subject, frozenset(scopes), expires_at)
    return principal, Peer(*client) if client is not None else None


def tag_of(text: bytes) -> int:
    """A number that an index finds a text of any length by. Texts may share one."""
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), signed=True)


def key_bytes(key: tuple[SessionId | None, str]) -> bytes:
    return encode(list(key))


def text_bytes(text: str) -> bytes:
    """A text of a peer, which may hold what a database takes for no text."""
    return text.encode("utf-8", "surrogatepass")


def text_of(stored: bytes) -> str:
    return stored.decode("utf-8", "surrogatepass")


def uri_tags(uris: Iterable[str]) -> list[int]:
    return sorted(tag_of(text_bytes(uri)) for uri in uris)


def due_of(expires_at: float, now: float, before: float) -> float:
    """When a session may have to end at the earliest, for the index.

    Args:
        before: What the row has.
    """
    if now < before <= expires_at and before >= expires_at - (expires_at - now) * COARSE:
        return before
    return expires_at


# --- from rows -------------------------------------------------------------------------------


def record_of(row: SessionRow) -> SessionRecord:
    """Raises:
    ValueError, TypeError, LookupError: Another program wrote it.
    """
    return _record(row, _body_of(row))


def _record(row: SessionRow, body: Mapping[str, Any]) -> SessionRecord:
    principal, peer = _facts(row.owner, row.facts)
    current, waits_from, lists = body.get("current"), body.get("waits"), body.get("lists")
    epoch = FencingEpoch(body["fence"])
    connection = body.get("connection")
    client = SessionClient(
        peer,
        CurrentSession(SessionId(current[0]), FencingEpoch(current[1])) if current else None,
        stream_opened=body.get("opened", False),
        subscriptions=frozenset(loads(row.uris)) if row.uris is not None else frozenset(),
        lists=frozenset(lists) if lists is not None else None,
        waits_from=SessionEventId(waits_from) if waits_from is not None else None,
        log_level=body.get("level"),
    )
    carried = body.get("carried")
    if carried:
        client.carried = {
            SessionId(origin): FencingEpoch(entry[0]) for origin, entry in carried.items()
        }
    state = NO_STATE
    if row.state is not None:
        values, version = loads(row.state)
        state = StoredState(values, version)
    return SessionRecord(
        SessionId(row.sid),
        Mode(row.mode),
        principal,
        Life(row.created_at, row.expires_at, row.ends_at),
        client,
        fencing_epoch=epoch,
        attachment=attachment_of(
            ConnectionId(connection) if connection is not None else None, epoch
        ),
        state=state,
        story=body.get("story", ""),
    )


def _event(log_epoch: LogEpoch, row: EventRow) -> LoggedEvent:
    key = None
    if row.key is not None:
        origin, text = loads(row.key)
        key = (SessionId(origin) if origin is not None else None, text)
    return LoggedEvent(
        Position(log_epoch, row.number).event_id(),
        row.number,
        row.payload if row.payload is not None else LeftOut(row.size),
        row.at,
        key,
        SessionId(text_of(row.origin)) if row.origin is not None else None,
    )


def read_log(
    counts: LogCounts, window: Window, rows: Sequence[EventRow], read: Sequence[tuple[int, int]]
) -> EventLog:
    by_number: dict[int, EventRow] = {}
    for row in rows:
        if row.number not in by_number or row.payload is not None:
            by_number[row.number] = row
    ordered = [by_number[number] for number in sorted(by_number)]
    events = ReadEvents((_event(counts.log_epoch, row) for row in ordered), read)
    names = {row.number: text_of(row.name) for row in ordered if row.name is not None}
    return EventLog.restored(counts, window, events, names)


def keyed(row: KeyRow) -> tuple[RequestKey, KeyedRequest]:
    return RequestKey(text_of(row.key)), KeyedRequest(
        row.digest,
        row.runner,
        row.at,
        KeyState(row.state),
        row.outcome if row.outcome is not None else LeftOut(row.size),
        frozenset(loads(row.scopes)),
        row.run,
    )


def stored(found: Found, stream: StreamName, policy: SessionPolicy, window: Window) -> Stored:
    """Args:
        stream: The log of the events that were read.

    Raises:
        ValueError, TypeError, LookupError: Another program wrote it.
    """
    row = found.row
    body = _body_of(row)
    record = _record(row, body)
    logs: dict[StreamName, EventLog] = {}
    now_there: dict[StreamName, EventLog] = {}
    is_as_it_was = body["line"] == row.line
    for name, (epoch, *counts) in body["logs"].items():
        is_read = name == stream
        its_window = window_for(record.mode, StreamName(name), window)
        # An event that somebody has may be lost. No other event may ever have its id (CUP8).
        new_epoch = LogEpoch(epoch) if is_as_it_was else log_epoch_after(LogEpoch(epoch))
        of_log = LogCounts(new_epoch, *counts)
        if name == found.stream and found.log is not None:
            log = EventLog.restored(of_log, its_window, found.log.again(), {})
        else:
            log = read_log(
                of_log, its_window, found.events if is_read else (), found.read if is_read else ()
            )
        logs[StreamName(name)] = log
        # Of an agent's log no other copy exists: its events stay, under new ids.
        stays = is_as_it_was or its_window is UNBOUNDED
        now_there[StreamName(name)] = log if stays else EventLog(new_epoch, window)
    streams = {name: log for name, log in now_there.items() if name != EVENTS}
    session = MemorySession(record, now_there.get(EVENTS), streams or None)
    session.holder = body.get("holder")
    session.lost_epochs = body.get("lost", 0) + (0 if is_as_it_was else MOST_LOST)
    counts = body.get("keys")
    if counts is not None:
        rows = [*found.finished, *found.answered]
        if found.asked_key is not None:
            rows.append(found.asked_key)
        session.keys = RequestKeys.restored(
            max_bytes=policy.request_key_bytes,
            lifetime=policy.request_key_lifetime,
            size=counts[0],
            answers=counts[1],
            known=NotedKeys(map(keyed, rows)),
            finished=_oldest(found.finished, found.oldest),
            answered=_oldest(found.answered, found.oldest),
        )
    if found.data is not None:
        value, version = loads(found.data)
        session.data = Data(value, version)
    session.uri_bytes = sum(len(text_bytes(uri)) for uri in record.client.subscriptions)
    kept: dict[str, list[Any]] = body.get("carried") or {}
    carried = {
        SessionId(origin): Position(LogEpoch(entry[1]), entry[2]) for origin, entry in kept.items()
    }
    return Stored(
        row, session, carried, session.data, logs,
        counts[2] if counts is not None else 0, record.state,
        record.client.subscriptions, not is_as_it_was,
    )  # fmt: skip


def _oldest(rows: Sequence[KeyRow], asked_for: int) -> deque[RequestKey]:
    names = [RequestKey(text_of(row.key)) for row in rows]
    return Oldest(names, len(rows) < asked_for)


# --- to rows ---------------------------------------------------------------------------------


def change_of(
    before: Stored,
    session: MemorySession,
    carried: Mapping[SessionId, Position],
    now: float,
) -> Change | None:
    """What a step changed; None: nothing."""
    record, row = session.record, before.row
    change = Change(row, record.life.expires_at, row.due_at, 0, b"")
    logs = dict(session.streams or {})
    if session.events is not None:
        logs[EVENTS] = session.events
    for name, log in before.logs.items():
        now_there = logs.get(name)
        if now_there is not log or not isinstance(log.events, NotedEvents):
            # Dropped, made anew, or emptied.
            change.wiped.append(name)
    for name, log in logs.items():
        added, removed = changed_events(log.events)
        change.added += [AddedEvent(name, log.events[n], log.name_of(n)) for n in added]
        change.removed += [(name, number) for number in removed]
    change.added.sort(key=lambda added: (added.stream, added.event.number))
    finished = _keys_changed(change, before, session)
    body = _body(row.line, session, logs, carried, finished)
    change.body = encode(body)
    if record.state is not before.state:
        change.state = encode([dict(record.state.values), record.state.version])
    if record.client.subscriptions != before.uris:
        uris = sorted(record.client.subscriptions)
        change.uris = encode(uris), uri_tags(uris)
    if session.data is not None and session.data is not before.data:
        change.data = encode([session.data.value, session.data.version])
    if change.expires_at != row.expires_at or row.due_at <= now:
        change.due_at = due_of(change.expires_at, now, row.due_at)
    if record.attachment is not None:
        attached = record.attachment
        change.attachment = attached.connection_id, attached.fencing_epoch
    is_same = (
        change.body == row.body
        and (change.expires_at, change.due_at) == (row.expires_at, row.due_at)
        and change.state is change.uris is change.data is None
        and not (change.added or change.removed or change.wiped)
        and not (change.keys or change.gone_keys)
    )
    if is_same:
        return None
    change.weight = sum(log.size for log in logs.values())
    change.weight += session.keys.size if session.keys is not None else 0
    return change


def _keys_changed(change: Change, before: Stored, session: MemorySession) -> int:
    finished = before.finished
    if session.keys is None:
        return finished
    known = session.keys.known
    for name in known.changed if isinstance(known, NotedKeys) else known:
        entry = known.get(name)
        if entry is None:
            change.gone_keys.append(name)
        else:
            finished += entry.state is not KeyState.RUNNING
            ended = finished if entry.state is not KeyState.RUNNING else None
            change.keys.append(StoredKey(name, entry, ended))
    return finished


def _body(
    line: str,
    session: MemorySession,
    logs: Mapping[StreamName, EventLog],
    carried: Mapping[SessionId, Position],
    finished: int,
) -> dict[str, Any]:
    record = session.record
    client = record.client
    body: dict[str, Any] = {
        "line": line,
        "fence": record.fencing_epoch,
        "logs": {name: list(log.counts) for name, log in sorted(logs.items())},
    }
    if record.attachment is not None:
        body["connection"] = record.attachment.connection_id
    if client.current is not None:
        body["current"] = [client.current.session_id, client.current.fencing_epoch]
    if client.stream_opened:
        body["opened"] = True
    if client.carried:
        body["carried"] = {
            origin: [epoch, carried[origin].log_epoch, carried[origin].number]
            for origin, epoch in sorted(client.carried.items())
        }
    if client.lists is not None:
        body["lists"] = sorted(client.lists)
    if client.waits_from is not None:
        body["waits"] = client.waits_from
    if client.log_level is not None:
        body["level"] = client.log_level
    if session.keys is not None:
        body["keys"] = [session.keys.size, session.keys.answer_bytes, finished]
    if session.holder is not None:
        body["holder"] = session.holder
    if record.story:
        body["story"] = record.story
    if session.lost_epochs:
        body["lost"] = session.lost_epochs
    return body


def found_again(row: SessionRow, session: MemorySession, stream: StreamName | None) -> Found:
    """What the next step may begin with: the row as it is now, and the oldest events of a log."""
    log = session.events if stream == EVENTS else (session.streams or {}).get(stream or EVENTS)
    if log is None:
        return Found(row)
    events = log.events
    if not isinstance(events, ReadEvents):
        # The step made it, or emptied it.
        events = ReadEvents(events.values(), ())
    oldest = events.oldest(KNOWN_EVENTS, log.counts)
    return Found(row, stream=stream, log=oldest, is_whole=len(oldest or ()) == len(log))


def new_row(session: MemorySession, line: str) -> SessionRow:
    record = session.record
    logs = {EVENTS: session.events} if session.events is not None else {}
    life = record.life
    facts = facts_of(record.principal, record.client.peer)
    # A session that ended may be made anew under its id: no version is of both.
    version = secrets.randbits(62)
    return SessionRow(
        line, record.session_id, version, record.mode.value, owner_of(record.principal),
        life.created_at, life.expires_at, life.ends_at, life.expires_at, facts,
        encode(_body(line, session, logs, {}, 0)), None, None,
    )  # fmt: skip
