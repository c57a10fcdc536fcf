"""One server-sent event stream: a bounded buffer, and the task that empties it.

Rules that must hold, and that ``tests/transports/test_sse.py`` owns:

1. Whoever pushes never waits. A full buffer is answered by :attr:`SseStream.full`; what did
   not fit waits in its log, not here.
2. A peer that takes nothing for ``slow_timeout`` seconds while the buffer is full is cut,
   whether somebody waits for room or nobody does. Nothing else in its session waits for it.
3. Whoever waits for room waits for ``slow_timeout`` at the most.
4. The peer that went away is noticed at once, by ``http.disconnect``.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Awaitable, Callable, Sequence

from starlette.types import Receive, Send

from mcp_sessions.core.log import LoggedEvent
from mcp_sessions.errors import Refusal, StoreUnavailable
from mcp_sessions.ids import SessionEventId, SessionId, parse_position

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


class SseStream:
    """One open response stream."""

    def __init__(
        self, *, limit: int, slow_timeout: float, comment: bytes = b": keep-alive\n\n"
    ) -> None:
        """Take what it works with.

        Args:
            comment: Sent when there was nothing else for a while.
            limit: Bytes that wait for the peer; see ``SessionPolicy.send_buffer``.
            slow_timeout: Seconds; see ``SessionPolicy.slow_timeout``.
        """
        self._limit = limit
        self._slow_timeout = slow_timeout
        self._comment = comment
        self._buffer: deque[tuple[bytes, SessionId | None]] = deque()
        self._size = 0
        self._holds = 0
        self._finished = False
        self._wake = asyncio.Event()
        self._taken = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self._cut = self._loop.create_future()
        self._slow: asyncio.TimerHandle | None = None
        self.closed = False
        """Nothing reaches the peer any more."""

        self.refill: Callable[[], Awaitable[bool]] | None = None
        """Pushes more when the buffer is empty; False: there is no more for now."""

    @property
    def full(self) -> bool:
        """No more should be pushed now."""
        return self._size >= self._limit

    def push(self, chunk: bytes, origin: SessionId | None = None) -> None:
        """Hand over a chunk.

        Args:
            origin: The session whose event it is; see :meth:`purge`.
        """
        if self.closed or self._finished:
            return
        self._buffer.append((chunk, origin))
        self._size += len(chunk)
        if self._slow is None and self.full:
            self._slow = self._loop.call_later(self._slow_timeout, self.cut)
        self._wake.set()

    def purge(self, origin: SessionId) -> None:
        """Take back what was not handed to the network yet of a session."""
        kept = [entry for entry in self._buffer if entry[1] != origin]
        if len(kept) != len(self._buffer):
            self._size -= sum(len(chunk) for chunk, _ in self._buffer)
            self._size += sum(len(chunk) for chunk, _ in kept)
            self._buffer = deque(kept)
            self._made_room()

    def wake(self) -> None:
        """There is more: ask ``refill``."""
        self._wake.set()

    def hold(self) -> Callable[[], None]:
        """Send nothing until the returned function is called."""
        self._holds += 1
        released = False

        def release() -> None:
            nonlocal released
            if not released:
                released = True
                self._holds -= 1
                self._wake.set()

        return release

    def finish(self) -> None:
        """End the stream when everything that was pushed is sent."""
        self._finished = True
        self._wake.set()

    def cut(self) -> None:
        """End the stream now, whatever waits."""
        self.closed = True
        if self._slow is not None:
            self._slow.cancel()
        self._wake.set()
        self._taken.set()
        if not self._cut.done():
            self._cut.set_result(None)

    async def room(self) -> None:
        """Let the writer run; wait until more can be pushed, ``slow_timeout`` at the most."""
        await asyncio.sleep(0)
        if not self.full or self.closed:
            return
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._slow_timeout):
                while self.full and not self.closed:
                    self._taken.clear()
                    await self._taken.wait()

    def _made_room(self) -> None:
        """The buffer is smaller: the peer's time starts anew."""
        self._taken.set()
        if self._slow is not None:
            self._slow.cancel()
            self._slow = None
        if self.full and not self.closed:
            self._slow = self._loop.call_later(self._slow_timeout, self.cut)

    async def serve(self, receive: Receive, send: Send, headers: list[tuple[bytes, bytes]]) -> None:
        """Send until the stream ends, is cut, or its peer is gone."""
        watcher = asyncio.ensure_future(self._watch(receive))
        writer = asyncio.ensure_future(self._write(send, headers))
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

    async def _write(self, send: Send, headers: list[tuple[bytes, bytes]]) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        while True:
            self._wake.clear()
            if self.closed:
                break
            if not self._holds:
                if self._buffer:
                    chunks = [chunk for chunk, _ in self._buffer]
                    self._buffer.clear()
                    body = chunks[0] if len(chunks) == 1 else b"".join(chunks)
                    await send({"type": "http.response.body", "body": body, "more_body": True})
                    self._size -= len(body)
                    self._made_room()
                    continue
                if self.refill is not None and await self.refill():
                    continue
                if self._finished and not self._buffer:
                    break
            try:
                async with asyncio.timeout(KEEP_ALIVE):
                    await self._wake.wait()
            except TimeoutError:
                comment = {"type": "http.response.body", "body": self._comment}
                await send({**comment, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


Frame = Callable[[LoggedEvent], bytes | None]
Read = Callable[[str], Awaitable[tuple[Sequence[LoggedEvent], Refusal | None]]]


class LogFeed:
    """Feeds one stream from one event log: everything after a position, once, in order.

    What is appended while the stream keeps up is handed over in the same step. When the
    buffer is full the log is the buffer: the stream is behind, and reads on from there.
    """

    def __init__(
        self,
        stream: SseStream,
        read: Read,
        after: str,
        frame: Frame,
        *,
        is_behind: bool = True,
    ) -> None:
        """Take what it works with.

        Args:
            stream: Where the events go.
            read: Reads the log after a position.
            after: The last event that the client has.
            frame: Makes what is sent of an event; None: the event is not for this stream.
            is_behind: There may be events after ``after`` in the log already.
        """
        self.stream = stream
        self.last = after
        self._read = read
        self._frame = frame
        self._behind = is_behind
        self._grew = False
        position = parse_position(after)
        self._number = position.number if position is not None else -1
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
        elif event.number <= self._number:
            # It was read from the log before its append returned here.
            self._end_if_final()
        elif self.stream.full or event.number > self._number + 1:
            # There is no room, or another append has not returned yet: the log knows best.
            self._behind = True
            self.stream.wake()
        else:
            self._push(event)

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

    async def _refill(self) -> bool:
        if not self._behind:
            return False
        self._grew = False
        try:
            events, refusal = await self._read(self.last)
        except StoreUnavailable:
            # The client comes back with its position and gets everything then.
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
        return bool(events)
