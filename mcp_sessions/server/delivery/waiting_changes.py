"""Queue server-wide changes until every session has them, and let announcers wait.

The queue is bounded; rules 2, 4 and 5 of :mod:`mcp_sessions.server.delivery.broadcaster`.

Only the announcer of a change waits for it. An announcement is noted in a context variable, so that
it is found where the application announces it: in a handler, in a task that a handler started, in a
worker thread that called back, in a listener of the server's own bus that runs inside of any of
these. A bus that calls its listeners in another context does not say who published, so no one
waits.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import secrets
from collections import Counter, deque
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

from mcp_sessions import method_names
from mcp_sessions.core.coalescing import coalescing_key
from mcp_sessions.core.messages import EventTemplate, notification_message, plain_draft
from mcp_sessions.core.named import updated_uri
from mcp_sessions.errors import StoreUnavailable
from mcp_sessions.ids import SessionId
from mcp_sessions.policy import SessionPolicy
from mcp_sessions.stores.records import ServerChange

logger = logging.getLogger(__name__)


EACH = 64
"""Changes that may wait before those with the same coalescing key are sent as one."""

KEPT = 10_000
"""Changes that may wait, in this process."""

KEPT_BYTES = 4_194_304
"""Bytes that their notifications may have together."""

_BEHIND = 8
"""Failures after which other changes are sent first."""


ChangeOutcome = StoreUnavailable | None
"""The outcome of a change: the reason why it is not stored for everyone yet; None: it is."""


@dataclass(slots=True, eq=False)
class Announced:
    outer: Announced | None = None
    """Waits for the same, too."""

    waiting: tuple[int, asyncio.Future[ChangeOutcome]] | None = None
    """The last of it that is not known to be stored, with its number among all."""

    is_open: bool = True

    def add(self, number: int, outcome: asyncio.Future[ChangeOutcome]) -> None:
        """Note a change that was announced, or that is sent together with such a change.

        Args:
            number: Its number among all. They are sent in order: the last one is waited for.
        """
        if self.is_open and (self.waiting is None or self.waiting[0] < number):
            self.waiting = number, outcome
        if self.outer is not None:
            self.outer.add(number, outcome)

    async def settled(self) -> ChangeOutcome:
        """Wait until all that was announced so far is stored, or the store failed. Later changes,
        of a task that outlives the request, are not waited for.
        """
        waiting, self.waiting, self.is_open = self.waiting, None, False
        if waiting is None:
            return None
        return await asyncio.shield(waiting[1])


ANNOUNCED: ContextVar[Announced | None] = ContextVar("mcp_sessions_announced", default=None)
"""Collects the changes that a task, and the tasks it starts, announce from now on."""


@contextmanager
def noting() -> Generator[Announced]:
    """Collect the changes that are announced inside. Outer collectors get them, too."""
    announced = Announced(ANNOUNCED.get())
    token = ANNOUNCED.set(announced)
    try:
        yield announced
    finally:
        ANNOUNCED.reset(token)


def note(number: int, outcome: asyncio.Future[ChangeOutcome]) -> None:
    announced = ANNOUNCED.get()
    if announced is not None:
        announced.add(number, outcome)


@dataclass(slots=True, eq=False)
class WaitingChange:
    number: int
    method: str
    params: Mapping[str, Any] | None
    change: ServerChange
    outcome: asyncio.Future[ChangeOutcome]
    is_sent_sessionless: bool = field(init=False, default=False)
    is_sent_to_replicas: bool = field(init=False, default=False)
    failures: int = field(init=False, default=0)
    """How often the store failed to tell, though it served something else just before."""

    is_served: bool = field(init=False, default=False)
    done: set[SessionId] = field(init=False, default_factory=set[SessionId])
    """The sessions that have it, or are not entitled."""

    unsure: set[SessionId] = field(init=False, default_factory=set[SessionId])
    """Those that may have it: the store failed in between."""

    busy: list[SessionId] = field(init=False, default_factory=list[SessionId])
    """Those that were in the middle of something when it was their turn."""

    def settle(self, outcome: ChangeOutcome) -> None:
        if not self.outcome.done():
            self.outcome.set_result(outcome)


class WaitingChanges:
    def __init__(self, policy: SessionPolicy, clock: Callable[[], float]) -> None:
        self._policy = policy
        self._clock = clock
        self._waiting: deque[WaitingChange] = deque()
        self._by_key: dict[str, WaitingChange] = {}
        """The waiting change of each coalescing key, if it is not begun."""

        self._bytes = 0
        self._lost: Counter[str] = Counter()
        self._renews = False
        self._away: ChangeOutcome = None
        self._name = secrets.token_urlsafe(12)
        self._numbers = itertools.count(1)

    def __len__(self) -> int:
        return len(self._waiting)

    @property
    def is_away(self) -> bool:
        return self._away is not None

    def answered(self) -> None:
        self._away = None

    @property
    def need_renewal(self) -> bool:
        return self._renews

    def begin_renewal(self) -> None:
        self._say_what_is_lost("too many changes waited; every session has to resume")
        self._renews = False

    def renewal_failed(self) -> None:
        self._renews = True

    def close(self) -> None:
        for waiting in self._waiting:
            waiting.settle(StoreUnavailable("the server stopped"))
            self._lost[waiting.method] += 1
        self._waiting.clear()
        self._by_key.clear()
        self._say_what_is_lost("the server stops")

    def first(self) -> WaitingChange:
        """Return the next change. No later change coalesces with it."""
        waiting = self._waiting[0]
        key = waiting.change.event.key
        if key is not None and self._by_key.get(key) is waiting:
            del self._by_key[key]
        return waiting

    def keep(self, method: str, params: Mapping[str, Any] | None) -> WaitingChange:
        """A change that waits from now on, or the one that it is sent with; if there are too
        many, one that is settled and does not wait.
        """
        key = coalescing_key(method, params, self._policy.coalescing)
        if key is not None and len(self._waiting) >= EACH:
            same = self._by_key.get(key)
            if same is not None:
                if self._away is not None:
                    same.settle(self._away)
                return same
        number = next(self._numbers)
        change = self.change(number, method, params, key)
        outcome = asyncio.get_running_loop().create_future()
        waiting = WaitingChange(number, method, params, change, outcome)
        if len(self._waiting) >= KEPT or self._bytes + change.size > KEPT_BYTES:
            self._lost[method] += 1
            self._renews = True
            waiting.settle(StoreUnavailable("too many changes wait to be stored"))
            return waiting
        self._waiting.append(waiting)
        self._bytes += change.size
        if key is not None:
            self._by_key[key] = waiting
        if self._away is not None:
            waiting.settle(self._away)
        return waiting

    def change(
        self, number: int, method: str, params: Mapping[str, Any] | None, key: str | None
    ) -> ServerChange:
        is_update = method == method_names.RESOURCE_UPDATED
        return ServerChange(
            f"{self._name}.{number}",
            self._clock(),
            updated_uri(params) if is_update else None,
            None if is_update else method_names.CHANGED_KIND.get(method),
            EventTemplate(method, params, key),
            plain_draft(notification_message(method, params), key),
        )

    def remove(self, waiting: WaitingChange) -> None:
        self._waiting.remove(waiting)
        self._bytes -= waiting.change.size
        waiting.settle(None)

    def postpone(self, waiting: WaitingChange, failed: StoreUnavailable) -> None:
        if self._away is None:
            logger.warning(
                "%s did not reach all sessions yet; the server keeps it until the store is back: "
                "%s",
                waiting.method, failed,
            )  # fmt: skip
        self._away = failed
        for each in self._waiting:
            each.settle(failed)
        if waiting.is_served:
            waiting.failures += 1
            if waiting.failures % _BEHIND == 0:
                self._waiting.rotate(-1)

    def _say_what_is_lost(self, why: str) -> None:
        if self._lost:
            logger.error(
                "changes were lost, and sessions miss them (%s): %s",
                why, ", ".join(f"{count} x {method}" for method, count in self._lost.items()),
            )  # fmt: skip
        self._lost.clear()
