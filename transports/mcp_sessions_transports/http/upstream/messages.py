"""What a session at a URL is told that is no request: one after the other, as it was said.

Who asks something waits for what was said before, and no longer than that may take.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import suppress
from typing import Any, Final

from mcp_sessions.background import Background
from mcp_sessions.server.upstream.port import UpstreamError
from mcp_sessions_transports.http.upstream.wire import CONNECTING, FAILURES, said

logger = logging.getLogger(__name__)

_WAITING: Final = 1_024
"""Messages that wait to be taken. What comes beyond that is left out: its server takes none."""


class Messages:
    """Of one session.

    Args:
        background: Sends them.
        send: Sends one; what it raises, but for ``FAILURES`` and ``UpstreamError``, is its own.
    """

    def __init__(self, background: Background, send: Callable[[bytes], Awaitable[None]]) -> None:
        self._background = background
        self._send = send
        self._turn = asyncio.Lock()
        self._last: asyncio.Task[None] | None = None
        self._waiting = 0
        self._takes = True

    def until_taken(self) -> Coroutine[Any, Any, None] | None:
        """What has to be waited for before a request may follow what was said before it; None:
        nothing, or a server that takes no messages. Raises nothing.
        """
        is_quiet = self._sending is None and not self._turn.locked()
        return None if is_quiet or not self._takes else self._until_taken()

    async def _until_taken(self) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(CONNECTING), self._turn:
                await self._last_is_taken()

    async def _last_is_taken(self) -> None:
        if self._sending is not None:
            await asyncio.wait({self._sending})

    async def add_in_turn(self, message: bytes) -> None:
        """Tell it once all that was said before is taken: no more waits to be sent then than what
        cannot wait, however much is said.
        """
        async with self._turn:
            await self._last_is_taken()
            self.add(message)

    def add(self, message: bytes) -> None:
        """Tell it after all that was said before, if that is taken in time. Never waits."""
        if self._waiting >= _WAITING:
            logger.warning("a message is left out: the server takes none")
            return
        self._waiting += 1
        until = asyncio.get_running_loop().time() + CONNECTING
        task = self._background.run("a message to a URL", self._tell(message, self._sending, until))
        # Also of one that never began.
        task.add_done_callback(self._is_told)
        self._last = task

    @property
    def _sending(self) -> asyncio.Task[None] | None:
        """What sends the last one; None: all were sent."""
        return self._last if self._last is not None and not self._last.done() else None

    def _is_told(self, _: asyncio.Task[None]) -> None:
        self._waiting -= 1

    async def _tell(self, message: bytes, before: asyncio.Task[None] | None, until: float) -> None:
        try:
            async with asyncio.timeout_at(until):
                if before is not None:
                    await asyncio.wait({before})
                await self._send(message)
            self._takes = True
        except TimeoutError:
            self._takes = False
            logger.info("a message was not taken in time")
        except (*FAILURES, UpstreamError) as failed:
            logger.info("a message was not taken: %s", said(failed))
