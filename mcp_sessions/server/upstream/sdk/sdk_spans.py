"""Add the session to the SDK's spans.

The SDK opens a span for each request, and looks its handler up inside it. At that look-up the
session is added to the span. Nothing of the SDK's is replaced or registered.
"""

from __future__ import annotations

from typing import Any, cast

from mcp.server.connection import Connection
from mcp.server.lowlevel.server import Server
from opentelemetry import trace

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
