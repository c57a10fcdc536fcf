"""Authorize a WebSocket: a client may open one if it may send a GET to the same endpoint.

The handshake passes through every layer before the HTTP endpoint. These are authentication,
required scopes, Host and Origin guards, the middleware of the application that the endpoint is
mounted in, and every application around that. If the handshake reaches the endpoint, the WebSocket
is accepted with the identity that it has there. Otherwise the client gets the answer of the layer
that refused. If the handshake cannot pass through the outermost application, every WebSocket is
refused.
"""

from __future__ import annotations

import asyncio
import contextvars
import logging
from collections.abc import Callable
from dataclasses import dataclass, field

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from mcp_sessions.principal import Principal
from mcp_sessions.seldom import Seldom
from mcp_sessions_transports.outermost import outermost
from mcp_sessions_transports.pages import ASKED, as_http
from mcp_sessions_transports.websocket.close_codes import CloseCode

logger = logging.getLogger(__name__)
logger.addFilter(Seldom())

_ANSWER = 30.0
"""Seconds within which an application has to say who may come in."""


@dataclass(frozen=True, slots=True)
class Authorized:
    principal: Principal
    context: contextvars.Context
    """The context variables that were set on the way, such as the access token."""


@dataclass(frozen=True, slots=True)
class Denied:
    status: int
    headers: list[tuple[bytes, bytes]]
    body: bytes


@dataclass(slots=True, eq=False, repr=False)
class HandshakeAuthorizer:
    """Authorizes a handshake as the HTTP application would authorize a GET.

    Args:
        app: The application that HTTP requests go through where nothing stands around it;
            None: there always is something.
        principal_of: Returns the sender of a request, from the values that authentication left in
            its scope.
        application: Answers with the one that stands around all others; None: it is found.
    """

    _app: ASGIApp | None
    _principal_of: Callable[[Scope], Principal]
    _application: Callable[[], ASGIApp] | None = None

    async def authorize(self, scope: Scope) -> Authorized | Denied:
        """Decide whether the handshake in ``scope`` is allowed."""
        app = self._app
        path_of = scope
        if self._application is not None:
            app = self._application()
        else:
            around = outermost()
            if around is not None:
                app, path_of = around.app, {**around.scope, "headers": scope["headers"]}
            if app is None:
                logger.warning(
                    "a WebSocket is refused: %s wraps the endpoint, and the layer cannot ask it "
                    "whether it accepts the credential. Pass application=lambda: app to "
                    "asgi_app() or routes(), with the outermost application",
                    around.described if around is not None else "an application",
                )
                return Denied(403, [(b"content-length", b"0")], b"")
        return await self._authorize(app, path_of)

    async def _authorize(self, app: ASGIApp, scope: Scope) -> Authorized | Denied:
        asked = _Asked(self._principal_of)
        get: Scope = {**as_http(scope, "GET"), ASKED: asked.here}
        try:
            async with asyncio.timeout(_ANSWER):
                await app(get, asked.receive, asked.send)
        except TimeoutError:
            logger.warning(
                "a WebSocket is refused: the application did not answer within %d s", _ANSWER
            )
            return Denied(504, [(b"content-length", b"0")], b"")
        return asked.outcome()


@dataclass(slots=True)
class _Asked:
    """One GET that stands for a handshake. Its client waits for the answer, and leaves."""

    principal_of: Callable[[Scope], Principal]
    reached: Authorized | None = None
    status: int = 500
    headers: list[tuple[bytes, bytes]] = field(default_factory=list[tuple[bytes, bytes]])
    body: list[bytes] = field(default_factory=list[bytes])
    was_sent: bool = False
    has_ended: asyncio.Event = field(default_factory=asyncio.Event)

    async def here(self, scope: Scope, send: Send) -> None:
        self.reached = Authorized(self.principal_of(scope), contextvars.copy_context())
        await send({"type": "http.response.start", "status": 204, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    async def receive(self) -> Message:
        if not self.was_sent:
            self.was_sent = True
            return {"type": "http.request", "body": b"", "more_body": False}
        await self.has_ended.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status, self.headers = message["status"], list(message.get("headers", ()))
        elif message["type"] == "http.response.body":
            self.body.append(message.get("body", b""))
            if not message.get("more_body", False):
                self.has_ended.set()

    def outcome(self) -> Authorized | Denied:
        if self.status < 300:
            if self.reached is not None:
                return self.reached
            # Somebody else answered, with what is no refusal for a GET, and is one for this.
            return Denied(403, [(b"content-length", b"0")], b"")
        return Denied(self.status, self.headers, b"".join(self.body))


async def deny(scope: Scope, receive: Receive, send: Send, answer: Denied) -> None:
    """Answer a handshake with an HTTP response where the server can, else with its own 403."""
    await receive()
    if "websocket.http.response" not in (scope.get("extensions") or {}):
        await send({"type": "websocket.close", "code": CloseCode.POLICY_VIOLATION})
        return
    start = {"type": "websocket.http.response.start", "status": answer.status}
    await send({**start, "headers": answer.headers})
    await send({"type": "websocket.http.response.body", "body": answer.body})
