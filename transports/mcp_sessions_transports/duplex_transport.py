"""The way out of a connection that carries everything both ways: one buffer for all messages.

Answers, notifications and session events leave in the order in which they were decided: an answer
to ``session/resume`` before the first replayed event.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from mcp_sessions.core.listen_messages import Filter, acknowledgement, completion, stamped
from mcp_sessions.core.log import Draft, LoggedEvent
from mcp_sessions.core.message import Message
from mcp_sessions.core.messages import (
    RequestId,
    encode,
    error_body,
    wire_error,
)
from mcp_sessions.errors import (
    REQUEST_CANCELLED,
    SessionNotFound,
    StoreUnavailable,
)
from mcp_sessions.ids import Position, SessionId
from mcp_sessions.server.connection.binding import ReadEvents
from mcp_sessions.server.connection.connection import (
    WatchedChannel,
    unwatched,
)
from mcp_sessions.server.dispatch.listening import Listening
from mcp_sessions.stores.records import Attached, SessionRecord
from mcp_sessions_transports.outbox import LogFeed, Outbox
from mcp_sessions_transports.served import Served


@dataclass(frozen=True, slots=True)
class DuplexListen:
    """A ``subscriptions/listen`` on a connection that carries everything both ways. The connection
    gets its sessions' events anyway. So a listen opens no stream: it filters the events of its
    session, and each of them carries its id.
    """

    request_id: RequestId
    _wanted: Filter
    _record: SessionRecord
    _listening: Listening

    def frame(self, event: LoggedEvent) -> bytes | None:
        return stamped(event.payload, self.request_id) if self._wanted.admits(event) else None

    def last(self, error: dict[str, Any] | None) -> bytes:
        return encode(
            completion(
                self.request_id, error, lambda each: self._listening.result(each, self._record)
            )
        )


class DuplexChannel(WatchedChannel):
    follows: Callable[[], None] | None = None
    close_stream: Callable[[], Awaitable[None]] | None = None

    def __init__(self, transport: DuplexTransport, kind: str, *, lasts: bool = False) -> None:
        """Make the way back for one message.

        Args:
            kind: The connection's.
            lasts: The answer comes when the connection ends, and not before.
        """
        self._transport = transport
        self.kind, self.lasts = kind, lasts

    @property
    def is_open(self) -> bool:
        return not self._transport.outbox.closed

    async def emit(self, message: bytes, key: str | None = None) -> None:
        self._transport.outbox.push(message)
        await self._transport.outbox.drain()

    async def answer(
        self,
        message: bytes,
        *,
        code: int | None = None,
        away: StoreUnavailable | None = None,
        retry_after: float | None = None,
    ) -> None:
        self._transport.channels.pop(self, None)
        self._transport.outbox.push(message)
        self.on_closed = self.on_reopened = unwatched
        if self.follows is not None:
            follows, self.follows = self.follows, None
            follows()
        # With the answer: a client that reads both knows that what it asks next was not asked.
        if self._transport.is_leaving:
            self._transport.close_if_quiet()

    def closed(self) -> None:
        self.run_after_answer()
        self.on_closed()


class DuplexTransport:
    def __init__(self, served: Served) -> None:
        self.close_stream: Callable[[], Awaitable[None]] | None = None
        self.channels: dict[DuplexChannel, None] = {}
        """The channels of requests that need an answer."""

        policy = served.policy
        self.outbox = Outbox(policy, most=policy.send_buffer + policy.max_unread_bytes)
        self._listening = served.listening
        self._listens: dict[SessionId, DuplexListen] = {}
        self.is_draining = False
        """Closed by this side, in order."""

        self.is_leaving = False
        """Closed by this side as soon as every request is answered; until then served as ever."""

        self.closed = asyncio.Event()
        """Set when nothing more goes out."""

        self._is_shared = served.bus.is_shared
        self._feeds: dict[SessionId, LogFeed] = {}
        self._holds = 0
        self._held: list[tuple[bytes, SessionId | None]] = []

    # --- the port --------------------------------------------------------------------------

    @property
    def is_taken(self) -> bool:
        """Whether the peer took everything that was sent.

        The server closes a WebSocket if its peer answers no ping. A pipe closes with the process at
        its other end.
        """
        return self.outbox.is_taken

    def begin(
        self, session_id: SessionId, attached: Attached, after: Position, read: ReadEvents
    ) -> None:
        self.withdraw(session_id)
        feed = LogFeed(
            self.outbox,
            read,
            after,
            frame=partial(self._frame, session_id),
            is_behind=False,
            is_checked=self._is_shared,
            push=self.push_event,
            # The window moved on while the peer took nothing: it has to resume, and learns why.
            cut=self.outbox.cut_slow,
        )
        self._feeds[session_id] = feed
        feed.take(attached.replay, attached.head)
        if self._is_shared:
            # Another process stored it after the head, and it was received too early.
            feed.check_position(None)

    def offer(self, session_id: SessionId, event: LoggedEvent) -> None:
        feed = self._feeds.get(session_id)
        if feed is not None:
            feed.offer(event)

    def check_position(self, session_id: SessionId, head: Position | None) -> None:
        feed = self._feeds.get(session_id)
        if feed is not None:
            feed.check_position(head)

    def send(self, draft: Draft) -> None:
        self.push_event(draft.before, draft.origin)

    def withdraw(self, session_id: SessionId, *, has_ended: bool = False) -> None:
        feed = self._feeds.pop(session_id, None)
        if feed is not None:
            # It may be reading its log just now.
            feed.end()
        if self._held:
            self._held = [entry for entry in self._held if entry[1] != session_id]
        self.outbox.purge(session_id)
        if session_id in self._listens:
            error = wire_error(SessionNotFound(session_id)) if has_ended else None
            self.end_listen(session_id, error)

    async def drain(self) -> None:
        await self.outbox.drain()

    def hold(self) -> Callable[[], None]:
        self._holds += 1

        def release() -> None:
            self._holds -= 1
            if not self._holds:
                held, self._held = self._held, []
                for chunk, origin in held:
                    self.outbox.push(chunk, origin)

        return release

    def close(self) -> None:
        self.is_draining = True
        for session_id in list(self._listens):
            self.end_listen(session_id, None)
        self.outbox.finish()

    # --- listens: each a filter on what its session is pushed anyway ------------------------

    def begin_listen(self, request_id: RequestId, wanted: Filter, record: SessionRecord) -> None:
        """Acknowledge a listen whose filter is set. It ends the session's earlier listen."""
        self.end_listen(record.session_id, None)
        self._listens[record.session_id] = DuplexListen(request_id, wanted, record, self._listening)
        self.outbox.push(encode(acknowledgement(wanted, request_id)))

    def end_listen(self, session_id: SessionId, error: dict[str, Any] | None) -> None:
        """Send the last message of a session's listen, if there is one.

        Args:
            session_id: The session.
            error: Why it ended; None: in order.
        """
        listen = self._listens.pop(session_id, None)
        if listen is not None:
            self.outbox.push(listen.last(error))

    def has_listen(self, request_id: object) -> bool:
        return any(request_id == listen.request_id for listen in self._listens.values())

    def cancels(self, notification: Message) -> bool:
        request_id = notification.cancels
        if request_id is None or not self.has_listen(request_id):
            return False
        for session_id, listen in list(self._listens.items()):
            if listen.request_id == request_id:
                self.end_listen(session_id, error_body(REQUEST_CANCELLED, "Request cancelled"))
        return True

    def _frame(self, session_id: SessionId, event: LoggedEvent) -> bytes | None:
        listen = self._listens.get(session_id)
        return event.payload if listen is None else listen.frame(event)

    # --- its end ---------------------------------------------------------------------------

    def close_when_quiet(self) -> None:
        """Close once every open request has its answer, also those that arrive meanwhile."""
        self.is_leaving = True
        self.close_if_quiet()

    def close_if_quiet(self) -> None:
        is_awaited = self.is_leaving and not self.is_draining
        if is_awaited and all(channel.lasts for channel in self.channels):
            self.close()

    def cut(self) -> None:
        self.outbox.cut()
        for channel in list(self.channels):
            channel.closed()
        self.channels.clear()

    def push_event(self, chunk: bytes, origin: SessionId | None) -> None:
        """Send a message that is no answer. It waits behind an answer that must go first."""
        if self._holds:
            self._held.append((chunk, origin))
        else:
            self.outbox.push(chunk, origin)
