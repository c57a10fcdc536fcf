"""Who may see the page.

A browser sends no ``Authorization: Bearer``. It asks its user for a name and a password instead.
The password is the API key or the token. The name does not count. The scope ``OPERATOR`` is needed:
the page shows the sessions of all principals, and a key of one of them is for its own. Without
authentication only a browser on this machine is served, and only if no proxy stands between.

Each answer has the same strict headers, also a refusal.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Awaitable, Callable, Iterable, Mapping
from functools import partial
from inspect import isawaitable
from typing import TYPE_CHECKING

from starlette.requests import Request
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from mcp_sessions.authentication.credential import OPERATOR
from mcp_sessions.core.nearness import is_near

if TYPE_CHECKING:
    from mcp_sessions.server.upstream.sdk.authentication import Authentication, OnDenied

HEADERS: Mapping[str, str] = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; "
    "img-src 'self'; connect-src 'self'; form-action 'self'; base-uri 'none'; "
    "frame-ancestors 'none'",
    "x-frame-options": "DENY",
    "x-content-type-options": "nosniff",
    "referrer-policy": "same-origin",
    "cross-origin-opener-policy": "same-origin",
    "cache-control": "no-store",
}
"""Of each answer."""

Allows = Callable[[Request], bool | Awaitable[bool]]
"""Says whether who sent a request may see the page."""

Guard = Callable[[ASGIApp], ASGIApp]
"""Returns an application that decides who reaches the one that it is given."""

_ASKS = b'Basic realm="mcp-sessions: the password is your API key or token", charset="UTF-8"'


def operator_guard(authentication: Authentication, denied: OnDenied) -> Guard:
    """Return the guard that asks for an operator's credential."""
    asks = partial(authentication.requiring([OPERATOR]).around, denied=denied)
    return lambda app: BasicAuthentication(asks(app))


def loopback_guard(app: ASGIApp) -> ASGIApp:
    """Serve this machine alone."""
    text = (
        "This page is for browsers on the machine of the server, without a proxy. "
        "For others it needs authentication.\n"
    )
    return Allowed(app, lambda request: is_near(request.scope), text)


def application_guard(allows: Allows) -> Guard:
    """Return the guard that asks another application."""
    return lambda app: Allowed(app, allows, "You may not see this page.\n")


def guarded(app: ASGIApp, guard: Guard) -> ASGIApp:
    return SecurityHeaders(guard(app))


class SecurityHeaders:
    """Add :data:`HEADERS` to each answer."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def sent(message: Message) -> None:
            if message["type"] == "http.response.start":
                added = [(name.encode(), value.encode()) for name, value in HEADERS.items()]
                message = {**message, "headers": [*message["headers"], *added]}
            await send(message)

        await self._app(scope, receive, sent)


class Allowed:
    """Refuse each request that is not allowed, with a text."""

    def __init__(self, app: ASGIApp, allows: Allows, text: str) -> None:
        self._app, self._allows, self._text = app, allows, text

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            allowed = self._allows(Request(scope))
            if isawaitable(allowed):
                allowed = await allowed
            if not allowed:
                await PlainTextResponse(self._text, 403)(scope, receive, send)
                return
        await self._app(scope, receive, send)


class BasicAuthentication:
    """Take a password for a bearer token, and ask for one."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def sent(message: Message) -> None:
            if message["type"] == "http.response.start" and message["status"] == 401:
                headers = [each for each in message["headers"] if each[0] != b"www-authenticate"]
                message = {**message, "headers": [*headers, (b"www-authenticate", _ASKS)]}
            await send(message)

        if scope["type"] == "http":
            scope = {**scope, "headers": list(_with_bearer(scope["headers"]))}
        await self._app(scope, receive, sent)


def _with_bearer(headers: Iterable[tuple[bytes, bytes]]) -> Iterable[tuple[bytes, bytes]]:
    for name, value in headers:
        scheme, _, rest = value.partition(b" ")
        if name == b"authorization" and scheme.lower() == b"basic":
            try:
                _, _, password = base64.b64decode(rest, validate=True).partition(b":")
            except binascii.Error:
                password = b""
            value = b"Bearer " + password
        yield name, value
