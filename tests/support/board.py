"""What threads and event loops tell each other in a test, without polling.

The servers under test run in their own thread with their own event loop, the tests in
another, and scripts of other languages in processes read by a third. They meet here.

Rules:

1. Nothing is lost: a waiter that arrives after the fact returns at once.
2. Every wait is bounded, and the error says what was waited for.
"""

import asyncio
import threading
from collections.abc import Callable
from typing import TypeVar

import anyio

T = TypeVar("T")


class Board:
    """Wakes waiters in any event loop when something changed in any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiters: list[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = []

    def announce(self) -> None:
        """Let every waiter look again. Callable from any thread."""
        with self._lock:
            for loop, event in self._waiters:
                loop.call_soon_threadsafe(event.set)

    async def until(
        self, look: Callable[[], T | None], *, what: str | Callable[[], str], within: float = 30.0
    ) -> T:
        """The first value of ``look()`` that is neither ``None`` nor ``False``.

        Args:
            look: Cheap and free of side effects; called after each announcement.
            what: For the error: what was waited for.
            within: Seconds.

        Raises:
            AssertionError: ``look`` found nothing within ``within``.
        """
        waiter = (asyncio.get_running_loop(), asyncio.Event())
        with self._lock:
            self._waiters.append(waiter)
        try:
            with anyio.move_on_after(within):
                while True:
                    # Clear before looking: an announcement in between sets it again.
                    waiter[1].clear()
                    found = look()
                    if found is not None and found is not False:
                        return found
                    await waiter[1].wait()
        finally:
            with self._lock:
                self._waiters.remove(waiter)
        said = what if isinstance(what, str) else what()
        raise AssertionError(f"not within {within:g} s: {said}")


class Stage:
    """Named marks that tools and tests set and wait for, each kind for the other.

    A tool that shall wait in the middle waits for a mark the test sets; a test that must
    know how far a tool has come waits for a mark the tool sets.
    """

    def __init__(self) -> None:
        self._board = Board()
        self._marks: list[str] = []

    def mark(self, name: str) -> None:
        """Set ``name``, for good. Callable from any thread."""
        self._marks.append(name)
        self._board.announce()

    def count(self, name: str) -> int:
        return self._marks.count(name)

    async def reached(self, name: str, *, times: int = 1, within: float = 30.0) -> None:
        """Return once ``name`` was marked ``times`` times.

        Raises:
            AssertionError: It was not, within ``within`` seconds.
        """
        await self._board.until(
            lambda: self.count(name) >= times,
            what=lambda: f"the mark {name!r} (set so far: {self._marks[-20:]})",
            within=within,
        )
