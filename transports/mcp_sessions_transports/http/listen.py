"""A session's ``subscriptions/listen`` stream: the modern era's way to receive its events.

Acknowledged first, then what waits, then live. Each event carries the listen request's id
and its own session event id; a client that was cut resumes the session and listens again.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

from starlette.types import Receive, Send

from mcp_sessions.core.listen_messages import Filter, acknowledgement, completion, stamped
from mcp_sessions.core.log import Draft, LoggedEvent
from mcp_sessions.core.messages import RequestId, wire_error
from mcp_sessions.errors import SessionNotFound
from mcp_sessions.ids import Position, SessionId, position_of
from mcp_sessions.policy import SessionPolicy
from mcp_sessions.server.connection.binding import ReadEvents
from mcp_sessions.stores.records import Attached
from mcp_sessions_transports.http.modern_channel import MODERN_SSE_HEADERS, PING, modern_event
from mcp_sessions_transports.http.sse import SseStream
from mcp_sessions_transports.outbox import LogFeed


@dataclass(eq=False, repr=False)
class ListenStream:
    """A :class:`~mcp_sessions.server.connection.binding.Transport` of one session's events. It
    begins with the acknowledgement.

    Args:
        is_shared: Other processes may store events of the session.
        result: Adds what the stream's last message carries in addition to its subscription id.
        encode: Writes that message.
    """

    _request_id: RequestId
    _wanted: Filter
    _policy: SessionPolicy
    _is_shared: bool
    _result: Callable[[dict[str, Any]], dict[str, Any]]
    _encode: Callable[[Any], bytes]
    close_stream: Callable[[], Awaitable[None]] | None = field(init=False, default=None)
    is_leaving: bool = field(init=False, default=False)
    """Nothing is asked on it."""

    _feed: LogFeed | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        self._stream = SseStream(self._policy, PING)
        acknowledged = acknowledgement(self._wanted, self._request_id)
        self._stream.push(modern_event(self._encode(acknowledged)))

    # --- the port --------------------------------------------------------------------------

    @property
    def is_taken(self) -> bool:
        return self._stream.is_taken

    def begin(
        self, session_id: SessionId, attached: Attached, after: Position, read: ReadEvents
    ) -> None:
        start = attached.waits_from if attached.waits_from is not None else attached.head
        self._feed = LogFeed(
            self._stream, read, position_of(start), frame=self._frame, is_checked=self._is_shared
        )
        self._stream.wake()

    def offer(self, session_id: SessionId, event: LoggedEvent) -> None:
        if self._feed is not None:
            self._feed.offer(event)

    def check_position(self, session_id: SessionId, head: Position | None) -> None:
        if self._feed is not None:
            self._feed.check_position(head)

    def send(self, draft: Draft) -> None:
        self._stream.push(modern_event(stamped(draft.before, self._request_id)), draft.origin)

    def withdraw(self, session_id: SessionId, *, has_ended: bool = False) -> None:
        self._finish(wire_error(SessionNotFound(session_id)) if has_ended else None)

    async def drain(self) -> None:
        await self._stream.drain()

    def hold(self) -> Callable[[], None]:
        return self._stream.hold()

    def close(self) -> None:
        self._finish(None)

    # --- the stream ------------------------------------------------------------------------

    async def serve(self, receive: Receive, send: Send) -> None:
        await self._stream.serve(receive, send, MODERN_SSE_HEADERS)

    def cut(self) -> None:
        self._stream.cut()

    def _frame(self, event: LoggedEvent) -> bytes | None:
        if not self._wanted.admits(event):
            return None
        return modern_event(stamped(event.payload, self._request_id))

    def _finish(self, error: dict[str, Any] | None) -> None:
        last = completion(self._request_id, error, self._result)
        self._stream.push(modern_event(self._encode(last)))
        self._stream.finish()
