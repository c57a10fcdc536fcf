"""Retry writes to the store until it is back.

A connection or a request may leave state in the store at its end, although no caller waits any
more. A store that is away at that moment would keep the state for ever. Such a write is idempotent,
and its failure does not fail its owner.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable, Hashable, Mapping

from mcp_sessions.background import Background, report
from mcp_sessions.core.backoff import Backoff
from mcp_sessions.errors import StoreUnavailable

logger = logging.getLogger(__name__)

PendingWrite = Callable[[], Awaitable[object]]

_NAME = "writes that wait for the store"

_BASE, _CAP = 0.2, 10.0
"""Seconds between two tries: at the most at first, and at the most ever."""


class PendingWrites:
    """The writes of one process that wait for the store; their number is bounded by what was open
    when the store went away.
    """

    def __init__(self) -> None:
        self._writes: dict[Hashable, PendingWrite] = {}
        self._sizes: dict[Hashable, int] = {}
        self._background = Background()
        self._is_working = False
        self._has_ended = False

    def __len__(self) -> int:
        return len(self._writes)

    @property
    def size(self) -> int:
        return sum(self._sizes.values())

    async def settle(self, writes: Mapping[Hashable, PendingWrite], *, size: int = 0) -> None:
        """Do writes, and return. Writes that the store refuses now are repeated later.

        Args:
            writes: Name → what to do; a newer one of the same name takes the place of an older.
            size: Bytes that each of them holds until it is done.
        """
        self._writes.update(writes)
        if size:
            self._sizes.update(dict.fromkeys(writes, size))
        try:
            for name in writes:
                await self._do(name)
        except StoreUnavailable as failed:
            logger.warning("the store is away; writes wait until it is back: %s", failed)
        finally:
            # Also if this task was cancelled: nobody else remembers them.
            self._work_on()

    def add(self, name: Hashable, write: PendingWrite) -> None:
        self._writes[name] = write
        self._work_on()

    async def flush(self, name: Hashable) -> bool:
        """Do one of the waiting writes now; False: no write of that name waits.

        Raises:
            StoreUnavailable: The write still waits.
        """
        if name not in self._writes:
            return False
        await self._do(name)
        return True

    async def close(self) -> None:
        """Drop the writes that wait: other processes find out that this one is gone."""
        self._has_ended = True
        await self._background.close()
        if self._writes:
            logger.warning(
                "%d writes were lost: the server stopped before the store was back",
                len(self._writes),
            )

    def _work_on(self) -> None:
        if self._writes and not self._has_ended and not self._is_working:
            self._is_working = True
            self._background.loop(_NAME, self._work)

    async def _work(self) -> None:
        backoff = Backoff(base=_BASE, cap=_CAP)
        while self._writes:
            try:
                await self._do(next(iter(self._writes)))
            except StoreUnavailable:
                await asyncio.sleep(backoff.failed(random.random()))
            else:
                backoff.progressed()
        self._is_working = False

    async def _do(self, name: Hashable) -> None:
        write = self._writes.get(name)
        if write is None:
            return
        try:
            await write()
        except StoreUnavailable:
            raise
        except Exception as failed:
            # A mistake, not an absence: another try would make it again.
            report(_NAME, failed)
        if self._writes.get(name) is write:
            del self._writes[name]
            self._sizes.pop(name, None)
