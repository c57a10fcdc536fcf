"""Report the changes of tasks on listens outside of sessions.

Rules, owned by ``tests/server/requests/test_task_listening.py``:

1. A listen gets the status that a task has when it begins, and each later one. Of several changes
   that a slow client did not take yet it gets the last.
2. A change that no message brought is found by a look at the store, every few seconds.
3. A task that has ended, or is forgotten, is looked at no more.

In a session, the changes of its tasks are events of its log.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from mcp_sessions.core.messages import encode
from mcp_sessions.errors import StoreUnavailable
from mcp_sessions.ids import SessionId

_LOOK: Final = 4.0
"""Seconds between two looks at what is listened to."""

Json = dict[str, Any]
Show = Callable[[SessionId], Awaitable[tuple[Json, bool] | None]]
Say = Callable[[Json], Awaitable[None]]


@dataclass(slots=True, eq=False, repr=False)
class _Listen:
    changed: dict[SessionId, None]
    wake: asyncio.Event = field(default_factory=asyncio.Event)


class TaskListeners:
    def __init__(self) -> None:
        self._listens: dict[SessionId, set[_Listen]] = {}

    def changed(self, task_id: SessionId) -> None:
        for listen in self._listens.get(task_id, ()):
            listen.changed[task_id] = None
            listen.wake.set()

    async def serve(self, task_ids: Sequence[SessionId], show: Show, say: Say) -> None:
        """Report tasks until each of them has ended.

        Args:
            show: Returns a task, and whether it has ended. None: it is forgotten.
            say: Sends it to the client, and waits for room there.
        """
        listen = _Listen(dict.fromkeys(task_ids))
        said: dict[SessionId, int | None] = dict.fromkeys(task_ids)
        for task_id in said:
            self._listens.setdefault(task_id, set()).add(listen)
        try:
            while said:
                listen.wake.clear()
                looked, listen.changed = listen.changed, {}
                for task_id in looked:
                    if task_id in said and not await _reported(task_id, said, show, say):
                        del said[task_id]
                try:
                    async with asyncio.timeout(_LOOK):
                        await listen.wake.wait()
                except TimeoutError:
                    listen.changed = dict.fromkeys(said)
        finally:
            for task_id in task_ids:
                listens = self._listens.get(task_id, set())
                listens.discard(listen)
                if not listens:
                    self._listens.pop(task_id, None)


async def _reported(
    task_id: SessionId, said: dict[SessionId, int | None], show: Show, say: Say
) -> bool:
    """Report a task if it changed. Return whether it runs still."""
    try:
        found = await show(task_id)
    except StoreUnavailable:
        # The next look shows it.
        return True
    if found is None:
        return False
    shown, has_ended = found
    known = hash(encode(shown))
    if said[task_id] != known:
        said[task_id] = known
        await say(shown)
    return not has_ended
