"""Define the records of a store, and the arguments and results of its methods: plain data.

Code that needs a session's fields imports this module. Code that calls a store imports its contract
(``contract.py``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import lru_cache
from typing import Any, NamedTuple

from mcp_sessions.core.life import Life
from mcp_sessions.core.log import Draft, LoggedEvent
from mcp_sessions.core.messages import EventTemplate
from mcp_sessions.core.request_keys import Begun, KeyUse
from mcp_sessions.core.states import Mode
from mcp_sessions.errors import Refusal
from mcp_sessions.ids import (
    EVENTS,
    GET_STREAM,
    ConnectionId,
    FencingEpoch,
    Position,
    SessionEventId,
    SessionId,
    StreamName,
)
from mcp_sessions.principal import Principal


@dataclass(frozen=True, slots=True)
class Attachment:
    connection_id: ConnectionId
    fencing_epoch: FencingEpoch


def attachment_of(
    connection_id: ConnectionId | None, fencing_epoch: FencingEpoch
) -> Attachment | None:
    """Return the attachment of that epoch: the newest is the only one, and has the connection."""
    return Attachment(connection_id, fencing_epoch) if connection_id is not None else None


@dataclass(frozen=True, slots=True)
class Peer:
    """A client's description in its handshake; enough to serve it in another process."""

    protocol_version: str
    initialize_params: Mapping[str, Any] | None = None
    """The params of ``initialize`` that ``core/client_description.py`` keeps, as they were sent.

    For a modern-era client: its request's envelope, under the same names. None: no handshake.
    """

    modern: bool = False
    """It speaks the modern era, where a server asks its client nothing."""

    @property
    def capabilities(self) -> Mapping[str, Any]:
        """What the client declared, in its handshake or with its request."""
        # As members_of, which would be one call more for each request.
        declared: Mapping[str, Any] | None = (self.initialize_params or {}).get("capabilities")
        return declared if isinstance(declared, dict) else {}


@dataclass(frozen=True, slots=True)
class CurrentSession:
    """A connection's current session (ASC2)."""

    session_id: SessionId
    fencing_epoch: FencingEpoch
    """The session's fencing epoch when it became current here. A higher one at the session
    means that another connection displaced this one."""


# Those of all sessions that have none: there may be many.
_NONE_CARRIED: Mapping[SessionId, FencingEpoch] = {}


@dataclass(slots=True)
class SessionClient:
    peer: Peer | None = None
    current: CurrentSession | None = None
    """Transport-mode: its current session."""

    stream_opened: bool = False
    """Transport-mode: its GET stream was open at least once."""

    carried: Mapping[SessionId, FencingEpoch] = field(
        default_factory=lambda: _NONE_CARRIED, repr=False
    )
    """Transport-mode: the sessions whose events go on its GET stream. Replaced as a whole,
    never changed in place."""

    subscriptions: frozenset[str] = frozenset()
    """Resource URIs."""

    lists: frozenset[str] | None = None
    """The list changes that its listen stream asked for (``tools``, ``prompts``,
    ``resources``); None: all, as long as it never listened."""

    waits_from: SessionEventId | None = None
    """The start of its next listen stream; None: at the head."""

    log_level: str | None = None
    """The level of its last ``logging/setLevel``.

    None: it sent none, or its server needs no reminder.
    """


class StoredState(NamedTuple):
    """The application's ``session.state``. Replaced as a whole, never changed in place."""

    values: Mapping[str, Any]
    version: int
    """Grows with every change."""


NO_STATE = StoredState({}, 0)


@dataclass(slots=True)
class SessionRecord:
    """The stored facts of one session. Read it; change it by the store's methods only."""

    session_id: SessionId = field(repr=False)
    mode: Mode
    principal: Principal
    """Its maker; ``principal.scopes`` are the scopes it was made with."""

    life: Life
    client: SessionClient = field(default_factory=SessionClient)
    fencing_epoch: FencingEpoch = FencingEpoch(0)
    attachment: Attachment | None = None
    state: StoredState = NO_STATE
    story: str = field(default="", compare=False, repr=False)
    """What happened to it (``core/story.py``): in the record of a session that ended, and of a
    whole one. Other records may leave it out."""

    is_new: bool = field(init=False, default=False, compare=False)
    """In the answer of ``create``: that call made the session."""

    @property
    def expires_text(self) -> str:
        """``expiresAt``: ISO 8601, UTC, in whole seconds, never later than the truth."""
        return _whole_second(int(self.life.expires_at))


@lru_cache(maxsize=1_024)
def _whole_second(seconds: int) -> str:
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


@dataclass(frozen=True, slots=True)
class Appended:
    event: LoggedEvent
    attachment: Attachment | None
    replaced: bool = False
    """An older event with its coalescing key is gone for it."""


@dataclass(frozen=True, slots=True)
class ServerChange:
    """A change of a resource or a list of the server, with the event for each entitled session."""

    id: str
    """Names it among all changes of all processes: 1 to 64 visible ASCII characters."""

    at: float
    """When it was announced, in seconds since 1970."""

    uri: str | None
    """The resource that was updated; None: a list changed."""

    listed: str | None
    """The list that changed: ``tools``, ``prompts`` or ``resources``; None: a resource did."""

    event: EventTemplate
    """The event of a protocol-mode session."""

    bare: Draft
    """The event for the GET stream of a transport-mode session."""

    def draft_for(
        self, mode: Mode, session_id: SessionId, *, again: bool = False
    ) -> tuple[StreamName, Draft]:
        is_bare = mode is Mode.TRANSPORT
        draft = replace(self.bare) if is_bare else self.event.draft(session_id)
        draft.name, draft.since = self.id, self.at if again else None
        return GET_STREAM if is_bare else EVENTS, draft


class AppendedChange(NamedTuple):
    """A session that has a change: the event that it became, and who was attached in the same
    step (:class:`Appended`).
    """

    session_id: SessionId
    stream: StreamName
    event: LoggedEvent
    attachment: Attachment | None
    replaced: bool


class StreamHead(NamedTuple):
    lives: bool
    position: Position | None
    """The position of a reader that has the whole stream; None: there is no such stream."""

    carries: bool = False
    """Its session is a connection that carries others (:attr:`SessionRecord.carried`)."""


class Audience(NamedTuple):
    session_ids: Sequence[SessionId]
    following: str | None
    """The start of the next page; None: there is none."""


class SessionPage(NamedTuple):
    records: Sequence[SessionRecord]
    following: str | None
    """The start of the next page; None: there is none."""


@dataclass(frozen=True, slots=True)
class Attached:
    fencing_epoch: FencingEpoch
    head: SessionEventId
    previous: Attachment | None
    """The attachment before; None: there was none."""

    replay: Sequence[LoggedEvent]
    """The events of (position, head], whole and in order; empty if ``refusal``."""

    refusal: Refusal | None
    """Why nothing is replayed; None: everything after the position is in ``replay``."""

    scopes: frozenset[str]
    """The scopes that the session was made with."""

    waits_from: SessionEventId | None = None
    """The start of its next listen stream until now. From now on it is the head.

    The value is taken in the same step: of two listen streams opened at once only one replays. An
    attach without a connection leaves the value in the record.
    """


@dataclass(frozen=True, slots=True)
class CurrentUse:
    """The expected current session of a connection. A request on the connection enters it, too."""

    session_id: SessionId
    held: bool = False
    """The caller runs a request of it."""

    key: KeyUse | None = None
    """The request's key."""


class Admitted(NamedTuple):
    """A request may be served; its session's idle time starts anew."""

    record: SessionRecord
    key: Begun | None = None
    """The state of its request key; None: it has none."""

    outcome: bytes | None = None
    """The kept answer, if ``key`` is ``ANSWERED``."""

    runner: str | None = None
    """The process that runs it, if ``key`` is ``RUNNING``."""

    run: str | None = None
    """The :attr:`KeyUse.run` of its runner that recorded the key, if ``key`` is ``RUNNING``.

    Empty: the runner gave none.
    """

    displaced: bool = False
    """The fencing epoch is another one now. Nothing was changed."""

    current: Admitted | None = None
    """As what the request was admitted to the session's current one in the same step; None: it was
    not, and nothing was changed there."""


@dataclass(frozen=True, slots=True)
class Relayed:
    event: LoggedEvent | None = None
    """The entry it became; None: it is there already, or the stream does not carry it (any
    more), or ``missing_after`` is set."""

    missing_after: Position | None = None
    """Not stored: an older event of that session has to be relayed first. The position of
    the last one that was."""


@dataclass(frozen=True, slots=True)
class Data:
    value: dict[str, Any]
    version: int
