"""A connection's GET stream while it is open: what its credential may hear of its log."""

from __future__ import annotations

from collections.abc import Sequence

from mcp_sessions.core.log import LoggedEvent
from mcp_sessions.errors import Refusal
from mcp_sessions.ids import Position, SessionId
from mcp_sessions.policy import SessionPolicy
from mcp_sessions.server.delivery.heard_log import HeardLog
from mcp_sessions_transports.http.sse import (
    SseStream,
    plain_frame,
    priming_event,
    sse_event,
)
from mcp_sessions_transports.log_feed import LogFeed


class GetStream:
    """One such stream."""

    __slots__ = ("_after", "_feed", "_log", "stream")

    def __init__(
        self, log: HeardLog, after: Position, policy: SessionPolicy, *, is_checked: bool
    ) -> None:
        """Send what follows ``after``.

        Args:
            is_checked: See :class:`~mcp_sessions_transports.log_feed.LogFeed`.
        """
        self._log = log
        self._after = after
        self.stream = SseStream(limit=policy.send_buffer, slow_timeout=policy.slow_timeout)
        self._feed = LogFeed(
            self.stream, self._read, after.event_id(), self._frame, is_checked=is_checked
        )

    @property
    def last(self) -> str:
        """The id of the last event that was handed over."""
        return self._feed.last

    def open_with(self, first: Sequence[bytes], *, primes: bool) -> None:
        """Send this before anything of the log.

        Args:
            first: Messages. They are in no log, which may be too small for them; only the
                last has an id, so that a client that is cut before it comes back with its
                old position and is told all of them again.
            primes: The client understands an event without data.
        """
        at = self._after.event_id()
        for number, message in enumerate(first, 1):
            self.stream.push(sse_event(message, at if number == len(first) else None))
        if primes:
            self.stream.push(priming_event(at))

    def begin(self, session_id: SessionId, scopes: frozenset[str]) -> None:
        """A session is attached, anew perhaps: what waits here of it is taken back.

        Args:
            scopes: Those that it needs; with fewer, the stream ends.
        """
        self.stream.purge(session_id)
        self._log.begin(session_id, scopes)
        self._cut_if_too_weak()

    def offer(self, entry: LoggedEvent) -> None:
        """An event was appended to its log."""
        if self._log.is_cleared(entry):
            self._feed.offer(entry)
        else:
            # Whether it may be heard here has to be asked; reading the log asks it.
            self._feed.check_position(None)

    def check_position(self, head: Position | None) -> None:
        """Read the log again if it goes on after what was sent, or if nobody knows (None)."""
        self._feed.check_position(head)

    async def drain(self) -> None:
        """Wait until the peer has taken enough of what waits for it."""
        await self._feed.drain()
        await self.stream.drain()

    def cut(self) -> None:
        """End it now."""
        self.stream.cut()

    async def _read(self, position: str) -> tuple[Sequence[LoggedEvent], Refusal | None]:
        heard = await self._log.read(position)
        self._cut_if_too_weak()
        return heard

    def _cut_if_too_weak(self) -> None:
        # To hear it, its client has to come back with the stronger credential (SEC3).
        if self._log.is_too_weak:
            self.stream.cut()

    def _frame(self, event: LoggedEvent) -> bytes | None:
        return None if self._log.is_over(event) else plain_frame(event)
