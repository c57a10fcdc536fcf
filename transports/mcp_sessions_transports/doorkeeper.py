"""Who may open a WebSocket: whoever may send a GET to the same endpoint.

The handshake is put through everything that stands before the HTTP endpoint, whatever that
is: authentication, required scopes, Host and Origin guards, the application's middleware.
What reaches the endpoint is let in, as who it is there; what does not gets that answer.
"""

from __future__ import annotations

import contextvars
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from mcp_sessions.principal import Principal

_ASKED = "mcp_sessions.asked"


@dataclass(frozen=True, slots=True)
class LetIn:
    """The handshake reached the endpoint."""

    principal: Principal
    context: contextvars.Context
    """The context variables that were set on the way, such as the access token."""


@dataclass(frozen=True, slots=True)
class TurnedAway:
    """It did not; this is what was answered instead."""

    status: int
    headers: list[tuple[bytes, bytes]]
    body: bytes


class Doorkeeper:
    """Asks the HTTP application whether a handshake may come in."""

    def __init__(self, app: ASGIApp, principal_of: Callable[[Scope], Principal]) -> None:
        """Take what it works with.

        Args:
            app: The application that HTTP requests go through.
            principal_of: Who sent a request, by what authentication left in its scope.
        """
        self._app = app
        self._principal_of = principal_of

    async def ask(self, scope: Scope) -> LetIn | TurnedAway:
        """Whether the handshake in ``scope`` may come in."""
        reached: list[LetIn] = []
        answer: dict[str, Any] = {"status": 500, "headers": []}
        body: list[bytes] = []

        def here(inner: Scope) -> None:
            reached.append(LetIn(self._principal_of(inner), contextvars.copy_context()))

        async def receive() -> Message:
            return {"type": "http.request", "body": b"", "more_body": False}

        async def send(message: Message) -> None:
            if message["type"] == "http.response.start":
                answer.update(status=message["status"], headers=list(message.get("headers", ())))
            else:
                body.append(message.get("body", b""))

        schemes = {"ws": "http", "wss": "https"}
        asked = {
            **scope,
            "type": "http",
            "method": "GET",
            "scheme": schemes.get(scope.get("scheme", "ws"), "http"),
            _ASKED: here,
        }
        await self._app(asked, receive, send)
        if reached:
            return reached[0]
        return TurnedAway(answer["status"], answer["headers"], b"".join(body))

    @staticmethod
    async def answered(scope: Scope, send: Send) -> bool:
        """At the endpoint: whether this is a question of ours; then it is answered here."""
        here = scope.get(_ASKED)
        if here is None:
            return False
        here(scope)
        await send({"type": "http.response.start", "status": 204, "headers": []})
        await send({"type": "http.response.body", "body": b""})
        return True


async def turn_away(scope: Scope, receive: Receive, send: Send, answer: TurnedAway) -> None:
    """Answer a handshake with an HTTP response where the server can, else with its own 403."""
    await receive()
    if "websocket.http.response" not in (scope.get("extensions") or {}):
        await send({"type": "websocket.close", "code": 1008})
        return
    start = {"type": "websocket.http.response.start", "status": answer.status}
    await send({**start, "headers": answer.headers})
    await send({"type": "websocket.http.response.body", "body": answer.body})
