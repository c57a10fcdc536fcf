"""Two ways to run work: one ends with its caller, one does not."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from typing import Any, TypeVar

from mcp_sessions.background import stopped

logger = logging.getLogger(__name__)

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
