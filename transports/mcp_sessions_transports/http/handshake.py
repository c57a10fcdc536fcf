"""Streamable HTTP of the handshake era: 2025-03-26, 2025-06-18 and 2025-11-25.

Statuses, texts and headers are those of the SDK's own transport, so that a stock client
cannot tell the two apart; sessions, streams and their past are ours. POST and DELETE are
here; GET, which has streams to go on with, is in :mod:`mcp_sessions_transports.http.get`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from functools import partial
from typing import Any

from starlette.requests import Request as HttpRequest
from starlette.types import Receive, Scope, Send

from mcp_sessions.background import Background
from mcp_sessions.core.messages import (
    Malformed,
    Message,
    Notification,
    NotNamed,
    Request,
    decode,
    named_session,
    parse,
)
from mcp_sessions.core.states import Mode
from mcp_sessions.errors import (
    INVALID_PARAMS,
    PARSE_ERROR,
    InvalidParams,
    InvalidRequest,
    SessionNotFound,
    Status,
)
from mcp_sessions.ids import ConnectionId, digest
from mcp_sessions.principal import Principal
from mcp_sessions.server.connection import DEFAULT_VERSION, Inbound
from mcp_sessions.server.delivery.stored_connection import StoredConnection
from mcp_sessions.server.dispatch.session_methods import SESSION_METHODS
from mcp_sessions.stores.records import Peer, SessionRecord
from mcp_sessions_transports.credentials import Watch
from mcp_sessions_transports.http.channel import PostChannel
from mcp_sessions_transports.http.get import HttpGet
from mcp_sessions_transports.http.io import (
    BodyTooLarge,
    Disconnected,
    Draining,
    Headers,
    accepts,
    is_json,
    prefers_sse,
    read_body,
    refusal,
    replay_body,
    send_empty,
    send_json,
    send_text,
)
from mcp_sessions_transports.http.sessions import (
    SessionHeader,
    send_missing,
    send_refused,
    session_header_of,
)
from mcp_sessions_transports.http.transport import http_transport
from mcp_sessions_transports.served import Served

logger = logging.getLogger(__name__)

_WITHOUT_SESSION = SESSION_METHODS
"""Served without ``initialize`` and without ``Mcp-Session-Id``."""


class HandshakeHttp:
    """Serves POST, GET and DELETE of the handshake era."""

    def __init__(self, served: Served) -> None:
        self._served = served
        self._sessions = served.transport_sessions
        self._header = SessionHeader(served.transport_sessions)
        self._get = HttpGet(served)
        self._background = Background()
        self._handled: dict[ConnectionId | Principal, int] = {}
        """How many notifications of a sender are handled now."""

        self._loop_or_none: asyncio.AbstractEventLoop | None = None

    @property
    def _loop(self) -> asyncio.AbstractEventLoop:
        # Kept: asking for the running loop costs a system call per question.
        if self._loop_or_none is None:
            self._loop_or_none = asyncio.get_running_loop()
        return self._loop_or_none

    async def serve(
        self,
        scope: Scope,
        receive: Receive,
        send: Send,
        headers: Headers,
        principal: Principal,
        draining: bool = False,
    ) -> None:
        """Serve one HTTP request whose Host and Origin are right.

        Args:
            draining: The server stops. No new request is served, but those that run may
                still be answered and cancelled: else their grace would be for nothing.

        Raises:
            Draining: This is a new request.
        """
        method = scope["method"]
        if method in ("GET", "DELETE") and not self._served.remembers:
            # Without a store there is neither a stream to open nor a session to delete.
            method = "none"
        match method:
            case "POST":
                await self._post(scope, receive, send, headers, principal, draining)
            case "GET":
                await self._get.serve(scope, receive, send, headers, principal)
            case "DELETE":
                await self._delete(send, headers, principal)
            case _:
                await send_json(
                    send,
                    refusal("Method Not Allowed"),
                    status=405,
                    headers=[(b"allow", b"GET, POST, DELETE")],
                )

    async def close(self) -> None:
        """Wait for what still runs here; called when the server stops."""
        await self._background.close()

    # --- POST ----------------------------------------------------------------------------------

    async def _post(
        self,
        scope: Scope,
        receive: Receive,
        send: Send,
        headers: Headers,
        principal: Principal,
        draining: bool,
    ) -> None:
        if accepts(headers) != (True, True):
            text = "Not Acceptable: Client must accept both application/json and text/event-stream"
            await send_json(send, refusal(text), status=406)
            return
        if not is_json(headers):
            text = "Unsupported Media Type: Content-Type must be application/json"
            await send_json(send, refusal(text), status=415)
            return
        try:
            body = await read_body(receive, headers, self._served.max_body)
        except BodyTooLarge:
            await send_text(send, 413, "Request body too large")
            return
        except Disconnected:
            return
        message = await _parse(body, send)
        if message is None:
            return
        if draining and isinstance(message, Request):
            raise Draining
        session_header = session_header_of(headers)
        connection: StoredConnection | None = None
        record: SessionRecord | None = None
        if session_header is not None and self._served.remembers:
            try:
                record = await self._header.of(session_header, principal, message)
                connection = self._served.connections.stored(record) if record is not None else None
            except (SessionNotFound, InvalidRequest) as refused:
                await send_refused(send, message, refused)
                return
        version = headers.get(b"mcp-protocol-version", DEFAULT_VERSION.encode()).decode("latin-1")
        peer = connection.peer if connection is not None else Peer(version)
        request = message if isinstance(message, Request) else Request(0, "", None)
        # SEC11. As this very message was admitted: by whom its connection was made.
        needed = record.principal.scopes if record is not None else principal.scopes
        beyond = principal.scopes - needed
        channel = self._channel(request, connection, peer.protocol_version, headers, beyond)
        inbound = Inbound(
            principal,
            peer,
            connection,
            channel,
            context=HttpRequest(scope, replay_body(body)),
            has_stream=connection is not None,
            resumes_stream=b"last-event-id" in headers,
            session_header=session_header,
            record=record,
        )
        if isinstance(message, Request):
            if message.method == "initialize":
                watch = partial(self._served.credentials.over, scope, principal)
                await self._initialize(message, inbound, channel, receive, send, watch)
            elif connection is None and not self._may_be_alone(message):
                await send_missing(send)
            else:
                try:
                    await self._served.router.request(message, inbound)
                    watch = partial(self._served.credentials.over, scope, principal)
                    await channel.respond(receive, send, watch)
                finally:
                    # Also if it is the store's absence that is answered.
                    channel.over()
        elif isinstance(message, Notification):
            if connection is None and not self._may_be_alone(message):
                await send_missing(send)
                return
            reported = self._served.router.reported(message, inbound)
            if reported is not None:
                await reported
            handled = await self._served.router.notification(message, inbound)
            if handled is not None:
                # In a task: a handler may wait for the client, and the client for this 202.
                self._handle(connection.id if connection is not None else principal, handled)
            session_id = connection.session_id if connection is not None else None
            await send_empty(send, 202, session_id=session_id)
        elif await self._served.router.answer(message, inbound) or connection is not None:
            session_id = connection.session_id if connection is not None else None
            await send_empty(send, 202, session_id=session_id)
        else:
            await send_missing(send)

    def _handle(
        self, sender: ConnectionId | Principal, handling: Coroutine[Any, Any, None]
    ) -> None:
        """Handle a notification beside those of the same sender, of which no more may be at
        work than requests (SEC8).
        """
        if self._handled.get(sender, 0) >= self._served.policy.max_running_requests:
            handling.close()
            logger.warning("a notification is left out: handlers of those before it do not end")
            return
        self._handled[sender] = self._handled.get(sender, 0) + 1
        task = self._background.run("a notification that was accepted", handling)
        task.add_done_callback(lambda _: self._was_handled(sender))

    def _was_handled(self, sender: ConnectionId | Principal) -> None:
        self._handled[sender] -= 1
        if not self._handled[sender]:
            del self._handled[sender]

    async def _initialize(
        self,
        request: Request,
        inbound: Inbound,
        channel: PostChannel,
        receive: Receive,
        send: Send,
        watch: Watch,
    ) -> None:
        served = self._served
        # A client that initializes has no connection yet, whatever header came along.
        alone = Inbound(
            inbound.principal, inbound.peer, None, inbound.channel, context=inbound.context
        )

        async def register(peer: Peer) -> StoredConnection:
            record = await served.lifecycle.create(Mode.TRANSPORT, inbound.principal, peer)
            logger.info("transport session %s opened", digest(record.session_id))
            return served.connections.new_connection(record, peer)

        answer, connection = await served.router.initialize(request, alone, register)
        session_id = connection.transport_session if connection is not None else None
        if not channel.has_stream:
            await send_json(send, answer, session_id=session_id)
            return
        # The server said something meanwhile. It had to wait: the headers name the session.
        await channel.answer(answer)
        await channel.respond(receive, send, watch, opened=session_id)

    def _channel(
        self,
        request: Request,
        connection: StoredConnection | None,
        version: str,
        headers: Headers,
        scopes_beyond: frozenset[str],
    ) -> PostChannel:
        served = self._served
        return PostChannel(
            request.id,
            http_transport(connection).responses if connection is not None else None,
            served.policy,
            self._loop,
            primes=served.primes(version),
            prefers_stream=prefers_sse(headers),
            process=served.bus.process,
            scopes_beyond=scopes_beyond,
        )

    def _may_be_alone(self, message: Request | Notification) -> bool:
        """Whether a message is served without ``initialize`` and ``Mcp-Session-Id``."""
        return not self._served.remembers or _needs_no_session(message)

    # --- DELETE --------------------------------------------------------------------------------

    async def _delete(self, send: Send, headers: Headers, principal: Principal) -> None:
        record = await self._header.required(headers, principal, send)
        if record is None:
            return
        await self._served.lifecycle.finish(record.session_id)
        await send_empty(send, Status.OK, session_id=record.session_id)


async def _parse(body: bytes, send: Send) -> Message | None:
    """The message in a body; None if it was refused here."""
    try:
        value = decode(body)
    except ValueError:
        await send_json(send, refusal("Parse error", PARSE_ERROR), status=400)
        return None
    try:
        return parse(value)
    except Malformed as malformed:
        text = f"Validation error: {malformed}"
        await send_json(send, refusal(text, INVALID_PARAMS), status=400)
        return None


def _needs_no_session(message: Request | Notification) -> bool:
    """Whether a message is served without ``initialize`` and without ``Mcp-Session-Id``."""
    if message.method in _WITHOUT_SESSION:
        return True
    try:
        return not isinstance(named_session(message.params), NotNamed)
    except InvalidParams:
        # Malformed metadata is answered as what it is; a notification is owed no answer.
        return isinstance(message, Request)
