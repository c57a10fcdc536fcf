"""What goes wrong with the store of one replica, and when.

Rules:

1. ``before``: a call raises and has no effect. ``after``: it has its effect, and its reply is lost.
2. ``slow``: a call takes seconds, half of them before its effect.
3. ``full``: a call that writes is refused, and one that reads is served.
4. A fault lasts for a window of time, or hits one call by its number, since the store was opened.
"""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any, Final, cast

from mcp_sessions.errors import StoreRefused, StoreUnavailable
from mcp_sessions.stores.contract import SessionStore
from tests.support.interposed import stepped

READS: Final = frozenset(
    {"load", "read", "head", "heads", "audience", "subscribers", "all_sessions", "load_data"}
)

SLOW: Final = 2.0
"""Seconds that a call of a slow store takes."""


@dataclass
class StoreFaults:
    """What happens to the calls of one replica's store."""

    how: str | None = None
    """Of the window that is open now."""

    at_calls: dict[int, str] = field(default_factory=dict[int, str])
    """The number of a call → how it fails."""

    calls: int = 0

    async def around(self, name: str, work: Callable[[], Awaitable[Any]]) -> Any:
        how = self.at_calls.get(self.calls, self.how)
        self.calls += 1
        match how:
            case "before":
                raise StoreUnavailable("away")
            case "full" if name not in READS:
                raise StoreRefused("the store is full", "full")
            case "slow":
                await asyncio.sleep(SLOW / 2)
            case _:
                pass
        result = await work()
        if how == "after":
            raise StoreUnavailable("the reply was lost")
        if how == "slow":
            await asyncio.sleep(SLOW / 2)
        return result

    def over(self, store: Any) -> SessionStore:
        failing = stepped(store, self.around)
        failing.exchange = stepped(store.exchange, self.around, ("join", "leave"))
        return cast("SessionStore", failing)
