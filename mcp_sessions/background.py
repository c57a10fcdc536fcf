"""Run work in the background: an owner runs it, and learns of its failure.

Rules, owned by ``tests/server/test_background.py``:

1. Every failure of a task is seen. It is a line in the log and a count
   (``mcp_sessions.background_failures``), also if its outcome is gathered later.
2. A loop continues: after a failure it starts again after a back-off, until its owner closes.
3. A store that is away is no defect: a warning without a traceback, and counted as well.
4. The text of an exception may quote an id. So only its kind is logged, and the line that raised
   it. The texts of our own errors hold nothing secret.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable, Coroutine
from contextvars import Context
from typing import Any, TypeVar

from mcp_sessions import metrics
from mcp_sessions.core.backoff import Backoff
from mcp_sessions.errors import SessionsError, StoreUnavailable

logger = logging.getLogger(__name__)

_BASE = 0.5
"""Seconds that a loop rests at the most after its first failure."""

_CAP = 15.0
"""Seconds that a loop rests at the most. One that ran for longer had made progress."""

_SLICE = 0.005
"""Seconds."""

_TURNS = 4
"""Turns of the event loop in which a small request is read, answered and written."""


async def give_way() -> None:
    """Let others have several turns: between two pieces of a work that has many.

    With one turn between them, a request that needs several would wait for as many pieces.
    """
    for _ in range(_TURNS):
        await asyncio.sleep(0)


class TimeSlice:
    """Measures for how long a work ran without waiting.

    Long work of unknown length gives way (:func:`give_way`) at the end of each slice.
    """

    def __init__(self) -> None:
        self._until: float | None = None

    def has_ended(self) -> bool:
        loop = asyncio.get_running_loop()
        if self._until is None:
            self._until = loop.time() + _SLICE
            # If the work waits by itself, others have their turn, and the next slice begins.
            loop.call_soon(self._begin_anew)
            return False
        return loop.time() >= self._until

    def _begin_anew(self) -> None:
        self._until = None


class Background:
    def __init__(self, *, draw: Callable[[], float] = random.random) -> None:
        """Hold no task yet.

        Args:
            draw: A random number from 0 to 1, for how long a loop rests.
        """
        self._draw = draw
        self.tasks: set[asyncio.Task[Any]] = set()
        """Those that run."""

    def run(
        self, what: str, work: Coroutine[Any, Any, None], *, context: Context | None = None
    ) -> asyncio.Task[None]:
        """Run ``work`` once. Its task raises nothing but ``CancelledError``.

        Args:
            what: Names the work in the log, in the counter and as the task: one of a few
                constants, without an id.
            context: Of the task; None: a copy of the caller's.
        """
        task = self._start(what, _once(what, work), context)
        # Cancelled before its first step, it leaves a coroutine that nobody awaits.
        task.add_done_callback(lambda _: work.close())
        return task

    def loop(self, what: str, make: Callable[[], Coroutine[Any, Any, None]]) -> asyncio.Task[None]:
        """Run what ``make`` makes until it returns; if it raises, rest, and run it anew.

        Args:
            what: See :meth:`run`.
        """
        return self._start(what, self._again_and_again(what, make), None)

    async def close(self) -> None:
        """Cancel every task and wait for it. More can be run afterwards."""
        # They raise nothing that was not reported (rule 1).
        await stopped(*(task for task in self.tasks if task is not asyncio.current_task()))

    def hold(self, task: asyncio.Task[Any]) -> None:
        """Take a task that its maker started. The maker has its failure reported."""
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)

    def _start(
        self, what: str, work: Coroutine[Any, Any, Any], context: Context | None
    ) -> asyncio.Task[None]:
        task = asyncio.create_task(work, name=what, context=context)
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)
        return task

    async def _again_and_again(
        self, what: str, make: Callable[[], Coroutine[Any, Any, None]]
    ) -> None:
        loop = asyncio.get_running_loop()
        backoff = Backoff(base=_BASE, cap=_CAP)
        while True:
            begun = loop.time()
            if await _once(what, make()):
                return
            if loop.time() - begun > _CAP:
                backoff.progressed()
            await asyncio.sleep(backoff.failed(self._draw()))


async def _once(what: str, work: Coroutine[Any, Any, None]) -> bool:
    try:
        await work
        return True
    except Exception as failed:
        report(what, failed)
    except asyncio.CancelledError as cancelled:
        if _is_cancelled():
            raise
        report(what, cancelled)
    return False


def _is_cancelled() -> bool:
    """Whether the task itself was cancelled, and not something that it waited for."""
    task = asyncio.current_task()
    return task is None or task.cancelling() > 0


async def stopped(*tasks: asyncio.Task[Any]) -> list[BaseException]:
    """Cancel tasks and wait until they ended.

    If the caller is cancelled meanwhile, it gets that cancellation, and none of the tasks' own.
    ``asyncio.gather`` would raise one of those: a cancel scope around the caller would not
    recognise it.

    Returns:
        Their exceptions, in their order, except cancellations.
    """
    for task in tasks:
        task.cancel()
    if tasks:
        await asyncio.wait(tasks)
    raised = (None if task.cancelled() else task.exception() for task in tasks)
    return [failed for failed in raised if failed is not None]


def watched(what: str, task: asyncio.Task[Any]) -> None:
    """Report what ends a task that its owner starts and holds itself.

    Args:
        what: See :meth:`Background.run`.
    """

    def ended(task: asyncio.Task[Any]) -> None:
        failed = None if task.cancelled() else task.exception()
        if failed is not None:
            report(what, failed)

    task.add_done_callback(ended)


def report(what: str, failed: BaseException) -> None:
    """Log and count what ended a piece of work that nobody awaits.

    Args:
        what: See :meth:`Background.run`.
    """
    metrics.background_failed(what, type(failed).__name__)
    if isinstance(failed, StoreUnavailable):
        logger.warning("%s: the session store failed: %s", what, failed)
        return
    raised = failed if isinstance(failed, SessionsError) else _Failure(type(failed).__name__)
    logger.error("%s failed", what, exc_info=(type(raised), raised, failed.__traceback__))


class _Failure(Exception):
    """Stands for an exception whose text may hold anything: its kind."""


T = TypeVar("T")


async def ended_with_caller(work: Coroutine[Any, Any, T]) -> T:
    """The outcome of ``work``, which runs in a task of its own, with a context of its own.

    If the caller is cancelled, so is the work, and it is waited for.

    Raises:
        CancelledError: The caller was cancelled.
        WorkCancelled: The work was, by itself or by another.
    """
    task = asyncio.create_task(work)
    try:
        await asyncio.wait({task})
    except asyncio.CancelledError:
        await stopped(task)
        raise
    if task.cancelled():
        raise WorkCancelled
    return task.result()


class WorkCancelled(Exception):
    """The awaited work was cancelled, not the task that waits for it."""


async def to_the_end(work: Coroutine[Any, Any, T]) -> T:
    """Run ``work`` to its end, even if the caller is cancelled."""
    task = asyncio.create_task(work)
    cancelled: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.wait({task})
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is None:
        return task.result()
    if not task.cancelled() and (failed := task.exception()) is not None:
        logger.warning("a write failed after its client disconnected: %r", failed)
    raise cancelled
