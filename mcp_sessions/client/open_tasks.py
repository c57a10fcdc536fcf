"""Remember the tasks of a program's calls, until their outcomes are here.

A task may outlive the program: a jar keeps its id for the next run. The server has no list of
tasks. They are bounded in number and in bytes. The oldest are forgotten first.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Final

import anyio
import anyio.to_thread

from mcp_sessions.client.jar import JarSlot, OpenTask
from mcp_sessions.core.messages import encode

logger = logging.getLogger(__name__)

_MOST: Final = 256
_MOST_BYTES: Final = 65_536


class OpenTasks:
    def __init__(self, slot: JarSlot | None) -> None:
        self._slot = slot
        self._tasks: dict[str, OpenTask] = {}
        self._saved: tuple[OpenTask, ...] = ()
        self._saving = anyio.Lock()

    def all(self) -> tuple[OpenTask, ...]:
        return tuple(self._tasks.values())

    async def load(self) -> None:
        if self._slot is not None:
            saved = await anyio.to_thread.run_sync(self._slot.load_tasks)
            self._tasks = {task.task_id: task for task in saved}
            self._saved = self.all()

    async def add(self, task: OpenTask) -> None:
        self._tasks[task.task_id] = task
        while len(self._tasks) > _MOST or _size(self._tasks.values()) > _MOST_BYTES:
            del self._tasks[next(iter(self._tasks))]
        await self._save()

    async def remove(self, task_id: str) -> None:
        if self._tasks.pop(task_id, None) is not None:
            await self._save()

    async def _save(self) -> None:
        if self._slot is None:
            return
        async with self._saving:
            tasks = self.all()
            if tasks == self._saved:
                return
            try:
                await anyio.to_thread.run_sync(self._slot.save_tasks, tasks)
                self._saved = tasks
            except OSError as error:
                logger.warning("a task is not in the jar: %s", error.strerror)


def _size(tasks: Iterable[OpenTask]) -> int:
    return sum(len(encode((task.task_id, task.tool, task.arguments))) for task in tasks)
