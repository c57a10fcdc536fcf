"""A session's ``subscriptions/listen`` stream: the modern era's way to hear its events.

Acknowledged first, then what waits, then live. Each event carries the listen request's id
and its own session event id; a client that was cut resumes the session and listens again.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from starlette.types import Receive, Send

from mcp_sessions.core.listening import Filter, acknowledgement, completion, stamped
from mcp_sessions.core.log import Draft, LoggedEvent
from mcp_sessions.core.messages import RequestId, wire_error
from mcp_sessions.errors import SessionNotFound
from mcp_sessions.ids import ConnectionId, FencingEpoch, Position, SessionId
from mcp_sessions.policy import SessionPolicy
from mcp_sessions.principal import Principal
from mcp_sessions.security import mint_connection_id
from mcp_sessions.server.cluster.bus import ClusterBus
from mcp_sessions.server.connection import ReadEvents
from mcp_sessions.server.upstream.port import UpstreamPeer
from mcp_sessions.stores.records import Attached, Attachment, CurrentSession, Peer
from mcp_sessions_transports.http.modern_channel import MODERN_SSE_HEADERS, PING, modern_event
from mcp_sessions_transports.http.sse import LogFeed, SseStream


class ListenStream:
    """A :class:`~mcp_sessions.server.connection.TransportConnection` of one session."""

    kind = "listen"

    is_leaving = False
    """Nothing is asked on it."""

    is_streaming = False
    """It is no GET stream."""

    def __init__(
        self,
        request_id: RequestId,
        principal: Principal,
        peer: Peer,
        wanted: Filter,
        *,
        policy: SessionPolicy,
        bus: ClusterBus,
        result: Callable[[dict[str, Any]], dict[str, Any]],
        encode_answer: Callable[[Any], bytes],
    ) -> None:
        """Take what it works with.

        Args:
            result: Adds what the stream's last message carries beside its subscription id.
            encode_answer: Writes that message.
        """
        self.id: ConnectionId = mint_connection_id("listen", bus.process)
        self.principal = principal
        self.peer = peer
        self.transport_session: SessionId | None = None
        self.attached: dict[SessionId, FencingEpoch] = {}
        self.upstream_peers: dict[SessionId | None, UpstreamPeer] = {}
        self.close_stream: Callable[[], Awaitable[None]] | None = None
        self._request_id = request_id
        self._wanted = wanted
        self._bus = bus
        self._result = result
        self._encode = encode_answer
        self._stream = SseStream(
            limit=policy.send_buffer, slow_timeout=policy.slow_timeout, comment=PING
        )
        self._feed: LogFeed[SseStream] | None = None
        self._stream.push(modern_event(encode_answer(acknowledgement(wanted, request_id))))

    # --- the port --------------------------------------------------------------------------

    async def current(self) -> CurrentSession | None:
        """See :class:`TransportConnection`. In the modern era every request names its own."""
        return None

    async def set_current(self, current: CurrentSession | None) -> None:
        """See :class:`TransportConnection`."""
        raise AssertionError("a listen stream carries one session and no requests")

    async def begin(
        self, session_id: SessionId, attached: Attached, after: Position, read: ReadEvents
    ) -> bool:
        """See :class:`TransportConnection`: it starts where its session waits for it."""
        self.attached[session_id] = attached.fencing_epoch
        start = attached.waits_from if attached.waits_from is not None else attached.head
        self._feed = LogFeed(
            self._stream,
            read,
            start,
            self._frame,
            is_checked=self._bus.is_shared,
        )
        self._stream.wake()
        return True

    async def deliver(
        self, session_id: SessionId, event: LoggedEvent, fencing_epoch: FencingEpoch
    ) -> bool:
        """See :class:`TransportConnection`."""
        if self._feed is not None and self.attached.get(session_id) == fencing_epoch:
            self._feed.offer(event)
        return True

    def appended(
        self, session_id: SessionId, event: LoggedEvent, attachment: Attachment | None
    ) -> None:
        """See :class:`TransportConnection`."""
        if self._feed is None:
            return
        if attachment == Attachment(self.id, self.attached.get(session_id, FencingEpoch(-1))):
            self._feed.offer(event)
        else:
            # Whether it was displaced is asked by who reads the log.
            self._feed.check_position(None)

    def check_position(self, session_id: SessionId, head: Position | None) -> None:
        """See :class:`TransportConnection`."""
        if self._feed is not None:
            self._feed.check_position(head)

    async def send(self, draft: Draft) -> None:
        """See :class:`TransportConnection`."""
        self._stream.push(modern_event(stamped(draft.before, self._request_id)), draft.origin)

    async def withdraw(
        self, session_id: SessionId, fencing_epoch: FencingEpoch | None = None
    ) -> None:
        """See :class:`TransportConnection`: the session went elsewhere, its log with it."""
        self._finish(None)

    async def session_over(self, session_id: SessionId) -> None:
        """See :class:`TransportConnection`."""
        self._finish(wire_error(SessionNotFound(session_id)))

    async def drain(self) -> None:
        """See :class:`TransportConnection`."""
        await self._stream.drain()

    def hold(self) -> Callable[[], None]:
        """See :class:`TransportConnection`."""
        return self._stream.hold()

    def close(self) -> None:
        """See :class:`TransportConnection`: a newer listen, or the server stops."""
        self._finish(None)

    # --- the stream ------------------------------------------------------------------------

    async def serve(self, receive: Receive, send: Send) -> None:
        """Send until the stream ends or its peer is gone."""
        await self._stream.serve(receive, send, MODERN_SSE_HEADERS)

    def cut(self) -> None:
        """End the stream now, without a result: its credential expired."""
        self._stream.cut()

    def _frame(self, event: LoggedEvent) -> bytes | None:
        if not self._wanted.admits(event):
            return None
        return modern_event(stamped(event.payload, self._request_id))

    def _finish(self, error: dict[str, Any] | None) -> None:
        last = completion(self._request_id, error, self._result)
        self._stream.push(modern_event(self._encode(last)))
        self._stream.finish()
