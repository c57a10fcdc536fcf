"""Repeat writes to the store until it is back.

A connection or a request may leave state in the store at its end, although no caller waits any
more. A store that is away at that moment would keep the state for ever. And what is appended to a
log must not be missing there. Rules:

1. A write is idempotent, and its failure does not fail its owner.
2. The steps of one log are done in order. While one of them waits, the later ones wait behind it.
3. The waiting writes are bounded in bytes (``MOST``). Beyond that, the session that has most loses
   its largest one. Its owner says what is written instead, so that the loss shows.
4. One write that fails delays no other.
5. A reader does not wait for ever: a log that has waited for ``PATIENCE`` is reported, again and
   again.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import secrets
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Hashable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final

from mcp_sessions.background import Background, report
from mcp_sessions.core.backoff import Backoff
from mcp_sessions.errors import StoreUnavailable

logger = logging.getLogger(__name__)

PendingWrite = Callable[[], Awaitable[object]]
Instead = Callable[[], PendingWrite]
"""Called when writes lose their place. Returns what is done instead of them."""

MOST: Final = 16_777_216
"""Bytes of what waits, at the most."""

OVERHEAD: Final = 1_024
"""Bytes that a step of a log counts in addition to its own."""

_NAME = "writes that wait for the store"

_BASE, _CAP = 0.2, 1.0
"""Seconds between two tries: at the most at first, and at the most ever. Readers wait for it."""

PATIENCE: Final = 15.0
"""Seconds for which a reader waits for a store that takes no events."""

_LAST_WORDS = 5.0
"""Seconds that the writes have when the server stops."""


@dataclass(slots=True, eq=False)
class _Waiting:
    write: PendingWrite
    owner: Hashable = None
    """The session, or the principal, that it is of."""

    size: int = 0
    lost: Instead | None = None

    def lose(self) -> None:
        if self.lost is not None:
            self.write = self.lost()
        self.size, self.lost = 0, None


@dataclass(slots=True, eq=False, kw_only=True)
class _WaitingLog(_Waiting):
    """The steps of one log that wait, in order."""

    turn: Callable[[], asyncio.Lock]
    """Held during each step."""

    steps: deque[tuple[PendingWrite, int]] = field(default_factory=deque[tuple[PendingWrite, int]])

    instead: PendingWrite | None = None
    """The first step, if the log lost its place."""

    reported_at: float
    """When it began to wait, or when it was reported."""

    is_late: bool = False
    """It was reported."""

    def lose(self) -> None:
        self.instead = self.lost() if self.lost is not None else nothing
        self.steps = deque([(self.instead, 0)])
        self.size = 0


class PendingWrites:
    """The writes of one process that wait for the store."""

    def __init__(self) -> None:
        self._writes: dict[Hashable, _Waiting] = {}
        self._background = Background()
        self._is_working = False
        self._has_ended = False
        self._counted = 0
        """Bytes of what waits, and of what waited since they were counted."""

        self.name = secrets.token_urlsafe(12)
        """Unique among those of all processes."""

        self.number = 0
        """Of the last event that got a name."""

        self.report_late: Callable[[Any], Awaitable[object]] = _to_nobody
        """Called with the name of a log that has waited for ``PATIENCE``."""

    def __len__(self) -> int:
        return len(self._writes)

    @property
    def size(self) -> int:
        return sum(each.size for each in list(self._writes.values()))

    @property
    def count(self) -> int:
        """The number of writes that wait: each step of a log is one."""
        waiting = list(self._writes.values())
        return sum(len(one.steps) if isinstance(one, _WaitingLog) else 1 for one in waiting)

    async def settle(
        self,
        writes: Mapping[Hashable, PendingWrite],
        *,
        owner: Hashable = None,
        size: int = 0,
        lost: Instead | None = None,
    ) -> None:
        """Do writes, and return. Writes that the store refuses now are repeated later.

        Args:
            writes: Name → what to do; a newer one of the same name takes the place of an older.
            owner: The session that they are of.
            size: Bytes that each of them holds until it is done.
            lost: See `Instead`.
        """
        for name, write in writes.items():
            self._writes[name] = _Waiting(write, owner, size, lost)
            self._counted += size
        try:
            for name in writes:
                await self._do(name)
        except StoreUnavailable as failed:
            self._bound()
            logger.warning("the store is away; writes wait until it is back: %s", failed)
        finally:
            # Also if this task was cancelled: nobody else remembers them.
            self._work_on()

    def add(self, name: Hashable, write: PendingWrite) -> None:
        self._writes[name] = _Waiting(write)
        self._work_on()

    async def flush(self, name: Hashable) -> bool:
        """Do one of the waiting writes now, or all steps of a log; False: none of that name waits.

        Raises:
            StoreUnavailable: The write still waits.
        """
        if name not in self._writes:
            return False
        await self._do(name)
        return True

    async def flush_late(self, log: Hashable) -> None:
        """Do all steps of a log that has waited for ``PATIENCE``.

        Raises:
            StoreUnavailable: They still wait.
        """
        waiting = self._writes.get(log)
        if isinstance(waiting, _WaitingLog) and waiting.is_late:
            await self._do(log)

    # --- logs --------------------------------------------------------------------------------

    async def in_order(
        self,
        log: Hashable,
        step: PendingWrite,
        *,
        owner: Hashable,
        holds: bytes,
        lost: Instead,
        turn: Callable[[], asyncio.Lock] | None = None,
        overlaps: bool = False,
    ) -> bool:
        """Do a step of a log after those that wait; False: it waits.

        Args:
            log: Names the log.
            step: What to do. It may be done again after it failed.
            owner: The session that it is of.
            holds: What it keeps in memory.
            lost: See `Instead`.
            turn: Held during each step; None: nothing is.
            overlaps: The step is tried at once, without ``turn``.
        """
        if log not in self._writes:
            try:
                if turn is None or overlaps:
                    await step()
                    return True
                async with turn():
                    if log not in self._writes:
                        await step()
                        return True
            except StoreUnavailable as failed:
                logger.warning("the store is away; writes wait until it is back: %s", failed)
        self.keep(log, step, owner=owner, holds=holds, lost=lost, turn=turn)
        return False

    def keep(
        self,
        log: Hashable,
        step: PendingWrite,
        *,
        owner: Hashable,
        holds: bytes,
        lost: Instead,
        turn: Callable[[], asyncio.Lock] | None = None,
    ) -> None:
        """Do a step of a log later; see :meth:`in_order`."""
        waiting = self._writes.get(log)
        if not isinstance(waiting, _WaitingLog):
            own = asyncio.Lock()
            waiting = _WaitingLog(
                nothing,
                owner,
                lost=lost,
                turn=turn or (lambda: own),
                reported_at=asyncio.get_running_loop().time(),
            )
            waiting.write = partial(_work_off, waiting)
            self._writes[log] = waiting
        size = len(holds) + OVERHEAD
        waiting.steps.append((step, size))
        waiting.size += size
        self._counted += size
        self._bound()
        self._work_on()

    def steps(self, log: Hashable) -> list[PendingWrite]:
        """Return the steps of a log that wait."""
        waiting = self._writes.get(log)
        return [step for step, _ in waiting.steps] if isinstance(waiting, _WaitingLog) else []

    # --- from start to end -----------------------------------------------------------------

    async def close(self) -> None:
        """Try once more, and drop what the store does not take. What other processes cannot find
        out is lost.
        """
        self._has_ended = True
        await self._background.close()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_LAST_WORDS):
                for name in list(self._writes):
                    with contextlib.suppress(StoreUnavailable):
                        await self._do(name)
        if self._writes:
            logger.error(
                "%d writes were lost: the server stopped before the store was back",
                len(self._writes),
            )

    def _bound(self) -> None:
        if self._counted <= MOST:
            return
        # To count all of them each time would take longer, the more of them wait.
        size = self.size
        while size > MOST:
            owners = Counter[Hashable]()
            for each in self._writes.values():
                owners[each.owner] += each.size
            (most, _), *_ = owners.most_common(1)
            its_own = (each for each in self._writes.values() if each.owner == most)
            largest = max(its_own, key=lambda each: each.size)
            size -= largest.size
            largest.lose()
            logger.error("too much waits for the store: the session with most of it loses some")
        self._counted = size

    def _work_on(self) -> None:
        if self._writes and not self._has_ended and not self._is_working:
            self._is_working = True
            self._background.loop(_NAME, self._work)

    async def _work(self) -> None:
        backoff = Backoff(base=_BASE, cap=_CAP)
        while self._writes:
            name = next(iter(self._writes))
            try:
                await self._do(name)
            except StoreUnavailable:
                if (waiting := self._writes.pop(name, None)) is not None:
                    # It may be this one that the store fails for.
                    self._writes[name] = waiting
                await self._report_late()
                await asyncio.sleep(backoff.failed(random.random()))
            else:
                backoff.progressed()
        self._is_working = False

    async def _report_late(self) -> None:
        now = asyncio.get_running_loop().time()
        for name, each in list(self._writes.items()):
            if isinstance(each, _WaitingLog) and now >= each.reported_at + PATIENCE:
                each.reported_at, each.is_late = now, True
                try:
                    await self.report_late(name)
                except Exception as failed:
                    report(_NAME, failed)

    async def _do(self, name: Hashable) -> None:
        waiting = self._writes.get(name)
        if waiting is None:
            return
        write = waiting.write
        try:
            await write()
        except StoreUnavailable:
            raise
        except Exception as failed:
            # A mistake, not an absence: another try would make it again.
            report(_NAME, failed)
        if self._writes.get(name) is waiting and waiting.write is write:
            del self._writes[name]


async def _to_nobody(log: Hashable) -> None: ...


async def nothing() -> None:
    """What is done instead of a write whose loss nobody can be told of."""


async def _work_off(log: _WaitingLog) -> None:
    """Do the steps of a log.

    Raises:
        StoreUnavailable: There are some left.
    """
    while log.steps:
        async with log.turn():
            if not log.steps:
                return
            first = log.steps[0]
            try:
                await first[0]()
            except StoreUnavailable:
                raise
            except Exception as failed:
                # A mistake, not an absence. What follows would hide the gap.
                report(_NAME, failed)
                if first[0] is not log.instead:
                    log.lose()
                    continue
            if log.steps and log.steps[0] is first:
                log.steps.popleft()
                log.size -= first[1]
