"""How what a store remembers is spelled in Redis."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import orjson

from mcp_sessions.core.log import LoggedEvent
from mcp_sessions.ids import (
    ConnectionId,
    FencingEpoch,
    LogEpoch,
    Position,
    SessionEventId,
    SessionId,
)
from mcp_sessions.principal import Principal
from mcp_sessions.stores.base import Attachment, CurrentSession, Mode, Peer, SessionRecord

Answer = Any
"""What a script answered: bytes, int, None, and lists of these."""


def packed(value: Any) -> bytes:
    """``value`` as JSON."""
    try:
        return orjson.dumps(value)
    except TypeError:
        # An integer beyond 64 bits, a lone surrogate: JSON has them.
        return json.dumps(value).encode()


def unpacked(text: bytes) -> Any:
    """What :func:`packed` made it from."""
    try:
        return orjson.loads(text)
    except orjson.JSONDecodeError:
        return json.loads(text)


def encoded(text: str) -> bytes:
    """Text of a peer, which may hold lone surrogates."""
    return text.encode("utf-8", "surrogatepass")


def decoded(text: bytes) -> str:
    """What :func:`encoded` made it from."""
    return text.decode("utf-8", "surrogatepass")


def tag_of(name: str) -> str:
    """What stands for a name (a session id, a URI) in a key. Keys turn up in monitors, slow
    logs and backups' listings, where a credential must not.
    """
    return hashlib.sha256(encoded(name)).hexdigest()[:40]


def owner_of(principal: Principal) -> bytes:
    """What tells a session's owner from others."""
    return packed([principal.client_id, principal.issuer, principal.subject])


def fields_of(
    session_id: SessionId, mode: Mode, principal: Principal, peer: Peer | None, ends_at: float
) -> dict[str, bytes | str]:
    """The fields of a new session."""
    fields: dict[str, bytes | str] = {
        "id": session_id,
        "mode": mode.value,
        "owner": owner_of(principal),
        "maker": packed([sorted(principal.scopes), principal.expires_at]),
        "ends": repr(ends_at),
        "fence": "0",
    }
    if peer is not None:
        fields["peer"] = packed([peer.protocol_version, peer.initialize_params, peer.modern])
    return fields


def record_of(answer: Answer) -> SessionRecord:
    """What ``record()`` of ``lua/session.lua`` answered."""
    fields, uris, state, carried = answer
    (
        session_id, mode, owner, maker, created, expires, ends, peer, fence, connection, current,
        opened, lists, waits, state_version,
    ) = fields  # fmt: skip
    epoch = FencingEpoch(int(fence))
    record = SessionRecord(
        SessionId(session_id.decode()),
        Mode(mode.decode()),
        principal_of(owner, maker),
        created_at=float(created),
        expires_at=float(expires),
        ends_at=float(ends),
        fencing_epoch=epoch,
        attachment=attachment_of(connection, fence),
        stream_opened=opened is not None,
        subscriptions=frozenset(decoded(uri) for uri in uris),
        state_version=int(state_version or 0),
    )
    if peer is not None:
        record.peer = Peer(*unpacked(peer))
    if current is not None:
        target, at = unpacked(current)
        record.current = CurrentSession(SessionId(target), FencingEpoch(at))
    if lists is not None:
        record.lists = frozenset(unpacked(lists))
    if waits is not None:
        record.waits_from = SessionEventId(waits.decode())
    if state:
        record.state = {decoded(key): unpacked(value) for key, value in _pairs(state)}
    if carried:
        record.carried = {
            SessionId(origin.decode()): FencingEpoch(int(text.split()[0]))
            for origin, text in _pairs(carried)
        }
    return record


def principal_of(owner: bytes, maker: bytes) -> Principal:
    """Who made a session."""
    scopes, expires_at = unpacked(maker)
    client_id, issuer, subject = unpacked(owner)
    return Principal(client_id, issuer, subject, frozenset(scopes), expires_at)


def attachment_of(connection: bytes | None, fence: bytes) -> Attachment | None:
    """Who hears a session; the newest attachment is the only one, so its epoch is the session's."""
    if connection is None:
        return None
    return Attachment(ConnectionId(connection.decode()), FencingEpoch(int(fence)))


def event_of(
    log_epoch: LogEpoch, number: int, payload: bytes, at: float, key: str | None, origin: str | None
) -> LoggedEvent:
    """One event of a log."""
    source = SessionId(origin) if origin is not None else None
    event_id = Position(log_epoch, number).event_id()
    own = (source, key) if key is not None else None
    return LoggedEvent(event_id, number, payload, at, own, source)


def events_of(log_epoch: LogEpoch, entries: Iterable[Sequence[Any]]) -> tuple[LoggedEvent, ...]:
    """The events of a log, from the entries of its Redis stream."""
    events: list[LoggedEvent] = []
    for entry_id, members in entries:
        named = dict(_pairs(members))
        key, origin = named.get(b"k"), named.get(b"o")
        events.append(
            event_of(
                log_epoch,
                int(entry_id.partition(b"-")[0]),
                named[b"p"],
                float(named[b"t"]),
                decoded(key) if key is not None else None,
                origin.decode() if origin is not None else None,
            )
        )
    return tuple(events)


def published_event(message: bytes) -> tuple[LoggedEvent, Attachment | None]:
    """An event as ``append`` of ``lua/log.lua`` published it, and who was attached."""
    head, _, rest = message.partition(b"\n")
    epoch, number, at, fence, *sizes = head.split(b" ")
    parts: list[bytes | None] = []
    for size in map(int, sizes):
        parts.append(rest[:size] if size >= 0 else None)
        rest = rest[max(size, 0) :]
    connection, key, origin = parts
    event = event_of(
        LogEpoch(epoch.decode()),
        int(number),
        rest,
        float(at),
        decoded(key) if key is not None else None,
        origin.decode() if origin is not None else None,
    )
    return event, attachment_of(connection, fence)


def tokens_of(answer: Sequence[bytes]) -> Mapping[bytes, bytes]:
    """URI → token of its subscription."""
    return dict(_pairs(answer))


def _pairs(flat: Sequence[bytes]) -> Iterable[tuple[bytes, bytes]]:
    return zip(flat[::2], flat[1::2], strict=True)
