from __future__ import annotations

import json
import re
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple, TypeVar

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

T = TypeVar("T")


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


def of_kind(kind: type[T], answer: ScriptAnswer) -> T:
    if not isinstance(answer, kind):
        raise unreadable(answer)
    return answer


def pair_of(answer: ScriptAnswer) -> tuple[ScriptAnswer, ScriptAnswer]:
    match answer:
        case [first, second]:
            return first, second
        case _:
            raise unreadable(answer)


class KnownFacts(NamedTuple):
    """The facts of a session that this process knows. The server need not send them again."""

    change: bytes
    """Names the last change of its subscriptions."""

    uris: frozenset[str]
    """They as they were after it."""

    peer: tuple[Peer | None] | None = None
    """The client's description of itself; None: unknown."""


NOTHING = KnownFacts(b"nothing", frozenset())


class Peers:
    """Caches the clients' descriptions of themselves, as this process read them.

    A description never changes, may be long, and is rarely needed.

    Args:
        most: Bytes to keep, as they are stored, and ``COST`` for each session; those that
            were used longest ago go first.
    """

    COST = 200
    """Bytes accounted for a session in addition to its client's own."""

    def __init__(self, most: int = 8_388_608) -> None:
        self._most = most
        self._kept = 0
        self._of: OrderedDict[SessionId, tuple[int, tuple[Peer | None]]] = OrderedDict()

    def known(self, session_id: SessionId) -> tuple[Peer | None] | None:
        found = self._of.get(session_id)
        if found is None:
            return None
        self._of.move_to_end(session_id)
        return found[1]

    def learn(self, session_id: SessionId, stored: bytes | None) -> Peer | None:
        self.forget(session_id)
        peer = Peer(*unpacked(stored)) if stored is not None else None
        cost = self.COST + len(stored or b"")
        self._of[session_id] = (cost, (peer,))
        self._kept += cost
        while self._kept > self._most:
            self.forget(next(iter(self._of)))
        return peer

    def clear(self) -> None:
        self._of.clear()
        self._kept = 0

    def forget(self, session_id: SessionId) -> None:
        gone = self._of.pop(session_id, None)
        self._kept -= gone[0] if gone is not None else 0


class KnownSubscriptions:
    """The subscriptions of sessions as this process saw them last, by what changed them last.

    A session may have thousands, and each request would get all of them again.

    Args:
        most: URIs to keep; those that were learned first go first.
    """

    def __init__(self, most: int = 100_000) -> None:
        self._most = most
        self._kept = 0
        self._of: dict[SessionId, tuple[bytes, frozenset[str]]] = {}

    def known(self, session_id: SessionId) -> tuple[bytes, frozenset[str]]:
        return self._of.get(session_id, NOTHING[:2])

    def learn(self, session_id: SessionId, change: bytes, uris: Sequence[bytes]) -> frozenset[str]:
        return self._keep(session_id, change, frozenset(decoded(uri) for uri in uris))

    def changed(
        self,
        session_id: SessionId,
        before: bytes | None,
        change: bytes,
        *,
        with_one: str | None = None,
        without: str | None = None,
    ) -> None:
        """This process changed a session's: it need not get all of them for that.

        Args:
            before: The name of the change before; None: there was none.
            change: Names the change.
            with_one: The URI that is there now.
            without: The URI that is there no more.
        """
        # Nothing is known of a session that never had any, and of one whose own were lost.
        known, uris = self.known(session_id) if before is not None else (None, frozenset[str]())
        if known == before:
            added = {with_one} if with_one is not None else set[str]()
            removed = {without} if without is not None else set[str]()
            self._keep(session_id, change, (uris | added) - removed)

    def _keep(self, session_id: SessionId, change: bytes, found: frozenset[str]) -> frozenset[str]:
        self.forget(session_id)
        if found:
            self._of[session_id] = (change, found)
            self._kept += len(found)
        while self._kept > self._most:
            self.forget(next(iter(self._of)))
        return found

    def clear(self) -> None:
        self._of.clear()
        self._kept = 0

    def forget(self, session_id: SessionId) -> None:
        _, gone = self._of.pop(session_id, NOTHING[:2])
        self._kept -= len(gone)


def record_of(
    answer: ScriptAnswer,
    subscriptions: KnownSubscriptions,
    peers: Peers,
    known: KnownFacts = NOTHING,
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
    client = SessionClient(
        known.peer[0] if known.peer is not None else peers.learn(session_id, peer),
        CurrentSession(*unpacked(current)) if current is not None else None,
        stream_opened=opened is not None,
        subscriptions=(
            known.uris if uris is None else subscriptions.learn(session_id, change or b"", uris)
        ),
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
    place: Position,
    payload: bytes,
    at: float,
    key: str | None,
    origin: str | None,
    event_id: SessionEventId | None = None,
) -> LoggedEvent:
    """Args:
    place: The event is the last one before this position.
    event_id: Its id, if the caller has it.
    """
    source = SessionId(origin) if origin is not None else None
    own = (source, key) if key is not None else None
    return LoggedEvent(event_id or place.event_id(), place.number, payload, at, own, source)


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
