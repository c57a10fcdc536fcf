"""What waits for one peer: a bounded buffer, and the loop that empties it.

Rules that must hold:

1. Whoever pushes never waits. A full buffer is answered by :attr:`Outbox.full`; what did not
   fit waits in its log, not here.
2. A peer that takes nothing for ``slow_timeout`` seconds while the buffer is full is cut,
   whether somebody waits for room or nobody does. Nothing else waits for it.
3. One that is owed answers, which wait nowhere else, has a bound of its own for all that waits,
   and is cut when it is reached.
4. Whoever waits for room waits for ``slow_timeout`` at the most.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import Awaitable, Callable

from mcp_sessions import metrics
from mcp_sessions.ids import SessionId

logger = logging.getLogger(__name__)

_AT_ONCE = 262_144
"""Bytes that are handed to the network in one step, or one chunk if that is larger."""

Write = Callable[[list[bytes]], Awaitable[None]]
Refill = Callable[[], Awaitable[bool]]
"""Pushes more; False: there is no more for now."""


class Outbox:
    """The way out to one peer.

    Args:
        limit: Bytes that wait for the peer; see ``SessionPolicy.send_buffer``.
        slow_timeout: Seconds; see ``SessionPolicy.slow_timeout``.
        most: Bytes above which the peer is cut at once; None: who pushes stops at ``limit``.
    """

    def __init__(self, *, limit: int, slow_timeout: float, most: int | None = None) -> None:
        self._limit = limit
        self._most = most
        self._slow_timeout = slow_timeout
        self._buffer: deque[tuple[bytes, SessionId | None]] = deque()
        self._size = 0
        self._holds = 0
        self._finished = False
        self._wake = asyncio.Event()
        self._taken = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self._cut = self._loop.create_future()
        self._slow: asyncio.TimerHandle | None = None
        self.closed = False
        """Nothing reaches the peer any more."""

        self.was_slow = False
        """It was cut because its peer took nothing."""

        self._refill: Refill | None = None

    def feed_by(self, refill: Refill) -> None:
        """Call ``refill`` when the buffer is empty."""
        self._refill = refill

    @property
    def full(self) -> bool:
        """No more should be pushed now."""
        return self._size >= self._limit

    def push(self, chunk: bytes, origin: SessionId | None = None) -> None:
        """Hand over a chunk.

        Args:
            origin: The session whose event it is; see :meth:`purge`.
        """
        if self.closed or self._finished:
            return
        self._buffer.append((chunk, origin))
        was_full = self.full
        self._size += len(chunk)
        # One alone goes out however large it is.
        if was_full and self._most is not None and self._size > self._most:
            logger.warning("%d bytes wait for a client that does not take them", self._size)
            self.cut_slow()
            return
        if self._slow is None and self.full:
            self._slow = self._loop.call_later(self._slow_timeout, self.cut_slow)
        self._wake.set()

    def purge(self, origin: SessionId) -> None:
        """Take back what was not handed to the network yet of a session."""
        kept = [entry for entry in self._buffer if entry[1] != origin]
        if len(kept) != len(self._buffer):
            self._size -= sum(len(chunk) for chunk, _ in self._buffer)
            self._size += sum(len(chunk) for chunk, _ in kept)
            self._buffer = deque(kept)
            self._made_room()

    def wake(self) -> None:
        """There is more: ask who feeds it."""
        self._wake.set()

    def hold(self) -> Callable[[], None]:
        """Send nothing until the returned function is called."""
        self._holds += 1
        released = False

        def release() -> None:
            nonlocal released
            if not released:
                released = True
                self._holds -= 1
                self._wake.set()

        return release

    def finish(self) -> None:
        """End when everything that was pushed is sent."""
        self._finished = True
        self._wake.set()

    def cut(self) -> None:
        """End now, whatever waits."""
        self.closed = True
        if self._slow is not None:
            self._slow.cancel()
        self._wake.set()
        self._taken.set()
        if not self._cut.done():
            self._cut.set_result(None)

    async def until_cut(self) -> None:
        """Wait until it was cut."""
        await asyncio.shield(self._cut)

    async def drain(self) -> None:
        """Let the writer run; wait until more can be pushed, ``slow_timeout`` at the most."""
        await asyncio.sleep(0)
        if not self.full or self.closed:
            return
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._slow_timeout):
                while self.full and not self.closed:
                    self._taken.clear()
                    await self._taken.wait()

    def _next_chunks(self) -> list[bytes]:
        """Some of what waits: a peer that takes it in time takes it, however much follows."""
        chunks: list[bytes] = []
        size = 0
        while self._buffer and size < _AT_ONCE:
            chunk, _ = self._buffer.popleft()
            chunks.append(chunk)
            size += len(chunk)
        return chunks

    def _made_room(self) -> None:
        """The buffer is smaller: the peer's time starts anew."""
        self._taken.set()
        if self._slow is not None:
            self._slow.cancel()
            self._slow = None
        if self.full and not self.closed:
            self._slow = self._loop.call_later(self._slow_timeout, self.cut_slow)

    def cut_slow(self) -> None:
        """End now: the peer does not keep up."""
        self.was_slow = True
        metrics.too_slow()
        self.cut()

    async def empty_into(
        self, write: Write, *, idle: Callable[[], Awaitable[None]] | None, interval: float
    ) -> None:
        """Write what is pushed, in order, until it is finished or cut.

        Args:
            write: Takes all that waits; returns when the network took it.
            idle: Called when there was nothing for ``interval`` seconds; None: never.
            interval: Seconds.
        """
        while True:
            self._wake.clear()
            if self.closed:
                return
            if not self._holds:
                if self._buffer:
                    chunks = self._next_chunks()
                    await write(chunks)
                    self._size -= sum(map(len, chunks))
                    self._made_room()
                    continue
                if self._refill is not None and await self._refill():
                    continue
                if self._finished and not self._buffer:
                    return
            if idle is None:
                await self._wake.wait()
                continue
            try:
                async with asyncio.timeout(interval):
                    await self._wake.wait()
            except TimeoutError:
                await idle()
