"""Who may see the page.

A browser sends no ``Authorization: Bearer``. It asks its user for a name and a password instead.
The password is the API key or the token. The name does not count. The scope ``OPERATOR`` is needed:
the page shows the sessions of all principals, and a key of one of them is for its own. Without a
lock only a browser on this machine is served, and only if no proxy stands between.

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

Lock = Callable[[ASGIApp], ASGIApp]
"""Returns an application that asks for a credential before the one that it is given."""

_ASKS = b'Basic realm="mcp-sessions: the password is your API key or token", charset="UTF-8"'


def lock_of(authentication: Authentication, denied: OnDenied) -> Lock:
    """Return the lock that an operator's credential opens."""
    return partial(authentication.requiring([OPERATOR]).around, denied=denied)


def locked(app: ASGIApp, lock: Lock | None) -> ASGIApp:
    """Return the application behind its door.

    Args:
        lock: None: there is none.
    """
    return Strict(NearOnly(app) if lock is None else AsPassword(lock(app)))


def as_asked(app: ASGIApp, allows: Allows) -> ASGIApp:
    """Return the application behind a door that another application keeps."""
    return Strict(AsAsked(app, allows))


class Strict:
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


class NearOnly:
    """Serve this machine alone."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and not is_near(scope):
            text = (
                "This page is for browsers on the machine of the server, without a proxy. "
                "For others it needs authentication.\n"
            )
            await PlainTextResponse(text, 403)(scope, receive, send)
            return
        await self._app(scope, receive, send)


class AsAsked:
    """Let the application decide who sees it."""

    def __init__(self, app: ASGIApp, allows: Allows) -> None:
        self._app, self._allows = app, allows

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            allowed = self._allows(Request(scope))
            if isawaitable(allowed):
                allowed = await allowed
            if not allowed:
                await PlainTextResponse("You may not see this page.\n", 403)(scope, receive, send)
                return
        await self._app(scope, receive, send)


class AsPassword:
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
