"""Which session a span of the SDK's belongs to.

The SDK opens a span for each request, and looks its handler up inside it. That look-up is
where the span is told of the session: nothing of the SDK's is replaced or registered, and
where no tracer is configured nothing stands between the kernel and the server.
"""

from __future__ import annotations

from typing import Any, cast

from mcp.server.connection import Connection
from mcp.server.lowlevel.server import Server
from opentelemetry import trace

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
