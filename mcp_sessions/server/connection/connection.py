"""A connection as the server knows it, and what came on it.

A *connection* is a WebSocket, a stdio pipe, or a transport-mode session over HTTP (its POSTs
and its GET stream together). A lone HTTP POST is none: it lives as long as its response and
cannot be pushed to. A *request channel* is the way back for one request.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from starlette.datastructures import Headers

from mcp_sessions import method_names
from mcp_sessions.core.addresses import text_of_address
from mcp_sessions.core.conversation_keys import ConversationKey
from mcp_sessions.core.log import Draft, LoggedEvent
from mcp_sessions.core.messages import (
    EXTENSION,
    RequestId,
    encode,
    notification_message,
    plain_draft,
)
from mcp_sessions.core.task import TASK, declares_tasks
from mcp_sessions.errors import Detached, OutcomeUnknown
from mcp_sessions.ids import ConnectionId, FencingEpoch, Position, SessionId
from mcp_sessions.principal import Principal
from mcp_sessions.server.connection.binding import ReadEvents, RequestChannel, Transport
from mcp_sessions.server.connection.joint_admission import JointAdmission
from mcp_sessions.server.reporting.audit import AuditEntry
from mcp_sessions.server.upstream.port import UpstreamPeer
from mcp_sessions.stores.records import Attached, Attachment, CurrentSession, Peer, SessionRecord

Unless = Callable[[], Awaitable[bool]]
"""Whether a message is not for its client. May raise ``StoreUnavailable``: it is asked again."""


def unwatched() -> None:
    """Used where nobody waits for a channel to close."""


class WatchedChannel:
    """Implements the callbacks of every :class:`RequestChannel`: on close, on reopening, and after
    the answer. Has the facts about a way back as most of them are.
    """

    kind: str = "http"
    encode = staticmethod(encode)
    cancels: bool = False
    is_admitted: bool = False
    is_answerable: bool = False

    follows: Callable[[], None] | None = None
    """Called once after the answer, also if there was none."""

    on_closed: Callable[[], None] = staticmethod(unwatched)
    on_reopened: Callable[[], None] = staticmethod(unwatched)
    """Know their request, and so each other's: a channel that is never open again forgets them, or
    both wait for the collector."""

    def run_after_answer(self) -> None:
        follows, self.follows = self.follows, None
        if follows is not None:
            follows()


@dataclass(slots=True, weakref_slot=True, eq=False, repr=False)
class ClientConnection:
    """A connection that can receive messages at any time, as the server knows it. The connection of
    a transport-mode session outlives this process: see
    :class:`~mcp_sessions.server.delivery.stored_connection.StoredConnection`.

    Args:
        transport_session: Over HTTP: its transport-mode session.
        scope: Of a WebSocket: the ASGI scope of its handshake.
    """

    id: ConnectionId
    kind: str
    principal: Principal
    peer: Peer
    transport: Transport
    transport_session: SessionId | None = None
    scope: Mapping[str, Any] | None = None
    attached: dict[SessionId, FencingEpoch] = field(
        init=False, default_factory=dict[SessionId, FencingEpoch]
    )
    """The protocol-mode sessions whose events go here. Over HTTP they are in the store
    (:attr:`SessionClient.carried`), and this stays empty."""

    upstream_peers: dict[SessionId | None, UpstreamPeer] = field(
        init=False, default_factory=dict[SessionId | None, UpstreamPeer]
    )
    """How the wrapped server sees it: once for itself and once per session used here."""

    last_method: str | None = field(init=False, default=None)
    """Of its newest request. None: none came."""

    has_left: bool = field(init=False, default=False)
    """Whether it has ended here, and can bring no more requests."""

    _current: CurrentSession | None = field(init=False, default=None)

    @property
    def is_one_wire(self) -> bool:
        """Whether all its answers go out on one wire, where their ids alone tell them apart. Over
        HTTP each request has a response of its own.
        """
        return self.transport_session is None

    @property
    def is_streaming(self) -> bool:
        return False

    def identify(self, peer: Peer) -> None:
        self.peer = peer

    async def current(self) -> CurrentSession | None:
        """Its current session (ASC2), as it is now. A request asks its
        :class:`Inbound`, which knows it from the request's own admission.
        """
        return self._current

    async def set_current(self, current: CurrentSession | None) -> None:
        self._current = current

    async def sessions(self) -> frozenset[SessionId]:
        """The sessions that its client has here: attached, or current.

        Raises:
            StoreUnavailable: Unknown.
        """
        current = await self.current()
        here = [*self.attached, current.session_id] if current is not None else self.attached
        return frozenset(here)

    async def begin(
        self, session_id: SessionId, attached: Attached, after: Position, read: ReadEvents
    ) -> bool:
        self.attached[session_id] = attached.fencing_epoch
        self.transport.begin(session_id, attached, after, read)
        return True

    async def deliver(
        self, session_id: SessionId, event: LoggedEvent, fencing_epoch: FencingEpoch
    ) -> bool:
        """Hand over one event of a session, in order, if it is attached here with that
        epoch. Never waits for the peer.

        Returns:
            False if what comes before it is gone from the session's window, so that nothing
            more can be handed over without a hole.
        """
        if self.attached.get(session_id) == fencing_epoch:
            self.transport.offer(session_id, event)
        return True

    def appended(
        self, session_id: SessionId, event: LoggedEvent, attachment: Attachment | None
    ) -> None:
        """Forward an event that another process stored, like :meth:`deliver`.

        It is an event of a stream that is watched for this connection.
        """
        fencing_epoch = self.attached.get(session_id, FencingEpoch(-1))
        if attachment == Attachment(self.id, fencing_epoch):
            self.transport.offer(session_id, event)
        else:
            # Whether it was displaced is asked by who reads the log.
            self.transport.check_position(session_id, None)

    def check_position(self, session_id: SessionId, head: Position | None) -> None:
        self.transport.check_position(session_id, head)

    async def send(self, draft: Draft, unless: Unless | None = None) -> None:
        """Hand over a message that is no session event. Never waits for the peer.

        Args:
            draft: The message.
            unless: Says that it is not to be sent.
        """
        if unless is None or not await unless():
            self.transport.send(draft)

    @property
    def knows_extension(self) -> bool:
        capabilities = self.peer.capabilities
        return EXTENSION in (capabilities.get("extensions") or ()) or (
            "experimental/sessions" in (capabilities.get("experimental") or ())
        )

    async def notify_detached(
        self,
        session_id: SessionId,
        reason: Detached,
        *,
        retry_after: float | None = None,
        instance: str | None = None,
    ) -> None:
        """Tell its client that a session left it, if it knows our extension.

        Args:
            session_id: The session.
            reason: Why.
            retry_after: Seconds over which clients come back; None: that is not said.
            instance: How the client that has it now calls itself (TKO12); None: unknown.
        """
        if not self.knows_extension:
            return
        params: dict[str, Any] = {"sessionId": session_id, "reason": reason.value}
        if retry_after is not None:
            params["retryAfter"] = retry_after
        if instance is not None:
            params["instance"] = instance
        message = notification_message(method_names.DETACHED, params)
        await self.send(plain_draft(message))

    async def withdraw(
        self,
        session_id: SessionId,
        fencing_epoch: FencingEpoch | None = None,
        *,
        has_ended: bool = False,
    ) -> None:
        """Drop unsent events of a session that is no longer attached here.

        Args:
            session_id: The session.
            fencing_epoch: Do nothing if it is attached here anew, with a higher one.
            has_ended: See :meth:`Transport.withdraw`.
        """
        self.transport.withdraw(session_id, has_ended=has_ended)


class NotChanged(Enum):
    HERE = "here"


@dataclass(slots=True, eq=False, repr=False)
class HttpFacts:
    request: Any = None
    """The handlers' ``ctx.request_context.request``: a Starlette ``Request``."""

    session_header: str | None = None
    """The POST's ``Mcp-Session-Id``."""

    resumes_stream: bool = False
    """The POST carried ``Last-Event-ID``."""

    record: SessionRecord | None = None
    """Its connection's session, as this very message was admitted to it. Older values of a
    connection's stored facts may be wrong.
    """

    joint: JointAdmission | None = None
    """How it was admitted to its connection, and to the current session with that."""


NOT_HTTP = HttpFacts()
"""For a message that came on a pipe or a WebSocket, or through another process."""


@dataclass(slots=True)
class Inbound:
    principal: Principal
    peer: Peer
    connection: ClientConnection | None
    """None: a lone POST."""

    channel: RequestChannel
    http: HttpFacts = NOT_HTTP
    changed_current: CurrentSession | NotChanged | None = field(init=False, default=NotChanged.HERE)
    """The connection's current session after this message."""

    conversation: ConversationKey | None = field(init=False, default=None)
    """Its session is that of the conversation with this key."""

    audit: AuditEntry | None = field(init=False, default=None)
    """None: what becomes of it is not written down."""

    @property
    def asked(self) -> Peer | None:
        """The peer that can answer questions of the handler; None: there is none."""
        return self.peer if self.connection is not None or self.channel.is_answerable else None

    @property
    def is_alone(self) -> bool:
        """Whether each message may come from another client, as far as the server knows."""
        return self.connection is None or self.peer.modern

    @property
    def scope(self) -> Mapping[str, Any] | None:
        """The ASGI scope of the HTTP request, or WebSocket, that it came by; None: a pipe."""
        if self.http.request is not None:
            return self.http.request.scope
        return self.connection.scope if self.connection is not None else None

    @property
    def address(self) -> str | None:
        """The address of the client, behind proxies that are trusted; None: it has none."""
        return text_of_address(self.scope)

    @property
    def headers(self) -> Mapping[str, str]:
        """Return the headers that came with the message, with lower-case names.

        If a name is there twice, the first one counts.
        """
        return Headers(raw=self.scope["headers"] if self.scope else [])

    @property
    def transport(self) -> str:
        return self.connection.kind if self.connection is not None else self.channel.kind

    async def current(self) -> CurrentSession | None:
        """The connection's current session (ASC2)."""
        if not isinstance(self.changed_current, NotChanged):
            return self.changed_current
        if self.http.record is not None:
            return self.http.record.client.current
        return await self.connection.current() if self.connection is not None else None

    async def set_current(self, current: CurrentSession | None) -> None:
        if self.connection is None:
            raise AssertionError("only a connection has a current session")
        await self.connection.set_current(current)
        self.changed_current = current

    async def make_current(self, session_id: SessionId, fencing_epoch: FencingEpoch) -> None:
        """Begin rule 2. In the modern era every request names its session."""
        if self.connection is not None and not self.peer.modern:
            await self.set_current(CurrentSession(session_id, fencing_epoch))

    def belongs_to(self, conversation: ConversationKey) -> None:
        self.conversation = conversation

    def audited(self, entry: AuditEntry | None) -> AuditEntry | None:
        self.audit = entry
        return entry

    def acknowledged(self) -> None:
        """Note that the request has begun, or is not answered by :meth:`answer`."""
        if self.audit is not None:
            self.audit.write(is_awaited=True)

    def of_its_era(self, result: dict[str, Any]) -> dict[str, Any]:
        """A result that may have been made for another request, also one of the other era: each
        result of the modern era says what type it is.

        Raises:
            OutcomeUnknown: It asks for input, which no result of the handshake era does; or it is a
                task, and this request's client did not declare tasks.
        """
        kind, peer = result.get("resultType"), self.peer
        if kind == "input_required" and not peer.modern:
            raise OutcomeUnknown
        if kind == TASK and not (peer.modern and declares_tasks(peer.capabilities)):
            raise OutcomeUnknown
        if not self.peer.modern or "resultType" in result:
            return result
        return {**result, "resultType": "complete"}

    def error(self, request_id: RequestId, error: Mapping[str, Any]) -> bytes:
        if self.audit is not None:
            self.audit.is_error(error)
        return self.channel.encode({"jsonrpc": "2.0", "id": request_id, "error": error})

    def notification(self, method: str, params: Mapping[str, Any] | None) -> bytes:
        message: dict[str, Any] = {"jsonrpc": "2.0", "method": method}
        if params is not None:
            message["params"] = params
        return self.channel.encode(message)
