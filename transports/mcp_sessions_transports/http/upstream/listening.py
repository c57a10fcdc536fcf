"""What a server says by itself: on a stream of the session, or where it was asked to tell."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager, aclosing
from dataclasses import dataclass
from typing import Final

import httpx2

from mcp_sessions.background import Background
from mcp_sessions.core.backoff import Backoff
from mcp_sessions.server.upstream.external.child import Forgotten
from mcp_sessions.server.upstream.port import UpstreamError
from mcp_sessions_transports.connect_errors import reason_of
from mcp_sessions_transports.http.client.failures import is_sse
from mcp_sessions_transports.http.client.incoming import position
from mcp_sessions_transports.http.client.sse_reader import EventTooLarge, ReadEvent
from mcp_sessions_transports.http.upstream.wire import FAILURES, RETRY, events_of

logger = logging.getLogger(__name__)

_STREAM: Final = 1.0
"""Seconds that are waited for it. Not all servers say at once that they will tell."""


@dataclass(slots=True, eq=False, repr=False)
class Listening:
    """Of one child.

    Args:
        background: Runs it, and ends it.
        open_: Opens it, after the event of that id.
        check: See :meth:`Wire.check`.
        hear: Takes an event.
        missed: What was said meanwhile is not known.
        forget: There is no such session any more.
        longest: Bytes of an event.
    """

    _background: Background
    _open: Callable[[str | None], AbstractAsyncContextManager[httpx2.Response]]
    _check: Callable[[httpx2.Response], Awaitable[None]]
    _hear: Callable[[ReadEvent], Awaitable[None]]
    _missed: Callable[[], Awaitable[None]]
    _forget: Callable[[], None]
    _longest: int
    _task: asyncio.Task[None] | None = None

    async def begin_anew(self) -> None:
        """Hear it; the stream on which it was heard so far ends afterwards."""
        before = self._task
        heard: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        task = self._background.run("what a URL says by itself", self._run(heard))
        # Else what changes meanwhile would be told to nobody.
        await asyncio.wait({heard}, timeout=_STREAM)
        if heard.done() and not heard.result():
            return
        self._task = task
        if before is not None:
            before.cancel()

    async def _run(self, heard: asyncio.Future[bool]) -> None:
        """Hear it until it is closed, or never can be.

        Args:
            heard: Whether it is heard.
        """
        backoff = Backoff(base=RETRY, cap=30)
        last_id: str | None = None
        while True:
            retry: float | None = None
            try:
                async with self._open(last_id) as response:
                    await self._check(response)
                    if not is_sse(response):
                        return
                    if heard.done() and last_id is None:
                        await self._missed()
                    if not heard.done():
                        heard.set_result(True)
                    async with aclosing(events_of(response, self._longest)) as events:
                        async for event in events:
                            backoff.progressed()
                            last_id = position(event, last_id)
                            retry = event.retry / 1000 if event.retry is not None else retry
                            await self._hear(event)
            except Forgotten:
                self._forget()
                return
            except UpstreamError:
                # It has no such stream.
                return
            except (*FAILURES, EventTooLarge) as broken:
                logger.debug("the stream of a session broke off: %s", reason_of(broken))
            finally:
                if not heard.done():
                    heard.set_result(False)
            wait = backoff.failed(random.random())
            await asyncio.sleep(wait if retry is None else min(retry, 30.0))
