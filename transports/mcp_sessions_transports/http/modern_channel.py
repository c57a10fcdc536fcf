"""The way back for one modern-era POST: as the SDK's own entry answers, to the byte.

A JSON body if the request is done before anything was sent for it, else a stream. The
stream is not resumable; what must survive it has a request key.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

from starlette.types import Receive

from mcp_sessions.background import stopped
from mcp_sessions.errors import StoreUnavailable
from mcp_sessions.policy import SessionPolicy
from mcp_sessions.server.connection.connection import WatchedChannel, unwatched
from mcp_sessions_transports.credentials import FRESH, no_stream
from mcp_sessions_transports.http.io import TOO_MANY, HttpCall, retry_header, send_json
from mcp_sessions_transports.http.sse import KEEP_ALIVE, SseStream

MODERN_SSE_HEADERS: list[tuple[bytes, bytes]] = [
    (b"content-type", b"text/event-stream"),
    (b"cache-control", b"no-cache, no-transform"),
    (b"connection", b"keep-alive"),
    (b"x-accel-buffering", b"no"),
]

PING = b": ping\r\n\r\n"

_WATCH_AFTER = 0.02
"""Seconds that a request may take before somebody watches whether its client is still
there: most are done by then, and need no task for it."""


def modern_event(payload: bytes) -> bytes:
    return b"event: message\r\ndata: " + payload + b"\r\n\r\n"


@dataclass(eq=False, repr=False)
class ModernChannel(WatchedChannel):
    """A :class:`~mcp_sessions.server.connection.binding.RequestChannel` over one modern POST.

    Args:
        status_of: The HTTP status of an answer with that error code.
        encode: Writes a message as the SDK's own entry does.
    """

    cancels = is_admitted = True

    _policy: SessionPolicy
    _loop: asyncio.AbstractEventLoop
    _status_of: Callable[[int], int]
    encode: Callable[[Any], bytes]
    is_open: bool = field(init=False, default=True)
    close_stream: Callable[[], Awaitable[None]] | None = field(init=False, default=None)
    _answer: tuple[int, bytes] | None = field(init=False, default=None)
    _away: StoreUnavailable | None = field(init=False, default=None)
    _retry_after: float | None = field(init=False, default=None)
    _stream: SseStream | None = field(init=False, default=None)
    _is_late: bool = field(init=False, default=False)
    """Its credential was checked a while ago."""

    def __post_init__(self) -> None:
        self._turn: asyncio.Future[None] = self._loop.create_future()

    async def emit(self, message: bytes, key: str | None = None) -> None:
        stream = self._commit()
        stream.push(modern_event(message))
        await stream.drain()

    async def answer(
        self,
        message: bytes,
        *,
        code: int | None = None,
        away: StoreUnavailable | None = None,
        retry_after: float | None = None,
    ) -> None:
        if self._stream is not None:
            self._stream.push(modern_event(message))
            self._stream.finish()
            return
        self._away, self._retry_after = away, retry_after
        status = 200 if code is None else self._status_of(code)
        self._answer = (status if retry_after is None else TOO_MANY, message)
        self._decided()

    async def respond(self, call: HttpCall) -> None:
        """Send the response: called once, by the task that took the POST.

        Raises:
            StoreUnavailable: The request cannot be served. Nothing was sent.
        """
        try:
            await self._wait(call.receive)
            if self._answer is not None:
                status, body = self._answer
                self.is_open = False
                self.on_closed = self.on_reopened = unwatched
                if self._away is not None:
                    raise self._away
                headers = retry_header(self._retry_after)
                if not self._is_late:
                    await send_json(call.send, body, status=status, headers=headers)
                else:
                    # SEC4: the credential may have ended while the request ran.
                    async with call.watch(no_stream) as watched:
                        send = watched.guarding(call.send)
                        await send_json(send, body, status=status, headers=headers)
            elif self._stream is not None:
                async with call.watch(self._stream.cut) as watched:
                    send = watched.guarding(call.send)
                    await self._stream.serve(call.receive, send, MODERN_SSE_HEADERS)
        finally:
            if self.is_open:
                self._close()
            if self.follows is not None:
                self.run_after_answer()

    async def _wait(self, receive: Receive) -> None:
        if self._answer is None:
            # One that waits for nothing is done in this turn of the loop, and needs no timer.
            await asyncio.sleep(0)
        if self._turn.done():
            return
        timer = self._loop.call_later(_WATCH_AFTER, self._decided)
        await self._turn
        timer.cancel()
        if self._answer is not None or self._stream is not None:
            return
        self._turn = self._loop.create_future()
        began = self._loop.time()
        watcher = self._loop.create_task(_gone(receive))
        timer = self._loop.call_later(KEEP_ALIVE - _WATCH_AFTER, self._silent)
        try:
            await asyncio.wait({watcher, self._turn}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            timer.cancel()
            await stopped(watcher)
        self._is_late = self._loop.time() - began >= FRESH - _WATCH_AFTER

    def _silent(self) -> None:
        # So long without a word that a proxy might close: stream, and say that we live.
        self._commit().push(PING)

    def _commit(self) -> SseStream:
        if self._stream is None:
            self._stream = SseStream(self._policy, PING)
            if not self.is_open:
                self._stream.cut()
            self._decided()
        return self._stream

    def _decided(self) -> None:
        if not self._turn.done():
            self._turn.set_result(None)

    def _close(self) -> None:
        if self._stream is not None:
            self._stream.cut()
        self.is_open = False
        self.on_closed()
        self.on_closed = self.on_reopened = unwatched


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        continue
