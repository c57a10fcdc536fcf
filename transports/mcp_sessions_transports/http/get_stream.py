"""A connection's GET stream while it is open: its log, as one credential may hear it.

Whoever opened it shall not hear what a stronger credential started (SEC3). So an event
is handed over when it was found that it may be heard; until then it is left in the log, and
who reads the log asks. A session that needs more scopes than the stream was opened with ends
the stream: to hear it, its client has to come back with the stronger credential.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

from mcp_sessions.core.log import LoggedEvent
from mcp_sessions.errors import Refusal
from mcp_sessions.ids import GET_STREAM, Position, SessionId
from mcp_sessions.policy import SessionPolicy
from mcp_sessions.stores.contract import SessionStore
from mcp_sessions_transports.http.sse import (
    LogFeed,
    SseStream,
    plain_frame,
    priming_event,
    sse_event,
)


class GetStream:
    """One such stream."""

    __slots__ = (
        "_after",
        "_cleared",
        "_clock",
        "_feed",
        "_over",
        "_scopes",
        "_session_id",
        "_store",
        "stream",
    )

    def __init__(
        self,
        session_id: SessionId,
        after: Position,
        *,
        scopes: frozenset[str],
        cleared: Collection[SessionId],
        over: set[SessionId],
        store: SessionStore,
        policy: SessionPolicy,
        clock: Callable[[], float],
        is_checked: bool,
    ) -> None:
        """Take what it works with.

        Args:
            session_id: The transport-mode session.
            after: What the client has.
            scopes: Those of the credential that opened it.
            cleared: The sessions that were found to need no others.
            over: Sessions of which nothing is handed over any more; those that are found to
                have ended are added.
            store: Where its log is.
            policy: The limits.
            clock: Seconds since 1970.
            is_checked: See :class:`~mcp_sessions_transports.http.sse.LogFeed`.
        """
        self._session_id = session_id
        self._after = after
        self._scopes = scopes
        self._cleared = set(cleared)
        self._over = over
        self._store = store
        self._clock = clock
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
        if self._scopes >= scopes:
            self._cleared.add(session_id)
        else:
            self.stream.cut()

    def offer(self, entry: LoggedEvent) -> None:
        """An event was appended to its log."""
        if entry.origin is None or entry.origin in self._cleared:
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

    async def _read(self, position: str) -> tuple[Sequence[LoggedEvent], Refusal | None]:
        events, refusal = await self._store.read(
            self._session_id, position, now=self._clock(), stream=GET_STREAM
        )
        origins = {event.origin for event in events if event.origin is not None}
        for origin in origins - self._cleared:
            record = await self._store.load(origin, now=0)
            if record is None:
                # It is over, and nothing of it is handed over any more.
                self._over.add(origin)
            elif not self._scopes >= record.principal.scopes:
                self.stream.cut()
                return (), refusal
            self._cleared.add(origin)
        return events, refusal

    def _frame(self, event: LoggedEvent) -> bytes | None:
        return None if event.origin in self._over else plain_frame(event)
