"""Add the session to the SDK's spans, and leave out spans that no tracer reads.

The SDK opens a span for each request, and looks its handler up inside it. At that look-up the
session is added to the span. Nothing of the SDK's is replaced or registered.

If no tracer is configured and the request carries no trace, the span has no effect. The request
then goes past the SDK's tracing.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, cast

from mcp.server._otel import OpenTelemetryMiddleware
from mcp.server.connection import Connection
from mcp.server.lowlevel.server import Server
from opentelemetry import trace

from mcp_sessions.core.client_description import ENVELOPE
from mcp_sessions.core.messages import REQUEST_KEY_META, SESSION_META
from mcp_sessions.server.upstream.port import CALL

SESSION_DIGEST = "mcp_sessions.session"
"""Short digest of a session's id, as in the logs; never the id."""

CONVERSATION = "gen_ai.conversation.id"
"""OpenTelemetry's name for the conversation that ties requests together. It is the host's own id,
as sent, since the host's spans have it too. In any other session it is the digest of
:data:`SESSION_DIGEST`.
"""


def is_tracing() -> bool:
    provider = trace.get_tracer_provider()
    return not isinstance(provider, (trace.ProxyTracerProvider, trace.NoOpTracerProvider))


_NO_TRACE: Final = frozenset({*ENVELOPE, SESSION_META, REQUEST_KEY_META, "progressToken"})
"""Members of ``_meta`` that no propagator reads."""


_GLOBALS = vars(trace)


def is_in_no_trace(params: Mapping[str, Any] | None) -> bool:
    # This runs for each request, so not is_tracing(), which looks through the environment.
    if _GLOBALS.get("_TRACER_PROVIDER", trace) is not None:
        return False
    meta: Mapping[str, Any] | None = params.get("_meta") if params else None
    return not meta or (isinstance(meta, dict) and meta.keys() <= _NO_TRACE)


def untraced(server: Server[Any]) -> Server[Any]:
    return cast("Server[Any]", _Untraced(server))


class _Untraced:
    def __init__(self, server: Server[Any]) -> None:
        self._server = server
        self.get_request_handler = server.get_request_handler
        self.cache_hints = server.cache_hints
        stamp = server.server_info_stamp
        is_flat = all(isinstance(value, str) for value in stamp.values())
        self._stamp = stamp if is_flat else None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._server, name)

    @property
    def middleware(self) -> list[Any]:
        return [
            each for each in self._server.middleware if type(each) is not OpenTelemetryMiddleware
        ]

    @property
    def server_info_stamp(self) -> dict[str, Any]:
        """Return a copy of the server's name and version. Plain texts need no deep copy."""
        return {**self._stamp} if self._stamp is not None else self._server.server_info_stamp


def traced(server: Server[Any], connection: Connection) -> Server[Any]:
    return cast("Server[Any]", _Traced(server, connection))


class _Traced:
    def __init__(self, server: Server[Any], connection: Connection) -> None:
        self._server = server
        self._connection = connection

    def __getattr__(self, name: str) -> Any:
        return getattr(self._server, name)

    def get_request_handler(self, method: str) -> Any:
        self._announce()
        return self._server.get_request_handler(method)

    def get_notification_handler(self, method: str) -> Any:
        self._announce()
        return self._server.get_notification_handler(method)

    def _announce(self) -> None:
        call, span = CALL.get(), trace.get_current_span()
        session = conversation = None
        if call is not None:
            call.is_traced(span)
            session, conversation = call.session, call.conversation
        if session is None and self._connection.session_id is not None:
            session = self._connection.session_id[:12]
        if session is not None:
            span.set_attributes({SESSION_DIGEST: session, CONVERSATION: conversation or session})
