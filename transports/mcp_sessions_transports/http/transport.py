"""What is open in this process of a transport-mode session over HTTP: its GET stream and its
response streams.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Sequence

from starlette.types import Receive, Send

from mcp_sessions.core.log import Draft, LoggedEvent
from mcp_sessions.ids import Position, SessionId
from mcp_sessions.policy import SessionPolicy
from mcp_sessions.server.connection import ClientConnection, ReadEvents
from mcp_sessions.server.delivery.stored_connection import StoredConnection
from mcp_sessions.server.delivery.streams import Streams
from mcp_sessions.stores.records import Attached
from mcp_sessions_transports.http.channel import ResponseStreams
from mcp_sessions_transports.http.get_stream import GetStream
from mcp_sessions_transports.http.sse import SSE_HEADERS, retry_event


class HttpTransport:
    """A :class:`~mcp_sessions.server.connection.Transport` over HTTP."""

    __slots__ = (
        "_get",
        "_is_over",
        "_is_shared",
        "_policy",
        "_primes",
        "close_stream",
        "responses",
    )

    is_leaving = False
    """A request has a connection of its own, which the server that runs us sees to."""

    def __init__(
        self,
        session_id: SessionId,
        streams: Streams,
        policy: SessionPolicy,
        *,
        primes: bool,
        is_shared: bool,
    ) -> None:
        """Nothing is open yet.

        Args:
            primes: The client understands an event without data.
            is_shared: Other processes may serve the session, too.
        """
        self.responses = ResponseStreams(session_id, streams, policy.max_finished_streams)
        self.close_stream: Callable[[], Awaitable[None]] | None = None
        if primes:
            self.close_stream = self._close_stream
        self._policy = policy
        self._primes = primes
        self._is_shared = is_shared
        self._get: GetStream | None = None
        self._is_over = False

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

    def withdraw(self, session_id: SessionId) -> None:
        """See :class:`Transport`."""
        if self._get is not None:
            self._get.stream.purge(session_id)

    def session_over(self, session_id: SessionId) -> None:
        """See :class:`Transport`."""
        self.withdraw(session_id)

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
        receive: Receive,
        send: Send,
        *,
        scopes: frozenset[str],
        cleared: Collection[SessionId],
    ) -> None:
        """Serve the GET stream until it ends; the one before it ends now, wherever it is.

        Args:
            connection: The one whose transport this is.
            after: What the client has.
            first: Messages that it opens with; see :meth:`GetStream.open_with`.
            receive: ASGI's.
            send: ASGI's.
            scopes: Those of the credential that opened it.
            cleared: The sessions that were found to need no others.

        Raises:
            StoreUnavailable: Nothing was sent.
        """
        self.cut_get()
        get = GetStream(
            connection.heard(scopes, cleared), after, self._policy, is_checked=self._is_shared
        )
        self._get = get
        get.open_with(first, primes=self._primes)
        if self._is_over:
            # Closed after this GET was admitted: its client comes back, and hears so.
            get.stream.finish()
        headers = [*SSE_HEADERS, (b"mcp-session-id", connection.session_id.encode("ascii"))]
        try:
            async with connection.streaming(get):
                await get.stream.serve(receive, send, headers)
        finally:
            if self._get is get:
                self._get = None

    def cut_get(self) -> None:
        """End the GET stream now: its credential is good no more."""
        if self._get is not None:
            self._get.cut()

    def come_back_after(self, seconds: float) -> None:
        """Tell whoever reads the GET stream when to open it again after it has ended."""
        if self._get is not None and self._primes:
            self._get.stream.push(retry_event(seconds))

    async def _close_stream(self) -> None:
        if self._get is not None:
            self._get.stream.finish()


def http_transport(connection: ClientConnection) -> HttpTransport:
    """The transport of a transport-mode session's connection."""
    if not isinstance(connection.transport, HttpTransport):
        raise AssertionError("it is of no transport-mode session")
    return connection.transport
