"""What a server says by itself: on one stream at a time, which is opened again when it ends."""

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
from mcp_sessions.server.upstream.external.child import Forgotten
from mcp_sessions.server.upstream.external.reopening import LEAST, LONGEST, Reopening
from mcp_sessions.server.upstream.port import UpstreamError

logger = logging.getLogger(__name__)

_STREAM: Final = 1.0
"""Seconds that are waited for it. Not all servers say at once that they will tell."""


class Heard(Protocol):
    """Who has a stream opened."""

    async def begun(self, *, goes_on: bool) -> None:
        """It is there.

        Args:
            goes_on: Where it ended before: nothing was missed.
        """
        ...

    def progressed(self) -> None:
        """It said something."""
        ...


Hear = Callable[[Heard], Awaitable[float | None]]
"""Opens a stream of all that is wanted now, and hears it until it ends or breaks off; the seconds
before it may be opened again, if the server says.

Raises:
    Forgotten: There is no such session any more.
    UpstreamError: It is refused.
"""


class Listening:
    """Of one child.

    Args:
        background: Runs it, and ends it.
        label: Whose that is, for the log.
        retry: Seconds before the first time that it is opened again.
        missed: What was said meanwhile is not known.
    """

    def __init__(
        self,
        background: Background,
        label: Callable[[], str],
        retry: float,
        missed: Callable[[], Awaitable[None]],
    ) -> None:
        self._background = background
        self._label = label
        self._retry = retry
        self._missed = missed
        self._task: asyncio.Task[None] | None = None
        self._stream: _Stream | None = None

    def answered(self) -> None:
        """It answers what it is asked: what was not heard since it could not be reached may be."""
        if self._stream is not None:
            self._stream.sooner()

    async def begin_anew(self, hear: Hear) -> None:
        """Hear it; the stream on which it was heard so far ends afterwards."""
        again = Reopening(self._retry)
        stream = _Stream(hear, self._missed, again, self._label, self._retry, self._task)
        self._stream = stream
        self._task = self._background.run("what a server says by itself", stream.run())
        # Else what changes meanwhile would be told to nobody.
        await asyncio.wait({stream.tried}, timeout=_STREAM)


@dataclass(eq=False)
class _Stream:
    """One that is heard, until it is closed or never can be."""

    _hear: Hear
    _missed: Callable[[], Awaitable[None]]
    _reopening: Reopening
    _label: Callable[[], str]
    _retry: float
    _before: asyncio.Task[None] | None
    """On which it was heard so far."""

    def __post_init__(self) -> None:
        self.tried: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._has_gap = False
        self._is_needed = False
        """It was heard before: who refuses it now is asked again."""

        self._was_begun = False
        """When it was opened last."""

        self._answers = asyncio.Event()
        """Set when its server answered something else since it was opened last."""

        self._sooner = Backoff(base=self._retry, cap=LONGEST)
        """How long is waited after that."""

    async def run(self) -> None:
        """Hear it."""
        try:
            while True:
                self._reopening.opened()
                self._was_begun = False
                self._answers.clear()
                try:
                    retry = await self._hear(self)
                except Forgotten:
                    return
                except UpstreamError as refused:
                    if await self._made_room():
                        continue
                    if not self._is_needed:
                        # It has no such stream.
                        return
                    logger.warning(
                        "%s: it does not tell of changes now: %s", self._label(), refused
                    )
                    retry = None
                self._has_gap = True
                self._set_tried()
                delay = self._reopening.delay(retry)
                # Who was heard may say when it can be again.
                await (asyncio.sleep(delay) if self._was_begun else self._pause(delay))
        finally:
            self._set_tried()
            if self._before is not None:
                self._before.cancel()

    async def begun(self, *, goes_on: bool) -> None:
        """See :class:`Heard`."""
        if self._before is not None:
            self._before.cancel()
            self._before = None
        has_gap, self._has_gap = self._has_gap and not goes_on, False
        self._is_needed = self._was_begun = True
        self._sooner.progressed()
        self._set_tried()
        if has_gap:
            await self._missed()

    def progressed(self) -> None:
        """See :class:`Heard`."""
        self._reopening.progressed()

    def sooner(self) -> None:
        """Open it again soon, if it is not open."""
        self._answers.set()

    async def _pause(self, seconds: float) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._answers.wait()
                # Later and later: there may be nothing to hear, whatever else it answers.
                await asyncio.sleep(LEAST + self._sooner.failed(random.random()))

    async def _made_room(self) -> bool:
        """End the stream before, if there is one: some servers allow no second one beside it."""
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
