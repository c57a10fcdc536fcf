"""Streamable HTTP of the handshake era: 2025-03-26, 2025-06-18 and 2025-11-25.

Statuses, texts and headers are those of the SDK's own transport, so that a stock client
cannot tell the two apart; sessions, streams and their past are ours.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine, Sequence
from typing import Any

from starlette.requests import Request as HttpRequest
from starlette.types import Receive, Scope, Send

from mcp_sessions.core.messages import (
    Answer,
    Malformed,
    Message,
    Notification,
    NotNamed,
    Request,
    RequestId,
    decode,
    error_message,
    named_session,
    parse,
    wire_error,
)
from mcp_sessions.errors import (
    INVALID_PARAMS,
    PARSE_ERROR,
    Detached,
    InvalidParams,
    InvalidReason,
    InvalidRequest,
    OutcomeUnknown,
    SessionNotFound,
    Status,
    StoreUnavailable,
)
from mcp_sessions.ids import (
    ConnectionId,
    SessionId,
    StreamName,
    digest,
    parse_session_id,
    process_of,
)
from mcp_sessions.principal import Principal
from mcp_sessions.server.connection import Inbound
from mcp_sessions.server.session_methods import SESSION_METHODS
from mcp_sessions.stores.base import Mode, Peer, SessionRecord
from mcp_sessions_transports.far_stream import FarStream
from mcp_sessions_transports.http_channel import PostChannel, post_event_id, post_stream_of
from mcp_sessions_transports.http_connection import HttpConnection
from mcp_sessions_transports.http_io import (
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
from mcp_sessions_transports.served import DEFAULT_VERSION, Served
from mcp_sessions_transports.sse import SSE_HEADERS, sse_event

logger = logging.getLogger(__name__)

_WITHOUT_SESSION = SESSION_METHODS
"""Served without ``initialize`` and without ``Mcp-Session-Id``."""

_NOT_FOUND = "Session not found"
_MISSING = "Bad Request: Missing session ID"


class HandshakeHttp:
    """Serves POST, GET and DELETE of the handshake era."""

    def __init__(self, served: Served) -> None:
        self._served = served
        self._tasks: set[asyncio.Task[Any]] = set()
        self._loop_or_none: asyncio.AbstractEventLoop | None = None
        if served.replicas is not None:
            served.replicas.on("get_opened", self._opened_elsewhere)
            served.replicas.on("stream_read", self._read_elsewhere)
            served.replicas.on("withdrawn", self._withdrawn_elsewhere)
            served.replicas.each_round.append(self._round)

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
        if method in ("GET", "DELETE") and not self._served.store.remembers:
            # Without a store there is neither a stream to open nor a session to delete.
            method = "none"
        match method:
            case "POST":
                await self._post(scope, receive, send, headers, principal, draining)
            case "GET":
                await self._get(scope, receive, send, headers, principal)
            case "DELETE":
                await self._delete(send, headers, principal)
            case _:
                await send_json(
                    send,
                    refusal("Method Not Allowed"),
                    status=405,
                    headers=[(b"allow", b"GET, POST, DELETE")],
                )

    async def revive(self, connection_id: ConnectionId) -> HttpConnection | None:
        """A connection that is in the store but not in this process yet."""
        served = self._served
        record = await served.store.load(SessionId(connection_id), now=served.clock())
        if record is None or record.mode is not Mode.TRANSPORT:
            return None
        return self._connection(record)

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
        session_header = _session_header(headers)
        connection: HttpConnection | None = None
        record: SessionRecord | None = None
        if session_header is not None and self._served.store.remembers:
            try:
                record = await self._of_header(session_header, principal, message)
                connection = self._connection(record) if record is not None else None
            except (SessionNotFound, InvalidRequest) as refused:
                await _refuse(send, message, refused)
                return
        version = headers.get(b"mcp-protocol-version", DEFAULT_VERSION.encode()).decode("latin-1")
        peer = connection.peer if connection is not None else Peer(version)
        request = message if isinstance(message, Request) else Request(0, "", None)
        channel = self._channel(request, connection, peer.protocol_version, headers)
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
                await self._initialize(message, inbound, send)
            elif connection is None and not self._may_be_alone(message):
                await send_json(send, refusal(_MISSING), status=400)
            else:
                await self._served.router.request(message, inbound)
                await channel.respond(receive, send)
        elif isinstance(message, Notification):
            if connection is None and not self._may_be_alone(message):
                await send_json(send, refusal(_MISSING), status=400)
                return
            handled = await self._served.router.notification(message, inbound)
            if handled is not None:
                # In a task: a handler may wait for the client, and the client for this 202.
                self._start(handled)
            session_id = connection.session_id if connection is not None else None
            await send_empty(send, 202, session_id=session_id)
        elif await self._served.router.answer(message, inbound) or connection is not None:
            session_id = connection.session_id if connection is not None else None
            await send_empty(send, 202, session_id=session_id)
        else:
            await send_json(send, refusal(_MISSING), status=400)

    async def _initialize(self, request: Request, inbound: Inbound, send: Send) -> None:
        served = self._served
        # A client that initializes has no connection yet, whatever header came along.
        alone = Inbound(
            inbound.principal, inbound.peer, None, inbound.channel, context=inbound.context
        )

        async def register(peer: Peer) -> HttpConnection:
            record = await served.methods.create(Mode.TRANSPORT, inbound.principal, peer)
            logger.info("transport session %s opened", digest(record.session_id))
            return self._make(record, peer)

        answer, connection = await served.router.initialize(request, alone, register)
        session_id = connection.transport_session if connection is not None else None
        await send_json(send, answer, session_id=session_id)

    # --- GET -----------------------------------------------------------------------------------

    async def _get(
        self, scope: Scope, receive: Receive, send: Send, headers: Headers, principal: Principal
    ) -> None:
        if not accepts(headers)[1]:
            text = "Not Acceptable: Client must accept text/event-stream"
            await send_json(send, refusal(text), status=406)
            return
        record = await self._of_required_header(headers, principal, send)
        if record is None:
            return
        connection = self._connection(record)
        if not await self._may_hear(record, principal):
            # A weaker credential does not hear what a stronger one may (pitfall F3).
            await send_json(send, refusal(_NOT_FOUND), status=Status.NOT_FOUND)
            return
        last_event_id = headers.get(b"last-event-id", b"").decode("latin-1") or None
        post_stream = post_stream_of(last_event_id) if last_event_id is not None else None
        if post_stream is not None:
            await self._resume_post(scope, receive, send, connection, principal, post_stream)
            return
        served = self._served
        if served.store.survives_process or served.replicas is not None:
            await self._catch_up(connection)
        after, lost, continues = await connection.position(last_event_id)
        first: Sequence[bytes] = ()
        if lost is not None and last_event_id is not None:
            first = await self._lost_its_place(connection, record)
        elif not continues:
            # A later GET without a position: its sessions wait for session/resume.
            for session_id, fencing_epoch in record.carried.items():
                await served.hub.detach(session_id, connection, fencing_epoch)
            if lost is not None:
                first = connection.refetch(record.subscriptions, served.upstream.listed())
        async with served.credentials.over(scope, principal, connection.cut_get):
            await connection.serve_get(
                after,
                first,
                receive,
                send,
                scopes=principal.scopes,
                cleared=record.carried,
            )

    async def _resume_post(
        self,
        scope: Scope,
        receive: Receive,
        send: Send,
        connection: HttpConnection,
        principal: Principal,
        post_stream: tuple[StreamName, str, RequestId],
    ) -> None:
        served = self._served
        name, position, request_id = post_stream
        channel = connection.posts.get(name)
        here = process_of(name) == served.host.process
        if (channel is None and here) or await self._is_gone(connection, name, position):
            await _answer_unknown(send, connection.session_id, request_id)
            return
        if channel is not None:
            async with served.credentials.over(scope, principal, channel.cut):
                await channel.resume(position, receive, send)
            return
        far = FarStream(
            connection.session_id,
            name,
            request_id,
            lambda at: post_event_id(name, at, request_id),
            store=served.store,
            policy=served.policy,
            clock=served.clock,
            replicas=served.replicas,
            primes=served.primes(connection.peer.protocol_version),
        )
        for older in connection.far:
            if older.name == name:
                older.supersede()
        connection.far[far] = None
        try:
            async with served.credentials.over(scope, principal, far.stream.cut):
                await far.serve(position, receive, send)
        finally:
            del connection.far[far]

    async def _may_hear(self, record: SessionRecord, principal: Principal) -> bool:
        """Whether it has the scopes of the transport session and of what is attached there,
        which a credential with more scopes may have started since.
        """
        if not principal.scopes >= record.principal.scopes:
            return False
        served = self._served
        for session_id in record.carried:
            carried = await served.store.load(session_id, now=served.clock())
            if carried is not None and not principal.scopes >= carried.principal.scopes:
                return False
        return True

    async def _is_gone(self, connection: HttpConnection, name: Any, position: str) -> bool:
        served = self._served
        _, refused = await served.store.read(
            connection.session_id, position, now=served.clock(), stream=name
        )
        return refused is not None

    async def _lost_its_place(
        self, connection: HttpConnection, record: SessionRecord
    ) -> Sequence[bytes]:
        """What the client missed is gone from the window: it is not left in silent doubt."""
        served = self._served
        for session_id in record.carried:
            # Its position in the session's own log may still be good: it has to resume.
            await served.hub.displace(session_id, Detached.EVICTED)
        return connection.refetch(record.subscriptions, served.upstream.listed())

    async def _catch_up(self, connection: HttpConnection) -> None:
        for session_id in await connection.catch_up():
            await self._served.hub.displace(session_id, Detached.EVICTED)

    # --- what other processes do -----------------------------------------------------------------

    def _opened_elsewhere(self, message: dict[str, Any]) -> Coroutine[Any, Any, None] | None:
        connection = self._local(message["session"])
        if connection is None:
            return None
        opened = (message["at"], message["from"])
        if connection.opened_elsewhere(opened, self._served.host.process):
            return None
        return connection.insist(message["from"])

    def _read_elsewhere(self, message: dict[str, Any]) -> Coroutine[Any, Any, None] | None:
        connection = self._local(message["session"])
        channel = connection.posts.get(message["stream"]) if connection is not None else None
        if channel is None:
            return None
        if message["is_read"]:
            channel.read_elsewhere(message["from"])
            return None
        return channel.left_elsewhere(message["from"])

    def _withdrawn_elsewhere(self, message: dict[str, Any]) -> Coroutine[Any, Any, None] | None:
        connection = self._local(message["connection"])
        if connection is None:
            return None
        return connection.withdrawn_elsewhere(SessionId(message["session"]))

    async def _round(self) -> None:
        """Make good what a process that died left undone, and forget what is not in use."""
        served = self._served
        unused = served.clock() - served.policy.idle_timeout
        for connection in served.hub.connections():
            if not isinstance(connection, HttpConnection):
                continue
            if connection.is_streaming:
                await self._catch_up(connection)
            elif connection.used_at < unused and not (connection.posts or connection.requests):
                await served.hub.let_go(connection)
            for channel in list(connection.posts.values()):
                await self._check_readers(channel)

    async def _check_readers(self, channel: PostChannel) -> None:
        replicas = self._served.replicas
        for process in channel.readers:
            if replicas is not None and not await replicas.is_alive(process):
                await channel.left_elsewhere(process)

    def _local(self, session_id: str) -> HttpConnection | None:
        connection = self._served.hub.local(ConnectionId(session_id))
        return connection if isinstance(connection, HttpConnection) else None

    # --- DELETE --------------------------------------------------------------------------------

    async def _delete(self, send: Send, headers: Headers, principal: Principal) -> None:
        record = await self._of_required_header(headers, principal, send)
        if record is None:
            return
        await self._served.methods.finish(record.session_id)
        await send_empty(send, Status.OK, session_id=record.session_id)

    # --- sessions ------------------------------------------------------------------------------

    async def _of_required_header(
        self, headers: Headers, principal: Principal, send: Send
    ) -> SessionRecord | None:
        """The transport session that a GET or DELETE names; None if it was refused here."""
        session_header = _session_header(headers)
        if session_header is None:
            await send_json(send, refusal(_MISSING), status=400)
            return None
        try:
            return await self._of_header(session_header, principal, None)
        except (SessionNotFound, InvalidRequest) as refused:
            await _refuse(send, None, refused)
            return None

    async def _of_header(
        self, session_header: str, principal: Principal, message: Message | None
    ) -> SessionRecord | None:
        """The transport session that ``Mcp-Session-Id`` names, as it is now; None if it names
        none but mirrors the session of the message's ``_meta``.

        Raises:
            SessionNotFound: Unknown, ended, expired or somebody else's: 404.
            InvalidRequest: One's own protocol-mode session: 400, mode_conflict.
        """
        if _mirrors(message, session_header):
            return None
        served = self._served
        session_id = parse_session_id(session_header)
        admitted = None
        if session_id is not None:
            admitted = await served.store.admit(
                session_id,
                principal,
                mode=Mode.TRANSPORT,
                now=served.clock(),
                held=session_id in served.host.held,
            )
        if admitted is None:
            raise SessionNotFound(session_header, status=Status.NOT_FOUND)
        record = admitted.record
        if record.mode is not Mode.TRANSPORT:
            raise InvalidRequest(
                InvalidReason.MODE_CONFLICT,
                "Mcp-Session-Id names a session of session/start",
                status=Status.BAD_REQUEST,
            )
        return record

    def _connection(self, record: SessionRecord) -> HttpConnection:
        """The connection of a transport session in this process, made if it is new here."""
        known = self._served.hub.local(ConnectionId(record.session_id))
        if isinstance(known, HttpConnection):
            known.used_at = self._served.clock()
            return known
        connection = self._make(record, record.peer or Peer(DEFAULT_VERSION))
        self._served.hub.add(connection)
        return connection

    def _make(self, record: SessionRecord, peer: Peer) -> HttpConnection:
        served = self._served
        primes = served.primes(peer.protocol_version)
        return HttpConnection(
            record,
            peer,
            served.store,
            served.policy,
            served.clock,
            primes=primes,
            replicas=served.replicas,
        )

    def _channel(
        self,
        request: Request,
        connection: HttpConnection | None,
        version: str,
        headers: Headers,
    ) -> PostChannel:
        served = self._served
        return PostChannel(
            request.id,
            connection,
            served.store,
            served.policy,
            served.clock,
            self._loop,
            primes=served.primes(version),
            prefers_stream=prefers_sse(headers),
            process=served.host.process,
        )

    def _may_be_alone(self, message: Request | Notification) -> bool:
        """Whether a message is served without ``initialize`` and ``Mcp-Session-Id``."""
        return not self._served.store.remembers or _needs_no_session(message)

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(_logged(work))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def close(self) -> None:
        """Wait for what still runs here; called when the server stops."""
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


async def _logged(work: Coroutine[Any, Any, None]) -> None:
    try:
        await work
    except StoreUnavailable as failed:
        # It was accepted, and is owed no answer.
        logger.error("a notification was not served: the session store is away: %s", failed)


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


async def _refuse(
    send: Send, message: Message | None, refused: SessionNotFound | InvalidRequest
) -> None:
    if isinstance(refused, SessionNotFound):
        await send_json(send, refusal(_NOT_FOUND), status=Status.NOT_FOUND)
        return
    request_id = message.id if isinstance(message, (Request, Answer)) else None
    body = error_message(request_id, wire_error(refused))
    await send_json(send, body, status=refused.status)


async def _answer_unknown(send: Send, session_id: str, request_id: str | int) -> None:
    """A response stream that nobody can go on with: its request is answered, and it ends."""
    body = error_message(request_id, wire_error(OutcomeUnknown()))
    headers = [*SSE_HEADERS, (b"mcp-session-id", session_id.encode("ascii"))]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": sse_event(body)})


def _session_header(headers: Headers) -> str | None:
    value = headers.get(b"mcp-session-id")
    return value.decode("latin-1") if value is not None else None


def _mirrors(message: Message | None, session_header: str) -> bool:
    """Whether ``Mcp-Session-Id`` only repeats the session of the message's ``_meta``."""
    if not isinstance(message, (Request, Notification)):
        return False
    members = message.params or {}
    if message.method == "session/resume" and members.get("sessionId") == session_header:
        # Document 002: both transport headers and resume parameters for one attempt.
        return False
    try:
        named = named_session(members)
    except InvalidParams:
        return False
    return not isinstance(named, NotNamed) and named == session_header


def _needs_no_session(message: Request | Notification) -> bool:
    """Whether a message is served without ``initialize`` and without ``Mcp-Session-Id``."""
    if message.method in _WITHOUT_SESSION:
        return True
    try:
        return not isinstance(named_session(message.params), NotNamed)
    except InvalidParams:
        # Malformed metadata is answered as what it is; a notification is owed no answer.
        return isinstance(message, Request)
