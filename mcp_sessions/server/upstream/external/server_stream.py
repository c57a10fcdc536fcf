"""Read the messages that a server sends by itself, on one stream at a time that is opened again."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Final, Protocol

from mcp_sessions.background import Background
from mcp_sessions.core.backoff import Backoff
from mcp_sessions.server.upstream.external.child_requests import Forgotten
from mcp_sessions.server.upstream.external.reopening import LEAST, LONGEST, Reopening
from mcp_sessions.server.upstream.port import UpstreamError

logger = logging.getLogger(__name__)

_STREAM: Final = 1.0
"""Seconds that a caller waits for the stream. Some servers do not confirm it at once."""


class StreamReceiver(Protocol):
    async def begun(self, *, continues: bool) -> None:
        """Note that the stream is open.

        Args:
            continues: Whether it continues where it ended before, without a gap.
        """
        ...

    def progressed(self) -> None: ...


ReadStream = Callable[[StreamReceiver], Awaitable[float | None]]
"""Function that opens a stream for all wanted changes, and reads it until it ends. It returns the
seconds before the stream may be opened again, if the server names them.

Raises:
    Forgotten: The session has ended.
    UpstreamError: The stream is refused.
"""


class ServerStream:
    def __init__(
        self,
        background: Background,
        label: Callable[[], str],
        retry: float,
        *,
        missed: Callable[[], Awaitable[None]],
    ) -> None:
        self._background = background
        self._label = label
        self._retry = retry
        self._missed = missed
        self._task: asyncio.Task[None] | None = None
        self._stream: _Stream | None = None

    def answered(self) -> None:
        """Note that the server answers requests, so that a broken stream may work again."""
        if self._stream is not None:
            self._stream.sooner()

    async def begin_anew(self, read_stream: ReadStream) -> None:
        again = Reopening(self._retry)
        stream = _Stream(read_stream, self._missed, again, self._label, self._retry, self._task)
        self._stream = stream
        self._task = self._background.run("the stream for changes of a server", stream.run())
        # Otherwise changes until then would reach no client.
        await asyncio.wait({stream.tried}, timeout=_STREAM)


@dataclass(eq=False)
class _Stream:
    _read_stream: ReadStream
    _missed: Callable[[], Awaitable[None]]
    _reopening: Reopening
    _label: Callable[[], str]
    _retry: float
    _before: asyncio.Task[None] | None
    """Task of the stream before it."""

    def __post_init__(self) -> None:
        self.tried: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._has_gap = False
        self._is_needed = False
        """Whether it was open before: after a refusal it is then tried again."""

        self._was_begun = False
        """Whether the last try opened it."""

        self._answers = asyncio.Event()
        """Set once the server answered another request since the stream was last opened."""

        self._sooner = Backoff(base=self._retry, cap=LONGEST)
        """Delay after such an answer."""

    async def run(self) -> None:
        try:
            while True:
                self._reopening.opened()
                self._was_begun = False
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
                self._set_tried()
                delay = self._reopening.delay(retry)
                # A server whose stream was open may name the time of the next try.
                await (asyncio.sleep(delay) if self._was_begun else self._pause(delay))
        finally:
            self._set_tried()
            if self._before is not None:
                self._before.cancel()

    async def begun(self, *, continues: bool) -> None:
        if self._before is not None:
            self._before.cancel()
            self._before = None
        has_gap, self._has_gap = self._has_gap and not continues, False
        self._is_needed = self._was_begun = True
        self._sooner.progressed()
        self._set_tried()
        if has_gap:
            await self._missed()

    def progressed(self) -> None:
        self._reopening.progressed()

    def sooner(self) -> None:
        self._answers.set()

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

    def _set_tried(self) -> None:
        if not self.tried.done():
            self.tried.set_result(None)
