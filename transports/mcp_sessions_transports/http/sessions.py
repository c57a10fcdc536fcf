"""``Mcp-Session-Id``: which transport-mode session an HTTP request names, and what is answered
where it names none.
"""

from __future__ import annotations

from starlette.types import Send

from mcp_sessions.core.messages import (
    Answer,
    Message,
    Notification,
    NotNamed,
    Request,
    error_message,
    named_session,
    wire_error,
)
from mcp_sessions.errors import (
    InvalidParams,
    InvalidRequest,
    SessionNotFound,
    Status,
)
from mcp_sessions.principal import Principal
from mcp_sessions.server.delivery.transport_sessions import TransportSessions
from mcp_sessions.stores.records import SessionRecord
from mcp_sessions_transports.http.io import Headers, refusal, send_json


class SessionHeader:
    """Finds the transport-mode session of a request."""

    def __init__(self, sessions: TransportSessions) -> None:
        self._sessions = sessions

    async def required(
        self, headers: Headers, principal: Principal, send: Send
    ) -> SessionRecord | None:
        """The transport session that a GET or DELETE names; None if it was refused here."""
        session_header = session_header_of(headers)
        if session_header is None:
            await send_missing(send)
            return None
        try:
            return await self._sessions.admit(session_header, principal)
        except (SessionNotFound, InvalidRequest) as refused:
            await send_refused(send, None, refused)
            return None

    async def of(
        self, session_header: str, principal: Principal, message: Message
    ) -> SessionRecord | None:
        """The transport session that a POST's header names; None if it names none but mirrors
        the session of the message's ``_meta``.

        Raises:
            SessionNotFound, InvalidRequest: See :meth:`TransportSessions.admit`.
        """
        if _mirrors(message, session_header):
            return None
        return await self._sessions.admit(session_header, principal)


def session_header_of(headers: Headers) -> str | None:
    """What ``Mcp-Session-Id`` says."""
    value = headers.get(b"mcp-session-id")
    return value.decode("latin-1") if value is not None else None


async def send_missing(send: Send) -> None:
    """Answer what has to name a transport session, and names none."""
    await send_json(send, refusal("Bad Request: Missing session ID"), status=400)


async def send_not_found(send: Send) -> None:
    """Answer what names a session that is not there, or not for who sent it."""
    await send_json(send, refusal("Session not found"), status=Status.NOT_FOUND)


async def send_refused(
    send: Send, message: Message | None, refused: SessionNotFound | InvalidRequest
) -> None:
    """Answer what :meth:`TransportSessions.admit` raised.

    Args:
        message: What came with the header; None: the request had no body.
    """
    if isinstance(refused, SessionNotFound):
        await send_not_found(send)
        return
    request_id = message.id if isinstance(message, (Request, Answer)) else None
    body = error_message(request_id, wire_error(refused))
    await send_json(send, body, status=refused.status)


def _mirrors(message: Message, session_header: str) -> bool:
    """Whether ``Mcp-Session-Id`` only repeats the session of the message's ``_meta``."""
    if not isinstance(message, (Request, Notification)):
        return False
    members = message.params or {}
    if message.method == "session/resume" and members.get("sessionId") == session_header:
        # The elevation document: both transport headers and resume parameters for one attempt.
        return False
    try:
        named = named_session(members)
    except InvalidParams:
        return False
    return not isinstance(named, NotNamed) and named == session_header
