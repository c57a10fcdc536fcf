"""What goes out on a connection that carries everything both ways.

Answers, notifications and session events go out on one buffer, in the order in which they were
decided: an answer to ``session/resume`` before the first replayed event.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from mcp_sessions.core.listening import Filter, acknowledgement, completion, stamped
from mcp_sessions.core.log import Draft, LoggedEvent
from mcp_sessions.core.messages import Notification, RequestId, encode, error_body, wire_error
from mcp_sessions.errors import REQUEST_CANCELLED, SessionNotFound
from mcp_sessions.ids import Position, SessionId
from mcp_sessions.server.binding import ReadEvents
from mcp_sessions.server.connection import WatchedChannel
from mcp_sessions.server.dispatch.listening import Listening
from mcp_sessions.stores.records import Attached, SessionRecord
from mcp_sessions_transports.outbox import LogFeed, Outbox
from mcp_sessions_transports.served import Served


class DuplexChannel(WatchedChannel):
    """A :class:`~mcp_sessions.server.binding.RequestChannel` on a shared connection."""

    close_stream: Callable[[], Awaitable[None]] | None = None

    def __init__(self, transport: DuplexTransport, *, lasts: bool = False) -> None:
        """The way back for one message.

        Args:
            lasts: The answer comes when the connection ends, and not before.
        """
        self._transport = transport
        self.lasts = lasts

    @property
    def is_open(self) -> bool:
        """See :class:`RequestChannel`."""
        return not self._transport.outbox.closed

    async def emit(self, message: bytes, key: str | None = None) -> None:
        """See :class:`RequestChannel`."""
        self._transport.outbox.push(message)
        await self._transport.outbox.drain()

    async def answer(
        self, message: bytes, *, code: int | None = None, is_away: bool = False
    ) -> None:
        """See :class:`RequestChannel`."""
        self._transport.channels.pop(self, None)
        self._transport.outbox.push(message)
        self.over()
        # With the answer: a client that reads both knows that what it asks next was not asked.
        self._transport.close_if_quiet()

    def closed(self) -> None:
        """The connection is gone before the answer."""
        self.over()
        self._on_closed()


class DuplexListens:
    """The listens on one such connection.

    It is pushed its sessions' events anyway. So a ``subscriptions/listen`` opens no stream: it is
    a filter on the events of its session, and an id that each of them carries until it ends. A
    session has one; the one before it ends in order.
    """

    def __init__(self, outbox: Outbox, listening: Listening) -> None:
        self._outbox = outbox
        self._listening = listening
        self._open: dict[SessionId, tuple[RequestId, Filter, SessionRecord]] = {}

    def begin(self, request_id: RequestId, wanted: Filter, record: SessionRecord) -> None:
        """Acknowledge a listen whose filter is set."""
        self.end(record.session_id, None)
        self._open[record.session_id] = (request_id, wanted, record)
        self._outbox.push(encode(acknowledgement(wanted, request_id)))

    def has(self, request_id: object) -> bool:
        """Whether the request with that id is an open listen."""
        return any(request_id == listening[0] for listening in self._open.values())

    def cancels(self, notification: Notification) -> bool:
        """End the listen that a notification cancels; False if it cancels none."""
        request_id = (notification.params or {}).get("requestId")
        if notification.method != "notifications/cancelled" or not self.has(request_id):
            return False
        for session_id, listening in list(self._open.items()):
            if listening[0] == request_id:
                self.end(session_id, error_body(REQUEST_CANCELLED, "Request cancelled"))
        return True

    def end(self, session_id: SessionId, error: dict[str, Any] | None) -> None:
        """Send the last message of a session's listen, if there is one.

        Args:
            error: Why it ended; None: in order.
        """
        listening = self._open.pop(session_id, None)
        if listening is None:
            return
        request_id, _, record = listening
        last = completion(
            request_id, error, lambda members: self._listening.result(members, record)
        )
        self._outbox.push(encode(last))

    def end_all(self) -> None:
        """End every one in order: the connection is closed."""
        for session_id in list(self._open):
            self.end(session_id, None)

    def frame(self, session_id: SessionId, event: LoggedEvent) -> bytes | None:
        """What is sent of an event; None: its session's listen did not ask for it."""
        listening = self._open.get(session_id)
        if listening is None:
            return event.payload
        request_id, wanted, _ = listening
        return stamped(event.payload, request_id) if wanted.admits(event) else None


class DuplexTransport:
    """A :class:`~mcp_sessions.server.binding.Transport` of a WebSocket or a pipe."""

    def __init__(self, served: Served) -> None:
        self.close_stream: Callable[[], Awaitable[None]] | None = None
        self.channels: dict[DuplexChannel, None] = {}
        """The ways back of what is owed an answer."""

        policy = served.policy
        self.outbox = Outbox(policy, most=policy.send_buffer + policy.max_unread_bytes)
        self.listens = DuplexListens(self.outbox, served.listening)
        self.is_draining = False
        """Closed by this side, in order."""

        self.is_leaving = False
        """Closed by this side as soon as nothing is owed to its client; until then it is served
        as ever."""

        self.over = asyncio.Event()
        """Set when nothing more goes out."""

        self._is_shared = served.bus.is_shared
        self._feeds: dict[SessionId, LogFeed] = {}
        self._holds = 0
        self._held: list[tuple[bytes, SessionId | None]] = []

    # --- the port --------------------------------------------------------------------------

    def begin(
        self, session_id: SessionId, attached: Attached, after: Position, read: ReadEvents
    ) -> None:
        """See :class:`Transport`."""
        self.withdraw(session_id)
        feed = LogFeed(
            self.outbox,
            read,
            after.event_id(),
            lambda logged: self.listens.frame(session_id, logged),
            is_behind=False,
            is_checked=self._is_shared,
            push=self.push_event,
            # The window moved on while the peer took nothing: it has to resume, and hears why.
            cut=self.outbox.cut_slow,
        )
        self._feeds[session_id] = feed
        feed.take(attached.replay, attached.head)
        if self._is_shared:
            # What another process stored after the head, and was heard too early.
            feed.check_position(None)

    def offer(self, session_id: SessionId, event: LoggedEvent) -> None:
        """See :class:`Transport`."""
        feed = self._feeds.get(session_id)
        if feed is not None:
            feed.offer(event)

    def check_position(self, session_id: SessionId, head: Position | None) -> None:
        """See :class:`Transport`."""
        feed = self._feeds.get(session_id)
        if feed is not None:
            feed.check_position(head)

    def send(self, draft: Draft) -> None:
        """See :class:`Transport`."""
        self.push_event(draft.before, draft.origin)

    def withdraw(self, session_id: SessionId, *, is_over: bool = False) -> None:
        """See :class:`Transport`."""
        feed = self._feeds.pop(session_id, None)
        if feed is not None:
            # It may be reading its log just now.
            feed.end()
        self.outbox.purge(session_id)
        self._held = [entry for entry in self._held if entry[1] != session_id]
        self.listens.end(session_id, wire_error(SessionNotFound(session_id)) if is_over else None)

    async def drain(self) -> None:
        """See :class:`Transport`."""
        await self.outbox.drain()

    def hold(self) -> Callable[[], None]:
        """See :class:`Transport`: events wait, answers do not."""
        self._holds += 1

        def release() -> None:
            self._holds -= 1
            if not self._holds:
                held, self._held = self._held, []
                for chunk, origin in held:
                    self.outbox.push(chunk, origin)

        return release

    def close(self) -> None:
        """See :class:`Transport`."""
        self.is_draining = True
        self.listens.end_all()
        self.outbox.finish()

    # --- its end ---------------------------------------------------------------------------

    def close_when_quiet(self) -> None:
        """Serve what was asked, and what is asked meanwhile; then :meth:`close`."""
        self.is_leaving = True
        self.close_if_quiet()

    def close_if_quiet(self) -> None:
        """:meth:`close`, if that is waited for and every answer was handed over."""
        if self.is_leaving and not self.is_draining:
            if all(channel.lasts for channel in self.channels):
                self.close()

    def cut(self) -> None:
        """The peer is not there any more: nobody hears what is owed an answer."""
        self.outbox.cut()
        for channel in list(self.channels):
            channel.closed()
        self.channels.clear()

    def push_event(self, chunk: bytes, origin: SessionId | None) -> None:
        """Hand over what is no answer: it waits behind an answer that has to come first."""
        if self._holds:
            self._held.append((chunk, origin))
        else:
            self.outbox.push(chunk, origin)
