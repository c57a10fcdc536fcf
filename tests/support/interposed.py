"""Stores between whose methods and their callers a test may step.

`stepped` does the stepping, over any store. Over `Interposed`, in memory, what stands in
``before`` runs before a method's effect, what stands in ``after`` when it has had it: it waits as
long as a store on another machine would take, or raises as one that is away does.

`suspending_store` suspends in every method, before and after its work, as a store on another
machine does. `MemoryStore` never suspends, so over it every race is won by luck. Over this one,
other tasks run between any two steps, in an order that the seed decides: what is wrong with the
order shows, and shows again.
"""

import asyncio
import inspect
import random
from collections.abc import Awaitable, Callable
from typing import Any, cast

from mcp_sessions.errors import StoreUnavailable
from mcp_sessions.stores.contract import SessionStore
from mcp_sessions.stores.memory import MemoryStore

Step = Callable[[], Awaitable[None]]
Around = Callable[[str, Callable[[], Awaitable[Any]]], Awaitable[Any]]
"""Gets the name of a method that is called, and its work; awaits that when its time has come."""


class _Stepped:
    def __init__(self, store: object, around: Around, except_: tuple[str, ...]) -> None:
        self._store = store
        self._around = around
        self._except = except_
        self._calls: dict[str, tuple[Any, Any]] = {}
        """A method's name → the method, and what steps around it."""

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._store, name)
        if not callable(found):
            return found
        kept = self._calls.get(name)
        # A test may have put another method there.
        if kept is not None and kept[0] == found:
            return kept[1]
        as_it_is = name.startswith("_") or name in self._except
        if as_it_is or not inspect.iscoroutinefunction(found):
            return found

        async def call(*args: Any, **kwargs: Any) -> Any:
            return await self._around(name, lambda: found(*args, **kwargs))

        self._calls[name] = (found, call)
        return call


def stepped(store: Any, around: Around, except_: tuple[str, ...] = ("open", "close")) -> Any:
    """``store``, whose every method is called by ``around``, but for ``except_``."""
    return _Stepped(store, around, except_)


def suspending_store(seed: int) -> SessionStore:
    """A `MemoryStore` that lets others run around each of its methods."""
    chance = random.Random(seed)

    async def suspend() -> None:
        for _ in range(chance.randrange(3)):
            await asyncio.sleep(0)

    async def around(_: str, work: Callable[[], Awaitable[Any]]) -> Any:
        await suspend()
        result = await work()
        await suspend()
        return result

    return cast("SessionStore", stepped(MemoryStore(), around))


class Interposed:
    """The steps, by the name of the store's method."""

    def __init__(self, store: SessionStore | None = None) -> None:
        """Over that store; None: over one in memory."""
        self.before: dict[str, Step] = {}
        self.after: dict[str, Step] = {}
        self.calls: list[str] = []
        """The methods that were called, in order."""

        self.memory = MemoryStore()
        self.store = cast("SessionStore", stepped(store or self.memory, self._call))

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

    async def _call(self, name: str, work: Callable[[], Awaitable[Any]]) -> Any:
        self.calls.append(name)
        before = self.before.get(name)
        if before is not None:
            await before()
        result = await work()
        after = self.after.get(name)
        if after is not None:
            await after()
        return result
