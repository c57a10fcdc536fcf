"""A transport-mode session over HTTP, as a connection: its GET stream and its POST streams.

Its session lives in the store; this object is only what is open in this process, and can be
made anew at any time.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence

from starlette.types import Receive, Send

from mcp_sessions.core.log import Draft, LoggedEvent
from mcp_sessions.core.messages import RequestId, notification_message
from mcp_sessions.errors import Refusal
from mcp_sessions.ids import (
    GET_STREAM,
    ConnectionId,
    FencingEpoch,
    Position,
    SessionId,
    StreamName,
    parse_position,
)
from mcp_sessions.policy import SessionPolicy
from mcp_sessions.server.running import RunningRequest
from mcp_sessions.server.upstream import UpstreamPeer
from mcp_sessions.stores.base import CurrentSession, Peer, SessionRecord, SessionStore
from mcp_sessions_transports.http_channel import PostChannel
from mcp_sessions_transports.sse import (
    SSE_HEADERS,
    LogFeed,
    SseStream,
    plain_frame,
    priming_event,
    sse_event,
)


class HttpConnection:
    """A :class:`~mcp_sessions.server.connection.TransportConnection` over HTTP."""

    kind = "http"

    __slots__ = (
        "_clock",
        "_finished",
        "_get",
        "_policy",
        "_primes",
        "_sent",
        "_store",
        "attached",
        "close_stream",
        "id",
        "peer",
        "posts",
        "principal",
        "record",
        "requests",
        "session_id",
        "transport_session",
        "upstream_peers",
    )

    def __init__(
        self,
        record: SessionRecord,
        peer: Peer,
        store: SessionStore,
        policy: SessionPolicy,
        clock: Callable[[], float],
        *,
        primes: bool,
    ) -> None:
        """Take what it works with.

        Args:
            primes: The client understands an event without data.
        """
        self.record = record
        self.session_id = record.session_id
        self.id = ConnectionId(record.session_id)
        self.transport_session: SessionId | None = record.session_id
        self.principal = record.principal
        self.peer = peer
        self.attached: dict[SessionId, FencingEpoch] = {}
        self.requests: dict[RequestId, RunningRequest] = {}
        self.upstream_peers: dict[SessionId | None, UpstreamPeer] = {}
        self.posts: dict[StreamName, PostChannel] = {}
        self.close_stream: Callable[[], Awaitable[None]] | None = None
        if primes:
            self.close_stream = self._close_stream
        self._store = store
        self._policy = policy
        self._clock = clock
        self._primes = primes
        self._get: LogFeed[SseStream] | None = None
        self._sent: str | None = None
        self._finished: dict[StreamName, None] | None = None

    # --- the port ------------------------------------------------------------------------

    async def current(self) -> CurrentSession | None:
        """See :class:`TransportConnection`."""
        return self.record.current

    async def set_current(self, current: CurrentSession | None) -> None:
        """See :class:`TransportConnection`."""
        await self._store.set_current(self.session_id, current)
        self.record.current = current

    async def deliver(self, session_id: SessionId, event: LoggedEvent) -> None:
        """See :class:`TransportConnection`."""
        key = event.key[1] if event.key is not None else None
        await self.send(Draft(event.payload, None, key, session_id))

    async def send(self, draft: Draft) -> None:
        """See :class:`TransportConnection`. It waits for the GET stream to open."""
        appended = await self._store.append(
            self.session_id, draft, now=self._clock(), stream=GET_STREAM
        )
        if appended is not None and self._get is not None:
            self._get.offer(appended.event)

    async def withdraw(self, session_id: SessionId) -> None:
        """See :class:`TransportConnection`."""
        await self._store.drop_origin(self.session_id, session_id)
        if self._get is not None:
            self._get.stream.purge(session_id)

    async def session_over(self, session_id: SessionId) -> None:
        """See :class:`TransportConnection`."""
        await self.withdraw(session_id)

    async def room(self) -> None:
        """See :class:`TransportConnection`."""
        if self._get is not None:
            await self._get.stream.room()
        else:
            # A handler that only emits must let others run.
            await asyncio.sleep(0)

    def hold(self) -> Callable[[], None]:
        """See :class:`TransportConnection`."""
        return self._get.stream.hold() if self._get is not None else lambda: None

    # --- the GET stream --------------------------------------------------------------------

    async def position(self, last_event_id: str | None) -> tuple[Position, Refusal | None, bool]:
        """Where a new GET stream starts.

        Returns:
            The position; why what came before it is lost, if it is; and whether the stream
            goes on where an earlier one ended (or is the first).
        """
        now = self._clock()
        first = await self._store.mark_stream_opened(self.session_id)
        head = await self._store.open_stream(self.session_id, GET_STREAM)
        if head is None:
            raise AssertionError("the session was admitted by this request")
        if last_event_id is None and not first:
            # What was never handed to any stream of this connection still goes out. One that
            # looks open may be dead: what it was handed is not told twice.
            sent = self._get.last if self._get is not None else self._sent
            last_event_id = sent or head.event_id()
            return await self._from(last_event_id, head, now), None, False
        if last_event_id is None:
            last_event_id = Position(head.log_epoch, 0).event_id()
        _, refusal = await self._store.read(
            self.session_id, last_event_id, now=now, stream=GET_STREAM
        )
        if refusal is not None:
            return head, refusal, False
        return _position(last_event_id), None, True

    async def _from(self, event_id: str, head: Position, now: float) -> Position:
        _, refusal = await self._store.read(self.session_id, event_id, now=now, stream=GET_STREAM)
        return head if refusal is not None else _position(event_id)

    def refetch(self, lists: frozenset[str]) -> list[bytes]:
        """What tells a client that lost its place to read everything again: one update per
        subscribed resource, one change per list.

        Args:
            lists: Of ``tools``, ``prompts`` and ``resources``, those that the server has.
        """
        updated = "notifications/resources/updated"
        return [
            *(
                notification_message(updated, {"uri": uri})
                for uri in sorted(self.record.subscriptions)
            ),
            *(
                notification_message(f"notifications/{name}/list_changed", None)
                for name in sorted(lists)
            ),
        ]

    async def serve_get(
        self, after: Position, first: Sequence[bytes], receive: Receive, send: Send
    ) -> None:
        """Serve the GET stream until it ends; the one before it ends now.

        Args:
            first: Messages that it opens with. They are in no log, which may be too small
                for them; only the last has an id, so that a client that is cut before it
                comes back with its old position and is told all of them again.
        """
        if self._get is not None:
            self._get.stream.cut()
        policy = self._policy
        stream = SseStream(limit=policy.send_buffer, slow_timeout=policy.slow_timeout)
        feed = LogFeed(stream, self._read, after.event_id(), plain_frame)
        self._get = feed
        for number, message in enumerate(first, 1):
            stream.push(sse_event(message, after.event_id() if number == len(first) else None))
        if self._primes:
            stream.push(priming_event(after.event_id()))
        headers = [*SSE_HEADERS, (b"mcp-session-id", self.session_id.encode("ascii"))]
        try:
            await stream.serve(receive, send, headers)
        finally:
            stream.cut()
            if self._get is feed:
                self._get = None
                self._sent = feed.last

    def cut_get(self) -> None:
        """End the GET stream now: its credential is good no more."""
        if self._get is not None:
            self._get.stream.cut()

    @property
    def is_streaming(self) -> bool:
        """Whether its GET stream is open."""
        return self._get is not None

    async def _read(self, position: str) -> tuple[Sequence[LoggedEvent], Refusal | None]:
        return await self._store.read(
            self.session_id, position, now=self._clock(), stream=GET_STREAM
        )

    async def _close_stream(self) -> None:
        if self._get is not None:
            self._get.stream.finish()

    # --- POST streams ------------------------------------------------------------------------

    async def stream_finished(self, name: StreamName) -> None:
        """A response stream has its answer and no reader: it can be fetched for a while yet."""
        if self._finished is None:
            self._finished = {}
        self._finished[name] = None
        while len(self._finished) > self._policy.max_finished_streams:
            oldest = next(iter(self._finished))
            del self._finished[oldest]
            self.posts.pop(oldest, None)
            await self._store.drop_stream(self.session_id, oldest)

    def stream_reopened(self, name: StreamName) -> None:
        """A response stream is read again: while it is, it is not forgotten."""
        if self._finished is not None:
            self._finished.pop(name, None)

    def close(self) -> None:
        """End every stream, after what was handed to it: the session is over, or the server
        stops.
        """
        if self._get is not None:
            self._get.stream.finish()
        for channel in list(self.posts.values()):
            channel.close()


def _position(event_id: str) -> Position:
    position = parse_position(event_id)
    if position is None:
        raise AssertionError("the store read from this position")
    return position
