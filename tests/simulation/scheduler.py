"""An event loop in virtual time, in which a seed decides what runs next.

A replica, a command behind it and a client are each a `Host`. Every step of a task belongs to the
host that started it: the host is in the context of the step (`Host.enters`). So a host is killed or
paused between any two steps of its tasks, and no task of it notices.

Rules:

1. Any ready task may run next, and a ready task may be passed over for some rounds. Callbacks keep
   their order, as the event loop promises it.
2. A killed host takes no step. The steps of a paused host wait until it goes on.
3. Time passes only when nothing is ready.
"""

import asyncio
import heapq
import random
import threading
from collections import deque
from collections.abc import Callable, Coroutine
from contextvars import ContextVar, copy_context
from typing import Any, Final, TypeVar, cast

from tests.support.virtual_time import VirtualTimeLoop

T = TypeVar("T")

_HOST: Final[ContextVar["Host | None"]] = ContextVar("host", default=None)

STEPS: Final = 300_000
"""Steps of one run, at most. A run that needs more turns in a circle."""


class Host:
    """What is killed and paused as one."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.is_dead = False
        self.is_paused = False
        self.held: list[asyncio.Handle] = []
        """The steps that became ready while it was paused, or after its death."""

        self.at_death: dict[object, Callable[[], None]] = {}
        """What the others notice at once: its connections break, its children die."""

    def enters(self, work: Callable[..., T], *args: Any) -> T:
        """Call ``work`` as a part of this host: so are the tasks that it starts."""
        context = copy_context()
        context.run(_HOST.set, self)
        return context.run(work, *args)

    def starts(self, work: Coroutine[Any, Any, T]) -> "asyncio.Task[T]":
        """Run ``work`` in a task of this host."""
        return self.enters(lambda: asyncio.get_running_loop().create_task(work))

    def kill(self) -> None:
        """Take no further step, and break what others have with it."""
        self.is_dead = True
        for notice in list(self.at_death.values()):
            notice()

    def pause(self) -> None:
        self.is_paused = True

    def resume(self) -> None:
        """Go on with what became ready meanwhile. After its death: so that it can be cleared up."""
        self.is_paused = self.is_dead = False
        loop = cast(Any, asyncio.get_running_loop())
        loop._ready.extend(self.held)
        self.held.clear()


def current_host() -> Host | None:
    return _HOST.get()


class TooManySteps(AssertionError):
    """The run never comes to an end."""


class NothingCanHappen(AssertionError):
    """No task is ready, and no timer runs: what is awaited never comes."""


class SimulationLoop(VirtualTimeLoop):
    def __init__(self, chance: random.Random, disorder: float) -> None:
        """Hold nothing yet.

        Args:
            chance: Decides the order.
            disorder: How likely a ready task is passed over, from 0 to 1; 0 is asyncio's own order.
        """
        super().__init__()
        self._chance = chance
        self._disorder = disorder
        self.steps = 0
        self._owner = threading.get_ident()

    def in_order(self) -> None:
        """From now on everything runs in asyncio's own order."""
        self._disorder = 0.0

    def _write_to_self(self) -> None:
        """Do nothing: no other thread waits for this one."""

    def call_soon_threadsafe(self, callback: Any, *args: Any, context: Any = None) -> Any:
        """See `asyncio`. No other thread has a part in a run: its time would be real."""
        if threading.get_ident() != self._owner:
            raise RuntimeError("another thread calls into a simulation")
        return self.call_soon(callback, *args, context=context)

    def _run_once(self) -> None:
        inside = cast(Any, self)
        ready: deque[asyncio.Handle] = inside._ready
        timers: list[asyncio.TimerHandle] = inside._scheduled
        if not ready:
            while timers and timers[0].cancelled():
                self._drop(timers)
            if not timers:
                raise NothingCanHappen
            self._jumping.now = max(self._jumping.now, timers[0].when())
        now = self.time()
        while timers and timers[0].when() <= now:
            timer = self._drop(timers)
            if not timer.cancelled():
                ready.append(timer)
        batch = [handle for handle in ready if not handle.cancelled()]
        ready.clear()
        handle: Any
        for handle in self._ordered(batch):
            host = handle._context.get(_HOST)
            if host is not None and (host.is_dead or host.is_paused):
                host.held.append(handle)
                continue
            self.steps += 1
            if not handle._cancelled:
                handle._run()
        if self.steps > STEPS:
            raise TooManySteps

    def _drop(self, timers: list[asyncio.TimerHandle]) -> asyncio.TimerHandle:
        timer = heapq.heappop(timers)
        cast(Any, timer)._scheduled = False
        return timer

    def _ordered(self, batch: list[asyncio.Handle]) -> list[asyncio.Handle]:
        """The steps that run now; others are ready again in the next round."""
        if not self._disorder:
            return batch
        chance, disorder = self._chance.random, self._disorder
        ready: deque[asyncio.Handle] = cast(Any, self)._ready
        now: list[asyncio.Handle] = []
        places: list[int] = []
        handle: Any
        for handle in batch:
            if isinstance(getattr(handle._callback, "__self__", None), asyncio.Task):
                if chance() < disorder:
                    ready.append(handle)
                    continue
                places.append(len(now))
            now.append(handle)
        if len(places) > 1:
            tasks = [now[place] for place in places]
            self._chance.shuffle(tasks)
            for place, task in zip(places, tasks, strict=True):
                now[place] = task
        return now
