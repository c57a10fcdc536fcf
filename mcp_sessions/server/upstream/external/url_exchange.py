"""Send one request to a URL and read its responses: the first, and after a break the next ones.

1. No request is sent twice. A response that breaks off is fetched from the point of the break, if
   its events have ids. Otherwise the outcome of its request is unknown, and the answer says so.
2. After the answer, on whichever stream, the response is not read much longer.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager, AsyncExitStack, aclosing
from dataclasses import dataclass, field
from typing import Final, Protocol, TypeVar

import httpx2

from mcp_sessions.http_client.body import whole
from mcp_sessions.http_client.connect_errors import reason_of
from mcp_sessions.http_client.redirects import is_sse
from mcp_sessions.http_client.sse_reader import ReadEvent, position
from mcp_sessions.server.upstream.external.child_requests import Waiting
from mcp_sessions.server.upstream.external.reopening import Reopening
from mcp_sessions.server.upstream.external.url_wire import (
    FAILURES,
    RETRY,
    events_of,
    pieces_of,
    unknown,
)
from mcp_sessions.server.upstream.port import UpstreamError

logger = logging.getLogger(__name__)

_T = TypeVar("_T")

_REOPENED: Final = 5
"""How often in a row a response is fetched on without anything new in it."""

_AFTER: Final = 5.0
"""Seconds in which a response may end by itself after its answer, so that its connection serves
the next request."""


class Opens(Protocol):
    def __call__(
        self,
        method: str,
        content: bytes | None = None,
        *,
        last_event_id: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> AbstractAsyncContextManager[httpx2.Response]: ...


class _Left(Exception):
    """The request has its answer, and its time for more messages has passed."""


@dataclass(frozen=True, slots=True, eq=False)
class UrlSession:
    opens: Opens
    check: Callable[[httpx2.Response], Awaitable[None]]

    begun: Callable[[httpx2.Response], None]
    """Takes a response that is a success."""

    on_event: Callable[[ReadEvent, Waiting], Awaitable[None]]
    """Takes an event of a response."""

    take: Callable[[bytes, Waiting], Awaitable[None]]
    """Takes a response that is one message."""

    longest: int
    """Bytes of a message."""


@dataclass(slots=True, eq=False)
class UrlExchange:
    _session: UrlSession
    _waiting: Waiting
    _last_id: str | None = None
    """How far its response was read."""

    _retry: float | None = None
    _reopening: Reopening = field(default_factory=lambda: Reopening(RETRY))
    _attempts: int = 0
    """How often it was fetched on since there was something new in it."""

    _left_at: float | None = None
    _limit: asyncio.Timeout | None = None

    def __post_init__(self) -> None:
        self._waiting.future.add_done_callback(self._was_answered)

    async def run(self, content: bytes, headers: Mapping[str, str] | None) -> UpstreamError:
        """Send the request, and take what its responses bring; its error, should that be no answer.

        Raises:
            Forgotten, UpstreamError: It did not run.
            httpx2.HTTPError: It may have.
            BodyTooLarge, EventTooLarge: Its answer is too large.
        """
        try:
            async with AsyncExitStack() as stack:
                opened = self._session.opens("POST", content, headers=headers)
                response = await self._in_time(stack.enter_async_context(opened))
                await self._in_time(self._session.check(response))
                self._session.begun(response)
                if not is_sse(response):
                    if "json" in response.headers.get("content-type", ""):
                        body = await self._in_time(
                            whole(pieces_of(response), limit=self._session.longest)
                        )
                        await self._session.take(body, self._waiting)
                    return unknown("what it answered is no answer")
                try:
                    await self._read(response)
                    if self._is_to_be_fetched_on:
                        await self._release()
                except FAILURES as broken:
                    if self._last_id is None:
                        raise
                    logger.debug("a response broke off: %s", reason_of(broken))
            await self._fetch_on()
        except _Left:
            logger.debug("a response is left, which does not end after its answer")
        return unknown("its response ended without an answer")

    @property
    def _is_to_be_fetched_on(self) -> bool:
        return self._last_id is not None and not self._waiting.future.done()

    async def _read(self, response: httpx2.Response) -> None:
        async with aclosing(events_of(response, self._session.longest)) as events:
            while (event := await self._in_time(anext(events, None))) is not None:
                self._last_id = position(event, self._last_id)
                self._attempts = 0
                if event.retry is not None:
                    self._retry = event.retry / 1000
                if event.data:
                    self._reopening.progressed()
                await self._session.on_event(event, self._waiting)

    async def _fetch_on(self) -> None:
        self._attempts = 0
        while self._attempts < _REOPENED and self._is_to_be_fetched_on:
            self._attempts += 1
            await self._in_time(asyncio.sleep(self._reopening.delay(self._retry)))
            self._reopening.opened()
            try:
                async with AsyncExitStack() as stack:
                    opened = self._session.opens("GET", last_event_id=self._last_id)
                    response = await self._in_time(stack.enter_async_context(opened))
                    await self._in_time(self._session.check(response))
                    if not is_sse(response):
                        return
                    await self._read(response)
            except UpstreamError:
                # Nobody knows of it any more. Whether of the session, what is asked next knows.
                return
            except FAILURES as broken:
                logger.debug("a response broke off again: %s", reason_of(broken))

    async def _release(self) -> None:
        """End the response, since the server ended its own. The client comes back for the rest."""
        response = self._waiting.call.response if self._waiting.call is not None else None
        if response is not None and response.close_stream is not None:
            await response.close_stream()

    # --- what was answered is left -------------------------------------------------------------

    def _was_answered(self, _: object) -> None:
        self._left_at = asyncio.get_running_loop().time() + _AFTER
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
