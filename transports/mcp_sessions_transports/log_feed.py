"""From an event log to one stream: everything after a position, once, in order."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Generic, Protocol, TypeVar

from mcp_sessions.core.log import LoggedEvent
from mcp_sessions.errors import Refusal, StoreUnavailable
from mcp_sessions.ids import Position, SessionEventId, SessionId, parse_position
from mcp_sessions_transports.outbox import Refill


class Lane(Protocol):
    """Where a feed's events go."""

    closed: bool

    def feed_by(self, refill: Refill) -> None:
        """Call ``refill`` when all that was pushed is sent."""
        ...

    @property
    def full(self) -> bool:
        """No more should be pushed now."""
        ...

    def push(self, chunk: bytes, origin: SessionId | None = None) -> None:
        """Hand over a chunk."""
        ...

    def wake(self) -> None:
        """There is more: ask who feeds it."""
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

    Args:
        stream: Where the events go.
        read: Reads the log after a position.
        after: The last event that the client has.
        frame: Makes what is sent of an event; None: the event is not for this stream.
        is_behind: There may be events after ``after`` in the log already.
        is_checked: Somebody calls :meth:`check_position` every few seconds, so that a store
            that is away for a while is no reason to end the stream.
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
        stream.feed_by(self.refill)

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
            await self.refill()

    async def refill(self) -> bool:
        """Push what follows in the log; False: nothing for now."""
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
