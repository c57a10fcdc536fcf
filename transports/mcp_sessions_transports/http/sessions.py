"""Transport-mode sessions: which one an HTTP request names, and its connection here.

The session is in the store. Its connection is made in each process where a request names it
for the first time, and can be made anew at any time.
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
from mcp_sessions.core.states import Mode
from mcp_sessions.errors import (
    InvalidParams,
    InvalidReason,
    InvalidRequest,
    SessionNotFound,
    Status,
)
from mcp_sessions.ids import ConnectionId, SessionId, parse_session_id
from mcp_sessions.principal import Principal
from mcp_sessions.stores.records import Peer, SessionRecord
from mcp_sessions_transports.http.connection import HttpConnection
from mcp_sessions_transports.http.io import Headers, refusal, send_json
from mcp_sessions_transports.served import DEFAULT_VERSION, Served


class TransportSessions:
    """The transport-mode sessions of one server."""

    def __init__(self, served: Served) -> None:
        self._served = served

    async def of_required_header(
        self, headers: Headers, principal: Principal, send: Send
    ) -> SessionRecord | None:
        """The transport session that a GET or DELETE names; None if it was refused here."""
        session_header = session_header_of(headers)
        if session_header is None:
            await send_missing(send)
            return None
        try:
            return await self.of_header(session_header, principal, None)
        except (SessionNotFound, InvalidRequest) as refused:
            await send_refused(send, None, refused)
            return None

    async def of_header(
        self, session_header: str, principal: Principal, message: Message | None
    ) -> SessionRecord | None:
        """The transport session that ``Mcp-Session-Id`` names, as it is now; None if it names
        none but mirrors the session of the message's ``_meta``.

        Raises:
            SessionNotFound: Unknown, ended, expired or somebody else's: 404.
            InvalidRequest: One's own protocol-mode session: 400, mode_conflict.
        """
        if _mirrors(message, session_header):
            return None
        served = self._served
        session_id = parse_session_id(session_header)
        admitted = None
        if session_id is not None:
            admitted = await served.store.admit(
                session_id,
                principal,
                mode=Mode.TRANSPORT,
                now=served.clock(),
                held=session_id in served.runner.held,
            )
        if admitted is None:
            raise SessionNotFound(session_header, status=Status.NOT_FOUND)
        record = admitted.record
        if record.mode is not Mode.TRANSPORT:
            raise InvalidRequest(
                InvalidReason.MODE_CONFLICT,
                "Mcp-Session-Id names a session of session/start",
                status=Status.BAD_REQUEST,
            )
        return record

    def connection(self, record: SessionRecord) -> HttpConnection:
        """The connection of a transport session in this process, made if it is new here."""
        known = self._served.hub.local(ConnectionId(record.session_id))
        if isinstance(known, HttpConnection):
            known.used_at = self._served.clock()
            return known
        connection = self.make(record, record.peer or Peer(DEFAULT_VERSION))
        self._served.hub.add(connection)
        return connection

    async def revive(self, connection_id: ConnectionId) -> HttpConnection | None:
        """A connection that is in the store but not in this process yet."""
        served = self._served
        record = await served.store.load(SessionId(connection_id), now=served.clock())
        if record is None or record.mode is not Mode.TRANSPORT:
            return None
        return self.connection(record)

    def make(self, record: SessionRecord, peer: Peer) -> HttpConnection:
        """A connection for a transport session that has none in this process."""
        served = self._served
        primes = served.primes(peer.protocol_version)
        return HttpConnection(
            record,
            peer,
            served.store,
            served.policy,
            served.clock,
            primes=primes,
            bus=served.bus,
        )


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
    """Answer what :meth:`TransportSessions.of_header` raised.

    Args:
        message: What came with the header; None: the request had no body.
    """
    if isinstance(refused, SessionNotFound):
        await send_not_found(send)
        return
    request_id = message.id if isinstance(message, (Request, Answer)) else None
    body = error_message(request_id, wire_error(refused))
    await send_json(send, body, status=refused.status)


def _mirrors(message: Message | None, session_header: str) -> bool:
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
