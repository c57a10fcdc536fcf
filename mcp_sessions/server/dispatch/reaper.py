"""Ends what has expired: the one task that looks at the clock by itself. Where there are too many
sessions it makes room.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Sequence

from mcp_sessions import metrics
from mcp_sessions.background import report
from mcp_sessions.errors import StoreUnavailable
from mcp_sessions.ids import digest
from mcp_sessions.policy import SessionPolicy
from mcp_sessions.server.delivery.hub import Hub
from mcp_sessions.server.requests.runner import RequestRunner
from mcp_sessions.stores.contract import SessionStore
from mcp_sessions.stores.records import SessionRecord

logger = logging.getLogger(__name__)

_BATCH = 256
"""Sessions ended before others may run."""


_PAUSE = 1.0
"""Seconds after which it is looked again what could make room, if nothing could."""


class Reaper:
    """Keeps the deadlines of sessions at work ahead, and ends those that have passed."""

    def __init__(
        self,
        store: SessionStore,
        runner: RequestRunner,
        hub: Hub,
        policy: SessionPolicy,
        clock: Callable[[], float],
        forget: Callable[[SessionRecord], Awaitable[None]],
    ) -> None:
        """Take what it works with.

        Args:
            forget: Ends what is at work here for a session that is over in the store.
        """
        self._store = store
        self._runner = runner
        self._hub = hub
        self._unused_for = policy.min_evictable_idle_time
        self._clock = clock
        self._forget = forget
        # The store hands each record out once.
        self._over: deque[SessionRecord] = deque()
        self._room = asyncio.Lock()
        self._looked: Counter[bool] = Counter()
        self._in_vain_at = -math.inf
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
        held = frozenset(self._runner.held)
        if held:
            await self._store.touch(held, now=now)
        await self._forget_all()
        count = 0
        while True:
            expired = await self._store.expire(now=now, held=held, limit=_BATCH)
            self._are_over(expired, "expired")
            await self._forget_all()
            count += len(expired)
            if len(expired) < _BATCH:
                return count
            await asyncio.sleep(0)

    async def make_room(self, evicts: bool) -> None:
        """A limit is reached: end what has expired; if that is nothing, sessions that are nobody's
        and hold nothing (SES20), many at once, so that not everyone who comes has to wait for it.

        Args:
            evicts: Whether sessions that live may be ended.
        """
        looked = self._looked[evicts]
        async with self._room:
            if looked != self._looked[evicts]:
                # Somebody else did it meanwhile. That goes for one who failed, too: else all who
                # come wait for a store that is away, one after the other.
                return
            try:
                if not await self.round() and evicts:
                    await self._evict()
            finally:
                self._looked.update({False, evicts})

    async def _evict(self) -> None:
        now = self._clock()
        if 0 <= now - self._in_vain_at < _PAUSE:
            return
        streaming = {
            connection.transport_session
            for connection in self._hub.connections()
            if connection.transport_session is not None and connection.is_streaming
        }
        evicted = await self._store.evict(
            now=now,
            unused_for=self._unused_for,
            held=streaming | self._runner.held.keys(),
            limit=_BATCH,
            # Another process may have a stream open that this one does not know of.
            opened=self._store.exchange is None,
        )
        if evicted:
            logger.warning(
                "there are too many sessions; %d that nobody used were ended", len(evicted)
            )
        else:
            self._in_vain_at = now
        self._are_over(evicted, "evicted")
        await self._forget_all()

    def _are_over(self, records: Sequence[SessionRecord], reason: str) -> None:
        self._over.extend(records)
        for record in records:
            metrics.session_over(record.mode.value, reason)
            logger.info("session %s %s", digest(record.session_id), reason)

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
