"""One server-sent event stream: a bounded buffer, and the task that empties it.

Rules that must hold, and that ``tests/transports/http/test_sse.py`` owns:

1. What is pushed waits in an :class:`~mcp_sessions_transports.outbox.Outbox`, whose rules
   hold here: nobody who pushes waits, and a peer that takes nothing is cut.
2. The peer that went away is noticed at once, by ``http.disconnect``.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Generic, Protocol, TypeVar

from starlette.types import Receive, Send

from mcp_sessions.core.log import LoggedEvent
from mcp_sessions.errors import Refusal, StoreUnavailable
from mcp_sessions.ids import Position, SessionEventId, SessionId, parse_position
from mcp_sessions_transports.outbox import Outbox

KEEP_ALIVE = 15.0
"""Seconds without an event after which a comment is sent, so that no proxy closes."""

RETRY = 1_000
"""Milliseconds after which a client of a closed stream should come back."""

_LAST_WORDS = 1.0
"""Seconds that a stream has to end properly when this side cuts it."""

SSE_HEADERS: list[tuple[bytes, bytes]] = [
    (b"content-type", b"text/event-stream"),
    (b"cache-control", b"no-cache, no-transform"),
    (b"x-accel-buffering", b"no"),
]


def sse_event(payload: bytes, event_id: str | None = None) -> bytes:
    """``payload`` (JSON without line breaks) as one event."""
    if event_id is None:
        return b"event: message\ndata: " + payload + b"\n\n"
    return b"id: " + event_id.encode() + b"\nevent: message\ndata: " + payload + b"\n\n"


def plain_frame(event: LoggedEvent) -> bytes:
    """An event under its own id."""
    return sse_event(event.payload, event.event_id)


def priming_event(event_id: str) -> bytes:
    """An event without data: a client that is cut before the first one can resume."""
    return b"id: " + event_id.encode() + b"\nretry: " + str(RETRY).encode() + b"\ndata: \n\n"


def retry_event(seconds: float) -> bytes:
    """When to come back once this stream has ended, instead of after ``RETRY``."""
    return b"retry: %d\n\n" % round(seconds * 1000)


class SseStream(Outbox):
    """One open response stream."""

    def __init__(
        self, *, limit: int, slow_timeout: float, comment: bytes = b": keep-alive\n\n"
    ) -> None:
        """Take what it works with.

        Args:
            limit: Bytes that wait for the peer; see ``SessionPolicy.send_buffer``.
            slow_timeout: Seconds; see ``SessionPolicy.slow_timeout``.
            comment: Sent when there was nothing else for a while.
        """
        super().__init__(limit=limit, slow_timeout=slow_timeout)
        self._comment = comment

    async def serve(self, receive: Receive, send: Send, headers: list[tuple[bytes, bytes]]) -> None:
        """Send until the stream ends, is cut, or its peer is gone."""
        watcher = asyncio.ensure_future(self._watch(receive))
        writer = asyncio.ensure_future(self._send_all(send, headers))
        try:
            await asyncio.wait({watcher, writer, self._cut}, return_when=asyncio.FIRST_COMPLETED)
            if self._cut.done() and not writer.done() and not watcher.done():
                await asyncio.wait({writer}, timeout=_LAST_WORDS)
        finally:
            self.cut()
            watcher.cancel()
            writer.cancel()
            results = await asyncio.gather(watcher, writer, return_exceptions=True)
        for result in results:
            # OSError: the server says that the peer is gone, which is how streams end.
            if isinstance(result, Exception) and not isinstance(result, OSError):
                raise result

    async def _watch(self, receive: Receive) -> None:
        while (await receive())["type"] != "http.disconnect":
            continue

    async def _send_all(self, send: Send, headers: list[tuple[bytes, bytes]]) -> None:
        async def write(chunks: list[bytes]) -> None:
            body = chunks[0] if len(chunks) == 1 else b"".join(chunks)
            await send({"type": "http.response.body", "body": body, "more_body": True})

        async def idle() -> None:
            await write([self._comment])

        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await self.empty_into(write, idle=idle, interval=KEEP_ALIVE)
        await send({"type": "http.response.body", "body": b"", "more_body": False})


class Lane(Protocol):
    """Where a feed's events go."""

    closed: bool
    refill: Callable[[], Awaitable[bool]] | None

    @property
    def full(self) -> bool:
        """No more should be pushed now."""
        ...

    def push(self, chunk: bytes, origin: SessionId | None = None) -> None:
        """Hand over a chunk."""
        ...

    def wake(self) -> None:
        """There is more: ask ``refill``."""
        ...

    def finish(self) -> None:
        """End when everything that was pushed is sent."""
        ...

    def cut(self) -> None:
        """End now."""
        ...


Frame = Callable[[LoggedEvent], bytes | None]
Read = Callable[[str], Awaitable[tuple[Sequence[LoggedEvent], Refusal | None]]]


LaneT = TypeVar("LaneT", bound=Lane)


class LogFeed(Generic[LaneT]):
    """Feeds one stream from one event log: everything after a position, once, in order.

    What is appended while the stream keeps up is handed over in the same step. When the
    buffer is full the log is the buffer: the stream is behind, and reads on from there.
    """

    def __init__(
        self,
        stream: LaneT,
        read: Read,
        after: str,
        frame: Frame,
        *,
        is_behind: bool = True,
        is_checked: bool = False,
    ) -> None:
        """Take what it works with.

        Args:
            stream: Where the events go.
            read: Reads the log after a position.
            after: The last event that the client has.
            frame: Makes what is sent of an event; None: the event is not for this stream.
            is_behind: There may be events after ``after`` in the log already.
            is_checked: Somebody calls :meth:`check_position` every few seconds, so that a store
                that is away for a while is no reason to end the stream.
        """
        self.stream = stream
        self.last = after
        self._read = read
        self._frame = frame
        self._behind = is_behind
        self._is_checked = is_checked
        self._grew = False
        self._reading = False
        position = parse_position(after)
        self._number = position.number if position is not None else -1
        self._log_epoch = position.log_epoch if position is not None else ""
        self._final: SessionEventId | None = None
        stream.refill = self._refill

    def offer(self, event: LoggedEvent, *, final: bool = False) -> None:
        """An event was appended to the log.

        Args:
            final: Nothing follows it: the stream ends after it.
        """
        if final:
            self._final = event.event_id
        if self._behind or self.stream.closed:
            self._grew = True
            self.stream.wake()
        elif not event.event_id.startswith(self._log_epoch):
            # The log was made anew, and what was lost with the old one the client can only be
            # told when it comes back.
            self.stream.cut()
        elif event.number <= self._number:
            # It was read from the log before its append returned here.
            self._end_if_final()
        elif self.stream.full or event.number > self._number + 1:
            # There is no room, or another append has not returned yet: the log knows best.
            self._behind = True
            self.stream.wake()
        else:
            self._push(event)

    def take(self, events: Sequence[LoggedEvent], head: SessionEventId) -> None:
        """Send what was read from the log as a whole, up to its head then; called first."""
        for event in events:
            if self.stream.full:
                self._behind = True
                self.stream.wake()
                return
            self._push(event)
        position = parse_position(head)
        if position is not None:
            # What stood between the last event and the head was replaced.
            self.last, self._number = head, position.number

    def check_position(self, head: Position | None) -> None:
        """Read the log again if it goes on after what was sent, or if nobody knows (None)."""
        if head is not None and head.event_id() == self.last:
            return
        self._behind = self._grew = True
        self.stream.wake()

    def end_at(self, event_id: SessionEventId) -> None:
        """The stream ends after that event, which is in the log already."""
        self._final = event_id

    def _push(self, event: LoggedEvent) -> None:
        self.last, self._number = event.event_id, event.number
        chunk = self._frame(event)
        if chunk is not None:
            self.stream.push(chunk, event.origin)
        self._end_if_final()

    def _end_if_final(self) -> None:
        if self._final is not None and self.last >= self._final:
            self.stream.finish()

    async def drain(self) -> None:
        """For who stored an event: read what the stream is behind with, so that a peer that
        takes nothing is seen by its full buffer.
        """
        if self._behind and not (self.stream.full or self.stream.closed):
            await self._refill()

    async def _refill(self) -> bool:
        if not self._behind or self._reading:
            # Whoever reads just now wakes the stream.
            return False
        self._reading = True
        try:
            return await self._read_on()
        finally:
            self._reading = False

    async def _read_on(self) -> bool:
        self._grew = False
        try:
            events, refusal = await self._read(self.last)
        except StoreUnavailable:
            # The client comes back with its position and gets everything then.
            if not self._is_checked:
                self.stream.cut()
            return False
        if refusal is not None:
            # The window moved on while the peer took nothing. Going on would leave a hole
            # that nobody sees; coming back is answered with the truth.
            self.stream.cut()
            return False
        # What was appended while the log was read may not be in what was read.
        self._behind = self._grew
        for event in events:
            if self.stream.full:
                self._behind = True
                break
            self._push(event)
        self._end_if_final()
        if self._behind:
            # Not for one who could not read at all: that would be asked again without end.
            self.stream.wake()
        return bool(events)
