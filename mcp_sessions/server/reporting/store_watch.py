"""Say that a store is back, and for how long it was away: one line for each outage and process.

Callers say that a call failed, each for itself. None of them knows when the store is back. So the
first failure starts a round of probes, and the first probe that succeeds ends it. Without a failure
the store is not asked.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass, field

from mcp_sessions.errors import StoreUnavailable
from mcp_sessions.stores.contract import SessionStore
from mcp_sessions.stores.outage import outage_of
from mcp_sessions.stores.probe import probe

logger = logging.getLogger(__name__)

_PAUSE = 0.5
"""Seconds between two probes."""


@dataclass(slots=True, eq=False, repr=False)
class StoreWatch:
    """Args:
    clock: Seconds since 1970.
    """

    _store: SessionStore
    _clock: Callable[[], float]
    _time: Callable[[], float] = field(init=False, default=lambda: 0.0)
    """Seconds, as the event loop counts them."""

    _failed: asyncio.Event = field(init=False, default_factory=asyncio.Event)
    _since: float | None = field(init=False, default=None)
    """When the first call failed, by the event loop. None: the store is there."""

    _is_away: bool = field(init=False, default=False)
    """A call was not just refused, or a probe failed, too."""

    @property
    def away(self) -> float:
        """Seconds for which the store is away. Any thread may ask."""
        since = self._since
        return 0.0 if since is None else max(0.0, self._time() - since)

    async def run(self) -> None:
        """Watch the store for ever."""
        outage, loop = outage_of(self._store), asyncio.get_running_loop()
        self._time = loop.time
        if outage is not None:
            outage.on_failure = lambda is_away: loop.call_soon_threadsafe(self._note, is_away)
        try:
            while True:
                await self._failed.wait()
                await self._until_it_is_back()
        finally:
            if outage is not None:
                outage.on_failure = None

    def _note(self, is_away: bool) -> None:
        if self._since is None:
            self._since = self._time()
        self._is_away |= is_away
        self._failed.set()

    async def _until_it_is_back(self) -> None:
        while True:
            try:
                await probe(self._store, now=self._clock())
                break
            except StoreUnavailable:
                self._is_away = True
                await asyncio.sleep(_PAUSE)
        away, was_away = self.away, self._is_away
        self._since, self._is_away = None, False
        self._failed.clear()
        if was_away:
            logger.warning("the store is back: it was away for %.1f s", away)
