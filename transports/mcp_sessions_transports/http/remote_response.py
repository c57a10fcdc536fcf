"""Serve a response stream with a request in another process, or in one that is gone.

The handler's messages are in the store as soon as they are sent, whichever process serves the
client that reconnects. The stream ends with the answer. If the process that runs the request died,
it ends with an error that says so.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from mcp_sessions.background import Background
from mcp_sessions.core.log import LoggedEvent
from mcp_sessions.core.messages import RequestId, decode, error_message, wire_error
from mcp_sessions.errors import OutcomeUnknown, StoreUnavailable
from mcp_sessions.ids import Position, SessionId, position_of, process_of
from mcp_sessions.policy import SessionPolicy
from mcp_sessions.server.cluster.replica import ClusterBus
from mcp_sessions.server.cluster.replica_messages import StreamRead
from mcp_sessions.server.delivery.pending_writes import PATIENCE
from mcp_sessions.server.delivery.streams import StreamLog
from mcp_sessions.stores.records import Attachment
from mcp_sessions_transports.http.io import HttpCall
from mcp_sessions_transports.http.post_streams import post_event_id
from mcp_sessions_transports.http.sse import (
    SseStream,
    priming_event,
    sse_event,
    sse_headers,
)
from mcp_sessions_transports.outbox import LogFeed

_ASK_EVERY = 1.0
"""Seconds between two questions whether the process that answers still lives."""


@dataclass(eq=False, repr=False)
class RemoteResponse:
    """A response stream of another process, as one GET reads it here.

    Args:
        log: The stream, whose name says where its request runs.
        request_id: The request's, which the answer has.
        primes: The client understands an event without data.
    """

    log: StreamLog
    _request_id: RequestId
    _policy: SessionPolicy
    _bus: ClusterBus
    _primes: bool
    _superseded: bool = False
    _feed: LogFeed | None = None

    def __post_init__(self) -> None:
        self._runner = process_of(self.log.name)
        self.stream = SseStream(self._policy)

    def supersede(self) -> None:
        """End this one: its client has reconnected."""
        self._superseded = True
        self.stream.cut()

    async def serve(self, position: str, call: HttpCall) -> None:
        """Send what follows ``position``, until the answer.

        Raises:
            StoreUnavailable: Nothing was sent.
        """
        stream, log = self.stream, self.log
        after = position_of(position)
        self._feed = LogFeed(stream, log.read, after, frame=self._frame, is_checked=True)
        if self._primes:
            stream.push(priming_event(self._sse_id(position)))
        background = Background()
        try:
            await self._bus.watch(log.session_id, log.name, self)
            await self._send_read(is_read=True)
            feed = self._feed
            background.loop("watching the replica that answers", lambda: self._watch_runner(feed))
            await stream.serve(call.receive, call.send, sse_headers(log.session_id))
        finally:
            stream.cut()
            await background.close()
            await self._bus.unwatch(log.session_id, log.name, self)
            if not self._superseded:
                await self._send_read(is_read=False)

    def appended(
        self, session_id: SessionId, event: LoggedEvent, attachment: Attachment | None
    ) -> None:
        if self._feed is not None:
            self._feed.offer(event)

    def check_position(self, session_id: SessionId, head: Position | None) -> None:
        if self._feed is not None:
            self._feed.check_position(head)

    async def _send_read(self, *, is_read: bool) -> None:
        if self._runner is not None:
            read = StreamRead(session_id=self.log.session_id, stream=self.log.name, is_read=is_read)
            await self._bus.try_send(read, to=self._runner)

    async def _watch_runner(self, feed: LogFeed) -> None:
        loop = asyncio.get_running_loop()
        until = loop.time() + PATIENCE
        while not self.stream.closed:
            try:
                if self._runner is None or not await self._bus.is_alive(self._runner):
                    # Asked in this order: it may have answered just before it died.
                    events, refusal = await self.log.read(feed.last)
                    if refusal is not None:
                        self.stream.cut()
                    elif any(self._is_answer(event) for event in events):
                        feed.check_position(None)
                    else:
                        # Its reader may have sent some of them since.
                        self._give_up([each for each in events if each.event_id > feed.last])
                    return
                until = loop.time() + PATIENCE
            except StoreUnavailable:
                if loop.time() >= until:
                    # The client comes back, and is answered 503 until the store is back.
                    self.stream.cut()
            await asyncio.sleep(_ASK_EVERY)

    def _give_up(self, events: Sequence[LoggedEvent]) -> None:
        for event in events:
            self.stream.push(sse_event(event.payload, self._sse_id(event.event_id)))
        body = error_message(self._request_id, wire_error(OutcomeUnknown()))
        self.stream.push(sse_event(body))
        self.stream.finish()

    def _sse_id(self, position: str) -> str:
        return post_event_id(self.log.name, position, self._request_id)

    def _frame(self, event: LoggedEvent) -> bytes:
        if self._feed is not None and self._is_answer(event):
            self._feed.end_at(event.event_id)
        return sse_event(event.payload, self._sse_id(event.event_id))

    def _is_answer(self, event: LoggedEvent) -> bool:
        message = decode(event.payload)
        return "method" not in message and message.get("id") == self._request_id
