"""Ends what has expired: the one task that looks at the clock by itself."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable

from mcp_sessions import metrics
from mcp_sessions.background import report
from mcp_sessions.errors import StoreUnavailable
from mcp_sessions.ids import digest
from mcp_sessions.policy import SessionPolicy
from mcp_sessions.server.host import Host
from mcp_sessions.stores.base import SessionRecord, SessionStore

logger = logging.getLogger(__name__)

_BATCH = 256
"""Sessions ended before others may run."""


class Reaper:
    """Keeps the deadlines of sessions at work ahead, and ends those that have passed."""

    def __init__(
        self,
        store: SessionStore,
        host: Host,
        policy: SessionPolicy,
        clock: Callable[[], float],
        forget: Callable[[SessionRecord], Awaitable[None]],
    ) -> None:
        """Take what it works with.

        Args:
            forget: Ends what is at work here for a session that is over in the store.
        """
        self._store = store
        self._host = host
        self._clock = clock
        self._forget = forget
        # The store hands each record out once.
        self._over: deque[SessionRecord] = deque()
        # A session at work is touched at least three times per idle timeout, so that no
        # replica sees it past its deadline.
        self.interval = max(0.05, min(5.0, policy.idle_timeout / 3))
        """Seconds between two rounds."""

    async def run(self) -> None:
        """Go round for ever; a store that is away for a while is asked again."""
        while True:
            await asyncio.sleep(self.interval)
            try:
                await self.round()
            except StoreUnavailable:
                logger.warning("the store is away; expired sessions wait")

    async def round(self) -> int:
        """One round: touch what is at work, end what has expired; how many ended."""
        now = self._clock()
        held = frozenset(self._host.held)
        if held:
            await self._store.touch(held, now=now)
        await self._forget_all()
        count = 0
        while True:
            expired = await self._store.expire(now=now, held=held, limit=_BATCH)
            self._over.extend(expired)
            for record in expired:
                metrics.session_over(record.mode.value, "expired")
                logger.info("session %s expired", digest(record.session_id))
            await self._forget_all()
            count += len(expired)
            if len(expired) < _BATCH:
                return count
            await asyncio.sleep(0)

    async def _forget_all(self) -> None:
        """End what is at work here for sessions that are over. One for which that fails has its
        turn again in the next round, after all others.
        """
        for _ in range(len(self._over)):
            record = self._over.popleft()
            try:
                await self._forget(record)
            except StoreUnavailable as failed:
                self._over.append(record)
                logger.warning(
                    "what is at work for session %s ends later: %s",
                    digest(record.session_id),
                    failed,
                )
            except Exception as failed:
                # A defect, and the next sessions have to end all the same.
                self._over.append(record)
                report("the end of an expired session", failed)
            except BaseException:
                self._over.append(record)
                raise
