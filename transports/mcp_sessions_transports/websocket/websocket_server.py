"""WebSocket, on the same path as HTTP: one JSON-RPC message per text frame, both eras."""

from __future__ import annotations

import asyncio
import base64
import binascii
import contextlib
import logging
import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

from starlette.types import Receive, Scope, Send

from mcp_sessions.background import stopped
from mcp_sessions.core.availability import not_running
from mcp_sessions.core.nearness import BY_NAME
from mcp_sessions.core.story import Why
from mcp_sessions.errors import LimitReached
from mcp_sessions.ids import digest
from mcp_sessions.principal import Principal
from mcp_sessions.seldom import Seldom
from mcp_sessions.server.calls.shares import share_of
from mcp_sessions_transports.credentials import CredentialEnded, CredentialWatch, Watched
from mcp_sessions_transports.duplex import DuplexConnection
from mcp_sessions_transports.http.io import Headers
from mcp_sessions_transports.origin import OriginGuard
from mcp_sessions_transports.served import Served
from mcp_sessions_transports.websocket.authorizer import (
    Authorized,
    Denied,
    HandshakeAuthorizer,
    deny,
)
from mcp_sessions_transports.websocket.close_codes import CloseCode

logger = logging.getLogger(__name__)
logger.addFilter(Seldom())

_BACK = 1
"""Seconds after which a client that was too slow reconnects."""

_FULL = 5.0
"""Seconds after which a client with too many connections may open another one."""

SUBPROTOCOL = "mcp"
BEARER = "mcp.bearer."
"""A browser cannot set headers. It offers this and the base64url of its token as a second
subprotocol. The token is never echoed and never logged.
"""


@dataclass(slots=True, eq=False, repr=False)
class WebSocketBinding:
    _served: Served
    _guard: OriginGuard
    _authorizer: HandshakeAuthorizer
    _credentials: CredentialWatch
    _open: dict[Hashable, int] = field(init=False, default_factory=dict[Hashable, int])

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if not self._served.availability.is_running:
            raise not_running()
        offered: list[str] = list(scope.get("subprotocols") or ())
        if self._guard.is_by_name:
            scope = {**scope, BY_NAME: True}
        admitted = await self._admitted(scope, offered)
        if isinstance(admitted, Denied):
            await deny(scope, receive, send, admitted)
            return
        scope, authorized, owner = admitted
        self._open[owner] = self._open.get(owner, 0) + 1
        try:
            selects = SUBPROTOCOL in offered
            connected = self._connected(scope, receive, send, authorized.principal, selects)
            await asyncio.create_task(connected, context=authorized.context)
        finally:
            left = self._open[owner] - 1
            if left:
                self._open[owner] = left
            else:
                del self._open[owner]

    async def _admitted(
        self, scope: Scope, offered: Sequence[str]
    ) -> tuple[Scope, Authorized, Hashable] | Denied:
        """Return the scope with its credential, who connects, and whose share of the connections it
        takes.
        """
        # If a field is there twice, the first counts, as over HTTP.
        headers: Headers = dict(reversed(scope["headers"]))
        if b"origin" in headers:
            await self._guard.learn(scope, headers)
        refused = self._guard.verdicts[headers.get(b"host"), headers.get(b"origin")]
        if refused is not None:
            return _text(*refused)
        if (retry_after := self._served.availability.retry_after) is not None:
            return _away(retry_after)
        bearers = [name for name in offered if name.startswith(BEARER)]
        if bearers and (b"authorization" in headers or len(bearers) > 1):
            return _text(400, "one credential, not two")
        if bearers:
            token = _token(bearers[0])
            if token is None:
                return _text(400, "the bearer subprotocol is malformed")
            fields = [*scope["headers"], (b"authorization", b"Bearer " + token)]
            scope = {**scope, "headers": fields}
        authorized = await self._authorizer.authorize(scope)
        if isinstance(authorized, Denied):
            return authorized
        if (retry_after := self._served.availability.retry_after) is not None:
            # Since it came.
            return _away(retry_after)
        owner = share_of(authorized.principal, scope)
        most = self._served.policy.max_connections_per_principal
        if most is not None and self._open.get(owner, 0) >= most:
            full = LimitReached("max_connections_per_principal", most, _FULL)
            self._served.router.limits.reached(full)
            wait = f"come back in {math.ceil(_FULL)} s"
            return _text(429, f"max_connections_per_principal is {most}; {wait}", _FULL)
        return scope, authorized, owner

    async def _connected(
        self, scope: Scope, receive: Receive, send: Send, principal: Principal, selects: bool
    ) -> None:
        if (await receive())["type"] != "websocket.connect":
            return
        accept: dict[str, Any] = {"type": "websocket.accept"}
        if selects:
            accept["subprotocol"] = SUBPROTOCOL
        await send(accept)
        served = self._served
        connection = DuplexConnection("websocket", principal, served, scope=scope)
        served.connections.add(connection.client)
        if served.availability.retry_after is not None:
            # A drain began after it was admitted, and did not know it.
            connection.transport.close_when_quiet()
        logger.debug("websocket %s opened", digest(connection.client.id))
        closing, why = Closing(), Why.CLOSED
        # A writer whose peer takes nothing learns of no cut: it waits for the network.
        cut = asyncio.ensure_future(connection.transport.outbox.until_cut())
        tasks = [cut]

        def expired() -> None:
            nonlocal why
            why = Why.CREDENTIAL_EXPIRED
            closing.because(CloseCode.POLICY_VIOLATION, "credential expired")
            connection.transport.outbox.cut()

        try:
            async with self._credentials.watch(scope, principal, expired) as watched:
                reader = asyncio.ensure_future(self._read(connection, receive, closing, watched))
                write = self._write(connection, watched.guarding(send), closing)
                writer = asyncio.ensure_future(write)
                tasks += [reader, writer]
                await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            failed = writer.exception() if writer.done() and not writer.cancelled() else None
            if failed is not None and not isinstance(failed, CredentialEnded):
                # The peer is gone, and perhaps said why.
                await asyncio.wait({reader}, timeout=1)
        finally:
            if connection.transport.outbox.was_slow:
                why = Why.SLOW
                said = reached("too slow", connection.transport.outbox.exceeded)
                closing.because(CloseCode.TRY_AGAIN_LATER, f"{said}; come back in {_BACK} s")
            elif connection.transport.is_draining:
                why = Why.DRAINING
                closing.because(CloseCode.SERVICE_RESTART, "the server is shutting down")
                # Before the store is written: what the client asks meanwhile nobody reads.
                await closing.say(send)
            await connection.gone(why=why)
            failures = await stopped(*tasks)
            await closing.say(send)
            logger.debug("websocket %s closed", digest(connection.client.id))
        for failure in failures:
            if not isinstance(failure, OSError):
                raise failure

    async def _read(
        self, connection: DuplexConnection, receive: Receive, closing: Closing, watched: Watched
    ) -> None:
        policy = self._served.policy
        first = True
        while True:
            try:
                async with asyncio.timeout(policy.init_timeout if first else None):
                    message = await receive()
            except TimeoutError:
                said = reached("nothing was said", ("init_timeout", f"{policy.init_timeout:g} s"))
                closing.because(CloseCode.POLICY_VIOLATION, said)
                return
            first = False
            if connection.transport.outbox.closed:
                # Cut already, perhaps with its credential: nothing more is served.
                return
            if message["type"] == "websocket.disconnect":
                closing.said()
                if message.get("code") == CloseCode.TOO_BIG:
                    logger.warning(
                        "a WebSocket was closed: a message was too large. Either the client's "
                        "exceeds max_message=%d, or ours exceeds the client's limit (our largest "
                        "had %d bytes)",
                        policy.max_message,
                        closing.largest,
                    )
                return
            text: str | None = message.get("text")
            if text is None:
                closing.because(CloseCode.UNSUPPORTED_DATA, "messages are text")
                return
            # Characters are at most four bytes: only a long one is worth counting exactly.
            if len(text) * 4 > policy.max_message and len(text.encode()) > policy.max_message:
                said = reached("message too big", ("max_message", f"{policy.max_message} bytes"))
                closing.because(CloseCode.TOO_BIG, said)
                return
            if watched.can_end and not await watched.is_good():
                return
            await connection.take(text.encode())

    async def _write(self, connection: DuplexConnection, send: Send, closing: Closing) -> None:
        async def write(chunks: list[bytes]) -> None:
            for chunk in chunks:
                closing.sent(len(chunk))
                try:
                    await send({"type": "websocket.send", "text": chunk.decode()})
                except RuntimeError as refused:
                    # The HTTP server closes the connection itself after a frame that it cannot
                    # read. It then refuses what we send, before the reader learns of the close.
                    raise ConnectionResetError("the HTTP server closed it") from refused

        await connection.transport.outbox.empty_into(write, idle=None, interval=0)


class Closing:
    def __init__(self) -> None:
        self.largest = 0
        """Bytes of the largest message that was sent."""

        self._code = CloseCode.NORMAL
        self._reason = ""
        self._is_said = False

    def because(self, code: CloseCode, reason: str) -> None:
        if self._code is CloseCode.NORMAL:
            self._code, self._reason = code, reason

    def sent(self, size: int) -> None:
        self.largest = max(self.largest, size)

    def said(self) -> None:
        self._is_said = True

    async def say(self, send: Send) -> None:
        if self._is_said:
            return
        message = {"type": "websocket.close", "code": int(self._code), "reason": self._reason}
        # A peer that is gone already cannot be notified why.
        with contextlib.suppress(OSError, RuntimeError, TimeoutError):
            async with asyncio.timeout(1):
                await send(message)
        self.said()


def reached(what: str, limit: tuple[str, str] | None) -> str:
    """Return the reason of a close, which RFC 6455 (5.5) lets have 123 bytes.

    Args:
        limit: Its name and its size.
    """
    return f"{what}: {limit[0]} is {limit[1]}" if limit is not None else what


def _away(retry_after: float) -> Denied:
    """Refuse a connection while the server stops. A session must not be attached where it is about
    to be cut again (WSS17).
    """
    return _text(503, "the server is shutting down", retry_after)


def _text(status: int, text: str, retry_after: float | None = None) -> Denied:
    body = text.encode()
    headers = [(b"content-type", b"text/plain"), (b"content-length", str(len(body)).encode())]
    if retry_after is not None:
        headers.append((b"retry-after", str(math.ceil(retry_after)).encode()))
    return Denied(status, headers, body)


def _token(subprotocol: str) -> bytes | None:
    encoded = subprotocol.removeprefix(BEARER)
    try:
        token = base64.b64decode(encoded + "=" * (-len(encoded) % 4), altchars=b"-_", validate=True)
    except (binascii.Error, ValueError):
        return None
    return token or None
