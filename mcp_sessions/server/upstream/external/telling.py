"""What children say by themselves, on its way to clients. Their readers wait for one client only.

Rules:

1. A client of several that share a child is told beside the reading of it, in order: whoever takes
   nothing keeps nobody else's answer. Its own answer comes after what was told before.
2. What waits for one of them is bounded in bytes, and left out beyond, with one warning: what is
   about one request soon, a resource's change where there are more of them than a client can have
   subscribed to. In their place it is told that its resources changed, so that it reads again.
3. A change that the store could not take is told again until it did: it is the same change however
   often it is told. Anything else might be told twice, and is left out with a warning. Neither ends
   the child.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable, Hashable, Mapping
from dataclasses import dataclass, field
from typing import Any

from mcp_sessions.background import Background, report
from mcp_sessions.core.backoff import Backoff
from mcp_sessions.core.messages import encode
from mcp_sessions.errors import StoreUnavailable

logger = logging.getLogger(__name__)

Way = Callable[[str, Mapping[str, Any] | None], Awaitable[object]]

WAITING = 1_048_576
"""Bytes of what waits for one client."""

CHANGES = 16_777_216
"""Bytes, likewise, with changes: as many as one can be subscribed to (``max_subscriptions``,
``max_subscription_bytes``)."""

OVERHEAD = 1_024
"""Bytes that a notification counts for beside its own."""

_READ_AGAIN = "notifications/resources/list_changed"
_WHAT = "a notification of a child"
_BASE = 0.5
_CAP = 15.0
"""Seconds after which a change is told again, at first and at last."""


@dataclass(frozen=True, slots=True)
class _Notification:
    way: Way
    method: str
    params: Mapping[str, Any] | None
    is_change: bool
    size: int


@dataclass(slots=True, eq=False)
class _Waiting:
    """For one client."""

    told: dict[Hashable, _Notification] = field(default_factory=dict[Hashable, _Notification])
    """In order; a change by what changed."""

    size: int = 0
    is_full: bool = False
    task: asyncio.Task[None] | None = None


class Telling:
    """All of one layer's."""

    def __init__(self, *, draw: Callable[[], float] = random.random) -> None:
        """Tell nobody yet.

        Args:
            draw: A random number from 0 to 1, for how soon a change is told again.
        """
        self._draw = draw
        self._waiting: dict[Hashable, _Waiting] = {}
        self._background = Background(draw=draw)

    async def now(
        self,
        who: Hashable,
        way: Way,
        method: str,
        params: Mapping[str, Any] | None,
        *,
        is_change: bool,
    ) -> None:
        """Tell a client that nobody else waits for.

        Args:
            who: See :meth:`later`.
            is_change: See :meth:`later`.
        """
        waiting = self._waiting.get(who)
        if waiting is None:
            try:
                await way(method, params)
                return
            except StoreUnavailable as away:
                report(_WHAT, away)
                if not is_change:
                    return
            except Exception as failed:
                # The boundary to one client: what is wrong there does not end the child.
                report(_WHAT, failed)
                return
        self.later(who, way, method, params, is_change=is_change)

    def later(
        self,
        who: Hashable,
        way: Way,
        method: str,
        params: Mapping[str, Any] | None,
        *,
        is_change: bool,
    ) -> None:
        """Tell one of several clients after what was told to it before.

        Args:
            who: Names the client, and what it is told about.
            is_change: It can be told twice, and what waits says it as well.
        """
        try:
            said = encode(params)
        except TypeError as failed:
            # It holds what JSON cannot say: whoever reads the child goes on.
            report(_WHAT, failed)
            return
        waiting = self._waiting.get(who)
        if waiting is None:
            waiting = self._waiting[who] = _Waiting()
            waiting.task = self._background.run(_WHAT, self._work(who, waiting))
        uri = (params or {}).get("uri")
        is_resource = isinstance(uri, str)
        name = (method, uri if is_resource else said) if is_change else object()
        if name in waiting.told:
            return
        size = len(said) + OVERHEAD
        if waiting.size and waiting.size + size > (CHANGES if is_change else WAITING):
            if not waiting.is_full:
                logger.warning("%s is left out: its client takes nothing", _WHAT)
            waiting.is_full = True
            if not is_change:
                return
            # What it is about is left out, and not that there is something to read again.
            method, params, size = _READ_AGAIN if is_resource else method, None, OVERHEAD
            name = (method, None)
            if name in waiting.told:
                return
        waiting.told[name] = _Notification(way, method, params, is_change, size)
        waiting.size += size

    def is_telling(self, who: Hashable) -> bool:
        """Whether something waits for that client."""
        return who in self._waiting

    async def told(self, who: Hashable) -> None:
        """Wait until nothing waits for that client."""
        waiting = self._waiting.get(who)
        if waiting is not None and waiting.task is not None:
            await asyncio.wait({waiting.task})

    def forget(self, who: Hashable) -> None:
        """That client hears nothing more."""
        waiting = self._waiting.pop(who, None)
        if waiting is not None and waiting.task is not None:
            waiting.task.cancel()

    async def close(self) -> None:
        """Tell nobody any more."""
        await self._background.close()
        self._waiting.clear()

    async def _work(self, who: Hashable, waiting: _Waiting) -> None:
        try:
            while waiting.told:
                # The same change is another one from now on: this one may be read already.
                first = waiting.told.pop(next(iter(waiting.told)))
                await self._tell(first)
                waiting.size -= first.size
        finally:
            if self._waiting.get(who) is waiting:
                del self._waiting[who]

    async def _tell(self, told: _Notification) -> None:
        backoff = Backoff(base=_BASE, cap=_CAP)
        while True:
            try:
                await told.way(told.method, told.params)
                return
            except StoreUnavailable as away:
                report(_WHAT, away)
                if not told.is_change:
                    return
            except Exception as failed:
                # The boundary to one client: what is wrong there is nothing to others.
                report(_WHAT, failed)
                return
            await asyncio.sleep(backoff.failed(self._draw()))
