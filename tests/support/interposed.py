"""A store in memory, between whose methods and their callers a test may step.

What stands in ``before`` runs before a method's effect, what stands in ``after`` when it has had
it: it waits as long as a store on another machine would take, or raises as one that is away does.
"""

import asyncio
import inspect
from collections.abc import Awaitable, Callable
from typing import Any, cast

from mcp_sessions.errors import StoreUnavailable
from mcp_sessions.stores.contract import SessionStore
from mcp_sessions.stores.memory import MemoryStore

Step = Callable[[], Awaitable[None]]


class Interposed:
    """The steps, by the name of the store's method."""

    def __init__(self) -> None:
        self.before: dict[str, Step] = {}
        self.after: dict[str, Step] = {}
        self.calls: list[str] = []
        """The methods that were called, in order."""

        self.memory = MemoryStore()
        self.store = cast("SessionStore", _Store(self))

    def takes(self, name: str, seconds: float) -> None:
        """A method answers so long after its effect."""

        async def wait() -> None:
            await asyncio.sleep(seconds)

        self.after[name] = wait

    def fails(self, name: str, when: str, *, times: int | None = None, first: int = 0) -> None:
        """A method fails.

        Args:
            when: ``before`` its effect, or ``after`` it.
            times: How often; None: until the test ends it.
            first: How many calls come through until then.
        """
        passed = 0

        async def fail() -> None:
            nonlocal passed
            passed += 1
            if passed > first and (times is None or passed <= first + times):
                raise StoreUnavailable("away")

        (self.before if when == "before" else self.after)[name] = fail

    def mend(self) -> None:
        """Nothing stands between any more."""
        self.before.clear()
        self.after.clear()


class _Store:
    """The store as the layer sees it: each method waits for its step first."""

    def __init__(self, interposed: Interposed) -> None:
        self._interposed = interposed
        for name, method in inspect.getmembers(interposed.memory, inspect.iscoroutinefunction):
            if not name.startswith("_") and name not in ("open", "close"):
                setattr(self, name, self._stepped(name, method))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._interposed.memory, name)

    def _stepped(
        self, name: str, method: Callable[..., Awaitable[Any]]
    ) -> Callable[..., Awaitable[Any]]:
        interposed = self._interposed

        async def call(*args: Any, **kwargs: Any) -> Any:
            interposed.calls.append(name)
            before = interposed.before.get(name)
            if before is not None:
                await before()
            result = await method(*args, **kwargs)
            after = interposed.after.get(name)
            if after is not None:
                await after()
            return result

        return call
