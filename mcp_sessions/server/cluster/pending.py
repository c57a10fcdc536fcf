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
    """The number of the newest update."""

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

    def add(self, update: Update) -> None:
        if update.number and update.number <= self.newest:
            # It came before: its sender did not learn that.
            return
        self.newest = update.number
        size = len(encode(update.message)) + _OVERHEAD
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

    def end(self, result: Result) -> None:
        if self.result is None:
            self.result = result
            self.news.set()

    def stop(self) -> None:
        self.has_ended = True
        for first, _ in self.waiting:
            if isinstance(first, asyncio.Event):
                first.set()
        for ends in list(self.served.values()):
            ends()
