"""A connection that carries everything both ways: what WebSocket and stdio have in common.

Both eras. Answers, notifications and session events go out on one buffer, in the order in
which they were decided: an answer to ``session/resume`` before the first replayed event.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Any

from mcp_sessions import metrics
from mcp_sessions.core.listening import LISTEN
from mcp_sessions.core.log import Draft, LoggedEvent
from mcp_sessions.core.messages import (
    Answer,
    Malformed,
    Notification,
    NotNamed,
    Request,
    RequestId,
    decode,
    error_body,
    error_message,
    id_of,
    named_session,
    parse,
    wire_error,
)
from mcp_sessions.errors import (
    INTERNAL_ERROR,
    INVALID_REQUEST,
    PARSE_ERROR,
    InvalidParams,
    InvalidReason,
    InvalidRequest,
    SessionNotFound,
    StoreUnavailable,
    WireError,
)
from mcp_sessions.ids import ConnectionId, FencingEpoch, Position, SessionId
from mcp_sessions.principal import Principal
from mcp_sessions.security import mint_connection_id
from mcp_sessions.server.connection import Inbound, ReadEvents
from mcp_sessions.server.dispatch.session_methods import SESSION_METHODS
from mcp_sessions.server.requests.runner import STORE_AWAY
from mcp_sessions.server.upstream.modern_rules import ModernRules
from mcp_sessions.server.upstream.port import UpstreamError, UpstreamPeer
from mcp_sessions.stores.records import Attached, Attachment, CurrentSession, Peer
from mcp_sessions_transports.duplex_listens import DuplexListens
from mcp_sessions_transports.handler_queue import HandlerQueue
from mcp_sessions_transports.http.sse import LogFeed
from mcp_sessions_transports.outbox import Outbox
from mcp_sessions_transports.served import DEFAULT_VERSION, Served

logger = logging.getLogger(__name__)


class DuplexChannel:
    """A :class:`~mcp_sessions.server.connection.RequestChannel` on a shared connection."""

    close_stream: Callable[[], Awaitable[None]] | None = None

    def __init__(self, connection: DuplexConnection, *, lasts: bool = False) -> None:
        """Take what it works with.

        Args:
            lasts: The answer comes when the connection ends, and not before.
        """
        self._connection = connection
        self.lasts = lasts
        self.on_closed: Callable[[], None] | None = None
        self.on_reopened: Callable[[], None] | None = None
        self._callbacks: list[Callable[[], None]] | None = None

    @property
    def is_open(self) -> bool:
        """See :class:`RequestChannel`."""
        return not self._connection.outbox.closed

    async def emit(self, message: bytes, key: str | None = None) -> None:
        """See :class:`RequestChannel`."""
        self._connection.outbox.push(message)
        await self._connection.outbox.drain()

    async def answer(
        self, message: bytes, *, code: int | None = None, is_away: bool = False
    ) -> None:
        """See :class:`RequestChannel`."""
        self._connection.channels.pop(self, None)
        self._connection.outbox.push(message)
        for callback in self._callbacks or ():
            callback()
        # With the answer: a client that reads both knows that what it asks next was not asked.
        self._connection.close_if_quiet()

    def after_answer(self, callback: Callable[[], None]) -> None:
        """See :class:`RequestChannel`."""
        self._callbacks = [*(self._callbacks or ()), callback]

    def closed(self) -> None:
        """The connection is gone before the answer."""
        for callback in self._callbacks or ():
            callback()
        if self.on_closed is not None:
            self.on_closed()


class _Lane:
    """One session's part of the shared way out; behind it stands the session's log."""

    def __init__(self, connection: DuplexConnection) -> None:
        self._connection = connection
        self.closed = False
        self.refill: Callable[[], Awaitable[bool]] | None = None

    @property
    def full(self) -> bool:
        return self._connection.outbox.full

    def push(self, chunk: bytes, origin: SessionId | None = None) -> None:
        if not self.closed:
            self._connection.push_event(chunk, origin)

    def wake(self) -> None:
        self._connection.outbox.wake()

    def finish(self) -> None:
        self.closed = True

    def cut(self) -> None:
        # The window moved on while the peer took nothing: it has to resume, and hears why.
        self._connection.outbox.was_slow = True
        metrics.too_slow()
        self._connection.outbox.cut()


class DuplexConnection:
    """A :class:`~mcp_sessions.server.connection.TransportConnection` both ways."""

    is_streaming = False
    """It has no GET stream."""

    def __init__(self, kind: str, principal: Principal, served: Served, rules: ModernRules) -> None:
        """Take what it works with.

        Args:
            kind: ``websocket`` or ``stdio``.
        """
        self.kind = kind
        self.id: ConnectionId = mint_connection_id(kind, served.runner.process)
        self.principal = principal
        self.peer = Peer(DEFAULT_VERSION)
        self.transport_session: SessionId | None = None
        self.attached: dict[SessionId, FencingEpoch] = {}
        self.upstream_peers: dict[SessionId | None, UpstreamPeer] = {}
        self.close_stream: Callable[[], Awaitable[None]] | None = None
        self.channels: dict[DuplexChannel, None] = {}
        policy = served.policy
        self.outbox = Outbox(
            limit=policy.send_buffer,
            slow_timeout=policy.slow_timeout,
            most=policy.send_buffer + policy.max_unread_bytes,
        )
        self.outbox.refill = self._refill
        self.is_draining = False
        """Closed by this side, in order."""

        self.is_leaving = False
        """Closed by this side as soon as nothing is owed to its client; until then it is served
        as ever."""

        self.over = asyncio.Event()
        """Set when nothing more goes out."""

        self._served = served
        self._rules = rules
        self._current: CurrentSession | None = None
        self._lanes: dict[SessionId, LogFeed[_Lane]] = {}
        self._listens = DuplexListens(self.outbox, served.listening)
        # A handler may wait for its client, and what that reports of its work comes as a
        # notification, too.
        self._handled = self._handler_queue()
        self._reported = self._handler_queue()
        self._holds = 0
        self._held: list[tuple[bytes, SessionId | None]] = []

    # --- the port --------------------------------------------------------------------------

    async def current(self) -> CurrentSession | None:
        """See :class:`TransportConnection`."""
        return self._current

    async def set_current(self, current: CurrentSession | None) -> None:
        """See :class:`TransportConnection`."""
        self._current = current

    async def begin(
        self, session_id: SessionId, attached: Attached, after: Position, read: ReadEvents
    ) -> bool:
        """See :class:`TransportConnection`."""
        await self.withdraw(session_id)
        self.attached[session_id] = attached.fencing_epoch
        is_shared = self._served.bus.is_shared
        feed = LogFeed(
            _Lane(self),
            read,
            after.event_id(),
            lambda logged: self._listens.frame(session_id, logged),
            is_behind=False,
            is_checked=is_shared,
        )
        self._lanes[session_id] = feed
        feed.take(attached.replay, attached.head)
        if is_shared:
            # What another process stored after the head, and was heard too early.
            feed.check_position(None)
        return True

    async def deliver(
        self, session_id: SessionId, event: LoggedEvent, fencing_epoch: FencingEpoch
    ) -> bool:
        """See :class:`TransportConnection`."""
        feed = self._lanes.get(session_id)
        if feed is not None and self.attached.get(session_id) == fencing_epoch:
            feed.offer(event)
        return True

    def appended(
        self, session_id: SessionId, event: LoggedEvent, attachment: Attachment | None
    ) -> None:
        """See :class:`TransportConnection`."""
        feed = self._lanes.get(session_id)
        if feed is None:
            return
        if attachment == Attachment(self.id, self.attached.get(session_id, FencingEpoch(-1))):
            feed.offer(event)
        else:
            # Whether it was displaced is asked by who reads the log.
            feed.check_position(None)

    def check_position(self, session_id: SessionId, head: Position | None) -> None:
        """See :class:`TransportConnection`."""
        feed = self._lanes.get(session_id)
        if feed is not None:
            feed.check_position(head)

    async def send(self, draft: Draft) -> None:
        """See :class:`TransportConnection`."""
        self.push_event(draft.before, draft.origin)

    async def withdraw(
        self, session_id: SessionId, fencing_epoch: FencingEpoch | None = None
    ) -> None:
        """See :class:`TransportConnection`."""
        feed = self._lanes.pop(session_id, None)
        if feed is not None:
            # It may be reading its log just now.
            feed.stream.finish()
        self.outbox.purge(session_id)
        self._held = [entry for entry in self._held if entry[1] != session_id]
        self._listens.end(session_id, None)

    async def session_over(self, session_id: SessionId) -> None:
        """See :class:`TransportConnection`."""
        self._listens.end(session_id, wire_error(SessionNotFound(session_id)))
        await self.withdraw(session_id)

    async def drain(self) -> None:
        """See :class:`TransportConnection`."""
        await self.outbox.drain()

    def hold(self) -> Callable[[], None]:
        """See :class:`TransportConnection`: events wait, answers do not."""
        self._holds += 1
        released = False

        def release() -> None:
            nonlocal released
            if released:
                return
            released = True
            self._holds -= 1
            if not self._holds:
                held, self._held = self._held, []
                for chunk, origin in held:
                    self.outbox.push(chunk, origin)

        return release

    def close(self) -> None:
        """See :class:`TransportConnection`."""
        self.is_draining = True
        self._listens.end_all()
        self.outbox.finish()

    def close_when_quiet(self) -> None:
        """Serve what was asked, and what is asked meanwhile; then :meth:`close`."""
        self.is_leaving = True
        self.close_if_quiet()

    def close_if_quiet(self) -> None:
        """:meth:`close`, if that is waited for and every answer was handed over."""
        if self.is_leaving and not self.is_draining:
            if all(channel.lasts for channel in self.channels):
                self.close()

    # --- what came in ------------------------------------------------------------------------

    async def take(self, body: bytes) -> None:
        """Serve one message; what is wrong with it is answered."""
        if self.is_draining:
            # Nothing more goes out: it may not run either, so that it can be sent again.
            return
        try:
            value = decode(body)
        except ValueError:
            self._refuse(None, error_body(PARSE_ERROR, "Parse error"))
            return
        try:
            message = parse(value)
        except Malformed as malformed:
            # With its id, if it has one: whoever sent it may be waiting.
            error = error_body(INVALID_REQUEST, f"Invalid request: {malformed}")
            self._refuse(id_of(value), error)
            return
        lasts = isinstance(message, Request) and message.method == LISTEN
        channel = DuplexChannel(self, lasts=lasts)
        size = len(body)
        if isinstance(message, Request):
            # Only what is owed an answer has a way back that can break.
            self.channels[channel] = None
        try:
            await self._take(message, channel, size)
        except StoreUnavailable as failed:
            logger.error("the session store is away: %s", failed)
            if isinstance(message, Request):
                error = error_body(INTERNAL_ERROR, STORE_AWAY)
                await channel.answer(error_message(message.id, error))
        while self.outbox.full and not self.outbox.closed:
            # Who takes no answers may not go on asking for more, however slowly it takes some.
            await self.outbox.drain()

    async def quiet(self, timeout: float) -> None:
        """Wait until nothing that came is at work, ``timeout`` seconds at the most."""
        await asyncio.gather(self._served.runner.quiet(self, timeout), self._handled.quiet(timeout))

    def refuse_too_big(self) -> None:
        """Answer a message that was too big to be read."""
        self._refuse(None, error_body(INVALID_REQUEST, "Invalid request: message too big"))

    async def gone(self) -> None:
        """The peer is not there any more: its sessions wait, its requests run on."""
        self.outbox.cut()
        # Before the store hears of it, which may be away: from now on they are unheard.
        for channel in list(self.channels):
            channel.closed()
        self.channels.clear()
        self._handled.end()
        self._reported.end()
        try:
            await self._served.hub.remove(self)
        finally:
            self.over.set()

    def push_event(self, chunk: bytes, origin: SessionId | None) -> None:
        """Hand over what is no answer: it waits behind an answer that has to come first."""
        if self._holds:
            self._held.append((chunk, origin))
        else:
            self.outbox.push(chunk, origin)

    async def _take(
        self, message: Request | Notification | Answer, channel: DuplexChannel, size: int
    ) -> None:
        router = self._served.router
        if isinstance(message, Answer):
            await router.answer(message, self._inbound(channel))
        elif isinstance(message, Notification):
            if self._listens.cancels(message):
                return
            if self.peer.modern:
                # The era has no other notification from a client, and no handshake for the
                # wrapped server to know its sender by.
                await router.cancel_keyed(message, self._inbound(channel))
                return
            await self._notified(message, channel, size)
        elif message.method == "initialize" and not self.peer.modern:
            await self._initialize(message, channel)
        elif self._rules.is_modern(message.params) or self._lacks_envelope(message):
            await self._modern(message, channel)
        else:
            await router.request(message, self._inbound(channel))

    async def _notified(
        self, notification: Notification, channel: DuplexChannel, size: int
    ) -> None:
        router, inbound = self._served.router, self._inbound(channel)
        reported = router.reported(notification, inbound)
        if reported is not None:
            await self._reported.put(reported, size)
        handled = await router.notification(notification, inbound)
        if handled is not None:
            await self._handled.put(handled, size)

    def _handler_queue(self) -> HandlerQueue:
        policy, runner = self._served.policy, self._served.runner
        return HandlerQueue(
            limit=policy.receive_buffer, patience=policy.slow_timeout, spawn=runner.spawn
        )

    def _lacks_envelope(self, request: Request) -> bool:
        """A client of the modern era sends it with every request; the methods of ours and
        what names its session do without, in either era.
        """
        ours = request.method in SESSION_METHODS or _names_session(request)
        return self.peer.modern and not ours

    async def _initialize(self, request: Request, channel: DuplexChannel) -> None:
        async def register(peer: Peer) -> DuplexConnection:
            self.peer = peer
            return self

        # A client that initializes has no connection yet.
        alone = Inbound(self.principal, self.peer, None, channel)
        router = self._served.router
        answer, connection = await router.initialize(request, alone, register, is_there=True)
        await alone.channel.answer(answer)
        if connection is None:
            return
        for stale in [key for key in self.upstream_peers if key is not None]:
            # What was made before the handshake knows nothing of the client.
            del self.upstream_peers[stale]

    async def _modern(self, request: Request, channel: DuplexChannel) -> None:
        route = self._rules.route(request.method, request.params)
        if isinstance(route, tuple):
            code, text, data = route
            await channel.answer(error_message(request.id, error_body(code, text, data)), code=code)
            return
        capabilities = {"capabilities": route.client_capabilities}
        peer = Peer(route.protocol_version, capabilities, modern=True)
        if self.peer.initialize_params is None:
            self.peer = peer
        inbound = self._inbound(channel, peer)
        inbound.modern, inbound.route = True, route
        if self._listens.has(request.id):
            refused = InvalidRequest(
                InvalidReason.DUPLICATE_ID, "a request with this id is still open"
            )
            await channel.answer(inbound.error(request.id, wire_error(refused)))
        elif request.method == LISTEN and _names_session(request):
            await self._listen(request, inbound)
            # Its last message comes when it ends; nothing of it can break before.
            self.channels.pop(channel, None)
        else:
            await self._served.router.request(request, inbound)

    async def _listen(self, request: Request, inbound: Inbound) -> None:
        """Events are pushed here anyway: a listen sets the filter and adds its id."""
        listening = self._served.listening
        try:
            record, wanted = await listening.admit(request, inbound)
            if record.session_id not in self.attached:
                await listening.attach(request, record, self)
        except WireError as refused:
            await inbound.channel.answer(inbound.error(request.id, wire_error(refused)))
            return
        except UpstreamError as failed:
            await inbound.channel.answer(inbound.error(request.id, failed.error))
            return
        self._listens.begin(request.id, wanted, record)

    # --- what goes out ---------------------------------------------------------------------

    def _inbound(self, channel: DuplexChannel, peer: Peer | None = None) -> Inbound:
        return Inbound(self.principal, peer or self.peer, self, channel)

    def _refuse(self, request_id: RequestId | None, error: dict[str, Any]) -> None:
        self.outbox.push(error_message(request_id, error))

    async def _refill(self) -> bool:
        more = False
        for feed in list(self._lanes.values()):
            if feed.stream.refill is not None and await feed.stream.refill():
                more = True
        return more


def _names_session(request: Request) -> bool:
    try:
        return not isinstance(named_session(request.params), NotNamed)
    except InvalidParams:
        # Malformed metadata is answered as what it is.
        return True
