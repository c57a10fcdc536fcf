"""Send messages to one peer, in order.

An outbox has a bounded buffer, the event logs that fill it, and the loop that empties it. Rules
that must hold:

1. A push never waits. :attr:`Outbox.full` says that the buffer is full. Events that did not fit
   wait in their log, not here.
2. A peer that takes nothing for ``slow_timeout`` seconds while the buffer is full is cut, whether
   a caller waits for room or not. Nothing else waits for it.
3. Answers wait nowhere else. A peer with waiting answers has its own bound for all that waits,
   and is cut when it is reached.
4. A caller waits for room for ``slow_timeout`` at the most.
5. Every entry of a log after a position is sent, once, in order. While the peer keeps up, a new
   entry is handed over in the same step. If the buffer is full, the log is the buffer: the feed
   is behind, and continues from there when there is room.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
from collections import deque
from collections.abc import Awaitable, Callable, Sequence

from mcp_sessions import metrics
from mcp_sessions.core.log import Draft, LoggedEvent
from mcp_sessions.errors import Refusal, StoreUnavailable
from mcp_sessions.ids import Position, SessionEventId, SessionId, position_of
from mcp_sessions.policy import SessionPolicy
from mcp_sessions.seldom import Seldom

logger = logging.getLogger(__name__)
logger.addFilter(Seldom())

_AT_ONCE = 262_144
"""Bytes that are handed to the network in one step, or one chunk if that is larger."""

_MOMENT = 0.1
"""Seconds between two moments at which it is looked who was silent for long enough."""

_SPREAD = 0.8
"""Seconds by which one stream's comment comes earlier than another's, at the most."""

Write = Callable[[list[bytes]], Awaitable[None]]
Frame = Callable[[LoggedEvent], bytes | None]
Read = Callable[[str], Awaitable[tuple[Sequence[LoggedEvent], Refusal | None]]]


class Outbox:
    """The queue of messages to one peer.

    Args:
        policy: Says how many bytes wait for the peer (``send_buffer``), and for how long
            (``slow_timeout``).
        most: Bytes above which the peer is cut at once: those of ``send_buffer`` and
            ``max_unread_bytes``. None: the code that pushes stops when it is full.
    """

    def __init__(self, policy: SessionPolicy, *, most: int | None = None) -> None:
        self._limit, self._slow_timeout = policy.send_buffer, policy.slow_timeout
        self._most = most
        self._buffer: deque[tuple[bytes, SessionId | None]] = deque()
        self._size = 0
        self.full = False
        self._holds = 0
        self._finished = False
        self._wake = asyncio.Event()
        self._taken = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self._cut = self._loop.create_future()
        self._slow: asyncio.TimerHandle | None = None
        self.closed = False
        """Nothing reaches the peer any more."""

        self._is_writing = False
        self.was_slow = False
        """It was cut because its peer took nothing."""

        self.exceeded: tuple[str, str] | None = None
        """The limit for which it was cut, and how large it is. None: none."""

        self.feeds: dict[LogFeed, None] = {}
        """Asked, each in its turn, when the buffer is empty."""

    @property
    def is_taken(self) -> bool:
        return not (self.closed or self._is_writing)

    @property
    def waiting(self) -> tuple[int, int]:
        return len(self._buffer), self._size

    def push(self, chunk: bytes, origin: SessionId | None = None) -> None:
        if self.closed or self._finished:
            return
        self._buffer.append((chunk, origin))
        before = self._size
        self._size = before + len(chunk)
        self.full = self._size >= self._limit
        # One alone goes out however large it is.
        if before >= self._limit and self._most is not None and self._size > self._most:
            logger.warning("%d bytes wait for a client that reads nothing", self._size)
            self.exceeded = "max_unread_bytes", f"{self._most - self._limit} bytes"
            self.cut_slow()
            return
        if self._slow is None and self.full:
            self._slow = self._loop.call_later(self._slow_timeout, self._cut_late)
        self._wake.set()

    def purge(self, origin: SessionId) -> None:
        kept = [entry for entry in self._buffer if entry[1] != origin]
        if len(kept) != len(self._buffer):
            self._size -= sum(len(chunk) for chunk, _ in self._buffer)
            self._size += sum(len(chunk) for chunk, _ in kept)
            self._buffer = deque(kept)
            self._made_room()

    def wake(self) -> None:
        self._wake.set()

    def hold(self) -> Callable[[], None]:
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
        self._finished = True
        self._wake.set()

    def cut(self) -> None:
        self.closed = True
        # Each feed knows its outbox: what only they know of must not wait for the collector.
        self.feeds.clear()
        if self._slow is not None:
            self._slow.cancel()
        self._wake.set()
        self._taken.set()
        if not self._cut.done():
            self._cut.set_result(None)

    async def until_cut(self) -> None:
        await asyncio.shield(self._cut)

    async def drain(self) -> None:
        """Run the writer, and wait for room, ``slow_timeout`` at the most."""
        await asyncio.sleep(0)
        if not self.full or self.closed:
            return
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._slow_timeout):
                while self.full and not self.closed:
                    self._taken.clear()
                    await self._taken.wait()

    def _made_room(self) -> None:
        """Note that the buffer shrank: the peer's time starts anew."""
        self.full = self._size >= self._limit
        self._taken.set()
        if self._slow is not None:
            self._slow.cancel()
            self._slow = None
        if self.full and not self.closed:
            self._slow = self._loop.call_later(self._slow_timeout, self._cut_late)

    def _cut_late(self) -> None:
        self.exceeded = "slow_timeout", f"{self._slow_timeout:g} s"
        self.cut_slow()

    def cut_slow(self) -> None:
        self.was_slow = True
        metrics.too_slow()
        self.cut()

    async def empty_into(
        self, write: Write, *, idle: Callable[[], Awaitable[None]] | None, interval: float
    ) -> None:
        """Write what is pushed, in order, until it is finished or cut.

        Args:
            write: Takes all that waits; returns when the network took it.
            idle: Called when there was nothing for ``interval`` seconds; None: never.
            interval: Seconds.
        """
        silence = Silence(self._loop, interval, self.wake) if idle is not None else None
        metrics.outboxes[self] = None
        try:
            while True:
                self._wake.clear()
                if self.closed:
                    return
                if not self._holds:
                    if self._buffer:
                        chunks: list[bytes] = []
                        size = 0
                        while self._buffer and size < _AT_ONCE:
                            chunk, _ = self._buffer.popleft()
                            chunks.append(chunk)
                            size += len(chunk)
                        self._is_writing = True
                        await write(chunks)
                        self._is_writing = False
                        self._size -= size
                        self._made_room()
                        if silence is not None:
                            silence.broken()
                        continue
                    is_refilled = False
                    for feed in list(self.feeds):
                        is_refilled |= await feed.refill()
                    if is_refilled:
                        continue
                    if self._finished and not self._buffer:
                        return
                    if silence is not None and idle is not None and silence.is_due:
                        silence.broken()
                        self._is_writing = True
                        await idle()
                        self._is_writing = False
                        continue
                await self._wake.wait()
        finally:
            # It empties once.
            del metrics.outboxes[self]
            if silence is not None:
                silence.end()


class Silence:
    """Reports when nothing was sent for a while."""

    __slots__ = ("_interval", "_loop", "_since", "_notify", "_timer", "is_due")

    def __init__(
        self, loop: asyncio.AbstractEventLoop, interval: float, notify: Callable[[], None]
    ) -> None:
        self._loop, self._notify = loop, notify
        self._interval = interval - random.random() * _SPREAD
        self.is_due = False
        """It has lasted ``interval`` seconds."""

        self._since = loop.time()
        self._timer = self._timer_at(self._since + self._interval)

    def broken(self) -> None:
        self._since = self._loop.time()
        self.is_due = False

    def end(self) -> None:
        self._timer.cancel()

    def _timer_at(self, moment: float) -> asyncio.TimerHandle:
        return self._loop.call_at(moment // _MOMENT * _MOMENT, self._look)

    def _look(self) -> None:
        now = self._loop.time()
        if now >= self._since + self._interval - _MOMENT:
            self.is_due = True
            self._notify()
            self._since = now
        self._timer = self._timer_at(self._since + self._interval)


class LogFeed:
    """Fills an outbox from one event log.

    Args:
        outbox: The outbox that gets the events.
        read: Reads the log after a position.
        after: The last event that the client has.
        frame: Makes what is sent of an event; None: the event is not for this stream.
        is_behind: There may be events after ``after`` in the log already.
        is_checked: Somebody calls :meth:`check_position` every few seconds, so that a store
            that is away for a while is no reason to cut the peer.
        push: Hands over what is sent of an event; None: :meth:`Outbox.push`.
        cut: Called when the log cannot be followed any more: its client has to come back, and
            learns why; None: :meth:`Outbox.cut`.
    """

    def __init__(
        self,
        outbox: Outbox,
        read: Read,
        after: Position,
        *,
        frame: Frame,
        is_behind: bool = True,
        is_checked: bool = False,
        push: Callable[[bytes, SessionId | None], None] | None = None,
        cut: Callable[[], None] | None = None,
    ) -> None:
        self._outbox = outbox
        self._push_chunk = push or outbox.push
        self._cut = cut or outbox.cut
        self._read = read
        self._frame = frame
        self._behind = is_behind
        self._is_checked = is_checked
        self._grew = False
        self._reading = False
        self._log_epoch, self._number = after.log_epoch, after.number
        self._final: SessionEventId | None = None
        self._has_ended = False
        outbox.feeds[self] = None

    @property
    def last(self) -> SessionEventId:
        """The id of the last event that was handed over, or the position where it began."""
        return Position(self._log_epoch, self._number).event_id()

    def end(self) -> None:
        self._has_ended = True
        self._outbox.feeds.pop(self, None)

    def offer(self, event: LoggedEvent, *, final: bool = False) -> None:
        """Send an event that was appended to the log.

        Args:
            final: Nothing follows it: the stream ends after it.
        """
        if final:
            self._final = event.event_id
        if self._behind or self._outbox.closed:
            self._grew = True
            self._outbox.wake()
        elif not event.event_id.startswith(self._log_epoch):
            # The log was made anew, and what was lost with the old one the client can only be
            # sent when it comes back.
            self._cut()
        elif event.number <= self._number:
            # It was read from the log before its append returned here.
            if self._final is not None:
                self._end_if_final(self._final)
        elif self._outbox.full or event.number > self._number + 1:
            # There is no room, or another append has not returned yet: the log knows best.
            self._behind = True
            self._outbox.wake()
        else:
            self._push(event)

    def foresee(self, drafts: Sequence[Draft]) -> None:
        """Send events that will be appended, and end the stream. The log has one writer, so their
        ids are known. An event that a later one replaces has a number, and is not sent.
        """
        newest = {draft.key: draft for draft in drafts}
        for draft in drafts:
            if self._behind:
                # The log knows best, when it has them.
                return
            number = self._number + 1
            if draft.key is not None and newest[draft.key] is not draft:
                self._number = number
                continue
            event_id = Position(self._log_epoch, number).event_id()
            event = LoggedEvent(event_id, number, draft.encode(event_id), 0.0, None, draft.origin)
            self.offer(event, final=draft is drafts[-1])

    def take(self, events: Sequence[LoggedEvent], head: SessionEventId) -> None:
        """Send what was read from the log as a whole, up to its head then. It is called first."""
        for event in events:
            if self._outbox.full:
                self._behind = True
                self._outbox.wake()
                return
            self._push(event)
        if not events or events[-1].event_id != head:
            # The events between the last one and the head were replaced.
            self._number = position_of(head).number

    def check_position(self, head: Position | None) -> None:
        if head == Position(self._log_epoch, self._number):
            return
        self._behind = self._grew = True
        self._outbox.wake()

    def end_at(self, event_id: SessionEventId) -> None:
        self._final = event_id

    def _push(self, event: LoggedEvent) -> None:
        self._number = event.number
        chunk = self._frame(event)
        if chunk is not None:
            self._push_chunk(chunk, event.origin)
        if self._final is not None:
            self._end_if_final(self._final)

    def _end_if_final(self, final: SessionEventId) -> None:
        if self.last >= final:
            self._outbox.finish()

    async def drain(self) -> None:
        """Read what the stream is behind with. A peer that takes nothing then has a full buffer."""
        if self._behind and not (self._outbox.full or self._outbox.closed):
            await self.refill()

    async def refill(self) -> bool:
        if not self._behind or self._reading:
            # The current reader wakes the stream.
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
            if not (self._is_checked or self._has_ended):
                self._cut()
            return False
        if self._has_ended:
            return False
        if refusal is not None:
            # The window moved on while the peer took nothing. Going on would leave a hole
            # that nobody sees; coming back is answered with the truth.
            self._cut()
            return False
        # Events that were appended during the read may be missing from it.
        self._behind = self._grew
        for event in events:
            if self._outbox.full:
                self._behind = True
                break
            self._push(event)
        if self._final is not None:
            self._end_if_final(self._final)
        if self._behind:
            # Not for one who could not read at all: that would be asked again without end.
            self._outbox.wake()
        return bool(events)
