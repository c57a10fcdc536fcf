"""One server-sent event stream: a bounded buffer, and the task that empties it.

Rules that must hold, and that ``tests/transports/http/test_sse.py`` owns:

1. What is pushed waits in an :class:`~mcp_sessions_transports.outbox.Outbox`, whose rules
   hold here: nobody who pushes waits, and a peer that takes nothing is cut.
2. The peer that went away is noticed at once, by ``http.disconnect``.
"""

from __future__ import annotations

import asyncio

from starlette.types import Receive, Send

from mcp_sessions.core.log import LoggedEvent
from mcp_sessions.policy import SessionPolicy
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


def sse_headers(session_id: str | None) -> list[tuple[bytes, bytes]]:
    """Those of a stream, with the transport session's ``Mcp-Session-Id`` if it is of one."""
    if session_id is None:
        return SSE_HEADERS
    return [*SSE_HEADERS, (b"mcp-session-id", session_id.encode("ascii"))]


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
    """One open response stream.

    Args:
        policy: See :class:`Outbox`.
        comment: Sent when there was nothing else for a while.
    """

    def __init__(self, policy: SessionPolicy, comment: bytes = b": keep-alive\n\n") -> None:
        super().__init__(policy)
        self._comment = comment

    async def serve(self, receive: Receive, send: Send, headers: list[tuple[bytes, bytes]]) -> bool:
        """Send until the stream ends, is cut, or its peer is gone; whether all was sent."""
        watcher = asyncio.ensure_future(self._watch(receive))
        writer = asyncio.ensure_future(self._send_all(send, headers))
        try:
            await asyncio.wait({watcher, writer, self._cut}, return_when=asyncio.FIRST_COMPLETED)
            if self._cut.done() and not writer.done() and not watcher.done():
                await asyncio.wait({writer}, timeout=_LAST_WORDS)
            is_whole = writer.done() and not self.closed
        finally:
            self.cut()
            watcher.cancel()
            writer.cancel()
            results = await asyncio.gather(watcher, writer, return_exceptions=True)
        for result in results:
            # OSError: the server says that the peer is gone, which is how streams end.
            if isinstance(result, Exception) and not isinstance(result, OSError):
                raise result
        return is_whole and results[1] is None

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
