"""Run the wrapped server's handlers of notifications, apart from the reader of the connection.

A handler may wait for its client, and the client's next message comes on the same connection. So
the reader must not wait for a handler. Rules:

1. Handlers run one after the other, in the order of their notifications.
2. A handler runs to its first wait before the next message is read: a request that follows
   ``notifications/initialized`` finds it processed.
3. The queue is bounded in bytes. If it is full, the reader waits for ``patience`` seconds. Then
   the handlers count as stuck, and notifications are dropped until one handler is done.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Coroutine
from typing import Any

from mcp_sessions.background import report

logger = logging.getLogger(__name__)

Handling = Coroutine[Any, Any, None]
Spawn = Callable[[Handling], asyncio.Task[None]]

_OVERHEAD = 1_024
"""Bytes that a notification counts for in addition to its own."""

_TURNS = 10
"""Turns of the event loop that a handler has before the next message is read."""


class HandlerQueue:
    """The notifications of one connection that are handled, or wait for that.

    Args:
        limit: Bytes of notifications that wait; see ``SessionPolicy.receive_buffer``.
        patience: Seconds that the reader waits for room, and that handlers have when the
            connection is gone; see ``SessionPolicy.slow_timeout``.
        spawn: Runs what has to end with the process.
    """

    def __init__(self, *, limit: int, patience: float, spawn: Spawn) -> None:
        self._limit = limit
        self._patience = patience
        self._spawn = spawn
        self._waiting: deque[tuple[Handling, int]] = deque()
        self._size = 0
        self._task: asyncio.Task[None] | None = None
        self._done = asyncio.Event()
        self._is_stuck = False

    async def put(self, handling: Handling, size: int) -> None:
        cost = size + _OVERHEAD
        if not self._fits(cost) and not self._is_stuck:
            self._is_stuck = not await self._room(cost)
        if not self._fits(cost):
            handling.close()
            logger.warning(
                "a notification is dropped: handlers of earlier ones do not return, and "
                "receive_buffer (%d bytes) is full",
                self._limit,
            )
            return
        self._waiting.append((handling, cost))
        self._size += cost
        if self._task is None:
            self._task = self._spawn(self._work())
        for _ in range(_TURNS):
            if not self._size:
                break
            await asyncio.sleep(0)

    async def quiet(self, timeout: float) -> None:
        if self._task is not None:
            await asyncio.wait({self._task}, timeout=timeout)

    def end(self) -> None:
        if self._task is not None:
            task = self._task
            timer = asyncio.get_running_loop().call_later(self._patience, task.cancel)
            task.add_done_callback(lambda _: timer.cancel())

    def _fits(self, cost: int) -> bool:
        return not self._size or self._size + cost <= self._limit

    async def _room(self, cost: int) -> bool:
        try:
            async with asyncio.timeout(self._patience):
                while not self._fits(cost):
                    self._done.clear()
                    await self._done.wait()
        except TimeoutError:
            return False
        return True

    async def _work(self) -> None:
        try:
            while self._waiting:
                handling, cost = self._waiting.popleft()
                try:
                    await handling
                except Exception as failed:
                    # The boundary to the wrapped server, or to a store that went away.
                    report("a notification", failed)
                self._size -= cost
                self._is_stuck = False
                self._done.set()
        finally:
            # Cancelled: nothing waits any more, and nobody waits for room.
            for handling, _ in self._waiting:
                handling.close()
            self._waiting.clear()
            self._size = 0
            self._task = None
            self._done.set()
