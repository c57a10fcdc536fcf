"""The contract of a session store: what must be atomic, and what survives.

A store remembers sessions, their event logs, subscriptions, keyed requests and data. It
knows nothing of connections but their ids, and nothing of MCP. Every method takes ``now``,
seconds since 1970, so that time can be passed in. A store that processes share judges by a clock
of its own: a process whose clock is set wrong must not end what belongs to others.

Each method is one atomic step: two callers never see each other's half. Nothing is written
after a session has ended; a late write is refused and never brings the session back.

There is no ``update(session)``. A whole-session write would let a slow process overwrite
what a faster one stored; each change has its own method instead.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, NamedTuple, Protocol

from mcp_sessions.core.log import Draft, LoggedEvent
from mcp_sessions.core.messages import EventTemplate
from mcp_sessions.core.request_keys import Begun
from mcp_sessions.errors import Refusal, SessionsError
from mcp_sessions.ids import (
    EVENTS,
    GET_STREAM,
    ConnectionId,
    FencingEpoch,
    Position,
    RequestKey,
    SessionEventId,
    SessionId,
    StreamName,
)
from mcp_sessions.policy import SessionPolicy
from mcp_sessions.principal import Principal


class Mode(Enum):
    """How a session is named on the wire. It never changes (SES1)."""

    PROTOCOL = "protocol"
    """Made by ``session/start`` or ``sessions/create``."""

    TRANSPORT = "transport"
    """Made by ``initialize`` over Streamable HTTP, named by ``Mcp-Session-Id``."""

    CONVERSATION = "conversation"
    """Made by ACP's ``session/new``. It never expires, and its event log has no bound."""


@dataclass(frozen=True, slots=True)
class Attachment:
    """Which connection hears a session's events."""

    connection_id: ConnectionId
    fencing_epoch: FencingEpoch


@dataclass(frozen=True, slots=True)
class Peer:
    """What a handshake told about a client; enough to serve it in another process."""

    protocol_version: str
    initialize_params: Mapping[str, Any] | None = None
    """Of the params of ``initialize`` what ``core/client_description.py`` keeps, as it was
    sent; None: no handshake. Of a modern-era client: what its request's envelope says, under
    the same names."""

    modern: bool = False
    """It speaks the modern era, where a server asks its client nothing."""


@dataclass(frozen=True, slots=True)
class CurrentSession:
    """A connection's current session (ASC2)."""

    session_id: SessionId
    fencing_epoch: FencingEpoch
    """The session's fencing epoch when it became current here. A higher one at the session
    means that another connection displaced this one."""


@dataclass(slots=True)
class SessionRecord:
    """What is known of one session. Read it; change it by the store's methods only."""

    session_id: SessionId = field(repr=False)
    mode: Mode
    principal: Principal
    """Its maker; ``principal.scopes`` are the scopes it was made with."""

    created_at: float
    expires_at: float
    """When it expires if nothing more happens: the earlier of idle and absolute."""

    ends_at: float
    """When its absolute lifetime is over. Of a conversation both are infinite."""

    peer: Peer | None = None
    fencing_epoch: FencingEpoch = FencingEpoch(0)
    attachment: Attachment | None = None
    current: CurrentSession | None = None
    """Transport-mode: its current session."""

    stream_opened: bool = False
    """Transport-mode: its GET stream was open at least once."""

    carried: Mapping[SessionId, FencingEpoch] = field(
        default_factory=dict[SessionId, FencingEpoch], repr=False
    )
    """Transport-mode: the sessions whose events go on its GET stream. Replaced as a whole,
    never changed in place."""

    subscriptions: frozenset[str] = field(default=frozenset())
    """Resource URIs."""

    lists: frozenset[str] | None = None
    """The list changes that its listen stream asked for (``tools``, ``prompts``,
    ``resources``); None: all, as long as it never listened."""

    waits_from: SessionEventId | None = None
    """Where its next listen stream starts; None: at the head."""

    state: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """The application's ``session.state``. Replaced as a whole, never changed in place."""

    state_version: int = 0
    """Grows with every change of ``state``."""


@dataclass(frozen=True, slots=True)
class Appended:
    """A stored event, and who was attached in the same step."""

    event: LoggedEvent
    attachment: Attachment | None
    replaced: bool = False
    """An older event with its coalescing key is gone for it."""


@dataclass(frozen=True, slots=True)
class ServerChange:
    """A resource or a list of the server is another one: what each entitled session is told."""

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
    """What goes on the GET stream of a transport-mode session."""

    @property
    def size(self) -> int:
        """Bytes of one event, about."""
        return len(self.bare.before)


class Told(NamedTuple):
    """A session that has a change: the event that it became, and who was attached in the same
    step (:class:`Appended`).
    """

    session_id: SessionId
    stream: StreamName
    event: LoggedEvent
    attachment: Attachment | None
    replaced: bool


class Audience(NamedTuple):
    """A page of the sessions that a change may be for."""

    session_ids: Sequence[SessionId]
    following: str | None
    """Where the next page begins; None: there is none."""


@dataclass(frozen=True, slots=True)
class Attached:
    """The outcome of an attach: one atomic step."""

    fencing_epoch: FencingEpoch
    head: SessionEventId
    previous: Attachment | None
    """Who heard the session before; None: nobody."""

    replay: Sequence[LoggedEvent]
    """The events of (position, head], whole and in order; empty if ``refusal``."""

    refusal: Refusal | None
    """Why nothing is replayed; None: everything after the position is in ``replay``."""

    scopes: frozenset[str]
    """The scopes that the session was made with."""

    waits_from: SessionEventId | None = None
    """Where its next listen stream was to start; from now on nowhere but at the head. Taken
    in the same step, so that of two listen streams opened at once one replays (only by a
    connection: with none the record keeps it)."""


@dataclass(frozen=True, slots=True)
class Admitted:
    """A request may be served; its session's idle time starts anew."""

    record: SessionRecord
    key: Begun | None = None
    """What is known of its request key; None: it has none."""

    outcome: bytes | None = None
    """The kept answer, if ``key`` is ``ANSWERED``."""

    runner: str | None = None
    """Which process runs it, if ``key`` is ``RUNNING``."""

    run: str | None = None
    """Which :attr:`KeyUse.run` of its runner recorded the key, if ``key`` is ``RUNNING``; empty
    if that said nothing."""

    displaced: bool = False
    """The fencing epoch is another one now. Nothing was changed."""


@dataclass(frozen=True, slots=True)
class Relayed:
    """What became of a session event on its way to a connection's GET stream."""

    event: LoggedEvent | None = None
    """The entry it became; None: it is there already, or the stream does not carry it (any
    more), or ``missing_after`` is set."""

    missing_after: Position | None = None
    """Not stored: an older event of that session has to be relayed first. The position of
    the last one that was."""


@dataclass(frozen=True, slots=True)
class KeyUse:
    """The request key of a request that is to be admitted."""

    key: RequestKey
    digest: bytes
    runner: str
    scopes: frozenset[str] = frozenset()
    """Those of the credential that sent it. Whoever has fewer than who began the key is not
    told its answer (SEC3)."""

    run: str = ""
    """Names this sending among all that its runner admits: the reply to an admission may be
    lost, and the key be recorded for a handler that never starts."""

    instead_of: str = ""
    """A run that is known to have begun nothing, and never will: if it has the key, and nothing
    was kept of it, this use has it now, as if it were the first. Empty: none."""


@dataclass(frozen=True, slots=True)
class Data:
    """A session's ``data`` and the version that a replacement must name."""

    value: dict[str, Any]
    version: int


class StateConflict(SessionsError):
    """A session's state is another one than the caller looked at; nothing was changed."""

    def __init__(self, newest: SessionRecord) -> None:
        super().__init__()
        self.newest = newest
        """The session as it is."""

    def __str__(self) -> str:
        return "session.state was changed elsewhere meanwhile"


class ExchangeListener(Protocol):
    """What a process hears from the others that share its store. Called in the event loop;
    nothing here may wait.
    """

    def on_message(self, message: bytes) -> None:
        """Another process sent this."""
        ...

    def on_event(
        self,
        session_id: SessionId,
        stream: StreamName,
        event: LoggedEvent,
        attachment: Attachment | None,
    ) -> None:
        """An event was appended to a watched stream, by whichever process, this one too.

        Args:
            attachment: Who was attached in the same step (:class:`Appended`): a connection
                that was displaced meanwhile hands the event over to nobody.
        """
        ...

    def on_gap(self) -> None:
        """Messages may have been lost: whatever is watched has to be read again."""
        ...


class Exchange(Protocol):
    """How the processes that share a store reach each other.

    Every message arrives at most once, and may be lost: whoever reads a stream notices by
    its position and reads the store. Every method may raise
    :class:`~mcp_sessions.errors.StoreUnavailable`.
    """

    async def join(self, process: str, listener: ExchangeListener) -> None:
        """Begin to hear, and to be alive for the others. Called once, after ``open``."""
        ...

    async def leave(self) -> None:
        """Be alive no more; the others see it at once."""
        ...

    async def send(self, message: bytes, *, to: str | None = None) -> None:
        """Send to one process, or to all others (None)."""
        ...

    async def watch(self, session_id: SessionId, stream: StreamName) -> None:
        """Hear what is appended to a stream from now on: what is appended after this returns
        is heard. Watching it twice is watching it once.
        """
        ...

    async def unwatch(self, session_id: SessionId, stream: StreamName) -> None:
        """Hear of a stream no more."""
        ...

    async def is_alive(self, process: str) -> bool:
        """Whether that process joined and neither left nor died; a process that died is
        noticed within ``LIVENESS`` seconds.
        """
        ...


TOLD_AT_ONCE = 16
"""Sessions that one call tells of a change, at the most: a store does them in a millisecond or
two, in which it serves nobody else."""

LIVENESS = 10.0
"""Seconds after which a process that gave no sign of life is taken for dead."""


class SessionStore(Protocol):
    """Where sessions are remembered. See the module's first lines for what always holds.

    Every method may raise :class:`~mcp_sessions.errors.StoreUnavailable`: whether a write
    happened is then unknown.
    """

    name: str
    """For people: ``memory``, ``sqlite``, ``redis``."""

    survives_process: bool
    """Whether sessions outlive the process that made them."""

    remembers: bool
    """False: it stores nothing, and ``sessions/create`` with ``state`` is all there is."""

    exchange: Exchange | None
    """How the processes that share it reach each other; None: one process has it alone."""

    async def open(self, policy: SessionPolicy) -> None:
        """Connect, and serve within the limits of ``policy``. Called once, first."""
        ...

    async def close(self) -> None:
        """Let go of every resource. Nothing is called after it."""
        ...

    async def create(
        self,
        mode: Mode,
        principal: Principal,
        *,
        peer: Peer | None,
        now: float,
    ) -> SessionRecord:
        """Make a session with a new id, nobody attached, an empty log and no subscriptions.

        Raises:
            LimitReached: ``max_sessions`` or ``max_sessions_per_principal`` are open
                already, or ``peer`` has more than ``max_client_bytes`` (``stores/limits.py``).
                Nothing was made.
        """
        ...

    async def load(self, session_id: SessionId, *, now: float) -> SessionRecord | None:
        """The session, or None if it is unknown, ended or past its deadline, which is not
        moved.
        """
        ...

    async def admit(
        self,
        session_id: SessionId,
        principal: Principal,
        *,
        mode: Mode,
        now: float,
        held: bool = False,
        fencing_epoch: FencingEpoch | None = None,
        key: KeyUse | None = None,
    ) -> Admitted | None:
        """Let a request of ``principal`` use the session: alive, owned, key recorded,
        deadline moved, in one step.

        Args:
            mode: The session's mode; in a session of the other one nothing is changed, and
                the caller sees it from the record.
            held: The caller is at work on this session, so it cannot be idle.
            fencing_epoch: The session's, as the caller knows it; if it is another now,
                nothing is changed and the answer says ``displaced``.
            key: Record this request key, or say what is known of it.

        Returns:
            None if the session is unknown, ended, expired or somebody else's, or if one of
            the two modes is ``CONVERSATION`` and the other is not; then nothing was
            changed, not even the deadline (SES10).
        """
        ...

    async def touch(self, session_ids: Collection[SessionId], *, now: float) -> None:
        """Move the idle deadline of these sessions, those that still live."""
        ...

    async def end(self, session_id: SessionId) -> SessionRecord | None:
        """End the session for ever and forget every trace of it: logs, subscriptions, keys,
        data. The record as it was, or None if it was not there (END2).
        """
        ...

    async def expire(
        self, *, now: float, held: Collection[SessionId], limit: int
    ) -> Sequence[SessionRecord]:
        """End up to ``limit`` sessions whose deadline has passed, but none of ``held``
        whose absolute lifetime is not over; the records as they were.

        A session that an operator ended beside this process is among them, once: so that
        what is at work for it here is ended, too.
        """
        ...

    async def evict(
        self,
        *,
        now: float,
        unused_for: float,
        held: Collection[SessionId],
        limit: int,
        opened: bool,
    ) -> Sequence[SessionRecord]:
        """End up to ``limit`` of the transport-mode sessions that are nobody's
        (:data:`~mcp_sessions.principal.ANONYMOUS`) and hold nothing: no subscription, no current
        session, no session that is attached there. The records as they were.

        First go those that were used for no longer than ``unused_for`` after they were made;
        of both kinds those that were not used for longest.

        Args:
            now: Seconds since 1970.
            unused_for: Seconds that nobody used it. Of one whose lifetime ends before its idle
                time that is not known; it stays.
            held: Never one of these.
            limit: How many at the most.
            opened: Those too whose GET stream was open once: the caller holds those where it
                still is, and nobody else serves them.
        """
        ...

    async def append(
        self,
        session_id: SessionId,
        draft: Draft,
        *,
        now: float,
        stream: StreamName = EVENTS,
    ) -> Appended | None:
        """Store ``draft`` as the newest event of a stream; make the stream if it is new.

        The id comes from the stream's own counter, in the same step, so that two processes
        can neither repeat nor skip one (EVT7).

        Returns:
            None if the session is unknown, ended or expired. A late append never brings it
            back (SES18).
        """
        ...

    async def renew(self, session_id: SessionId) -> None:
        """Make a protocol-mode session's events anew, under another epoch: what it had is gone,
        and every position from before is refused. For a log that an event is missing in.
        Nothing happens to a session of another mode.
        """
        ...

    async def audience(self, change: ServerChange, after: str | None) -> Audience:
        """Sessions that a change may be for, in pages of some hundred: :meth:`tell` decides.

        Who is entitled from the first page to the last is in one of them, or in several; who
        was not at any time is in none, or is passed over by :meth:`tell`.

        Args:
            after: Where this page begins (:attr:`Audience.following`); None: the first one.
        """
        ...

    async def tell(
        self,
        session_ids: Sequence[SessionId],
        change: ServerChange,
        *,
        now: float,
        again: bool = False,
    ) -> Sequence[Told]:
        """Append a change to those of these sessions that are entitled to it, as
        :meth:`append` does; who has it now, in the order of ``session_ids``.

        A protocol-mode session is told by ``change.event`` if it is subscribed to
        ``change.uri``, or if its :attr:`SessionRecord.lists` have ``change.listed``; a
        transport-mode session by ``change.bare`` on its GET stream if it is subscribed, or
        carries no session; a conversation by nothing. Whether it is entitled is asked in the
        step that appends. Each session is one step at least.

        Args:
            session_ids: ``TOLD_AT_ONCE`` at the most, each of them once.
            again: They may have it already: a call before ended in ``StoreUnavailable``.
                Where that may have stored something, who has it is not given it again, and
                is in the answer as if this call had stored it.

        Raises:
            StoreUnavailable: Unknown which of them have it.
        """
        ...

    async def read(
        self,
        session_id: SessionId,
        after: str | None,
        *,
        now: float,
        stream: StreamName = EVENTS,
        limit: int | None = None,
    ) -> tuple[Sequence[LoggedEvent], Refusal | None]:
        """The events of a stream after a position, whole and in order, or nothing and why.

        A stream that is not there answers ``UNKNOWN_POSITION``, whatever was asked.

        Args:
            limit: Read a page of at most this many, which ends with the event that makes
                its payloads ``core.log.PAGE_BYTES`` or more; go on from the last one's id,
                until a page is empty.
        """
        ...

    async def head(self, session_id: SessionId, *, stream: StreamName = EVENTS) -> Position | None:
        """The position of who has seen everything of a stream; None if it is not there."""
        ...

    async def open_stream(self, session_id: SessionId, stream: StreamName) -> Position | None:
        """Make a stream if it is new; its head. None if the session is not there."""
        ...

    async def drop_stream(self, session_id: SessionId, stream: StreamName) -> None:
        """Forget a stream and everything in it."""
        ...

    async def drop_origin(
        self,
        session_id: SessionId,
        origin: SessionId,
        *,
        stream: StreamName = GET_STREAM,
        fencing_epoch: FencingEpoch | None = None,
    ) -> None:
        """Remove one session's events from a connection's stream, which carries that session
        no longer.

        Args:
            fencing_epoch: Do nothing if it carries that session with a higher epoch: who
                displaced it comes too late, and it is attached there anew. None: whatever.
        """
        ...

    async def carry(
        self,
        connection: SessionId,
        origin: SessionId,
        fencing_epoch: FencingEpoch,
        after: Position,
    ) -> bool:
        """From now on the GET stream of the transport-mode session ``connection`` takes the
        events of ``origin``, attached there with that epoch, that follow ``after``. What the
        stream has of that session by an older epoch is removed, as :meth:`drop_origin` does.
        Told twice of one epoch it goes on where it is: what was relayed is not relayed again.

        Returns:
            False if ``connection`` is unknown, ended or expired, or carries that session
            with a higher epoch already.
        """
        ...

    async def relay(
        self,
        connection: SessionId,
        origin: SessionId,
        fencing_epoch: FencingEpoch,
        event: LoggedEvent,
        *,
        now: float,
        skips: bool = False,
    ) -> Relayed:
        """Append an event of ``origin`` to the GET stream of ``connection``, as
        :meth:`append` does, under its coalescing key and with ``origin``: once, in the order
        of its own log, and only while the stream carries that session with that epoch.

        Processes that store events of one session at the same time relay them in any order;
        this is where they fall into line again.

        Args:
            skips: The events between the last one relayed and this one were replaced by
                newer ones: the caller read the log, and relays all that is left of it.
        """
        ...

    async def attach(
        self,
        session_id: SessionId,
        connection_id: ConnectionId | None,
        *,
        now: float,
        position: str | None = None,
        only_if_free: bool = False,
    ) -> Attached | None:
        """Make this the session's one connection; raise its fencing epoch.

        Attach, head and range are one step: what is appended later is after ``head``.

        Args:
            connection_id: The connection; None: displace whoever is there and let the
                events wait (there is no stream to send them on).
            position: What the client says it saw last.
            only_if_free: Do nothing and answer None if another connection is attached.

        Returns:
            None if the session is unknown, ended or expired, or not free.
        """
        ...

    async def detach(self, session_id: SessionId, fencing_epoch: FencingEpoch) -> bool:
        """Let go of the session, if the attachment with that epoch still has it.

        A late close of a displaced connection changes nothing (TKO9).
        """
        ...

    async def set_current(self, session_id: SessionId, current: CurrentSession | None) -> None:
        """Remember a transport-mode session's current session."""
        ...

    async def mark_stream_opened(self, session_id: SessionId) -> bool:
        """Remember that the GET stream was open; whether this was the first time."""
        ...

    async def subscribe(self, session_id: SessionId, uri: str) -> bool:
        """Add a resource subscription; False if the session is not there.

        Raises:
            LimitReached: It has ``max_subscriptions`` others already, the URI has more than
                ``max_uri_bytes``, or all together ``max_subscription_bytes``. Nothing was added.
        """
        ...

    async def unsubscribe(self, session_id: SessionId, uri: str) -> bool:
        """Remove a resource subscription; False if the session is not there."""
        ...

    async def subscribers(self, uri: str) -> Sequence[SessionId]:
        """The sessions of both modes that subscribed to a resource."""
        ...

    async def all_sessions(self, principal: Principal | None = None) -> Sequence[SessionRecord]:
        """Every live session, or every one of a principal."""
        ...

    async def set_filter(
        self, session_id: SessionId, uris: frozenset[str], lists: frozenset[str]
    ) -> bool:
        """Replace the session's subscriptions by a listen stream's filter; False if the
        session is not there.

        Raises:
            LimitReached: As :meth:`subscribe`; nothing was replaced.
        """
        ...

    async def set_waits_from(self, session_id: SessionId, event_id: SessionEventId | None) -> None:
        """Remember where the session's next listen stream starts."""
        ...

    async def change_state(
        self,
        session_id: SessionId,
        changed: Mapping[str, Any],
        removed: Collection[str],
        *,
        expected_version: int | None = None,
    ) -> SessionRecord | None:
        """Apply one request's changes to the newest state, key by key, and raise its
        version; the session as it is then, or None if it is not there.

        Args:
            expected_version: Of the state that the caller looked at; None: whichever it is.

        Raises:
            StateConflict: The state's version is another one. Nothing was changed.
            LimitReached: It would have more than ``max_state_bytes``. Nothing was changed.
        """
        ...

    async def finish_request(
        self, session_id: SessionId, key: RequestKey, outcome: bytes | None, *, now: float
    ) -> bool:
        """Keep the outcome of a keyed request (None: unknown); whether it was kept."""
        ...

    async def load_data(self, session_id: SessionId) -> Data | None:
        """The session's data, a copy; None if the session is not there."""
        ...

    async def replace_data(
        self, session_id: SessionId, value: Mapping[str, Any], *, expected_version: int
    ) -> bool:
        """Replace the session's data if its version still is ``expected_version``.

        Raises:
            LimitReached: It is more than ``max_data_bytes``. Nothing was replaced.
        """
        ...
