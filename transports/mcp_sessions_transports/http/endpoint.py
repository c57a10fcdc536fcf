"""Streamable HTTP: one endpoint, two eras. Picks the era and guards the door."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Coroutine
from typing import Any

from starlette.types import Receive, Scope, Send

from mcp_sessions.core.messages import encode, error_body
from mcp_sessions.errors import INTERNAL_ERROR, StoreUnavailable
from mcp_sessions.principal import Principal
from mcp_sessions_transports.http.handshake import HandshakeHttp
from mcp_sessions_transports.http.io import Draining, Headers, send_json, send_text
from mcp_sessions_transports.http.modern import ModernHttp
from mcp_sessions_transports.origin import OriginGuard
from mcp_sessions_transports.websocket.authorizer import HandshakeAuthorizer

logger = logging.getLogger(__name__)

_DRAINING = "the server is shutting down"

RETRY_AFTER_STORE = 1.0
"""Seconds after which a client should ask again when the store was away."""


class StreamableHttp:
    """The ASGI endpoint."""

    def __init__(
        self,
        *,
        handshake: HandshakeHttp,
        modern: ModernHttp,
        handshake_versions: frozenset[str],
        guard: OriginGuard,
        principal_of: Callable[[Scope], Principal],
        ready: Callable[[], None],
    ) -> None:
        """Take what it works with.

        Args:
            modern: Serves every request whose version is not of the handshake era.
            principal_of: Who sent a request, by what authentication left in the scope.
            ready: Raises if the layer does not run.
        """
        self._handshake = handshake
        self._modern = modern
        self._handshake_versions = frozenset(v.encode() for v in handshake_versions)
        self._guard = guard
        self._principal_of = principal_of
        self._ready = ready
        self.retry_after: float | None = None
        """Set while the server drains: new requests are told to come back (seconds)."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one HTTP request."""
        if await HandshakeAuthorizer.answered(scope, send):
            return
        self._ready()
        fields = [(name, value.strip(b" \t")) for name, value in scope["headers"]]
        if fields != scope["headers"]:
            # RFC 9110, 5.5: white space around a value is no part of it. Not every HTTP
            # server takes it off.
            scope = {**scope, "headers": fields}
        # Of a field that is there twice the first counts, as for the SDK.
        headers: Headers = dict(reversed(fields))
        version = headers.get(b"mcp-protocol-version")
        is_modern = version is not None and version not in self._handshake_versions
        if self.retry_after is not None and (is_modern or scope["method"] != "POST"):
            await _unavailable(send, _DRAINING, self.retry_after)
            return
        if is_modern:
            modern = self._modern.serve(scope, receive, send, headers, self._principal_of(scope))
            await _guarded(modern, send)
            return
        refused = self._guard.check(headers)
        if refused is not None:
            status, text = refused
            await send_text(send, status, text)
            return
        principal, draining = self._principal_of(scope), self.retry_after is not None
        handshake = self._handshake.serve(scope, receive, send, headers, principal, draining)
        try:
            await _guarded(handshake, send)
        except Draining:
            await _unavailable(send, _DRAINING, self.retry_after or 0)


async def _guarded(serving: Coroutine[Any, Any, None], send: Send) -> None:
    try:
        await serving
    except StoreUnavailable as failed:
        # A line for each request, not a traceback: what is wrong is not in this program.
        logger.error("the session store is away: %s", failed)
        await _unavailable(send, "the session store is away", RETRY_AFTER_STORE)


async def _unavailable(send: Send, text: str, retry_after: float) -> None:
    body = encode({"jsonrpc": "2.0", "id": None, "error": error_body(INTERNAL_ERROR, text)})
    headers = [(b"retry-after", str(math.ceil(retry_after)).encode())]
    await send_json(send, body, status=503, headers=headers)
