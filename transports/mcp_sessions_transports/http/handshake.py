"""Streamable HTTP of the handshake era: 2025-03-26, 2025-06-18 and 2025-11-25.

Statuses, texts and headers are those of the SDK's own transport, so that a stock client
cannot tell the two apart; sessions, streams and their past are ours. Here is which
transport-mode session a request names, POST, DELETE and GET.

A GET gets a connection's stream, or the rest of a POST's response. Rules:

1. A client with a ``Last-Event-ID`` gets everything that followed it, whole, whichever process has
   it. If that is impossible, the client learns it. A response ends with :class:`OutcomeUnknown`.
   The connection's stream has messages to read everything again.
2. A credential gets nothing of a session that was started with more scopes, nor a response to a
   request that was sent with more.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine, Hashable
from dataclasses import dataclass
from typing import Any

from starlette.requests import Request as HttpRequest
from starlette.types import Send

from mcp_sessions import method_names
from mcp_sessions.background import Background
from mcp_sessions.core.ends import EndReason
from mcp_sessions.core.message import Message
from mcp_sessions.core.messages import (
    Answer,
    NotNamed,
    error_message,
    wire_error,
)
from mcp_sessions.core.states import Mode
from mcp_sessions.errors import (
    InvalidRequest,
    NotBegun,
    OutcomeUnknown,
    Refusal,
    SessionNotFound,
    Status,
    StoreUnavailable,
)
from mcp_sessions.ids import StreamName, process_of
from mcp_sessions.protocol_versions import DEFAULT_VERSION
from mcp_sessions.seldom import Seldom
from mcp_sessions.server.calls.shares import share_of
from mcp_sessions.server.connection.connection import HttpFacts, Inbound
from mcp_sessions.server.connection.joint_admission import JointAdmission
from mcp_sessions.server.delivery.questions import confirmed
from mcp_sessions.server.delivery.stored_connection import StoredConnection
from mcp_sessions.stores.records import Peer, SessionRecord
from mcp_sessions.turns import Turns
from mcp_sessions_transports.http.channel import NO_SCOPES, PostChannel, http_transport
from mcp_sessions_transports.http.io import (
    HttpCall,
    Post,
    ServerDraining,
    accepts,
    has_left,
    read_post,
    refusal,
    send_json,
    send_not_found,
    send_text,
)
from mcp_sessions_transports.http.post_streams import (
    PostPosition,
    may_read,
    post_position_of,
)
from mcp_sessions_transports.http.remote_response import RemoteResponse
from mcp_sessions_transports.http.sse import sse_event, sse_headers
from mcp_sessions_transports.served import Served

logger = logging.getLogger(__name__)
logger.addFilter(Seldom())


@dataclass(slots=True, eq=False, repr=False)
class HttpGet:
    _served: Served
    _turns: Turns

    async def serve(self, call: HttpCall, record: SessionRecord) -> None:
        """Serve one GET until its stream ends.

        Args:
            record: The transport session that it was admitted to.

        Raises:
            StoreUnavailable: Nothing was sent.
        """
        served, sessions = self._served, self._served.transport_sessions
        send, principal = call.send, call.principal
        connection = served.connections.stored(record)
        if not await sessions.may_receive(record, principal):
            # A weaker credential does not receive what a stronger one may (SEC3).
            await send_not_found(send)
            return
        last_event_id = call.headers.get(b"last-event-id", b"").decode("latin-1") or None
        at = post_position_of(last_event_id) if last_event_id is not None else None
        if at is not None:
            if may_read(at.stream, principal.scopes - record.principal.scopes):
                await self._resume_post(call, connection, at)
            else:
                # SEC3: its request was sent by a stronger one than made the connection.
                await send_not_found(send)
            return
        try:
            after, first = await sessions.start_stream(connection, record, last_event_id)
        except SessionNotFound:
            await send_not_found(send)
            return
        transport = http_transport(connection)
        async with call.watch(transport.cut) as watched:
            guarded = call.sending(watched.guarding(send))
            await transport.serve_get(
                connection, after, first, guarded, cleared=record.client.carried, turns=self._turns
            )

    # --- the rest of a response ------------------------------------------------------------

    async def _resume_post(
        self, call: HttpCall, connection: StoredConnection, at: PostPosition
    ) -> None:
        served = self._served
        name, position, request_id = at.stream, at.event_id, at.request_id
        responses = http_transport(connection).responses
        log = responses.log(name)
        here = process_of(name) == served.bus.process
        is_lost = here and not responses.knows(name)
        if not is_lost:
            _, refusal = await log.read(position)
            if refusal is Refusal.AHEAD and await self._is_stored_soon(name):
                raise StoreUnavailable("messages of a response stream are not stored yet")
            is_lost = refusal is not None
        # Asked anew: it may have been forgotten while the log was read.
        channel = responses.read_again(name) if not is_lost else None
        if is_lost or (here and channel is None):
            await _answer_unknown(call.send, connection.session_id, request_id)
            return
        if channel is not None:
            await channel.resume(position, call)
            return
        remote = RemoteResponse(log, request_id, served.policy, served.bus, responses.primes)
        for older in responses.remote:
            if older.log.name == name:
                older.supersede()
        responses.remote[remote] = None
        try:
            async with call.watch(remote.stream.cut) as watched:
                await remote.serve(position, call.sending(watched.guarding(call.send)))
        finally:
            del responses.remote[remote]

    async def _is_stored_soon(self, stream: StreamName) -> bool:
        """Whether another process may have sent messages of a stream while the store was away: it
        stores them when the store is back.
        """
        bus, runner = self._served.bus, process_of(stream)
        return bus.is_remote(runner) and await bus.is_alive(runner)


async def _answer_unknown(send: Send, session_id: str, request_id: str | int) -> None:
    """End a response stream that nobody can continue. Its request gets an error."""
    body = error_message(request_id, wire_error(OutcomeUnknown()))
    headers = sse_headers(session_id)
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": sse_event(body)})


_DEFAULT_VERSION = DEFAULT_VERSION.encode()


class HandshakeHttp:
    def __init__(self, served: Served, max_body: int) -> None:
        self._served = served
        self._max_body = max_body
        self._sessions = served.transport_sessions
        self._turns = Turns()
        self._get = HttpGet(served, self._turns)
        self._background = Background()
        self._handled: dict[Hashable, int] = {}
        """How many notifications of a sender are handled now."""

        # Kept: asking for the running loop costs a system call per question.
        self._loop: asyncio.AbstractEventLoop | None = None

    async def serve(self, call: HttpCall, draining: bool = False) -> None:
        """Serve one HTTP request whose Host and Origin are right.

        Args:
            draining: The server stops. No new request is served, but those that run may
                still be answered and cancelled: else their grace would be for nothing.

        Raises:
            ServerDraining: This is a new request.
        """
        method, send = call.scope["method"], call.send
        if method in ("GET", "DELETE") and not self._served.remembers:
            # Without a store there is neither a stream to open nor a session to delete.
            method = "none"
        match method:
            case "POST":
                await self._post(call, draining)
            case "GET" if not accepts(call.headers)[1]:
                text = "Not Acceptable: Client must accept text/event-stream"
                await send_json(send, refusal(text), status=406)
            case "GET":
                # When many clients were cut they come back together, each with a GET.
                await self._turns.take()
                record = await self._admitted(call)
                if record is not None:
                    await self._get.serve(call, record)
            case "DELETE":
                record = await self._admitted(call)
                if record is not None:
                    await self._served.lifecycle.finish(record.session_id, EndReason.CLIENT)
                    await send_text(send, Status.OK, session_id=record.session_id)
            case _:
                await send_json(
                    send,
                    refusal("Method Not Allowed"),
                    status=405,
                    headers=[(b"allow", b"GET, POST, DELETE")],
                )

    async def close(self) -> None:
        await self._background.close()

    # --- POST ----------------------------------------------------------------------------------

    async def _post(self, call: HttpCall, draining: bool) -> None:
        post = await read_post(call, self._max_body)
        if post is None:
            return
        message = post.message
        if draining and not isinstance(message, Answer) and not message.is_notification:
            raise ServerDraining
        joins, session_header = self._served.joint_admissions, call.session_header
        joint = None
        if joins is not None and session_header is not None and not isinstance(message, Answer):
            joint = joins.admission_for(message, session_header, call.principal)
        if joint is None:
            channel = await self._take(post, call, session_header, None)
        else:
            async with joint:
                channel = await self._take(post, call, session_header, joint)
        if channel is not None:
            call.arrived()
            await channel.respond(call)

    async def _take(
        self,
        post: Post,
        call: HttpCall,
        session_header: str | None,
        joint: JointAdmission | None,
    ) -> PostChannel | None:
        message, scope, send, principal = post.message, call.scope, call.send, call.principal
        connection: StoredConnection | None = None
        record: SessionRecord | None = None
        if (
            session_header is not None
            and self._served.remembers
            and not _mirrors(message, session_header)
        ):
            try:
                record, connection = await self._sessions.connected(
                    session_header, principal, joint
                )
            except (SessionNotFound, InvalidRequest) as refused:
                conversations = self._served.conversations
                is_platforms = (
                    isinstance(refused, SessionNotFound)
                    and conversations is not None
                    and conversations.is_platforms(session_header, principal, scope)
                )
                if not is_platforms:
                    await _send_refused(send, message, refused)
                    return None
            except StoreUnavailable as failed:
                raise NotBegun(failed) from failed
        version = call.headers.get(b"mcp-protocol-version", _DEFAULT_VERSION)
        peer = connection.peer if connection is not None else Peer(version.decode("latin-1"))
        # SEC3. As this very message was admitted: by whom its connection was made.
        needed = record.principal.scopes if record is not None else principal.scopes
        if self._loop is None:
            self._loop = asyncio.get_running_loop()
        channel = PostChannel(
            0 if isinstance(message, Answer) or message.is_notification else message.id,
            http_transport(connection).responses if connection is not None else None,
            self._served.policy,
            self._loop,
            post.prefers_stream,
            self._served.bus.process,
            # Most need no others, and the empty set is one.
            principal.scopes - needed or NO_SCOPES,
        )
        request, resumes_stream = HttpRequest(scope, post.again), b"last-event-id" in call.headers
        http = HttpFacts(request, session_header, resumes_stream, record, joint)
        inbound = Inbound(principal, peer, connection, channel, http)
        if isinstance(message, Answer):
            taken = self._served.router.answer(message, inbound)
            if not isinstance(taken, bool):
                taken = await confirmed(taken)
            if not taken and connection is None:
                await _send_missing(send)
                return None
        elif message.method == method_names.INITIALIZE and not message.is_notification:
            await self._initialize(message, inbound, channel, call)
            return None
        elif connection is None and not self._may_be_alone(message):
            await _send_missing(send)
            return None
        elif not message.is_notification:
            try:
                await self._served.router.request(message, inbound)
            except BaseException:
                # Also if it is the store's absence that is answered.
                channel.run_after_answer()
                raise
            return channel
        else:
            reported = self._served.router.reported(message, inbound)
            if reported is not None:
                await reported
            handled = await self._served.router.notification(message, inbound)
            if handled is not None:
                # In a task: a handler may wait for the client, and the client for this 202.
                share = share_of(principal, scope)
                self._handle(connection.id if connection is not None else share, handled)
        session_id = connection.session_id if connection is not None else None
        await send_text(send, 202, session_id=session_id)
        return None

    def _handle(self, sender: Hashable, handling: Coroutine[Any, Any, None]) -> None:
        """Handle a notification concurrently. A sender has at most as many as requests (ERR6)."""
        most = self._served.policy.max_running_requests
        if self._handled.get(sender, 0) >= most:
            handling.close()
            logger.warning(
                "a notification is dropped: handlers of %d earlier ones do not return "
                "(max_running_requests)",
                most,
            )
            return
        self._handled[sender] = self._handled.get(sender, 0) + 1
        task = self._background.run("a notification that was accepted", handling)
        task.add_done_callback(lambda _: self._was_handled(sender))

    def _was_handled(self, sender: Hashable) -> None:
        self._handled[sender] -= 1
        if not self._handled[sender]:
            del self._handled[sender]

    async def _initialize(
        self, request: Message, inbound: Inbound, channel: PostChannel, call: HttpCall
    ) -> None:
        served = self._served
        # A client that initializes has no connection yet, whatever header came along.
        http = HttpFacts(inbound.http.request)
        alone = Inbound(inbound.principal, inbound.peer, None, inbound.channel, http)

        async def register(peer: Peer) -> StoredConnection:
            if call.fresh_until is not None and call.clock() >= call.fresh_until:
                # The server took its time.
                await call.check_again()
            record = await served.lifecycle.create(Mode.TRANSPORT, inbound.principal, peer)
            return served.connections.new_connection(record, peer)

        answer, connection = await served.router.initialize(request, alone, register)
        session_id = connection.transport_session if connection is not None else None
        if session_id is not None and not channel.has_stream and await has_left(call.receive):
            # Nobody knows its name: a client that tries again would leave one each time.
            await served.lifecycle.finish(session_id, EndReason.CLIENT)
            return
        if not channel.has_stream:
            await send_json(call.send, answer, session_id=session_id)
            return
        # The server said something meanwhile. It had to wait: the headers name the session.
        await channel.answer(answer)
        await channel.respond(call, opened=session_id)

    def _may_be_alone(self, message: Message) -> bool:
        served = self._served
        if not served.remembers or message.method in method_names.OF_SESSIONS:
            return True
        if served.conversations is not None:
            # Hosts that start no session have one all the same: no header shuts them out.
            return True
        # Wrong metadata of a notification gets no answer.
        return message.names_session and not (
            message.is_notification and message.session is NotNamed.MALFORMED
        )

    async def _admitted(self, call: HttpCall) -> SessionRecord | None:
        """The transport session that a GET or DELETE names; None if it was refused here."""
        session_header = call.session_header
        if session_header is None:
            await _send_missing(call.send)
            return None
        try:
            return await self._sessions.admit(session_header, call.principal)
        except (SessionNotFound, InvalidRequest) as refused:
            await _send_refused(call.send, None, refused)
            return None


async def _send_missing(send: Send) -> None:
    await send_json(send, refusal("Bad Request: Missing session ID"), status=400)


async def _send_refused(
    send: Send, message: Message | Answer | None, refused: SessionNotFound | InvalidRequest
) -> None:
    """Answer what :meth:`TransportSessions.admit` raised.

    Args:
        message: The message with the header; None: the request had no body.
    """
    if isinstance(refused, SessionNotFound):
        await send_not_found(send)
        return
    request_id = message.id if message is not None else None
    if isinstance(message, Message) and message.is_notification:
        request_id = None
    body = error_message(request_id, wire_error(refused))
    await send_json(send, body, status=refused.status)


def _mirrors(message: Message | Answer, session_header: str) -> bool:
    if isinstance(message, Answer):
        return False
    resumed = (
        (message.params or {}).get("sessionId")
        if message.method == method_names.RESUME_SESSION
        else ""
    )
    # The elevation document: both transport headers and resume parameters for one attempt.
    return message.session == session_header and resumed != session_header
