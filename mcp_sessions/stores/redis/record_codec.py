from __future__ import annotations

import json
import re
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import orjson

from mcp_sessions.core.life import Life
from mcp_sessions.core.log import LoggedEvent
from mcp_sessions.core.messages import decode
from mcp_sessions.core.states import Mode
from mcp_sessions.errors import StoreRefused
from mcp_sessions.ids import (
    ConnectionId,
    FencingEpoch,
    LogEpoch,
    Position,
    SessionEventId,
    SessionId,
)
from mcp_sessions.principal import Principal
from mcp_sessions.stores.records import (
    NO_STATE,
    Attachment,
    CurrentSession,
    Peer,
    SessionClient,
    SessionRecord,
    StoredState,
)

_MODES = {mode.value.encode(): mode for mode in Mode}

ScriptAnswer = Any
"""The answer of a script: bytes, int, None, and lists of these."""


def packed(value: Any) -> bytes:
    try:
        return orjson.dumps(value)
    except TypeError:
        # An integer beyond 64 bits, a lone surrogate: JSON has them.
        return json.dumps(value).encode()


def unpacked(text: bytes) -> Any:
    try:
        return decode(text)
    except ValueError:
        # A lone surrogate: JSON has it, orjson does not read it.
        return json.loads(text)


def encoded(text: str) -> bytes:
    """Text of a peer, which may hold lone surrogates."""
    return text.encode("utf-8", "surrogatepass")


def decoded(text: bytes) -> str:
    return text.decode("utf-8", "surrogatepass")


def optional(*values: bytes | str | None) -> list[bytes | str | int]:
    """Values as ``optional()`` of ``lua/session.lua`` takes them."""
    return [part for each in values for part in ((0, "") if each is None else (1, each))]


def owner_of(principal: Principal) -> bytes:
    return packed([principal.client_id, principal.issuer, principal.subject])


def fields_of(
    session_id: SessionId, mode: Mode, principal: Principal, peer: Peer | None, life: Life
) -> dict[str, bytes | str]:
    fields: dict[str, bytes | str] = {
        "id": session_id,
        "mode": mode.value,
        "owner": owner_of(principal),
        "maker": packed([sorted(principal.scopes), principal.expires_at]),
        "created": repr(life.created_at),
        "expires": repr(life.expires_at),
        "ends": repr(life.ends_at),
        "fence": "0",
    }
    if peer is not None:
        fields["peer"] = packed([peer.protocol_version, peer.initialize_params, peer.modern])
    return fields


_NAME = re.compile(rb"[!-~]+")
"""The form of a session's id: it is sent in headers."""


def unreadable(answer: object) -> StoreRefused:
    """Return the error for a value in Redis that no script of this release wrote.

    Args:
        answer: The answer, or the error that reading it raised.
    """
    return StoreRefused(
        f"a value in Redis cannot be read ({type(answer).__name__}): another program wrote it, or "
        "another release"
    )


class KnownFacts(NamedTuple):
    """The facts of a session that this process knows. The server need not send them again."""

    change: bytes
    """Names the last change of its subscriptions. Empty: there was none."""

    uris: frozenset[str]
    """They as they were after it."""

    peer: tuple[Peer | None] | None = None
    """The client's description of itself, which never changes; None: unknown."""

    peer_bytes: int = 0
    """Of its description, as it is stored."""


NOTHING = KnownFacts(b"nothing", frozenset())


class KnownSessions:
    """The facts of sessions that may be long, and that few requests need, as this process saw them
    last.

    Args:
        most: Bytes to keep, about; those that were used longest ago go first.
    """

    COST, URI_COST = 200, 100
    """Bytes accounted for a session in addition to its client's own, and for a subscription."""

    def __init__(self, most: int = 16_777_216) -> None:
        self._most = most
        self._kept = 0
        self._of: OrderedDict[SessionId, tuple[KnownFacts, int]] = OrderedDict()

    def of(self, session_id: SessionId) -> KnownFacts:
        found = self._of.get(session_id)
        if found is None:
            return NOTHING
        self._of.move_to_end(session_id)
        return found[0]

    def learn(self, session_id: SessionId, facts: KnownFacts) -> None:
        self.forget(session_id)
        cost = self.COST + facts.peer_bytes + self.URI_COST * len(facts.uris)
        self._of[session_id] = facts, cost
        self._kept += cost
        while self._kept > self._most:
            self.forget(next(iter(self._of)))

    def changed(
        self,
        session_id: SessionId,
        before: bytes | None,
        change: bytes,
        *,
        with_one: str | None = None,
        without: str | None = None,
    ) -> None:
        """This process changed a session's subscriptions: it need not get all of them for that.

        Args:
            before: The name of the change before; None: there was none, or it was lost.
            change: Names the change.
            with_one: The URI that is there now.
            without: The URI that is there no more.
        """
        known = self.of(session_id)
        if before is None:
            known = known._replace(change=b"", uris=frozenset())
        if known.change == (before or b""):
            added = {with_one} if with_one is not None else set[str]()
            uris = (known.uris | added) - {without}
            self.learn(session_id, known._replace(change=change, uris=uris))

    def forget(self, session_id: SessionId) -> None:
        _, cost = self._of.pop(session_id, (NOTHING, 0))
        self._kept -= cost


def record_of(
    answer: ScriptAnswer, sessions: KnownSessions, known: KnownFacts = NOTHING
) -> SessionRecord:
    """Read the answer of ``record()`` of ``lua/session.lua``.

    Args:
        known: The facts that the script was asked to leave out.
    """
    fields, uris, state, carried, *told = answer
    (
        session_id, mode, owner, maker, created, expires, ends, peer, fence, connection, current,
        opened, lists, waits, state_version, change, level,
    ) = fields  # fmt: skip
    if _NAME.fullmatch(session_id) is None:
        raise ValueError("a session's id goes into headers")
    session_id = SessionId(session_id.decode())
    described = known.peer
    if uris is not None or described is None:
        if uris is not None:
            known = known._replace(change=change or b"", uris=frozenset(map(decoded, uris)))
        if described is None:
            described = (Peer(*unpacked(peer)) if peer is not None else None,)
            known = known._replace(peer=described, peer_bytes=len(peer or b""))
        sessions.learn(session_id, known)
    client = SessionClient(
        described[0],
        CurrentSession(*unpacked(current)) if current is not None else None,
        stream_opened=opened is not None,
        subscriptions=known.uris,
        lists=frozenset(unpacked(lists)) if lists is not None else None,
        waits_from=SessionEventId(decoded(waits)) if waits is not None else None,
        log_level=decoded(level) if level is not None else None,
    )
    if carried:
        client.carried = {
            SessionId(decoded(origin)): FencingEpoch(int(text.split()[0]))
            for origin, text in _pairs(carried)
        }
    values = {decoded(key): unpacked(value) for key, value in _pairs(state)} if state else {}
    version = int(state_version or 0)
    return SessionRecord(
        session_id,
        _MODES[mode],
        principal_of(owner, maker),
        Life(float(created), float(expires), float(ends)),
        client,
        fencing_epoch=FencingEpoch(int(fence)),
        attachment=stored_attachment(connection, fence),
        state=StoredState(values, version) if version else NO_STATE,
        story=decoded(told[0]) if told and told[0] is not None else "",
    )


@lru_cache(maxsize=1024)
def principal_of(owner: bytes, maker: bytes) -> Principal:
    """Return the principal that made a session. It is cached, since each request needs it."""
    scopes, expires_at = unpacked(maker)
    client_id, issuer, subject = unpacked(owner)
    return Principal(client_id, issuer, subject, frozenset(scopes), expires_at)


def stored_attachment(connection: bytes | None, fence: bytes) -> Attachment | None:
    if connection is None:
        return None
    return Attachment(ConnectionId(decoded(connection)), FencingEpoch(int(fence)))


def _stored_event(
    epoch: LogEpoch,
    number: bytes,
    payload: bytes,
    at: bytes,
    key: bytes | None,
    origin: bytes | None,
) -> LoggedEvent:
    text = decoded(key) if key is not None else None
    source = decoded(origin) if origin is not None else None
    return event_at(Position(epoch, int(number)), payload, float(at), text, source)


def event_at(
    place: Position, payload: bytes, at: float, key: str | None, origin: str | None
) -> LoggedEvent:
    """The event that is the last one before a position."""
    source = SessionId(origin) if origin is not None else None
    own = (source, key) if key is not None else None
    return LoggedEvent(place.event_id(), place.number, payload, at, own, source)


def events_of(log_epoch: LogEpoch, entries: Iterable[Sequence[Any]]) -> tuple[LoggedEvent, ...]:
    events: list[LoggedEvent] = []
    for entry_id, members in entries:
        named = dict(_pairs(members))
        number, rest = entry_id.partition(b"-")[0], (named.get(b"k"), named.get(b"o"))
        events.append(_stored_event(log_epoch, number, named[b"p"], named[b"t"], *rest))
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
    attachment = stored_attachment(connection, fence)
    return _stored_event(LogEpoch(epoch.decode()), number, rest, at, key, origin), attachment


def tokens_of(answer: Sequence[bytes]) -> Mapping[bytes, bytes]:
    return dict(_pairs(answer))


def _pairs(flat: Sequence[bytes]) -> Iterable[tuple[bytes, bytes]]:
    return zip(flat[::2], flat[1::2], strict=True)
