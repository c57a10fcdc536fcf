"""The SDK's spans: which session one belongs to, and none where nobody reads them.

The SDK opens a span for each request, and looks its handler up inside it. That look-up is
where the span is told of the session: nothing of the SDK's is replaced or registered.

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
"""The short digest of a session's id, as it stands in the logs; never the id."""

CONVERSATION = "gen_ai.conversation.id"
"""OpenTelemetry's name for what ties requests together: the host's own id of its conversation,
as it was sent, for by that the host's spans are found; in any other session the same digest."""


def is_tracing() -> bool:
    """Whether the application has set a tracer provider."""
    provider = trace.get_tracer_provider()
    return not isinstance(provider, (trace.ProxyTracerProvider, trace.NoOpTracerProvider))


_NO_TRACE: Final = frozenset({*ENVELOPE, SESSION_META, REQUEST_KEY_META, "progressToken"})
"""Members of ``_meta`` that no propagator reads."""


_GLOBALS = vars(trace)


def is_in_no_trace(params: Mapping[str, Any] | None) -> bool:
    """Whether no tracer is configured, and nothing in a request's ``_meta`` can be of a trace."""
    # Not is_tracing(), which looks through the environment: this is asked for each request.
    if _GLOBALS.get("_TRACER_PROVIDER", trace) is not None:
        return False
    meta: Mapping[str, Any] | None = params.get("_meta") if params else None
    return not meta or (isinstance(meta, dict) and meta.keys() <= _NO_TRACE)


def untraced(server: Server[Any]) -> Server[Any]:
    """``server`` without the SDK's own tracing, for requests that no span is about."""
    return cast("Server[Any]", _Untraced(server))


class _Untraced:
    """A lowlevel server without the SDK's tracing."""

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
        """The server's, as it is now."""
        return [
            each for each in self._server.middleware if type(each) is not OpenTelemetryMiddleware
        ]

    @property
    def server_info_stamp(self) -> dict[str, Any]:
        """What says who answers, in a copy of its own. Plain texts need no deep one."""
        return {**self._stamp} if self._stamp is not None else self._server.server_info_stamp


def traced(server: Server[Any], connection: Connection) -> Server[Any]:
    """``server``, as the requests of one connection see it."""
    return cast("Server[Any]", _Traced(server, connection))


class _Traced:
    """A lowlevel server whose look-ups say whose they are."""

    def __init__(self, server: Server[Any], connection: Connection) -> None:
        self._server = server
        self._connection = connection

    def __getattr__(self, name: str) -> Any:
        return getattr(self._server, name)

    def get_request_handler(self, method: str) -> Any:
        """The handler; the span around the look-up is told of the session."""
        self._tell()
        return self._server.get_request_handler(method)

    def get_notification_handler(self, method: str) -> Any:
        """The same for a notification's."""
        self._tell()
        return self._server.get_notification_handler(method)

    def _tell(self) -> None:
        call, span = CALL.get(), trace.get_current_span()
        session = conversation = None
        if call is not None:
            call.is_traced(span)
            session, conversation = call.session, call.conversation
        if session is None and self._connection.session_id is not None:
            session = self._connection.session_id[:12]
        if session is not None:
            span.set_attributes({SESSION_DIGEST: session, CONVERSATION: conversation or session})
