"""What is open in this process of a transport-mode session over HTTP: its GET stream and its
response streams.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import dataclass

from mcp_sessions.core.log import Draft, LoggedEvent
from mcp_sessions.errors import Refusal
from mcp_sessions.ids import Position, SessionId
from mcp_sessions.policy import SessionPolicy
from mcp_sessions.server.binding import ReadEvents
from mcp_sessions.server.connection import ClientConnection
from mcp_sessions.server.delivery.stored_connection import StoredConnection
from mcp_sessions.stores.records import Attached
from mcp_sessions_transports.http.channel import ResponseStreams
from mcp_sessions_transports.http.io import HttpCall
from mcp_sessions_transports.http.sse import (
    SseStream,
    plain_frame,
    priming_event,
    retry_event,
    sse_event,
    sse_headers,
)
from mcp_sessions_transports.outbox import LogFeed


class GetStream:
    """A connection's GET stream while it is open: what one credential may hear of its log.

    Whoever opened the stream shall not hear what a stronger credential started (SEC3). So an
    event is handed over when it was found that it may be heard; until then it is left in the
    log, and who reads the log asks. A session that needs more scopes than the stream was opened
    with ends the stream: to hear it, its client has to come back with the stronger credential.
    """

    __slots__ = ("_after", "_cleared", "_connection", "_feed", "_scopes", "stream")

    def __init__(
        self,
        connection: StoredConnection,
        after: Position,
        policy: SessionPolicy,
        *,
        scopes: frozenset[str],
        cleared: Collection[SessionId],
        is_checked: bool,
    ) -> None:
        """Send what follows ``after``.

        Args:
            connection: Whose log it is.
            scopes: Those of the credential that opened it.
            cleared: The sessions that were found to need no others.
            is_checked: See :class:`~mcp_sessions_transports.outbox.LogFeed`.
        """
        self._connection = connection
        self._scopes = scopes
        self._cleared = set(cleared)
        self._after = after
        self.stream = SseStream(policy)
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

    def cut(self) -> None:
        """End it now."""
        self.stream.cut()

    async def _read(self, position: str) -> tuple[Sequence[LoggedEvent], Refusal | None]:
        heard = await self._connection.heard(position, self._scopes, self._cleared)
        if heard is None:
            self.stream.cut()
        return heard or ((), None)

    def _frame(self, event: LoggedEvent) -> bytes | None:
        return None if event.origin in self._connection.over else plain_frame(event)


@dataclass(slots=True, eq=False, repr=False)
class HttpTransport:
    """A :class:`~mcp_sessions.server.binding.Transport` over HTTP.

    Args:
        is_shared: Other processes may serve the session, too.
    """

    responses: ResponseStreams
    _policy: SessionPolicy
    _is_shared: bool
    close_stream: Callable[[], Awaitable[None]] | None = None
    is_leaving: bool = False
    """A request has a connection of its own, which the server that runs us sees to."""

    _get: GetStream | None = None
    _is_over: bool = False

    def __post_init__(self) -> None:
        if self.responses.primes:
            self.close_stream = self._close_stream

    # --- the port ------------------------------------------------------------------------

    def begin(
        self, session_id: SessionId, attached: Attached, after: Position, read: ReadEvents
    ) -> None:
        """See :class:`Transport`. What is replayed becomes entries of the GET stream's log."""
        if self._get is not None:
            self._get.begin(session_id, attached.scopes)

    def offer(self, session_id: SessionId, event: LoggedEvent) -> None:
        """See :class:`Transport`: of an entry of the GET stream's log."""
        if self._get is not None:
            self._get.offer(event)

    def check_position(self, session_id: SessionId, head: Position | None) -> None:
        """See :class:`Transport`."""
        if self._get is not None:
            self._get.check_position(head)

    def send(self, draft: Draft) -> None:
        """See :class:`Transport`."""
        raise AssertionError("what goes on a GET stream is an entry of its log")

    def withdraw(self, session_id: SessionId, *, is_over: bool = False) -> None:
        """See :class:`Transport`."""
        if self._get is not None:
            self._get.stream.purge(session_id)

    async def drain(self) -> None:
        """See :class:`Transport`."""
        if self._get is not None:
            await self._get.drain()
        else:
            # A handler that only emits must let others run.
            await asyncio.sleep(0)

    def hold(self) -> Callable[[], None]:
        """See :class:`Transport`."""
        return self._get.stream.hold() if self._get is not None else lambda: None

    def close(self) -> None:
        """See :class:`Transport`: every stream, after what was handed to it."""
        self._is_over = True
        if self._get is not None:
            self._get.stream.finish()
        self.responses.close()

    # --- the GET stream --------------------------------------------------------------------

    async def serve_get(
        self,
        connection: StoredConnection,
        after: Position,
        first: Sequence[bytes],
        call: HttpCall,
        *,
        cleared: Collection[SessionId],
    ) -> None:
        """Serve the GET stream until it ends; the one before it ends now, wherever it is.

        Args:
            connection: The one whose transport this is.
            after: What the client has.
            first: Messages that it opens with; see :meth:`GetStream.open_with`.
            call: What opens it.
            cleared: The sessions that were found to need no other scopes.

        Raises:
            StoreUnavailable: Nothing was sent.
        """
        self.cut_get()
        get = GetStream(
            connection,
            after,
            self._policy,
            scopes=call.principal.scopes,
            cleared=cleared,
            is_checked=self._is_shared,
        )
        self._get = get
        get.open_with(first, primes=self.responses.primes)
        if self._is_over:
            # Closed after this GET was admitted: its client comes back, and hears so.
            get.stream.finish()
        headers = sse_headers(connection.session_id)
        try:
            async with connection.streaming(get):
                await get.stream.serve(call.receive, call.send, headers)
        finally:
            if self._get is get:
                self._get = None

    def cut_get(self) -> None:
        """End the GET stream now: its credential is good no more."""
        if self._get is not None:
            self._get.cut()

    def come_back_after(self, seconds: float) -> None:
        """Tell whoever reads the GET stream when to open it again after it has ended."""
        if self._get is not None and self.responses.primes:
            self._get.stream.push(retry_event(seconds))

    async def _close_stream(self) -> None:
        if self._get is not None:
            self._get.stream.finish()


def http_transport(connection: ClientConnection) -> HttpTransport:
    """The transport of a transport-mode session's connection."""
    if not isinstance(connection.transport, HttpTransport):
        raise AssertionError("it is of no transport-mode session")
    return connection.transport
