"""Send one request over Streamable HTTP, and read its responses: the first, and after a break the
next ones.

1. No request is sent twice. A response that breaks off is fetched from the point of the break, if
   its events have ids.
2. After the answer, on whichever stream, the response is not read much longer.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack, aclosing, suppress
from dataclasses import dataclass, field
from typing import Any, Final, TypeVar

import httpx2

from mcp_sessions.background import TimeSlice, give_way
from mcp_sessions.core.backoff import Backoff
from mcp_sessions.core.messages import Answer, Malformed, decode, parse
from mcp_sessions.http_client.body import pieces, whole
from mcp_sessions.http_client.connect_errors import reason_of
from mcp_sessions.http_client.session import is_sse
from mcp_sessions.http_client.sse_reader import Position, ReadEvent, SseReader

LEAST: Final = 0.1
"""Seconds, whatever the server says: zero would be a loop."""

LONGEST: Final = 30.0
"""Seconds, at most."""

_LASTED: Final = 5.0
"""Seconds after which a stream without messages was no failure either."""


class Reopening:
    """Time the next try of one stream. If it brought a message or lasted, the server's delay
    counts. If it ends at once, each delay is longer.

    Args:
        base: Seconds before the first time, at the most, if the server does not say.
    """

    def __init__(self, base: float) -> None:
        self._backoff = Backoff(base=base, cap=LONGEST)
        self._opened_at = 0.0

    def opened(self) -> None:
        self._opened_at = asyncio.get_running_loop().time()

    def progressed(self) -> None:
        self._backoff.progressed()

    def delay(self, retry: float | None) -> float:
        """Return the seconds before an ended stream is opened again.

        Args:
            retry: Seconds that the server named. None: it named none.
        """
        if asyncio.get_running_loop().time() - self._opened_at >= _LASTED:
            self._backoff.progressed()
        is_first = not self._backoff.failures
        later = self._backoff.failed(random.random())
        if retry is None:
            return later
        wanted = min(max(retry, LEAST), LONGEST)
        return wanted if is_first else max(wanted, later)


logger = logging.getLogger(__name__)

FAILURES: Final = (httpx2.HTTPError, httpx2.StreamError, OSError)
"""Exceptions of a failed exchange."""

RETRY: Final = 1.0
"""Seconds before a stream is opened again, at the most, if the server does not say."""

_BODY_LOOKED_AT: Final = 65_536
"""Bytes of a refusal."""

_REFUSAL: Final = 10.0
"""Seconds in which what a refusal says is read."""

_LINES: Final = 256
"""Lines that are read at once; more are read in portions."""

_PORTION: Final = 4_096
"""Bytes."""

_T = TypeVar("_T")


Opens = Callable[[str | None], AbstractAsyncContextManager[httpx2.Response]]
"""Opens a response that is a success: the first one, or what follows after the event of that id."""


class _Left(Exception):
    """The request has its answer, and its time for more messages has passed."""


@dataclass(slots=True, eq=False, kw_only=True)
class Exchange:
    opens: Opens
    refusal: type[Exception]
    """Raised by ``opens``: the server refuses, and would refuse again."""

    begun: Callable[[httpx2.Response], Awaitable[object]]
    """Takes the response, before it is read. It raises: the response is not read."""

    on_event: Callable[[ReadEvent], Awaitable[object]]
    """Takes an event of a response."""

    take: Callable[[bytes], Awaitable[object]]
    """Takes a response that is one message."""

    longest: int
    """Bytes of a message."""

    attempts: int
    """How often in a row a response is fetched on without anything new in it."""

    after: float = 0.0
    """Seconds in which a response may end by itself after its answer, so that its connection serves
    the next request."""

    ended: Callable[[], Awaitable[object]] | None = None
    """Called when the first response ended before its answer, and is fetched on."""

    is_open: bool = field(init=False, default=False)
    """Whether there was a response."""

    is_answered: bool = field(init=False, default=False)
    _position: Position = field(init=False, default_factory=Position)
    _reopening: Reopening = field(init=False, default_factory=lambda: Reopening(RETRY))
    _left: int = field(init=False, default=0)
    """How often it may be fetched on, unless there is something new in it."""

    _left_at: float | None = field(init=False, default=None)
    _limit: asyncio.Timeout | None = field(init=False, default=None)

    async def run(self) -> None:
        """Send the request, and take what its responses bring.

        Raises:
            httpx2.HTTPError: It broke off, and cannot be fetched on.
            ResponseTooLarge, EventTooLarge: Its answer is too large.
        """
        self._left = self.attempts
        broken: Exception | None = None
        try:
            async with AsyncExitStack() as stack:
                response = await self._in_time(stack.enter_async_context(self.opens(None)))
                await self._in_time(self.begun(response))
                self.is_open = True
                if not is_sse(response):
                    body = await self._in_time(whole(pieces_of(response), limit=self.longest))
                    await self.take(body)
                    return
                try:
                    await self._read(response)
                    if self._is_to_be_fetched_on and self.ended is not None:
                        await self.ended()
                except FAILURES as failed:
                    broken = failed
                    logger.debug("a response broke off: %s", reason_of(failed))
            broken = await self._fetch_on() or broken
        except _Left:
            logger.debug("a response is left, which does not end after its answer")
        if broken is not None and not self.is_answered:
            raise broken

    @property
    def _is_to_be_fetched_on(self) -> bool:
        return self._position.id is not None and not self.is_answered and self._left > 0

    async def _read(self, response: httpx2.Response) -> None:
        async with aclosing(events_of(response, self.longest)) as events:
            while (event := await self._in_time(anext(events, None))) is not None:
                self._position.note(event)
                self._left = self.attempts
                if event.data:
                    self._reopening.progressed()
                await self.on_event(event)
                if self.is_answered and not self.after:
                    return

    async def _fetch_on(self) -> Exception | None:
        """Fetch what follows. Return how that broke off, at last."""
        broken: Exception | None = None
        while self._is_to_be_fetched_on:
            self._left -= 1
            await self._in_time(asyncio.sleep(self._reopening.delay(self._position.retry)))
            if self.is_answered:
                # On another stream.
                return broken
            self._reopening.opened()
            try:
                async with AsyncExitStack() as stack:
                    opened = self.opens(self._position.id)
                    response = await self._in_time(stack.enter_async_context(opened))
                    if not is_sse(response):
                        return broken
                    await self._read(response)
            except self.refusal:
                # Nobody knows of it any more. Whether of the session, what is asked next knows.
                return broken
            except FAILURES as failed:
                broken = failed
                logger.debug("a response broke off again: %s", reason_of(failed))
        return broken

    # --- what was answered is left -------------------------------------------------------------

    def answered(self, _: object = None) -> None:
        self.is_answered = True
        self._left_at = asyncio.get_running_loop().time() + self.after
        if self._limit is not None:
            self._limit.reschedule(self._left_at)

    async def _in_time(self, work: Awaitable[_T]) -> _T:
        """Await ``work`` at the server, within the time limit.

        Messages that arrived are taken without this: they are not lost.

        Raises:
            _Left: It takes too long after the answer.
        """
        try:
            async with asyncio.timeout_at(self._left_at) as self._limit:
                return await work
        except TimeoutError:
            if self._limit is not None and self._limit.expired():
                raise _Left from None
            raise
        finally:
            self._limit = None


async def pieces_of(response: httpx2.Response) -> AsyncGenerator[bytes]:
    """The body of a response, see :func:`pieces`. However much comes at once, others have their
    turns meanwhile.
    """
    time_slice = TimeSlice()
    async with aclosing(pieces(response)) as found:
        async for piece in found:
            yield piece
            if time_slice.has_ended():
                await give_way()


async def events_of(response: httpx2.Response, longest: int) -> AsyncGenerator[ReadEvent]:
    reader, time_slice = SseReader(max_bytes=longest), TimeSlice()
    async with aclosing(pieces_of(response)) as chunks:
        async for chunk in chunks:
            size = len(chunk) if chunk.count(b"\n") < _LINES else _PORTION
            for begin in range(0, len(chunk), size):
                for event in reader.feed(chunk[begin : begin + size]):
                    yield event
                    if time_slice.has_ended():
                        await give_way()
                if time_slice.has_ended():
                    await give_way()


async def refused_with(response: httpx2.Response) -> Answer | None:
    """The JSON-RPC answer in a refusal; None: there is none."""
    body = b""
    with suppress(TimeoutError):
        async with asyncio.timeout(_REFUSAL), aclosing(pieces_of(response)) as found:
            async for piece in found:
                body += piece
                if len(body) > _BODY_LOOKED_AT:
                    break
    with suppress(ValueError, Malformed):
        value: Any = decode(body)
        answer = parse(value)
        return answer if isinstance(answer, Answer) else None
    return None
