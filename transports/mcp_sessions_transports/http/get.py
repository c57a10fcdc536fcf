"""GET of the handshake era: the stream of a connection, or the rest of a POST's response.

1. Who comes back with a ``Last-Event-ID`` gets what followed it, whole, whichever process
   has it. If that cannot be, it is told: a response as :class:`OutcomeUnknown`, a place in
   the connection's stream by messages to read everything again.
2. Nothing of a session is heard by a credential with fewer scopes than it was started with,
   nor a response by one with fewer than its request was sent with.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from starlette.types import Receive, Scope, Send

from mcp_sessions.core.messages import error_message, notification_message, wire_error
from mcp_sessions.errors import Detached, OutcomeUnknown, SessionNotFound
from mcp_sessions.ids import process_of
from mcp_sessions.principal import Principal
from mcp_sessions.stores.records import SessionRecord
from mcp_sessions_transports.http.cluster import catch_up
from mcp_sessions_transports.http.connection import HttpConnection
from mcp_sessions_transports.http.io import Headers, accepts, refusal, send_json
from mcp_sessions_transports.http.post_streams import (
    PostPosition,
    may_read,
    post_position_of,
)
from mcp_sessions_transports.http.remote_response import RemoteResponse
from mcp_sessions_transports.http.sessions import TransportSessions, send_not_found, send_refused
from mcp_sessions_transports.http.sse import SSE_HEADERS, sse_event
from mcp_sessions_transports.served import Served


class HttpGet:
    """Serves GET of the handshake era."""

    def __init__(self, served: Served, sessions: TransportSessions) -> None:
        self._served = served
        self._sessions = sessions

    async def serve(
        self, scope: Scope, receive: Receive, send: Send, headers: Headers, principal: Principal
    ) -> None:
        """Serve one GET until its stream ends.

        Raises:
            StoreUnavailable: Nothing was sent.
        """
        if not accepts(headers)[1]:
            text = "Not Acceptable: Client must accept text/event-stream"
            await send_json(send, refusal(text), status=406)
            return
        record = await self._sessions.of_required_header(headers, principal, send)
        if record is None:
            return
        connection = self._sessions.connection(record)
        if not await self._may_hear(record, principal):
            # A weaker credential does not hear what a stronger one may (SEC3).
            await send_not_found(send)
            return
        last_event_id = headers.get(b"last-event-id", b"").decode("latin-1") or None
        at = post_position_of(last_event_id) if last_event_id is not None else None
        if at is not None:
            if may_read(at.stream, principal.scopes - record.principal.scopes):
                await self._resume_post(scope, receive, send, connection, principal, at)
            else:
                # SEC11: its request was sent by a stronger one than made the connection.
                await send_not_found(send)
            return
        served = self._served
        if served.store.survives_process or served.bus.is_shared:
            await catch_up(connection, served.hub)
        try:
            after, lost, continues = await connection.position(
                last_event_id, was_opened=record.stream_opened
            )
        except SessionNotFound as over:
            await served.hub.let_go(connection)
            await send_refused(send, None, over)
            return
        first: Sequence[bytes] = ()
        if lost is not None and last_event_id is not None:
            first = await self._lost_its_place(record)
        elif not continues:
            # A later GET without a position: its sessions wait for session/resume.
            for session_id, fencing_epoch in record.carried.items():
                await served.hub.detach(session_id, connection, fencing_epoch)
            if lost is not None:
                first = _refetch(record.subscriptions, served.upstream.listed())
        async with served.credentials.over(scope, principal, connection.cut_get):
            await connection.serve_get(
                after,
                first,
                receive,
                send,
                scopes=principal.scopes,
                cleared=record.carried,
            )

    async def _may_hear(self, record: SessionRecord, principal: Principal) -> bool:
        """Whether it has the scopes of the transport session and of what is attached there,
        which a credential with more scopes may have started since.
        """
        if not principal.scopes >= record.principal.scopes:
            return False
        served = self._served
        for session_id in record.carried:
            carried = await served.store.load(session_id, now=served.clock())
            if carried is not None and not principal.scopes >= carried.principal.scopes:
                return False
        return True

    async def _lost_its_place(self, record: SessionRecord) -> Sequence[bytes]:
        """What the client missed is gone from the window: it is not left in silent doubt."""
        served = self._served
        for session_id in record.carried:
            # Its position in the session's own log may still be good: it has to resume.
            await served.hub.displace(session_id, Detached.EVICTED)
        return _refetch(record.subscriptions, served.upstream.listed())

    # --- the rest of a response ------------------------------------------------------------

    async def _resume_post(
        self,
        scope: Scope,
        receive: Receive,
        send: Send,
        connection: HttpConnection,
        principal: Principal,
        at: PostPosition,
    ) -> None:
        served = self._served
        name, position, request_id = at.stream, at.event_id, at.request_id
        responses = connection.responses
        channel, log = responses.channels.get(name), responses.log(name)
        here = process_of(name) == served.runner.process
        if (channel is None and here) or (await log.read(position))[1] is not None:
            await _answer_unknown(send, connection.session_id, request_id)
            return
        if channel is not None:
            async with served.credentials.over(scope, principal, channel.cut):
                await channel.resume(position, receive, send)
            return
        remote = RemoteResponse(
            log,
            request_id,
            policy=served.policy,
            bus=served.bus,
            primes=served.primes(connection.peer.protocol_version),
        )
        for older in responses.remote:
            if older.log.name == name:
                older.supersede()
        responses.remote[remote] = None
        try:
            async with served.credentials.over(scope, principal, remote.stream.cut):
                await remote.serve(position, receive, send)
        finally:
            del responses.remote[remote]


def _refetch(subscriptions: Collection[str], lists: frozenset[str]) -> list[bytes]:
    """What tells a client that lost its place to read everything again: one update per
    subscribed resource, one change per list.

    Args:
        subscriptions: URIs.
        lists: Of ``tools``, ``prompts`` and ``resources``, those that the server has.
    """
    updated = "notifications/resources/updated"
    return [
        *(notification_message(updated, {"uri": uri}) for uri in sorted(subscriptions)),
        *(
            notification_message(f"notifications/{name}/list_changed", None)
            for name in sorted(lists)
        ),
    ]


async def _answer_unknown(send: Send, session_id: str, request_id: str | int) -> None:
    """A response stream that nobody can go on with: its request is answered, and it ends."""
    body = error_message(request_id, wire_error(OutcomeUnknown()))
    headers = [*SSE_HEADERS, (b"mcp-session-id", session_id.encode("ascii"))]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": sse_event(body)})
