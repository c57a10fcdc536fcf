"""Serve Streamable HTTP of the modern era (2026-07-28), with sessions.

A client that knows nothing of sessions sees the same as from the SDK's own entry. The SDK itself
decides the rules for it.

A session's events go on the stream of its ``subscriptions/listen``: acknowledged first, then what
waits, then live. Each event carries the listen request's id and its own session event id; a client
that was cut resumes the session and listens again.

A POST is answered as the SDK's own entry answers it, to the byte (`ModernChannel`): by a JSON body
if the request is done before anything was sent for it, else by a stream. The stream is not
resumable; what must survive it has a request key.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

from starlette.requests import Request as HttpRequest
from starlette.types import Receive, Send

from mcp_sessions import method_names
from mcp_sessions.background import stopped
from mcp_sessions.core.listen_messages import Filter, acknowledgement, completion, stamped
from mcp_sessions.core.log import Draft, LoggedEvent
from mcp_sessions.core.message import Message, read
from mcp_sessions.core.messages import (
    Notification,
    NotNamed,
    RequestId,
    error_message,
    wire_error,
)
from mcp_sessions.core.story import Why
from mcp_sessions.errors import LimitReached, SessionNotFound, StoreUnavailable, WireError
from mcp_sessions.ids import Position, SessionId, position_of
from mcp_sessions.policy import SessionPolicy
from mcp_sessions.security import mint_connection_id
from mcp_sessions.server.calls.table import Call, Outcome
from mcp_sessions.server.connection.binding import ReadEvents
from mcp_sessions.server.connection.connection import (
    ClientConnection,
    HttpFacts,
    Inbound,
    WatchedChannel,
    unwatched,
)
from mcp_sessions.server.dispatch.modern_limits import check_modern
from mcp_sessions.server.upstream.modern_rules import ModernRefusal
from mcp_sessions.server.upstream.port import UpstreamError
from mcp_sessions.stores.records import Attached, Peer, SessionRecord
from mcp_sessions_transports.credentials import FRESH, no_stream
from mcp_sessions_transports.http.io import (
    TOO_MANY,
    BodyTooLarge,
    Disconnected,
    HttpCall,
    accepts,
    has_left,
    read_body,
    replay_body,
    retry_header,
    send_json,
    send_text,
    send_too_large,
)
from mcp_sessions_transports.http.sse import KEEP_ALIVE, SseStream
from mcp_sessions_transports.origin import OriginGuard
from mcp_sessions_transports.outbox import LogFeed
from mcp_sessions_transports.served import Served


@dataclass(eq=False, repr=False)
class ListenStream:
    """A :class:`~mcp_sessions.server.connection.binding.Transport` of one session's events. It
    begins with the acknowledgement.

    Args:
        is_shared: Other processes may store events of the session.
        result: Adds what the stream's last message carries in addition to its subscription id.
        encode: Writes that message.
    """

    _request_id: RequestId
    _wanted: Filter
    _policy: SessionPolicy
    _is_shared: bool
    _result: Callable[[dict[str, Any]], dict[str, Any]]
    _encode: Callable[[Any], bytes]
    close_stream: Callable[[], Awaitable[None]] | None = field(init=False, default=None)
    is_leaving: bool = field(init=False, default=False)
    """Nothing is asked on it."""

    _feed: LogFeed | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        self._stream = SseStream(self._policy, PING)
        acknowledged = acknowledgement(self._wanted, self._request_id)
        self._stream.push(modern_event(self._encode(acknowledged)))

    # --- the port --------------------------------------------------------------------------

    @property
    def is_taken(self) -> bool:
        return self._stream.is_taken

    @property
    def was_slow(self) -> bool:
        return self._stream.was_slow

    def begin(
        self, session_id: SessionId, attached: Attached, after: Position, read: ReadEvents
    ) -> None:
        start = attached.waits_from if attached.waits_from is not None else attached.head
        self._feed = LogFeed(
            self._stream, read, position_of(start), frame=self._frame, is_checked=self._is_shared
        )
        self._stream.wake()

    def offer(self, session_id: SessionId, event: LoggedEvent) -> None:
        if self._feed is not None:
            self._feed.offer(event)

    def check_position(self, session_id: SessionId, head: Position | None) -> None:
        if self._feed is not None:
            self._feed.check_position(head)

    def send(self, draft: Draft) -> None:
        self._stream.push(modern_event(stamped(draft.before, self._request_id)), draft.origin)

    def withdraw(self, session_id: SessionId, *, has_ended: bool = False) -> None:
        self._finish(wire_error(SessionNotFound(session_id)) if has_ended else None)

    async def drain(self) -> None:
        await self._stream.drain()

    def hold(self) -> Callable[[], None]:
        return self._stream.hold()

    def close(self) -> None:
        self._finish(None)

    # --- the stream ------------------------------------------------------------------------

    async def serve(self, receive: Receive, send: Send) -> None:
        await self._stream.serve(receive, send, MODERN_SSE_HEADERS)

    def cut(self) -> None:
        self._stream.cut()

    def _frame(self, event: LoggedEvent) -> bytes | None:
        if not self._wanted.admits(event):
            return None
        return modern_event(stamped(event.payload, self._request_id))

    def _finish(self, error: dict[str, Any] | None) -> None:
        last = completion(self._request_id, error, self._result)
        self._stream.push(modern_event(self._encode(last)))
        self._stream.finish()


@dataclass(slots=True, eq=False, repr=False)
class ModernHttp:
    _served: Served
    _guard: OriginGuard
    _max_body: int
    _loop: asyncio.AbstractEventLoop | None = None

    async def serve(self, call: HttpCall) -> None:
        """Serve one HTTP request. The order of the checks is the SDK's."""
        headers, send = call.headers, call.send
        try:
            body = await read_body(call.receive, headers, self._max_body)
            if call.arrival is not None:
                call.arrival.is_read = True
            if call.fresh_until is not None and call.clock() >= call.fresh_until:
                await call.check_again()
        except BodyTooLarge:
            await send_too_large(send, self._max_body)
            return
        except Disconnected:
            return
        is_post = call.scope["method"] == "POST"
        if is_post and not headers.get(b"content-type", b"").lower().startswith(
            b"application/json"
        ):
            await send_text(send, 400, "Invalid Content-Type header")
            return
        refused = self._guard.verdicts[headers.get(b"host"), headers.get(b"origin")]
        if refused is not None:
            await send_text(send, *refused)
            return
        if not is_post:
            await send_text(send, 405, headers=[(b"allow", b"POST")])
            return
        takes_json, takes_sse = accepts(headers)
        if not (takes_json and takes_sse):
            await send_text(send, 406)
            return
        http_request = HttpRequest(call.scope, replay_body(body))
        checked = await self._served.rules.check(http_request, body)
        if isinstance(checked, ModernRefusal):
            await _send_refused(send, checked)
        elif isinstance(checked, Notification):
            inbound, _ = self._inbound(call, Peer("", None, modern=True), http_request)
            await self._served.router.cancel_keyed(read(checked), inbound)
            await send_text(send, 202)
        else:
            request, peer = read(checked[0]), checked[1]
            header = call.session_header
            is_named = header is not None and not isinstance(request.session, NotNamed)
            if is_named and request.session != header:
                await _send_refused(send, self._served.rules.header_mismatch(request.id))
                return
            try:
                check_modern(request, len(body), self._served.policy)
            except LimitReached as refused:
                self._served.router.limits.reached(refused)
                error = error_message(request.id, wire_error(refused))
                await send_json(send, error)
                return
            await self._serve(request, call, peer, http_request)

    async def _serve(
        self, request: Message, call: HttpCall, peer: Peer, http_request: HttpRequest
    ) -> None:
        inbound, channel = self._inbound(call, peer, http_request)
        if (
            request.method == method_names.LISTEN
            and self._served.remembers
            and request.names_session
        ):
            await self._listen(request, inbound, channel, call)
            return
        try:
            await self._served.router.request(request, inbound)
        except BaseException:
            channel.run_after_answer()
            raise
        call.arrived()
        await channel.respond(call)

    async def _listen(
        self, request: Message, inbound: Inbound, channel: ModernChannel, call: HttpCall
    ) -> None:
        served, retry_after = self._served, None
        # This process, or its store, stood still. What its client sent since may have gone
        # elsewhere: a late listen would take the events that wait for the next one (HTM1), or the
        # session from that one, and set its filter.
        if await has_left(call.receive):
            return
        try:
            with served.router.audited(request, inbound):
                record, wanted = await served.listening.admit(request, inbound)
                if await has_left(call.receive):
                    return
                connection, stream = await self._open(request, inbound, record, wanted)
        except WireError as refused:
            error = wire_error(refused)
            if isinstance(refused, LimitReached):
                retry_after = refused.retry_after
        except UpstreamError as failed:
            error = failed.error
        else:
            call.arrived()
            try:
                async with call.watch(stream.cut) as watched:
                    await stream.serve(call.receive, watched.guarding(call.send))
            finally:
                stream.cut()
                why = Why.SLOW if stream.was_slow else Why.CLOSED
                await served.attachments.remove(connection, why=why)
            return
        await Call(request, inbound).answer(Outcome(None, error), retry_after=retry_after)
        await channel.respond(call)

    async def _open(
        self, request: Message, inbound: Inbound, record: SessionRecord, wanted: Filter
    ) -> tuple[ClientConnection, ListenStream]:
        served = self._served
        stream = ListenStream(
            request.id,
            wanted,
            served.policy,
            served.bus.is_shared,
            lambda members: served.listening.result(members, record),
            inbound.channel.encode,
        )
        connection_id = mint_connection_id("listen", served.bus.process)
        connection = ClientConnection(
            connection_id, "listen", inbound.principal, inbound.peer, stream
        )
        served.connections.add(connection)
        try:
            await served.listening.attach(request, record, connection)
        except BaseException:
            # Nobody serves it: it must not stay behind as a connection.
            await served.attachments.remove(connection, why=Why.NOT_ATTACHED)
            raise
        inbound.acknowledged()
        return connection, stream

    def _inbound(
        self, call: HttpCall, peer: Peer, http_request: HttpRequest
    ) -> tuple[Inbound, ModernChannel]:
        if self._loop is None:
            self._loop = asyncio.get_running_loop()
        policy, rules = self._served.policy, self._served.rules
        channel = ModernChannel(policy, self._loop, rules.status_of, rules.dumps)
        http = HttpFacts(http_request, call.session_header, b"last-event-id" in call.headers)
        return Inbound(call.principal, peer, None, channel, http), channel


async def _send_refused(send: Send, refused: ModernRefusal) -> None:
    if refused.body is None:
        await send_text(send, refused.status)
    else:
        await send_json(send, refused.body, status=refused.status)


MODERN_SSE_HEADERS: list[tuple[bytes, bytes]] = [
    (b"content-type", b"text/event-stream"),
    (b"cache-control", b"no-cache, no-transform"),
    (b"connection", b"keep-alive"),
    (b"x-accel-buffering", b"no"),
]

PING = b": ping\r\n\r\n"

_WATCH_AFTER = 0.02
"""Seconds that a request may take before somebody watches whether its client is still
there: most are done by then, and need no task for it."""


def modern_event(payload: bytes) -> bytes:
    return b"event: message\r\ndata: " + payload + b"\r\n\r\n"


@dataclass(eq=False, repr=False)
class ModernChannel(WatchedChannel):
    """A :class:`~mcp_sessions.server.connection.binding.RequestChannel` over one modern POST.

    Args:
        status_of: The HTTP status of an answer with that error code.
        encode: Writes a message as the SDK's own entry does.
    """

    cancels = is_admitted = True

    _policy: SessionPolicy
    _loop: asyncio.AbstractEventLoop
    _status_of: Callable[[int], int]
    encode: Callable[[Any], bytes]
    is_open: bool = field(init=False, default=True)
    close_stream: Callable[[], Awaitable[None]] | None = field(init=False, default=None)
    _answer: tuple[int, bytes] | None = field(init=False, default=None)
    _away: StoreUnavailable | None = field(init=False, default=None)
    _retry_after: float | None = field(init=False, default=None)
    _stream: SseStream | None = field(init=False, default=None)
    _is_late: bool = field(init=False, default=False)
    """Its credential was checked a while ago."""

    def __post_init__(self) -> None:
        self._turn: asyncio.Future[None] = self._loop.create_future()

    async def emit(self, message: bytes, key: str | None = None) -> None:
        stream = self._commit()
        stream.push(modern_event(message))
        await stream.drain()

    async def answer(
        self,
        message: bytes,
        *,
        code: int | None = None,
        away: StoreUnavailable | None = None,
        retry_after: float | None = None,
    ) -> None:
        if self._stream is not None:
            self._stream.push(modern_event(message))
            self._stream.finish()
            return
        self._away, self._retry_after = away, retry_after
        status = 200 if code is None else self._status_of(code)
        self._answer = (status if retry_after is None else TOO_MANY, message)
        self._decided()

    async def respond(self, call: HttpCall) -> None:
        """Send the response: called once, by the task that took the POST.

        Raises:
            StoreUnavailable: The request cannot be served. Nothing was sent.
        """
        try:
            await self._wait(call.receive)
            if self._answer is not None:
                status, body = self._answer
                self.is_open = False
                self.on_closed = self.on_reopened = unwatched
                if self._away is not None:
                    raise self._away
                headers = retry_header(self._retry_after)
                if not self._is_late:
                    await send_json(call.send, body, status=status, headers=headers)
                else:
                    # SEC4: the credential may have ended while the request ran.
                    async with call.watch(no_stream) as watched:
                        send = watched.guarding(call.send)
                        await send_json(send, body, status=status, headers=headers)
            elif self._stream is not None:
                async with call.watch(self._stream.cut) as watched:
                    send = watched.guarding(call.send)
                    await self._stream.serve(call.receive, send, MODERN_SSE_HEADERS)
        finally:
            if self.is_open:
                self._close()
            if self.follows is not None:
                self.run_after_answer()

    async def _wait(self, receive: Receive) -> None:
        if self._answer is None:
            # One that waits for nothing is done in this turn of the loop, and needs no timer.
            await asyncio.sleep(0)
        if self._turn.done():
            return
        timer = self._loop.call_later(_WATCH_AFTER, self._decided)
        await self._turn
        timer.cancel()
        if self._answer is not None or self._stream is not None:
            return
        self._turn = self._loop.create_future()
        began = self._loop.time()
        watcher = self._loop.create_task(_gone(receive))
        timer = self._loop.call_later(KEEP_ALIVE - _WATCH_AFTER, self._silent)
        try:
            await asyncio.wait({watcher, self._turn}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            timer.cancel()
            await stopped(watcher)
        self._is_late = self._loop.time() - began >= FRESH - _WATCH_AFTER

    def _silent(self) -> None:
        # So long without a word that a proxy might close: stream, and say that we live.
        self._commit().push(PING)

    def _commit(self) -> SseStream:
        if self._stream is None:
            self._stream = SseStream(self._policy, PING)
            if not self.is_open:
                self._stream.cut()
            self._decided()
        return self._stream

    def _decided(self) -> None:
        if not self._turn.done():
            self._turn.set_result(None)

    def _close(self) -> None:
        if self._stream is not None:
            self._stream.cut()
        self.is_open = False
        self.on_closed()
        self.on_closed = self.on_reopened = unwatched


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        continue
