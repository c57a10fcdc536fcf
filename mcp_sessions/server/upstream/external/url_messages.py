"""Send notifications and answers to a session at a URL, one after the other, in order.

A request waits for its clients' earlier messages, for a bounded time. The layer's own messages (a
cancellation, the refusal of a question) wait for nothing, and nothing waits for them.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import suppress
from typing import Any, Final

from mcp_sessions.background import Background
from mcp_sessions.server.upstream.external.url_wire import CONNECTING, FAILURES, said
from mcp_sessions.server.upstream.port import UpstreamError

logger = logging.getLogger(__name__)

_WAITING: Final = 1_024
"""Messages of the layer's that wait to be taken. What comes beyond that is left out: its server
takes none.
"""


class Messages:
    def __init__(self, background: Background, send: Callable[[bytes], Awaitable[None]]) -> None:
        self._background = background
        self._send = send
        self._turn = asyncio.Lock()
        self._ours: asyncio.Task[None] | None = None
        self._theirs: asyncio.Task[None] | None = None
        self._waiting = 0
        self._left_out = 0
        self._takes = True

    # --- what its clients say ----------------------------------------------------------------

    def until_taken(self) -> Coroutine[Any, Any, None] | None:
        """Return the wait for the messages before a request; None: there are none to wait for.

        There are also none if the server takes no messages. The wait raises nothing.
        """
        is_quiet = (self._theirs is None or self._theirs.done()) and not self._turn.locked()
        return None if is_quiet or not self._takes else self._until_taken()

    async def _until_taken(self) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(CONNECTING), self._turn:
                await _done(self._theirs)

    async def add_in_turn(self, message: bytes) -> None:
        """Add a message, once the server took all earlier ones."""
        async with self._turn:
            await _done(self._theirs)
            self._theirs = self._run(message, None)

    # --- what the layer says by itself -------------------------------------------------------

    def add(self, message: bytes) -> None:
        """Add a message without waiting. It is dropped if too many messages wait already."""
        if self._waiting >= _WAITING:
            self._left_out += 1
            return
        self._waiting += 1
        self._ours = self._run(message, self._ours)
        # Also of one that never began.
        self._ours.add_done_callback(self._answered)

    def _answered(self, _: asyncio.Task[None]) -> None:
        self._waiting -= 1
        if not self._waiting and self._left_out:
            logger.warning(
                "%d messages were dropped: the server at a URL accepts none", self._left_out
            )
            self._left_out = 0

    # --- how it is sent ----------------------------------------------------------------------

    def _run(self, message: bytes, before: asyncio.Task[None] | None) -> asyncio.Task[None]:
        until = asyncio.get_running_loop().time() + CONNECTING
        return self._background.run("a message to a URL", self._deliver(message, before, until))

    async def _deliver(
        self, message: bytes, before: asyncio.Task[None] | None, until: float
    ) -> None:
        try:
            async with asyncio.timeout_at(until):
                await _done(before)
                await self._send(message)
            self._takes = True
        except TimeoutError:
            self._takes = False
            logger.info("the server at a URL did not accept a message in time")
        except (*FAILURES, UpstreamError) as failed:
            logger.info("the server at a URL did not accept a message: %s", said(failed))


async def _done(task: asyncio.Task[None] | None) -> None:
    if task is not None and not task.done():
        await asyncio.wait({task})
