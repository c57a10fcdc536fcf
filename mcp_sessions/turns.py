"""Let a few of many waiting tasks run in each turn of the event loop.

Rules, owned by ``tests/test_turns.py``:

1. In one turn of the event loop a few tasks continue, in the order in which they came. Other
   requests wait for these few, not for all.
2. A task that is cancelled while it waits takes no turn from another.
3. Work in many steps takes a few steps in each turn, from each task that has some, in their order.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

AT_ONCE = 32


class Turns:
    """Turns of the event loop, shared by the callers that do the same.

    Args:
        at_once: How many go on in one of them.
    """

    __slots__ = ("_at_once", "_is_due", "_left", "_loop", "_waiting")

    def __init__(self, at_once: int = AT_ONCE) -> None:
        self._at_once = at_once
        self._loop: asyncio.AbstractEventLoop | None = None
        self._begin(None)

    def _begin(self, loop: asyncio.AbstractEventLoop | None) -> None:
        self._loop = loop
        self._left = self._at_once
        self._is_due = False
        self._waiting: deque[asyncio.Future[None]] = deque()

    async def take(self) -> None:
        """Wait for the callers that came before."""
        loop = asyncio.get_running_loop()
        if loop is not self._loop:
            # What waited in a loop that has ended waits no more.
            self._begin(loop)
        if not self._is_due:
            self._is_due = True
            loop.call_soon(self._next)
        if self._left:
            self._left -= 1
            return
        mine = loop.create_future()
        self._waiting.append(mine)
        await mine

    def _next(self) -> None:
        self._left = self._at_once
        while self._left and self._waiting:
            first = self._waiting.popleft()
            if not first.done():
                first.set_result(None)
                self._left -= 1
        self._is_due = self._left < self._at_once
        if self._is_due:
            asyncio.get_running_loop().call_soon(self._next)


class Steps:
    """Does work in steps, in turns with other work.

    Args:
        at_once: How many of them are done in one turn of the event loop.
    """

    __slots__ = ("_at_once", "_is_due", "_waiting")

    def __init__(self, at_once: int = 4) -> None:
        self._at_once = at_once
        self._waiting: deque[Callable[[], bool]] = deque()
        self._is_due = False

    def add(self, step: Callable[[], bool]) -> None:
        """Call ``step`` in its turn, and again for as long as it returns True."""
        self._waiting.append(step)
        self._go_on()

    def _go_on(self) -> None:
        if self._waiting and not self._is_due:
            self._is_due = True
            asyncio.get_running_loop().call_soon(self._next)

    def _next(self) -> None:
        self._is_due = False
        try:
            for _ in range(min(self._at_once, len(self._waiting))):
                step = self._waiting.popleft()
                if step():
                    self._waiting.append(step)
        finally:
            # Also if one failed: the others wait.
            self._go_on()
