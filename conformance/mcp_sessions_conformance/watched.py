"""Waiting until something has changed, or has not."""

import asyncio
import contextlib
from collections.abc import Callable
from typing import Any

from mcp_sessions_conformance.peer import Failure


class Watched:
    """Holds a value that changes, and wakes its waiters."""

    def __init__(self, wait: float) -> None:
        self.wait = wait
        """Seconds that anything may take."""

        self._changed = asyncio.Event()

    def wake(self) -> None:
        """Let those who wait look again."""
        self._changed.set()
        self._changed = asyncio.Event()

    async def until(
        self, look: Callable[[], Any], what: str, *, within: float | None = None
    ) -> Any:
        """Wait until ``look()`` finds something, and return it.

        Raises:
            Failure: It found nothing in time.
        """
        seconds = self.wait if within is None else within
        deadline = asyncio.get_running_loop().time() + seconds
        while True:
            changed = self._changed
            found = look()
            if found:
                return found
            left = deadline - asyncio.get_running_loop().time()
            if left <= 0:
                raise Failure(f"{what} did not come within {seconds:g} s")
            try:
                async with asyncio.timeout(left):
                    await changed.wait()
            except TimeoutError:
                continue

    async def never(self, look: Callable[[], Any], what: str, *, within: float) -> None:
        """Return when ``look()`` found nothing for so many seconds.

        Raises:
            Failure: It found something, at once.
        """
        deadline = asyncio.get_running_loop().time() + within
        while True:
            changed = self._changed
            if look():
                raise Failure(what)
            left = deadline - asyncio.get_running_loop().time()
            if left <= 0:
                return
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(left):
                    await changed.wait()
