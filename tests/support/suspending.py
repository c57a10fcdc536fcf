"""A store that suspends in every method, before and after its work, as one on another machine does.

`MemoryStore` never suspends, so over it every race is won by luck. Over this one, other
tasks run between any two steps, in an order that the seed decides: what is wrong with the
order shows, and shows again.
"""

import asyncio
import inspect
import random
from collections.abc import Awaitable, Callable
from typing import Any, cast

from mcp_sessions.stores.contract import SessionStore
from mcp_sessions.stores.memory import MemoryStore


def suspending_store(seed: int) -> SessionStore:
    """A `MemoryStore` that lets others run around each of its methods."""
    return cast("SessionStore", _Suspending(MemoryStore(), random.Random(seed)))


class _Suspending:
    """Stands for any method of the store behind it."""

    def __init__(self, store: MemoryStore, chance: random.Random) -> None:
        for name in dir(store):
            method = getattr(store, name)
            if name.startswith("_") and name != "_sessions":
                continue
            if inspect.iscoroutinefunction(method) and name not in ("open", "close"):
                method = _suspends(method, chance)
            setattr(self, name, method)


def _suspends(
    method: Callable[..., Awaitable[Any]], chance: random.Random
) -> Callable[..., Awaitable[Any]]:
    async def suspending(*args: Any, **kwargs: Any) -> Any:
        for _ in range(chance.randrange(3)):
            await asyncio.sleep(0)
        result = await method(*args, **kwargs)
        for _ in range(chance.randrange(3)):
            await asyncio.sleep(0)
        return result

    return suspending
