"""A connection that carries everything both ways: what WebSocket and stdio have in common.

Both eras. ``duplex_transport.py`` sends what goes out.

The wrapped server's handlers of notifications run apart from the reader of the connection. A
handler may wait for its client, and the client's next message comes on the same connection. So
the reader must not wait for a handler. Rules:

1. Handlers run one after the other, in the order of their notifications.
2. A handler runs to its first wait before the next message is read: a request that follows
   ``notifications/initialized`` finds it processed.
3. The queue is bounded in bytes. If it is full, the reader waits for ``patience`` seconds. Then
   the handlers count as stuck, and notifications are dropped until one handler is done.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Coroutine, Mapping
from typing import Any

from mcp_sessions import method_names
from mcp_sessions.background import report
from mcp_sessions.core.message import Message, read
from mcp_sessions.core.messages import (
    PROTOCOL_VERSION_META,
    Answer,
    Malformed,
    RequestId,
    decode,
    error_body,
    error_message,
    id_of,
    parse,
    wire_error,
)
from mcp_sessions.core.story import Why
from mcp_sessions.errors import (
    INVALID_REQUEST,
    PARSE_ERROR,
    InvalidReason,
    InvalidRequest,
    LimitReached,
    StoreUnavailable,
    WireError,
)
from mcp_sessions.principal import Principal
from mcp_sessions.protocol_versions import DEFAULT_VERSION
from mcp_sessions.security import mint_connection_id
from mcp_sessions.seldom import Seldom
from mcp_sessions.server.calls.table import Call, Outcome
from mcp_sessions.server.connection.connection import (
    ClientConnection,
    Inbound,
)
from mcp_sessions.server.dispatch.modern_limits import check_modern
from mcp_sessions.server.requests.outcome import store_error
from mcp_sessions.server.upstream.port import UpstreamError
from mcp_sessions.stores.records import Peer
from mcp_sessions_transports.duplex_transport import DuplexChannel, DuplexTransport
from mcp_sessions_transports.served import Served

logger = logging.getLogger(__name__)
logger.addFilter(Seldom())


Handling = Coroutine[Any, Any, None]
Spawn = Callable[[Handling], asyncio.Task[None]]

_OVERHEAD = 1_024
"""Bytes that a notification counts for in addition to its own."""

_TURNS = 10
"""Turns of the event loop that a handler has before the next message is read."""


class HandlerQueue:
    """The notifications of one connection that are handled, or wait for that.

    Args:
        limit: Bytes of notifications that wait; see ``SessionPolicy.receive_buffer``.
        patience: Seconds that the reader waits for room, and that handlers have when the
            connection is gone; see ``SessionPolicy.slow_timeout``.
        spawn: Runs what has to end with the process.
    """

    def __init__(self, *, limit: int, patience: float, spawn: Spawn) -> None:
        self._limit = limit
        self._patience = patience
        self._spawn = spawn
        self._waiting: deque[tuple[Handling, int]] = deque()
        self._size = 0
        self._task: asyncio.Task[None] | None = None
        self._done = asyncio.Event()
        self._is_stuck = False

    async def put(self, handling: Handling, size: int) -> None:
        cost = size + _OVERHEAD
        if not self._fits(cost) and not self._is_stuck:
            self._is_stuck = not await self._room(cost)
        if not self._fits(cost):
            handling.close()
            logger.warning(
                "a notification is dropped: handlers of earlier ones do not return, and "
                "receive_buffer (%d bytes) is full",
                self._limit,
            )
            return
        self._waiting.append((handling, cost))
        self._size += cost
        if self._task is None:
            self._task = self._spawn(self._work())
        for _ in range(_TURNS):
            if not self._size:
                break
            await asyncio.sleep(0)

    async def quiet(self, timeout: float) -> None:
        if self._task is not None:
            await asyncio.wait({self._task}, timeout=timeout)

    def end(self) -> None:
        if self._task is not None:
            task = self._task
            timer = asyncio.get_running_loop().call_later(self._patience, task.cancel)
            task.add_done_callback(lambda _: timer.cancel())

    def _fits(self, cost: int) -> bool:
        return not self._size or self._size + cost <= self._limit

    async def _room(self, cost: int) -> bool:
        try:
            async with asyncio.timeout(self._patience):
                while not self._fits(cost):
                    self._done.clear()
                    await self._done.wait()
        except TimeoutError:
            return False
        return True

    async def _work(self) -> None:
        try:
            while self._waiting:
                handling, cost = self._waiting.popleft()
                try:
                    await handling
                except Exception as failed:
                    # The boundary to the wrapped server, or to a store that went away.
                    report("a notification", failed)
                self._size -= cost
                self._is_stuck = False
                self._done.set()
        finally:
            # Cancelled: nothing waits any more, and nobody waits for room.
            for handling, _ in self._waiting:
                handling.close()
            self._waiting.clear()
            self._size = 0
            self._task = None
            self._done.set()


class DuplexConnection:
    def __init__(
        self,
        kind: str,
        principal: Principal,
        served: Served,
        *,
        scope: Mapping[str, Any] | None = None,
    ) -> None:
        self.transport = DuplexTransport(served)
        connection_id = mint_connection_id(kind, served.bus.process)
        self.client = ClientConnection(
            connection_id,
            kind,
            principal,
            # A client is of the modern era from the start, if only that is spoken.
            Peer(DEFAULT_VERSION, modern=not served.rules.handshake_versions),
            self.transport,
            scope=scope,
        )
        self._served = served
        # A handler may wait for its client, and what that reports of its work comes as a
        # notification, too.
        self._handled = self._handler_queue()
        self._reported = self._handler_queue()

    # --- what came in ------------------------------------------------------------------------

    async def take(self, body: bytes) -> None:
        """Serve one message; what is wrong with it is answered.

        Returns when the next one may be read: who takes no answers may not go on asking for more,
        however slowly it takes some.
        """
        await self._take_one(body)
        outbox = self.transport.outbox
        while outbox.full and not outbox.closed:
            await outbox.drain()

    async def _take_one(self, body: bytes) -> None:
        if self.transport.is_draining:
            # Nothing more goes out: it may not run either, so that it can be sent again.
            return
        try:
            value = decode(body)
        except ValueError:
            self._refuse(None, error_body(PARSE_ERROR, "Parse error"))
            return
        try:
            parsed = parse(value)
        except Malformed as malformed:
            # With its id, if it has one: whoever sent it may be waiting.
            error = error_body(INVALID_REQUEST, f"Invalid request: {malformed}")
            self._refuse(id_of(value), error)
            return
        message = parsed if isinstance(parsed, Answer) else read(parsed)
        request = None if isinstance(message, Answer) or message.is_notification else message
        lasts = request is not None and request.method == method_names.LISTEN
        channel = DuplexChannel(self.transport, self.client.kind, lasts=lasts)
        size = len(body)
        if request is not None:
            # Only what gets an answer has a way back that can break.
            self.transport.channels[channel] = None
        try:
            await self._take(message, channel, size)
        except StoreUnavailable as failed:
            logger.error("the session store failed: %s", failed)
            if request is not None:
                await channel.answer(error_message(request.id, store_error(failed)))

    async def quiet(self, timeout: float) -> None:
        await asyncio.gather(
            self._served.runner.quiet(self.client, timeout), self._handled.quiet(timeout)
        )

    def refuse_too_big(self) -> None:
        self._refuse(None, error_body(INVALID_REQUEST, "Invalid request: message too big"))

    async def gone(self, *, why: str = Why.CLOSED) -> None:
        """Detach the sessions of a peer that is gone. Its requests continue."""
        # Before the store learns of it, which may be away: from now on they are without a listener.
        self.transport.cut()
        self._handled.end()
        self._reported.end()
        try:
            await self._served.attachments.remove(self.client, why=why)
        finally:
            self.transport.closed.set()

    async def _take(self, message: Message | Answer, channel: DuplexChannel, size: int) -> None:
        router = self._served.router
        if isinstance(message, Answer):
            router.answer(message, self._inbound(channel))
        elif message.is_notification:
            if self.transport.cancels(message):
                return
            if self.client.peer.modern:
                # The era has no other notification from a client, and no handshake for the
                # wrapped server to know its sender by.
                await router.cancel_keyed(message, self._inbound(channel))
                return
            await self._notified(message, channel, size)
        elif message.method == method_names.INITIALIZE and not self.client.peer.modern:
            await self._initialize(message, channel)
        elif PROTOCOL_VERSION_META in message.meta or self._lacks_envelope(message):
            await self._modern(message, channel, size)
        else:
            # Without an envelope it is of the handshake era (WSS10), in which a client that is
            # known by its envelopes did no handshake.
            peer = Peer(DEFAULT_VERSION) if self.client.peer.modern else self.client.peer
            inbound = Inbound(self.client.principal, peer, self.client, channel)
            await router.request(message, inbound)

    async def _notified(self, notification: Message, channel: DuplexChannel, size: int) -> None:
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

    def _lacks_envelope(self, request: Message) -> bool:
        """A client of the modern era sends it with every request. The methods of ours and requests
        that name their session do without, in each era that is spoken.
        """
        ours = request.method in method_names.OF_SESSIONS or (
            request.names_session and self._served.rules.handshake_versions
        )
        return self.client.peer.modern and not ours

    async def _initialize(self, request: Message, channel: DuplexChannel) -> None:
        async def register(peer: Peer) -> ClientConnection:
            self.client.identify(peer)
            return self.client

        # A client that initializes has no connection yet.
        client = self.client
        alone = Inbound(client.principal, client.peer, None, channel)
        router = self._served.router
        answer, connection = await router.initialize(request, alone, register, is_there=True)
        await alone.channel.answer(answer)
        if connection is None:
            return
        for stale in [key for key in self.client.upstream_peers if key is not None]:
            # A channel from before the handshake knows nothing of the client.
            del self.client.upstream_peers[stale]

    async def _modern(self, request: Message, channel: DuplexChannel, size: int) -> None:
        peer = self._served.rules.client(request.method, request.params)
        if isinstance(peer, tuple):
            code, text, data = peer
            await channel.answer(error_message(request.id, error_body(code, text, data)), code=code)
            return
        try:
            check_modern(request, size, self._served.policy)
        except LimitReached as refused:
            self._served.router.limits.reached(refused)
            await channel.answer(error_message(request.id, wire_error(refused)))
            return
        if self.client.peer.initialize_params is None and request.method != method_names.DISCOVER:
            # A client that asks for the versions may continue with a handshake (WSS10), above all
            # if that was refused.
            self.client.identify(peer)
        inbound = Inbound(self.client.principal, peer, self.client, channel)
        if self.transport.has_listen(request.id):
            refused = InvalidRequest(
                InvalidReason.DUPLICATE_ID, "a request with this id is still open"
            )
            await Call(request, inbound).answer(Outcome(None, wire_error(refused)))
        elif request.method == method_names.LISTEN and request.names_session:
            await self._listen(request, inbound)
            # Its last message comes when it ends; nothing of it can break before.
            self.transport.channels.pop(channel, None)
        else:
            await self._served.router.request(request, inbound)

    async def _listen(self, request: Message, inbound: Inbound) -> None:
        """Set the filter of a listen and add its id. Events are pushed here in any case."""
        listening = self._served.listening
        try:
            with self._served.router.audited(request, inbound):
                record, wanted = await listening.admit(request, inbound)
                if record.session_id not in self.client.attached:
                    await listening.attach(request, record, self.client)
        except WireError as refused:
            await Call(request, inbound).answer(Outcome(None, wire_error(refused)))
            return
        except UpstreamError as failed:
            await Call(request, inbound).answer(Outcome(None, failed.error))
            return
        self.transport.begin_listen(request.id, wanted, record)
        inbound.acknowledged()

    # --- what goes out ---------------------------------------------------------------------

    def _inbound(self, channel: DuplexChannel) -> Inbound:
        return Inbound(self.client.principal, self.client.peer, self.client, channel)

    def _refuse(self, request_id: RequestId | None, error: dict[str, Any]) -> None:
        self.transport.outbox.push(error_message(request_id, error))
