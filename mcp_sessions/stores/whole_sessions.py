"""A session with all that belongs to it, to move it to another store: plain data, and as JSON.

``mcp-sessions store`` dumps, loads and copies whole sessions. A store reads one in one piece
(:class:`WholeSessions`), and adds one as it is. What a session becomes on its way is in
:func:`moved`: two stores must never give out one event id twice.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Protocol

from mcp_sessions.core.life import Life
from mcp_sessions.core.log import EventLog, LogCounts, LoggedEvent
from mcp_sessions.core.request_keys import KeyedRequest, KeyState
from mcp_sessions.core.states import Mode
from mcp_sessions.ids import (
    EVENTS,
    SESSION_ID,
    ConnectionId,
    FencingEpoch,
    LogEpoch,
    Position,
    RequestKey,
    SessionEventId,
    SessionId,
    StreamName,
    parse_position,
)
from mcp_sessions.principal import Principal
from mcp_sessions.security import log_epoch_after, mint_log_epoch
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


class WholeLog(NamedTuple):
    counts: LogCounts
    events: Sequence[LoggedEvent]
    """In order."""

    names: Mapping[int, str]
    """Event numbers → their names, of those that have one."""


@dataclass(slots=True)
class WholeSession:
    record: SessionRecord
    data: Data | None = None
    logs: dict[StreamName, WholeLog] = field(default_factory=dict[StreamName, WholeLog])
    keys: list[tuple[RequestKey, KeyedRequest]] = field(
        default_factory=list[tuple[RequestKey, KeyedRequest]]
    )
    """Those that finished, in that order, and then those that run."""

    carried: dict[SessionId, Position] = field(default_factory=dict[SessionId, Position])
    """Of each session in ``record.client.carried``, the last event that its GET stream has."""


class WholeSessions(Protocol):
    """The part of the contract of a store that moves sessions."""

    async def session_ids(self) -> Sequence[SessionId]:
        """The ids of all sessions, also of those that cannot be read or have expired."""
        ...

    async def whole(self, session_id: SessionId) -> WholeSession | None:
        """All of a session, as it is at one moment; None if it is not there. Its time may have
        come.
        """
        ...

    async def add_whole(self, whole: WholeSession) -> bool:
        """Add a session as it is, whole or not at all, whatever the limits are.

        Returns:
            False if its id is there already. Nothing was changed.
        """
        ...


def whole_log(log: EventLog) -> WholeLog:
    names = {number: log.name_of(number) for number in log.events}
    return WholeLog(
        log.counts,
        list(log.events.values()),
        {number: name for number, name in names.items() if name is not None},
    )


# --- on its way to another store -----------------------------------------------------------------


class Moving(NamedTuple):
    """A session that goes to another store: the epoch of its events, and the one it gets."""

    log_epoch: LogEpoch | None
    new_epoch: LogEpoch


def moving(whole: WholeSession) -> Moving:
    log = whole.logs.get(EVENTS)
    old = log.counts.log_epoch if log is not None else None
    return Moving(old, log_epoch_after(old) if old is not None else mint_log_epoch())


def moved(whole: WholeSession, sessions: Mapping[SessionId, Moving]) -> WholeSession:
    """A session as another store gets it.

    Each log has a new epoch: the store that it is from may give out ids of the old one. So no
    position that a client has is good any more, and none is answered with a hole. The numbers
    stay. Nobody runs the requests that ran: their outcome is unknown from now on.

    Args:
        sessions: All that go there. A connection that is none of them is gone.
    """
    record = whole.record
    client, own = record.client, sessions[record.session_id]
    logs = {
        name: _renewed(
            log, own.new_epoch if name == EVENTS else log_epoch_after(log.counts.log_epoch)
        )
        for name, log in whole.logs.items()
    }
    carried = {
        origin: _followed(position, sessions[origin])
        for origin, position in whole.carried.items()
        if origin in sessions
    }
    waits = parse_position(client.waits_from) if client.waits_from is not None else None
    attachment = record.attachment
    if attachment is not None and attachment.connection_id not in sessions:
        attachment = None
    client = replace(
        client,
        waits_from=_followed(waits, own).event_id() if waits is not None else None,
        carried={origin: epoch for origin, epoch in client.carried.items() if origin in carried},
    )
    keys = [
        (key, replace(entry, state=KeyState.DROPPED) if entry.state is KeyState.RUNNING else entry)
        for key, entry in whole.keys
    ]
    # Not by replace(): a field of the record is no argument.
    there = SessionRecord(
        record.session_id, record.mode, record.principal, record.life, client,
        record.fencing_epoch, attachment, record.state, record.story,
    )  # fmt: skip
    return WholeSession(there, whole.data, logs, keys, carried)


def _followed(position: Position, session: Moving) -> Position:
    """A position in the events of a session that moved. One of an older log is refused there,
    too.
    """
    if position.log_epoch != session.log_epoch:
        return position
    return Position(session.new_epoch, position.number)


def _renewed(log: WholeLog, epoch: LogEpoch) -> WholeLog:
    events: list[LoggedEvent] = []
    for event in log.events:
        event_id = Position(epoch, event.number).event_id()
        # An event may hold its own id. The new one is as long.
        payload = event.payload.replace(event.event_id.encode(), event_id.encode())
        events.append(event._replace(event_id=event_id, payload=payload))
    return WholeLog(log.counts._replace(log_epoch=epoch), events, log.names)


# --- what may be wrong ---------------------------------------------------------------------------


def faults_of(session_id: SessionId, whole: WholeSession) -> list[str]:
    """What of a session cannot be as it is."""
    faults: list[str] = []
    if whole.record.session_id != session_id:
        faults.append("its record has the id of another session")
    for name, log in whole.logs.items():
        counts, numbers = log.counts, [event.number for event in log.events]
        named = f"log {name}"
        if len(numbers) != counts.kept:
            faults.append(f"{named}: {len(numbers)} events are there, and it counts {counts.kept}")
        elif numbers and not counts.floor < numbers[0] <= numbers[-1] <= counts.head:
            faults.append(f"{named}: it has an event outside of its range")
        elif sum(len(event.payload) for event in log.events) != counts.size:
            faults.append(f"{named}: its events have other sizes than it counts")
    if whole.carried.keys() != whole.record.client.carried.keys():
        faults.append("the sessions that it carries have no position")
    return faults


# --- JSON ----------------------------------------------------------------------------------------


def to_json(whole: WholeSession) -> dict[str, Any]:
    record = whole.record
    client, principal, peer = record.client, record.principal, record.client.peer
    return {
        "id": record.session_id,
        "mode": record.mode.value,
        "principal": [
            principal.client_id,
            principal.issuer,
            principal.subject,
            sorted(principal.scopes),
            principal.expires_at,
        ],
        "life": [
            record.life.created_at,
            _finite(record.life.expires_at),
            _finite(record.life.ends_at),
        ],
        "peer": [peer.protocol_version, peer.initialize_params, peer.modern] if peer else None,
        "fencingEpoch": record.fencing_epoch,
        "connection": record.attachment.connection_id if record.attachment else None,
        "current": [client.current.session_id, client.current.fencing_epoch]
        if client.current
        else None,
        "streamOpened": client.stream_opened,
        "subscriptions": sorted(client.subscriptions),
        "lists": sorted(client.lists) if client.lists is not None else None,
        "waitsFrom": client.waits_from,
        "logLevel": client.log_level,
        "state": [dict(record.state.values), record.state.version],
        "story": record.story,
        "data": [whole.data.value, whole.data.version] if whole.data is not None else None,
        "carried": {
            origin: [client.carried[origin], position.log_epoch, position.number]
            for origin, position in sorted(whole.carried.items())
        },
        "logs": {name: _log_to_json(log) for name, log in sorted(whole.logs.items())},
        "keys": [
            [
                key,
                entry.digest.hex(),
                entry.runner,
                entry.run,
                sorted(entry.scopes),
                entry.at,
                entry.state.value,
                _text(entry.outcome),
            ]
            for key, entry in whole.keys
        ],
    }


def from_json(kept: Any) -> WholeSession:
    """Raises:
    ValueError, TypeError, LookupError: It is no session.
    """
    client_id, issuer, subject, scopes, credential_expires_at = kept["principal"]
    created_at, expires_at, ends_at = kept["life"]
    current, lists, state = kept["current"], kept["lists"], kept["state"]
    session_id, epoch = kept["id"], FencingEpoch(int(kept["fencingEpoch"]))
    if SESSION_ID.fullmatch(session_id) is None:
        raise ValueError("a session's id goes into headers")
    carried: dict[str, list[Any]] = kept["carried"]
    client = SessionClient(
        Peer(*kept["peer"]) if kept["peer"] is not None else None,
        CurrentSession(SessionId(current[0]), FencingEpoch(current[1])) if current else None,
        stream_opened=bool(kept["streamOpened"]),
        carried={SessionId(origin): FencingEpoch(each[0]) for origin, each in carried.items()},
        subscriptions=frozenset(kept["subscriptions"]),
        lists=frozenset(lists) if lists is not None else None,
        waits_from=SessionEventId(kept["waitsFrom"]) if kept["waitsFrom"] is not None else None,
        log_level=kept["logLevel"],
    )
    connection = kept["connection"]
    record = SessionRecord(
        SessionId(session_id),
        Mode(kept["mode"]),
        Principal(client_id, issuer, subject, frozenset(scopes), credential_expires_at),
        Life(float(created_at), _infinite(expires_at), _infinite(ends_at)),
        client,
        fencing_epoch=epoch,
        attachment=attachment_of(
            ConnectionId(connection) if connection is not None else None, epoch
        ),
        state=StoredState(dict(state[0]), int(state[1])) if state[1] else NO_STATE,
        # Older releases wrote none.
        story=str(kept.get("story", "")),
    )
    return WholeSession(
        record,
        Data(dict(kept["data"][0]), int(kept["data"][1])) if kept["data"] is not None else None,
        {StreamName(name): _log_of_json(log) for name, log in kept["logs"].items()},
        [_key_of_json(*each) for each in kept["keys"]],
        {
            SessionId(origin): Position(LogEpoch(each[1]), int(each[2]))
            for origin, each in carried.items()
        },
    )


def _log_to_json(log: WholeLog) -> dict[str, Any]:
    return {
        "epoch": log.counts.log_epoch,
        "head": log.counts.head,
        "floor": log.counts.floor,
        "evicted": log.counts.evicted,
        "events": [
            [
                event.number,
                event.at,
                event.key[1] if event.key is not None else None,
                event.origin,
                log.names.get(event.number),
                _text(event.payload),
            ]
            for event in log.events
        ],
    }


def _log_of_json(kept: Mapping[str, Any]) -> WholeLog:
    epoch = LogEpoch(kept["epoch"])
    if parse_position(Position(epoch, 0).event_id()) is None:
        raise ValueError("no epoch of a log")
    events: list[LoggedEvent] = []
    names: dict[int, str] = {}
    for number, at, key, text_of_origin, name, payload in kept["events"]:
        origin = SessionId(text_of_origin) if text_of_origin is not None else None
        identity = (origin, str(key)) if key is not None else None
        event_id = Position(epoch, int(number)).event_id()
        events.append(LoggedEvent(event_id, number, _bytes(payload), float(at), identity, origin))
        if name is not None:
            names[number] = name
    size = sum(len(event.payload) for event in events)
    counts = LogCounts(
        epoch, int(kept["head"]), int(kept["floor"]), int(kept["evicted"]), len(events), size
    )
    return WholeLog(counts, events, names)


def _key_of_json(
    key: str,
    digest: str,
    runner: str,
    run: str,
    scopes: Sequence[str],
    at: float,
    state: str,
    outcome: str,
) -> tuple[RequestKey, KeyedRequest]:
    return RequestKey(str(key)), KeyedRequest(
        bytes.fromhex(digest),
        str(runner),
        float(at),
        KeyState(state),
        _bytes(outcome),
        frozenset(scopes),
        str(run),
    )


def _text(stored: bytes) -> str:
    return bytes(stored).decode("utf-8", "surrogateescape")


def _bytes(text: str) -> bytes:
    return text.encode("utf-8", "surrogateescape")


def _finite(seconds: float) -> float | None:
    return seconds if math.isfinite(seconds) else None


def _infinite(seconds: float | None) -> float:
    return float(seconds) if seconds is not None else math.inf
