"""Write server-sent event streams, and serve the GET stream of a connection.

Rules that must hold, and that ``tests/transports/http/test_sse.py`` owns:

1. A pushed message waits in an :class:`~mcp_sessions_transports.outbox.Outbox`, with its rules: a
   push never waits, and a peer that takes nothing is cut.
2. The server notices at once that the peer went away, by ``http.disconnect``.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from starlette.types import Receive, Send

from mcp_sessions.background import stopped
from mcp_sessions.core.log import Draft, LoggedEvent
from mcp_sessions.errors import Refusal
from mcp_sessions.ids import Position, SessionId
from mcp_sessions.policy import SessionPolicy
from mcp_sessions.server.connection.binding import ReadEvents
from mcp_sessions.server.delivery.stored_connection import StoredConnection
from mcp_sessions.stores.records import Attached
from mcp_sessions.turns import Turns
from mcp_sessions_transports.http.io import HttpCall
from mcp_sessions_transports.outbox import LogFeed, Outbox

KEEP_ALIVE = 15.0
"""Seconds without an event after which a comment is sent, or up to one less, so that no proxy
closes."""

RETRY = 1_000
"""Milliseconds after which a client of a closed stream should come back."""

_LAST_WORDS = 1.0
"""Seconds that a stream has to end properly when this side cuts it."""

SSE_HEADERS: list[tuple[bytes, bytes]] = [
    (b"content-type", b"text/event-stream"),
    (b"cache-control", b"no-cache, no-transform"),
    (b"x-accel-buffering", b"no"),
]


def sse_headers(session_id: str | None) -> list[tuple[bytes, bytes]]:
    if session_id is None:
        return SSE_HEADERS
    return [*SSE_HEADERS, (b"mcp-session-id", session_id.encode("ascii"))]


def sse_event(payload: bytes, event_id: str | None = None) -> bytes:
    if event_id is None:
        return b"event: message\ndata: " + payload + b"\n\n"
    return b"id: " + event_id.encode() + b"\nevent: message\ndata: " + payload + b"\n\n"


def plain_frame(event: LoggedEvent) -> bytes:
    return sse_event(event.payload, event.event_id)


def priming_event(event_id: str) -> bytes:
    """An event without data: a client that is cut before the first one can resume."""
    return b"id: " + event_id.encode() + b"\nretry: " + str(RETRY).encode() + b"\ndata: \n\n"


def retry_event(seconds: float) -> bytes:
    """Say when to reconnect after the end of this stream, instead of after ``RETRY``."""
    return b"retry: %d\n\n" % round(seconds * 1000)


class SseStream(Outbox):
    def __init__(
        self,
        policy: SessionPolicy,
        comment: bytes = b": keep-alive\n\n",
        turns: Turns | None = None,
    ) -> None:
        super().__init__(policy)
        self._comment = comment
        self._turns = turns
        self.has_sent = False
        """Something besides the headers was handed to the network."""

    async def serve(self, receive: Receive, send: Send, headers: list[tuple[bytes, bytes]]) -> bool:
        watcher = asyncio.ensure_future(self._watch(receive))
        writer = asyncio.ensure_future(self._send_all(send, headers))
        try:
            await asyncio.wait({watcher, writer, self._cut}, return_when=asyncio.FIRST_COMPLETED)
            if self._cut.done() and not writer.done() and not watcher.done():
                await asyncio.wait({writer}, timeout=_LAST_WORDS)
            is_whole = writer.done() and not self.closed
        finally:
            self.cut()
            failures = await stopped(watcher, writer)
        for failure in failures:
            # OSError: the server says that the peer is gone, which is how streams end.
            if not isinstance(failure, OSError):
                raise failure
        return is_whole and not writer.cancelled() and writer.exception() is None

    async def _watch(self, receive: Receive) -> None:
        while (await receive())["type"] != "http.disconnect":
            continue
        if self._turns is not None:
            # Nobody waits for what is left to do, and many peers may have gone together.
            await self._turns.take()

    async def _send_all(self, send: Send, headers: list[tuple[bytes, bytes]]) -> None:
        async def write(chunks: list[bytes]) -> None:
            body = chunks[0] if len(chunks) == 1 else b"".join(chunks)
            self.has_sent = True
            await send({"type": "http.response.body", "body": body, "more_body": True})

        async def idle() -> None:
            await write([self._comment])

        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await self.empty_into(write, idle=idle, interval=KEEP_ALIVE)
        await send({"type": "http.response.body", "body": b"", "more_body": False})


class GetStream:
    """Serves a connection's GET stream while it is open: the part of its log that a credential may
    get.

    A stream must not carry the events of a session that a stronger credential started (SEC3). So an
    event is handed over once it is known to be allowed. Until then it is left in the log, and the
    reader of the log checks it. A session that needs more scopes than the stream has ends the
    stream: its client must reconnect with the stronger credential.
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
        turns: Turns,
    ) -> None:
        self._connection = connection
        self._scopes = scopes
        self._cleared = set(cleared)
        self._after = after
        self.stream = SseStream(policy, turns=turns)
        self._feed = LogFeed(
            self.stream, self._read, after, frame=self._frame, is_checked=is_checked
        )

    @property
    def last(self) -> str:
        return self._feed.last

    @property
    def was_slow(self) -> bool:
        return self.stream.was_slow

    @property
    def has_sent(self) -> bool:
        return self.stream.has_sent

    def open_with(self, first: Sequence[bytes], *, primes: bool) -> None:
        """Send messages before anything of the log.

        Args:
            first: Messages. They are in no log, which may be too small for them; only the
                last has an id, so that a client that is cut before it comes back with its
                old position and gets all of them again.
            primes: The client understands an event without data.
        """
        at = self._after.event_id()
        for number, message in enumerate(first, 1):
            self.stream.push(sse_event(message, at if number == len(first) else None))
        if primes:
            self.stream.push(priming_event(at))

    def begin(self, session_id: SessionId, scopes: frozenset[str]) -> None:
        """Withdraw what waits of a session that is attached, perhaps again.

        Args:
            scopes: Those that it needs; with fewer, the stream ends.
        """
        self.stream.purge(session_id)
        if self._scopes >= scopes:
            self._cleared.add(session_id)
        else:
            self.stream.cut()

    def offer(self, entry: LoggedEvent) -> None:
        if entry.origin is None or entry.origin in self._cleared:
            self._feed.offer(entry)
        else:
            # Whether it may be sent here has to be asked; reading the log asks it.
            self._feed.check_position(None)

    def check_position(self, head: Position | None) -> None:
        """Read the log again if ``head`` is after what was sent. None: the head is unknown."""
        self._feed.check_position(head)

    async def drain(self) -> None:
        await self._feed.drain()
        await self.stream.drain()

    def cut(self) -> None:
        self.stream.cut()

    async def _read(self, position: str) -> tuple[Sequence[LoggedEvent], Refusal | None]:
        found = await self._connection.events_after(position, self._scopes, self._cleared)
        if found is None:
            self.stream.cut()
        return found or ((), None)

    def _frame(self, event: LoggedEvent) -> bytes | None:
        return None if event.origin in self._connection.ended else plain_frame(event)


class Responses(Protocol):
    @property
    def primes(self) -> bool: ...

    def close(self) -> None: ...


ResponsesT = TypeVar("ResponsesT", bound=Responses)


@dataclass(slots=True, eq=False, repr=False)
class HttpTransport(Generic[ResponsesT]):
    """A :class:`~mcp_sessions.server.connection.binding.Transport` over HTTP: what is open in this
    process of a transport-mode session, its GET stream and its response streams.

    Args:
        is_shared: Other processes may serve the session, too.
    """

    responses: ResponsesT
    _policy: SessionPolicy
    _is_shared: bool
    close_stream: Callable[[], Awaitable[None]] | None = None
    is_leaving: bool = False
    """A request has a connection of its own, which the server that runs us sees to."""

    _get: GetStream | None = None
    _has_ended: bool = False

    def __post_init__(self) -> None:
        if self.responses.primes:
            self.close_stream = self._close_stream

    # --- the port ------------------------------------------------------------------------

    @property
    def is_taken(self) -> bool:
        """Whether the client of the GET stream took everything. A comment follows each silence on
        it.
        """
        return self._get is not None and self._get.stream.is_taken

    def begin(
        self, session_id: SessionId, attached: Attached, after: Position, read: ReadEvents
    ) -> None:
        """Start the stream. Replayed events become entries of the GET stream's log."""
        if self._get is not None:
            self._get.begin(session_id, attached.scopes)

    def offer(self, session_id: SessionId, event: LoggedEvent) -> None:
        if self._get is not None:
            self._get.offer(event)

    def check_position(self, session_id: SessionId, head: Position | None) -> None:
        if self._get is not None:
            self._get.check_position(head)

    def send(self, draft: Draft) -> None:
        raise AssertionError("what goes on a GET stream is an entry of its log")

    def withdraw(self, session_id: SessionId, *, has_ended: bool = False) -> None:
        if self._get is not None:
            self._get.stream.purge(session_id)

    async def drain(self) -> None:
        if self._get is not None:
            await self._get.drain()
        else:
            # A handler that only emits must let others run.
            await asyncio.sleep(0)

    def hold(self) -> Callable[[], None]:
        return self._get.stream.hold() if self._get is not None else lambda: None

    def close(self) -> None:
        self._has_ended = True
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
        turns: Turns,
    ) -> None:
        """Serve the GET stream until it ends; the one before it ends now, wherever it is.

        Args:
            connection: The one whose transport this is.
            after: The client's position.
            first: Messages that it opens with; see :meth:`GetStream.open_with`.
            call: The request that opens it.
            cleared: The sessions that were found to need no other scopes.
            turns: See :class:`SseStream`.

        Raises:
            StoreUnavailable: Nothing was sent.
        """
        self.cut()
        get = GetStream(
            connection,
            after,
            self._policy,
            scopes=call.principal.scopes,
            cleared=cleared,
            is_checked=self._is_shared,
            turns=turns,
        )
        self._get = get
        get.open_with(first, primes=self.responses.primes)
        if self._has_ended:
            # Closed after this GET was admitted: its client comes back, and learns so.
            get.stream.finish()
        headers = sse_headers(connection.session_id)
        try:
            async with connection.streaming(get):
                await get.stream.serve(call.receive, call.send, headers)
        finally:
            if self._get is get:
                self._get = None

    def cut(self) -> None:
        if self._get is not None:
            self._get.cut()

    def come_back_after(self, seconds: float) -> None:
        if self._get is not None and self.responses.primes:
            self._get.stream.push(retry_event(seconds))

    async def _close_stream(self) -> None:
        if self._get is not None:
            self._get.stream.finish()
