"""Carry to clients the messages that children send by themselves.

The reading of a child waits for its client only if there is one client. For a message of one call
it waits a moment: the client of that call may be at a replica that died, and other calls run.

Rules:

1. If several clients share a child, each gets its messages in order, apart from the reading of the
   child. So a client that reads nothing delays no other answer. Its own answer comes after the
   messages before it.
2. The queue of each of them is bounded in bytes. Beyond that, messages are left out with one
   warning. Messages about one request are left out soon. Changes of resources are left out only if
   there are more than a client can subscribe to. Instead the client gets a notification that its
   resources changed, so that it reads again.
3. A change that the store could not take is sent again until the store takes it: a change may be
   sent twice. Any other message may not, and is left out with a warning. Neither ends the child.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable, Hashable, Mapping
from dataclasses import dataclass, field
from typing import Any

from mcp_sessions import method_names
from mcp_sessions.background import Background, report
from mcp_sessions.core.backoff import Backoff
from mcp_sessions.core.messages import encode
from mcp_sessions.errors import StoreUnavailable
from mcp_sessions.seldom import Seldom

logger = logging.getLogger(__name__)
logger.addFilter(Seldom())

SendNotification = Callable[[str, Mapping[str, Any] | None], Awaitable[object]]

WAITING = 1_048_576
"""Bytes that wait for one client, at most."""

CHANGES = 16_777_216
"""Bytes, likewise, with changes: as many as a client can subscribe to (``max_subscriptions``,
``max_subscription_bytes``).
"""

OVERHEAD = 1_024
"""Bytes that a notification counts in addition to its own."""

MOMENT = 1.0
"""Seconds for which the reading of a child waits for the client of one call."""

_WHAT = "a notification of a child"
_BASE = 0.5
_CAP = 15.0
"""Seconds before a change is sent again: the first delay, and the longest."""


@dataclass(frozen=True, slots=True)
class _Notification:
    way: SendNotification
    method: str
    params: Mapping[str, Any] | None
    is_change: bool
    size: int


@dataclass(slots=True, eq=False)
class _Waiting:
    queued: dict[Hashable, _Notification] = field(default_factory=dict[Hashable, _Notification])
    """Notifications in order. A change has its object as key."""

    size: int = 0
    is_full: bool = False
    task: asyncio.Task[None] | None = None


class Notifier:
    def __init__(self) -> None:
        self._waiting: dict[Hashable, _Waiting] = {}
        self._background = Background()

    async def now(
        self,
        who: Hashable,
        way: SendNotification,
        method: str,
        params: Mapping[str, Any] | None,
        *,
        is_change: bool,
    ) -> None:
        """Send a message to a client that shares its child with no other client.

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
                # This is the boundary to one client: its failure does not end the child.
                report(_WHAT, failed)
                return
        self.later(who, way, method, params, is_change=is_change)

    async def of_call(
        self,
        call: Hashable,
        way: SendNotification,
        method: str,
        params: Mapping[str, Any] | None,
    ) -> None:
        """Send a message of a call of such a client. The answer of the call comes after it."""
        waiting = self._waiting.get(call)
        if waiting is not None and waiting.size + len(encode(params)) + OVERHEAD > WAITING:
            await self.flush(call)
        self.later(call, way, method, params, is_change=False)
        if waiting is None:
            await self.flush(call, MOMENT)

    def later(
        self,
        who: Hashable,
        way: SendNotification,
        method: str,
        params: Mapping[str, Any] | None,
        *,
        is_change: bool,
    ) -> None:
        """Send one of several clients a message after the earlier ones.

        Args:
            who: Key of the client, and of the subject.
            is_change: Whether it may be sent twice, so that an equal one in the queue is enough.
        """
        try:
            said = encode(params)
        except TypeError as failed:
            # JSON cannot express it. The child is still read.
            report(_WHAT, failed)
            return
        waiting = self._waiting.get(who)
        if waiting is None:
            waiting = self._waiting[who] = _Waiting()
            waiting.task = self._background.run(_WHAT, self._work(who, waiting))
        uri = (params or {}).get("uri")
        is_resource = isinstance(uri, str)
        name = (method, uri if is_resource else said) if is_change else object()
        if name in waiting.queued:
            return
        size = len(said) + OVERHEAD
        if waiting.size and waiting.size + size > (CHANGES if is_change else WAITING):
            if not waiting.is_full:
                logger.warning("%s is dropped: its client reads nothing", _WHAT)
            waiting.is_full = True
            if not is_change:
                return
            # The message no longer names the object. It only asks the client to read again.
            method = method_names.RESOURCES_CHANGED if is_resource else method
            params, size, name = None, OVERHEAD, (method, None)
            if name in waiting.queued:
                return
        waiting.queued[name] = _Notification(way, method, params, is_change, size)
        waiting.size += size

    def waits(self, who: Hashable) -> bool:
        return who in self._waiting

    async def flush(self, who: Hashable, timeout: float | None = None) -> None:
        waiting = self._waiting.get(who)
        if waiting is not None and waiting.task is not None:
            await asyncio.wait({waiting.task}, timeout=timeout)

    def forget(self, who: Hashable) -> None:
        waiting = self._waiting.pop(who, None)
        if waiting is not None and waiting.task is not None:
            waiting.task.cancel()

    async def close(self) -> None:
        await self._background.close()
        self._waiting.clear()

    async def _work(self, who: Hashable, waiting: _Waiting) -> None:
        try:
            while waiting.queued:
                # From now on an equal change is a new one: the client may read this one already.
                first = waiting.queued.pop(next(iter(waiting.queued)))
                await self._deliver(first)
                waiting.size -= first.size
        finally:
            if self._waiting.get(who) is waiting:
                del self._waiting[who]

    async def _deliver(self, notification: _Notification) -> None:
        backoff = Backoff(base=_BASE, cap=_CAP)
        while True:
            try:
                await notification.way(notification.method, notification.params)
                return
            except StoreUnavailable as away:
                report(_WHAT, away)
                if not notification.is_change:
                    return
            except Exception as failed:
                # This is the boundary to one client: its failure does not affect others.
                report(_WHAT, failed)
                return
            await asyncio.sleep(backoff.failed(random.random()))
