"""WebSocket, the client side: one JSON-RPC message per text frame, both eras.

A `mcp_sessions.client.dialer.Link`. The connection is one for all requests; when it is gone,
so is the link, and the client opens another.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import anyio
import httpx2
from anyio.abc import TaskStatus
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import (
    ConnectionClosed,
    InvalidHandshake,
    InvalidStatus,
    InvalidURI,
    WebSocketException,
)
from websockets.typing import Subprotocol

from mcp_sessions import method_names
from mcp_sessions.client.dialer import (
    AnswerTooLarge,
    Down,
    Failed,
    Failure,
    LinkSettings,
    Missed,
    Received,
    Sink,
    Unanswered,
)
from mcp_sessions.client.messages import instead_of_dropped, received
from mcp_sessions.client.reconnect_policy import ReconnectPolicy
from mcp_sessions.core.messages import Json, RequestId, encode, error_body, members_of
from mcp_sessions.core.nearness import past_proxies
from mcp_sessions.core.outline import Outline
from mcp_sessions.core.resume import FailureCause
from mcp_sessions.errors import INVALID_REQUEST, OUTCOME_UNKNOWN
from mcp_sessions.http_client.connect_errors import reason_of, retry_after, without_credentials
from mcp_sessions_transports.websocket.close_codes import CloseCode, should_come_back

logger = logging.getLogger(__name__)

SUBPROTOCOL = Subprotocol("mcp")
DROPPED = 4
"""A message of more than this many limits in length costs the connection (1009). A smaller one
above the limit is dropped: the server would send it again after each reconnect.
"""

PING_INTERVAL = 20.0
"""Seconds between two pings; a connection that does not answer one is gone as long after."""


@dataclass(slots=True, eq=False, kw_only=True)
class WebSocketDialer:
    url: str = field(repr=False)
    headers: Mapping[str, str] = field(repr=False)
    auth: httpx2.Auth | None
    policy: ReconnectPolicy

    target: str = field(init=False)

    def __post_init__(self) -> None:
        self.target = without_credentials(self.url)

    def link(self) -> WebSocketLink:
        return WebSocketLink(self)


_SMALL = 1_024
"""Bytes that every server takes: no such message was too large for it."""

_LARGE = 65_536
"""Bytes beyond which it is what WSS5 says. With fewer bytes, something between the two may have
closed because of an answer that was too large: the call may have run.
"""


@dataclass(frozen=True, slots=True)
class _Sent:
    size: int = 0
    """Bytes."""

    id: RequestId | None = None
    is_question: bool = False
    """It asks; else it answers, or is a notification."""


class _LargeMessages:
    def __init__(self) -> None:
        self._open: dict[RequestId, _Sent] = {}
        """Requests that have no answer."""

        self._other = _Sent()
        """The largest of what has none."""

        self._taken = _SMALL
        """Bytes that the server is known to take."""

    def sent(self, message: Json, size: int) -> _Sent:
        sent = _Sent(size, message.get("id"), "method" in message)
        if size > _SMALL and sent.is_question and sent.id is not None:
            self._open[sent.id] = sent
        elif size > self._other.size:
            self._other = sent
        return sent

    def answered(self, request_id: object) -> None:
        sent = self.given_up(request_id)
        if sent is not None:
            self._taken = max(self._taken, sent.size)

    def given_up(self, request_id: object) -> _Sent | None:
        return self._open.pop(request_id, None) if isinstance(request_id, (str, int)) else None

    def largest(self) -> _Sent | None:
        largest = max((*self._open.values(), self._other), key=lambda sent: sent.size)
        return largest if largest.size > self._taken else None


class WebSocketLink:
    kind = "websocket"

    def __init__(self, dialer: WebSocketDialer) -> None:
        self.name = dialer.target
        self._dialer = dialer
        self._policy = dialer.policy
        self._socket: ClientConnection | None = None
        self._is_closing = False
        self._headers: Mapping[str, str] = {}
        self._large = _LargeMessages()

    async def run(self, sink: Sink, *, task_status: TaskStatus[None]) -> None:
        socket = self._socket = await self._open()
        task_status.started()
        try:
            async for frame in socket:
                data = frame.encode() if isinstance(frame, str) else frame
                if len(data) > self._policy.max_message:
                    await self._was_dropped(sink, data)
                    continue
                message = received(data)
                if message is not None:
                    if "method" not in message:
                        self._large.answered(message.get("id"))
                    await sink(self, Received(message))
            failure = self._closed(socket)
        except ConnectionClosed:
            failure = self._closed(socket)
        finally:
            with anyio.CancelScope(shield=True):
                with anyio.move_on_after(self._policy.closing_timeout):
                    await socket.close()
                socket.transport.abort()
        if not self._is_closing:
            large = self._too_large()
            if large is not None:
                # Other requests may be repeated on the next connection.
                failure = replace(failure, may_return=True)
            if large is not None and large.id is not None:
                if large.is_question:
                    await sink(self, Unanswered(large.id, self._refused(large.size)))
                else:
                    await sink(self, AnswerTooLarge(large.id))
            await sink(self, Down(failure))

    def _too_large(self) -> _Sent | None:
        """Return the message that was too large for the server, so that it closed (WSS5)."""
        socket = self._socket
        if socket is None or _was_far_too_large(socket):
            return None
        closed = socket.protocol.close_rcvd
        is_too_big = closed is not None and closed.code == CloseCode.TOO_BIG
        return self._large.largest() if is_too_big else None

    def _refused(self, size: int) -> Failure:
        text = f"{self.name}: a message of {size} bytes is too large for the server"
        data = {"reason": "too_large", "size": size}
        if size > _LARGE:
            error = error_body(INVALID_REQUEST, f"Invalid request: {text}", data)
        else:
            error = error_body(OUTCOME_UNKNOWN, f"Outcome unknown: perhaps {text}", data)
        return Failure(FailureCause.STATUS, text, status=413, error=error, is_answer=True)

    async def _was_dropped(self, sink: Sink, data: bytes) -> None:
        outline = Outline()
        outline.feed(data)
        answer = instead_of_dropped(outline, self.name, self._policy.max_message)
        if answer is None:
            await sink(self, Missed())
        elif outline.has_method:
            # Its asker waits.
            try:
                await self.send(answer, {})
            except Failed as failed:
                logger.info("the refusal of a question could not be sent: %s", failed)
        else:
            await sink(self, Received(answer))

    async def _open(self) -> ClientConnection:
        headers = {**self._dialer.headers, **self._headers, **await self._credentials()}
        try:
            return await _Connect(
                self._dialer.url,
                create_connection=_Connection,
                subprotocols=[SUBPROTOCOL],
                additional_headers=headers,
                compression=None,
                proxy=None if past_proxies(self._dialer.url) else True,
                max_size=self._policy.max_message * DROPPED,
                open_timeout=self._policy.connect_timeout,
                close_timeout=self._policy.closing_timeout,
                ping_interval=PING_INTERVAL,
                ping_timeout=PING_INTERVAL,
            )
        except InvalidStatus as error:
            status = error.response.status_code
            text = f"{self.name}: the WebSocket was refused with HTTP status {status}"
            asked = retry_after(error.response.headers.get("retry-after", ""))
            failure = Failure(FailureCause.UNREACHABLE, text, status=status, retry_after=asked)
            raise Failed(failure) from None
        except (OSError, TimeoutError, InvalidHandshake, InvalidURI, WebSocketException) as error:
            reason = reason_of(error, seconds=self._policy.connect_timeout)
            text = f"{self.name}: no WebSocket: {reason}"
            raise Failed(Failure(FailureCause.UNREACHABLE, text)) from None

    async def _credentials(self) -> dict[str, str]:
        if self._dialer.auth is None:
            return {}
        url = httpx2.URL(self._dialer.url)
        plain = url.copy_with(scheme="https" if url.scheme == "wss" else "http")
        flow = self._dialer.auth.async_auth_flow(httpx2.Request("GET", plain))
        try:
            request = await anext(flow)
        finally:
            await flow.aclose()
        value = request.headers.get("authorization")
        return {"Authorization": value} if value is not None else {}

    def _closed(self, socket: ClientConnection) -> Failure:
        if _was_far_too_large(socket):
            # The server would send it again on the next connection.
            most = self._policy.max_message * DROPPED
            text = f"{self.name}: a message of the server has more than {most} bytes (max_message)"
            return Failure(FailureCause.CLOSED, text, may_return=False)
        code = socket.close_code
        # 1005 and 1006 are never sent: the peer gave no code, or the connection broke.
        given = None if code in (None, 1005, 1006) else code
        again = should_come_back(given)
        if given == CloseCode.POLICY_VIOLATION and self._dialer.auth is not None:
            # The credential was good no more; a new one may be.
            again = True
        return Failure(
            FailureCause.CUT if given is None else FailureCause.CLOSED,
            f"{self.name}: the WebSocket was closed with {given or 'no code'}",
            may_return=again,
        )

    async def send(self, message: Json, headers: Mapping[str, str]) -> None:
        if self._socket is None:
            raise AssertionError("a link is used before it runs")
        data = encode(message)
        if message.get("method") == method_names.CANCELLED:
            self._large.given_up(members_of(message.get("params")).get("requestId"))
        sent = self._large.sent(message, len(data))
        try:
            await self._socket.send(data.decode())
        except ConnectionClosed:
            if sent.is_question and self._too_large() is sent:
                # Before its end was out. Sent again it would cost the next connection, too.
                raise Failed(self._refused(sent.size)) from None
            raise Failed(
                Failure(FailureCause.CUT, f"{self.name}: the WebSocket is closed")
            ) from None

    def configure(self, settings: LinkSettings) -> None:
        self._headers = settings.headers

    def listen(self) -> None:
        """Do nothing: every message comes on one stream."""

    def abandon(self, request_id: RequestId) -> None:
        self._large.given_up(request_id)

    async def close(self, *, leave: bool) -> None:
        self._is_closing = True
        if self._socket is not None:
            with anyio.move_on_after(self._policy.closing_timeout, shield=True):
                await self._socket.close()


def _was_far_too_large(socket: ClientConnection) -> bool:
    """Whether this side closed the connection because of a message's size."""
    sent = socket.protocol.close_sent
    is_too_big = sent is not None and sent.code == CloseCode.TOO_BIG
    return is_too_big and not socket.protocol.close_rcvd_then_sent


class _Connection(ClientConnection):
    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self.transport = _Gone()


class _Gone(asyncio.Transport):
    """In place of a transport whose connection is lost. The library aborts it once more, which
    asyncio's own may answer with an AttributeError, if it was lost with something in its buffer.
    """

    def abort(self) -> None:
        """Do nothing: the transport is closed already."""

    def is_closing(self) -> bool:
        return True


class _Connect(connect):
    """Connects without following redirects: they may lead to another server, and the
    credentials in the headers were meant for this one.
    """

    def process_redirect(self, exc: Exception) -> Exception | str:
        """Return the error: a redirect is never followed."""
        return exc
