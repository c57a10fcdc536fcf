"""Hold a request that another process serves, until its result is here (``relay.py``)."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from mcp_sessions.core.messages import encode
from mcp_sessions.seldom import Seldom
from mcp_sessions.server.cluster.replica_messages import Result, Update

logger = logging.getLogger(__name__)
logger.addFilter(Seldom())

_WAITING = 1_048_576
"""Bytes of updates that wait for one client, at most. Beyond that notifications are left out."""

_OVERHEAD = 1_024
"""Bytes that an update counts in addition to its own."""

_CONFIRMED = 262_144
"""Bytes of updates after which their sender learns at once that they came."""

_LOOKS = 6
"""How often what is missing is asked for, at most. Then it is left out."""


def size_of(update: Update) -> int:
    return len(encode(update.message)) + _OVERHEAD


RelayedOutcome = tuple[Mapping[str, Any] | None, Mapping[str, Any] | None]
"""A result, or an error. Neither: the request did not run here, and never will."""

OnUpdate = Callable[[Mapping[str, Any]], Awaitable[None]]


@dataclass(eq=False)
class Pending:
    process: str
    within: set[str]
    """The requests of the receiver to which it belongs. It ends with the last of them. Empty: it
    belongs to none.
    """

    is_repeatable: bool
    on_update: OnUpdate | None
    serve: Callable[[Any, Any], Coroutine[Any, Any, RelayedOutcome]] | None
    """Serves what is asked within it."""

    waiting: deque[tuple[Update | asyncio.Event, int]] = field(
        init=False, default_factory=deque[tuple[Update | asyncio.Event, int]]
    )
    """Updates that its client did not get yet, each with its size, and turns of what is asked."""

    size: int = field(init=False, default=0)
    newest: int = field(init=False, default=0)
    """The number of the newest update before which none is missing."""

    early: dict[int, tuple[Update, int]] = field(
        init=False, default_factory=dict[int, tuple[Update, int]]
    )
    """Updates that came while one before them is missing, by their numbers, with their sizes."""

    looked: int = field(init=False, default=0)
    """How often what is missing was asked for."""

    unconfirmed: int = field(init=False, default=0)
    """Bytes of updates that came since their sender heard of it."""

    is_full: bool = field(init=False, default=False)
    is_open: bool = field(init=False, default=True)
    """Whether its client listens."""

    is_gone: bool = field(init=False, default=False)
    """The receiver does not know it."""

    has_ended: bool = field(init=False, default=False)
    """Nobody passes its updates on any more."""

    result: Result | None = field(init=False, default=None)
    news: asyncio.Event = field(init=False, default_factory=asyncio.Event)
    served: dict[str, Callable[[], None]] = field(
        init=False, default_factory=dict[str, "Callable[[], None]"]
    )
    """The questions within it, each with what is called when this one ends."""

    def add(self, update: Update) -> bool:
        """Take an update. Return whether its sender should hear at once what came."""
        if update.number and update.number <= self.newest:
            # It came before: its sender did not learn that.
            return False
        size = size_of(update)
        if update.number > self.newest + 1:
            is_first = not self.early
            self.early[update.number] = update, size
            sizes = [size for _, size in self.early.values()]
            if sum(sizes) - max(sizes) > _WAITING:
                self.skips()
            return is_first
        self._take(update, size)
        while self.newest + 1 in self.early:
            self._take(*self.early.pop(self.newest + 1))
        self.unconfirmed += size
        if self.unconfirmed <= _CONFIRMED:
            return False
        self.unconfirmed = 0
        return True

    def looks(self, *, is_last: bool) -> None:
        """Count that what is missing is asked for again. Skip it at last."""
        is_missing = self.early or (self.result is not None and not self.is_whole)
        self.looked = self.looked + 1 if is_missing else 0
        if is_last or self.looked > _LOOKS:
            self.skips()

    def skips(self) -> None:
        """Leave out what is missing: it does not come any more."""
        if self.early:
            logger.warning("messages of a call at another replica were lost")
        for number in sorted(self.early):
            self._take(*self.early.pop(number))
        if self.result is not None:
            self.newest = max(self.newest, self.result.updates)
        self.looked = 0

    @property
    def is_whole(self) -> bool:
        """It has its result, and passed on all that came before."""
        return (
            self.result is not None
            and not self.waiting
            and not self.early
            and self.newest >= self.result.updates
        )

    def _take(self, update: Update, size: int) -> None:
        self.newest = update.number
        if self.size and self.size + size > _WAITING and "id" not in update.message:
            if not self.is_full:
                logger.warning(
                    "a client reads progress and log messages too slowly; some are dropped"
                )
            self.is_full = True
            return
        self.waiting.append((update, size))
        self.size += size
        self.news.set()

    async def turn(self) -> None:
        if self.has_ended:
            return
        mine = asyncio.Event(), 0
        self.waiting.append(mine)
        self.news.set()
        try:
            await mine[0].wait()
        finally:
            with suppress(ValueError):
                self.waiting.remove(mine)

    async def pass_on(self) -> None:
        while self.waiting:
            first, size = self.waiting.popleft()
            if isinstance(first, asyncio.Event):
                first.set()
                # The waiting task runs first.
                await asyncio.sleep(0)
            elif self.on_update is not None:
                await self.on_update(first.message)
            self.size -= size

    def listens(self, is_open: bool) -> None:
        self.is_open = is_open

    def is_unknown(self) -> None:
        self.is_gone = True
        self.news.set()

    def is_sent(self) -> None:
        self.is_gone = False
        self.newest = 0
        self.early.clear()

    def end(self, result: Result) -> bool:
        """Take the result. Return whether its sender should hear at once what came."""
        if self.result is not None:
            return False
        self.result = result
        self.news.set()
        return result.updates > self.newest

    def stop(self) -> None:
        self.has_ended = True
        for first, _ in self.waiting:
            if isinstance(first, asyncio.Event):
                first.set()
        for ends in list(self.served.values()):
            ends()
