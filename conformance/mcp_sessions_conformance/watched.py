import asyncio
import contextlib
from collections.abc import Callable
from typing import Any

from mcp_sessions_conformance.peer import Failure


class Watched:
    def __init__(self, wait: float) -> None:
        self.wait = wait
        """Seconds that anything may take."""

        self._changed = asyncio.Event()

    def wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    async def until(
        self, look: Callable[[], Any], what: str, *, within: float | None = None
    ) -> Any:
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
