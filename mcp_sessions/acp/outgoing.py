"""Queue the messages for one client: callers never wait, order is kept, size is bounded."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable

from mcp_sessions.acp.client_line import Wire

logger = logging.getLogger(__name__)


class Outgoing:
    """One client's.

    Args:
        limit: Bytes that wait before who sends has to wait.
        on_closed: Called once, when nothing reaches the client any more.
    """

    def __init__(self, wire: Wire, limit: int, on_closed: Callable[[], None]) -> None:
        self.closed = False
        """Nothing reaches the client any more."""

        self._wire = wire
        self._limit = limit
        self._on_closed = on_closed
        self._waiting: deque[bytes] = deque()
        self._size = 0
        """Bytes that wait, or are being written."""

        self._pushed = asyncio.Event()
        self._changed = asyncio.Event()

    def push(self, data: bytes) -> None:
        """Hand over whole lines, in order. Never waits."""
        if not self.closed:
            self._waiting.append(data)
            self._size += len(data)
            self._pushed.set()

    async def drain(self, until: Callable[[], bool] = lambda: False) -> None:
        while self._size >= self._limit and not self.closed and not until():
            self._changed.clear()
            await self._changed.wait()

    async def written(self) -> None:
        while self._size and not self.closed:
            self._changed.clear()
            await self._changed.wait()

    def wake(self) -> None:
        self._changed.set()

    async def write(self) -> None:
        while True:
            self._pushed.clear()
            if self._waiting:
                data = b"".join(self._waiting)
                self._waiting.clear()
                try:
                    await self._wire.write(data)
                except OSError as error:
                    logger.debug("a client takes nothing any more: %s", error)
                    self.close()
                    return
                self._size -= len(data)
                self._changed.set()
            elif self.closed:
                return
            else:
                await self._pushed.wait()

    def close(self) -> None:
        if self.closed:
            return
        self.closed = True
        self._waiting.clear()
        self._size = 0
        self._pushed.set()
        self._changed.set()
        self._on_closed()
