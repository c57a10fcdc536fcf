"""The pages in browsers that may call an endpoint, and read its answers (CORS).

Rules, owned by ``tests/serve/test_pages.py``:

1. The pages that the operator names may call and read. :class:`OriginGuard` and the answers of CORS
   compare their origins in the same way.
2. If the operator names none, the application around the endpoint is asked about a page that is
   not of this machine. What its own CORS allows may come in, also as a WebSocket. It is asked as a
   browser asks it, by a preflight without a credential.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator

from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Message, Scope, Send

from mcp_sessions_transports.origin import AllowedNames, AllowsPage, SecuritySettings
from mcp_sessions_transports.outermost import OF_THE_SERVER, around

ASKED = "mcp_sessions.asked"
"""The key in the scope of a request that only asks what stands before the endpoint: what takes its
answer. The endpoint calls it, and serves nothing."""

AROUND = "mcp_sessions.around"
"""The key in a scope for the Starlette in which an application of ours is mounted."""

_METHODS = ("GET", "POST", "DELETE")

_EXPOSED = ("Mcp-Session-Id", "Mcp-Protocol-Version", "WWW-Authenticate", "Retry-After")
"""Response headers that a client in a page reads."""

_ANSWER = 10.0
"""Seconds within which an application has to answer a preflight."""


class _Readable(CORSMiddleware):
    def __init__(self, app: ASGIApp, origins: AllowedNames) -> None:
        super().__init__(
            app,
            allow_methods=_METHODS,
            allow_headers=["*"],
            expose_headers=_EXPOSED,
            # The operator named the page: it may also call a server on a private network.
            allow_private_network=True,
        )
        self._origins = origins

    def is_allowed_origin(self, origin: str) -> bool:
        return self._origins.have(origin)


def readable_by_pages(app: ASGIApp, settings: SecuritySettings | None) -> ASGIApp:
    """The application with the answers of CORS, for the pages that :class:`OriginGuard` allows.

    A request without ``Origin`` passes through unchanged. A page may send any request header:
    2026-07-28 lets a tool name headers of its own. Cookies are not asked for.

    Args:
        app: Serves the endpoint, with its authentication. A preflight has no credential, so it
            is answered before that.
        settings: The operator's own. None, or no allowed origin: ``app`` itself.
    """
    origins = settings.allowed_origins if settings is not None else []
    return _Readable(app, AllowedNames(origins)) if origins else app


def pages_of_application(application: Callable[[], ASGIApp] | None) -> AllowsPage:
    """Return what asks the application around an endpoint whether it allows a page.

    Args:
        application: Answers with the outermost application; None: it is found.
    """

    def applications(scope: Scope) -> Iterator[tuple[ASGIApp, Scope]]:
        if application is not None:
            yield application(), scope
            return
        found = [(each.app, each.scope) for each in around(scope["type"]) if each.app is not None]
        yield from found[-1:]
        # A middleware that runs what is inside of it in a task hides what is outside.
        starlette = scope.get(AROUND, scope.get("app"))
        if starlette is not None:
            yield starlette, scope

    async def allows(scope: Scope, host: bytes | None, origin: bytes) -> bool:
        for app, seen in applications(scope):
            if await _allows(app, seen, host, origin):
                return True
        return False

    return allows


async def _allows(app: ASGIApp, scope: Scope, host: bytes | None, origin: bytes) -> bool:
    allowed: list[bytes] = []

    async def receive() -> Message:
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message: Message) -> None:
        for name, value in message.get("headers", ()):
            if name.lower() == b"access-control-allow-origin":
                allowed.append(value)

    fields = [(b"origin", origin), (b"access-control-request-method", b"POST")]
    preflight: Scope = {
        **as_http(scope, "OPTIONS"),
        "headers": fields if host is None else [(b"host", host), *fields],
        ASKED: _nothing,
    }
    try:
        async with asyncio.timeout(_ANSWER):
            await app(preflight, receive, send)
    except TimeoutError:
        return False
    return allowed in ([origin], [b"*"])


async def _nothing(scope: Scope, send: Send) -> None:
    await send({"type": "http.response.start", "status": 204, "headers": []})
    await send({"type": "http.response.body", "body": b""})


def as_http(scope: Scope, method: str) -> Scope:
    """Return the scope of a request that goes the way of another one, or of a WebSocket."""
    schemes = {"ws": "http", "wss": "https"}
    scheme: str = scope.get("scheme", "http")
    return {
        **{key: scope[key] for key in OF_THE_SERVER if key in scope},
        "type": "http",
        "method": method,
        "scheme": schemes.get(scheme, scheme),
        # A mount appends its own path to it, in the scope that it was given.
        "root_path": scope.get("app_root_path", scope.get("root_path", "")),
        "extensions": {},
        **({"state": dict(scope["state"])} if "state" in scope else {}),
    }
