"""Read the messages that a server sends by itself, on one stream at a time that is opened again."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Final

from mcp_sessions.background import Background
from mcp_sessions.core.backoff import Backoff
from mcp_sessions.http_client.exchange import LEAST, LONGEST, Reopening
from mcp_sessions.server.upstream.external.child_requests import Forgotten
from mcp_sessions.server.upstream.port import UpstreamError

logger = logging.getLogger(__name__)

_RETRY: Final = 1.0
"""Seconds before a stream is opened again, if the server names none."""

_STREAM: Final = 1.0
"""Seconds that a caller waits for the stream. Some servers do not confirm it at once."""


ReadStream = Callable[["ServerStream"], Awaitable[float | None]]
"""Function that opens a stream for all wanted changes, and reads it until it ends. It returns the
seconds before the stream may be opened again, if the server names them. It says to the object when
the stream is open, and when something new came.

Raises:
    Forgotten: The session has ended.
    UpstreamError: The stream is refused.
"""


@dataclass(eq=False)
class ServerStream:
    """Read the messages that a server sends by itself, on a stream that is opened again."""

    _read_stream: ReadStream
    _missed: Callable[[], Awaitable[None]]
    """Called after a gap."""

    _label: Callable[[], str]
    _before: asyncio.Task[None] | None = None
    """The task of the stream before it, which ends once this one is open."""

    def __post_init__(self) -> None:
        self.task: asyncio.Task[None] | None = None
        self._reopening = Reopening(_RETRY)
        self._tried = asyncio.Event()
        self._has_gap = False
        self._is_needed = False
        """Whether it was open before: after a refusal it is then tried again."""

        self.is_open = False
        """Whether the last try opened it."""

        self._answers = asyncio.Event()
        """Set once the server answered another request since the stream was last opened."""

        self._sooner = Backoff(base=_RETRY, cap=LONGEST)
        """Delay after such an answer."""

    async def begin(self, background: Background) -> None:
        self.task = background.run("the stream for changes of a server", self._run())
        # Otherwise changes until then would reach no client.
        with suppress(TimeoutError):
            async with asyncio.timeout(_STREAM):
                await self._tried.wait()

    def answered(self) -> None:
        """Note that the server answers requests, so that a broken stream may work again."""
        self._answers.set()

    async def _run(self) -> None:
        try:
            while True:
                self._reopening.opened()
                self.is_open = False
                self._answers.clear()
                try:
                    retry = await self._read_stream(self)
                except Forgotten:
                    return
                except UpstreamError as refused:
                    if await self._made_room():
                        continue
                    if not self._is_needed:
                        # The server has no such stream.
                        return
                    logger.warning("%s: it sends no changes for now: %s", self._label(), refused)
                    retry = None
                self._has_gap = True
                self._tried.set()
                delay = self._reopening.delay(retry)
                # A server whose stream was open may name the time of the next try.
                await (asyncio.sleep(delay) if self.is_open else self._pause(delay))
        finally:
            self._tried.set()
            if self._before is not None:
                self._before.cancel()

    async def begun(self, *, continues: bool) -> None:
        """Note that the stream is open.

        Args:
            continues: Whether it continues where it ended before, without a gap.
        """
        if self._before is not None:
            self._before.cancel()
            self._before = None
        has_gap, self._has_gap = self._has_gap and not continues, False
        self._is_needed = self.is_open = True
        self._sooner.progressed()
        self._tried.set()
        if has_gap:
            await self._missed()

    def progressed(self) -> None:
        self._reopening.progressed()

    async def _pause(self, seconds: float) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._answers.wait()
                # The delay grows: the server may have no stream, even if it answers other requests.
                await asyncio.sleep(LEAST + self._sooner.failed(random.random()))

    async def _made_room(self) -> bool:
        """End the stream before, if there is one: some servers allow only one at a time."""
        before, self._before = self._before, None
        if before is None or before.done():
            return False
        before.cancel()
        await asyncio.wait({before})
        self._is_needed = self._has_gap = True
        return True
