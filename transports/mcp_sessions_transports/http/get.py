"""Serve a GET of the handshake era: a connection's stream, or the rest of a POST's response.

1. A client with a ``Last-Event-ID`` gets everything that followed it, whole, whichever process has
   it. If that is impossible, the client learns it. A response ends with :class:`OutcomeUnknown`.
   The connection's stream has messages to read everything again.
2. A credential gets nothing of a session that was started with more scopes, nor a response to a
   request that was sent with more.
"""

from __future__ import annotations

from dataclasses import dataclass

from starlette.types import Send

from mcp_sessions.core.messages import error_message, wire_error
from mcp_sessions.errors import OutcomeUnknown, Refusal, SessionNotFound, StoreUnavailable
from mcp_sessions.ids import StreamName, process_of
from mcp_sessions.server.delivery.stored_connection import StoredConnection
from mcp_sessions.stores.records import SessionRecord
from mcp_sessions.turns import Turns
from mcp_sessions_transports.http.channel import http_transport
from mcp_sessions_transports.http.io import HttpCall, send_not_found
from mcp_sessions_transports.http.post_streams import (
    PostPosition,
    may_read,
    post_position_of,
)
from mcp_sessions_transports.http.remote_response import RemoteResponse
from mcp_sessions_transports.http.sse import sse_event, sse_headers
from mcp_sessions_transports.served import Served


@dataclass(slots=True, eq=False, repr=False)
class HttpGet:
    _served: Served
    _turns: Turns

    async def serve(self, call: HttpCall, record: SessionRecord) -> None:
        """Serve one GET until its stream ends.

        Args:
            record: The transport session that it was admitted to.

        Raises:
            StoreUnavailable: Nothing was sent.
        """
        served, sessions = self._served, self._served.transport_sessions
        send, principal = call.send, call.principal
        connection = served.connections.stored(record)
        if not await sessions.may_receive(record, principal):
            # A weaker credential does not receive what a stronger one may (SEC3).
            await send_not_found(send)
            return
        last_event_id = call.headers.get(b"last-event-id", b"").decode("latin-1") or None
        at = post_position_of(last_event_id) if last_event_id is not None else None
        if at is not None:
            if may_read(at.stream, principal.scopes - record.principal.scopes):
                await self._resume_post(call, connection, at)
            else:
                # SEC11: its request was sent by a stronger one than made the connection.
                await send_not_found(send)
            return
        try:
            after, first = await sessions.start_stream(connection, record, last_event_id)
        except SessionNotFound:
            await send_not_found(send)
            return
        transport = http_transport(connection)
        async with call.watch(transport.cut_get) as watched:
            guarded = call.sending(watched.guarding(send))
            await transport.serve_get(
                connection, after, first, guarded, cleared=record.client.carried, turns=self._turns
            )

    # --- the rest of a response ------------------------------------------------------------

    async def _resume_post(
        self, call: HttpCall, connection: StoredConnection, at: PostPosition
    ) -> None:
        served = self._served
        name, position, request_id = at.stream, at.event_id, at.request_id
        responses = http_transport(connection).responses
        log = responses.log(name)
        here = process_of(name) == served.bus.process
        is_lost = here and not responses.knows(name)
        if not is_lost:
            _, refusal = await log.read(position)
            if refusal is Refusal.AHEAD and await self._is_stored_soon(name):
                raise StoreUnavailable("messages of a response stream are not stored yet")
            is_lost = refusal is not None
        # Asked anew: it may have been forgotten while the log was read.
        channel = responses.read_again(name) if not is_lost else None
        if is_lost or (here and channel is None):
            await _answer_unknown(call.send, connection.session_id, request_id)
            return
        if channel is not None:
            await channel.resume(position, call)
            return
        remote = RemoteResponse(log, request_id, served.policy, served.bus, responses.primes)
        for older in responses.remote:
            if older.log.name == name:
                older.supersede()
        responses.remote[remote] = None
        try:
            async with call.watch(remote.stream.cut) as watched:
                await remote.serve(position, call.sending(watched.guarding(call.send)))
        finally:
            del responses.remote[remote]

    async def _is_stored_soon(self, stream: StreamName) -> bool:
        """Whether another process may have sent messages of a stream while the store was away: it
        stores them when the store is back.
        """
        bus, runner = self._served.bus, process_of(stream)
        return bus.is_remote(runner) and await bus.is_alive(runner)


async def _answer_unknown(send: Send, session_id: str, request_id: str | int) -> None:
    """End a response stream that nobody can continue. Its request gets an error."""
    body = error_message(request_id, wire_error(OutcomeUnknown()))
    headers = sse_headers(session_id)
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": sse_event(body)})
