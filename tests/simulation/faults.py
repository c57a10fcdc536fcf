"""What goes wrong with the store of one replica, and when.

Rules:

1. ``before``: a call raises and has no effect. ``after``: it has its effect, and its reply is lost.
2. ``slow``: a call takes seconds, half of them before its effect.
3. ``full``: a call that writes is refused, and one that reads is served.
4. A fault lasts for a window of time, for all calls or those of one method, or hits one call: by
   its number since the store was opened, or the next call of one method.
5. ``kill before`` and ``kill after``: the process dies at that call, before or after its effect.
   ``pause before`` and ``pause after``: it stands still there.
6. A fault may be for messages of one kind between replicas: ``of``.
"""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final, cast

from mcp_sessions.errors import StoreRefused, StoreUnavailable
from mcp_sessions.stores.contract import SessionStore
from tests.simulation.scheduler import Host
from tests.support.interposed import stepped

READS: Final = frozenset(
    {"load", "read", "head", "heads", "audience", "subscribers", "all_sessions", "load_data"}
    # A message between replicas is stored nowhere.
    | {"send", "is_alive", "watch", "unwatch"}
)

SLOW: Final = 2.0
"""Seconds that a call of a slow store takes."""


@dataclass
class Aimed:
    """A fault that hits a call of one method, once.

    Args:
        skips: So many calls of it pass before.
        of: The kind of the message, if it hits that only (`replica_messages`).
    """

    method: str
    how: str
    skips: int = 0
    of: str | None = None
    has_hit: asyncio.Event = field(default_factory=asyncio.Event)

    def hits(self, method: str, message: bytes = b"") -> bool:
        if method != self.method or self.has_hit.is_set():
            return False
        if self.of is not None and f'"kind":"{self.of}"'.encode() not in message:
            return False
        self.skips -= 1
        if self.skips >= 0:
            return False
        self.has_hit.set()
        return True


@dataclass
class StoreFaults:
    """What happens to the calls of one replica's store.

    Args:
        kill: Kills its process.
        pause: Lets it stand still.
    """

    kill: Callable[[], None]
    pause: Callable[[], None] = field(default=lambda: None)

    how: str | None = None
    """Of the window that is open now."""

    at_calls: dict[int, str] = field(default_factory=dict[int, str])
    """The number of a call → how it fails."""

    of_methods: dict[str, str] = field(default_factory=dict[str, str])
    """A method → how each call of it fails."""

    calls: int = 0

    aimed: list[Aimed] = field(default_factory=list[Aimed])

    async def around(
        self, name: str, work: Callable[[], Awaitable[Any]], message: bytes = b""
    ) -> Any:
        how = self.at_calls.get(self.calls, self.of_methods.get(name, self.how))
        self.calls += 1
        how = next((each.how for each in self.aimed if each.hits(name, message)), how)
        match how:
            case "kill before":
                await self._die()
            case "pause before":
                await self._stand_still()
            case "before":
                raise StoreUnavailable("away")
            case "full" if name not in READS:
                raise StoreRefused("the store is full", "full")
            case "slow":
                await asyncio.sleep(SLOW / 2)
            case _:
                pass
        result = await work()
        if how == "kill after":
            await self._die()
        if how == "pause after":
            await self._stand_still()
        if how == "after":
            raise StoreUnavailable("the reply was lost")
        if how == "slow":
            await asyncio.sleep(SLOW / 2)
        return result

    async def _die(self) -> None:
        # What others notice of it is no step of its own.
        Host("what kills").enters(self.kill)
        # A dead process takes no further step, but to be cleared up.
        await asyncio.Event().wait()

    async def _stand_still(self) -> None:
        Host("what pauses").enters(self.pause)
        # Its next step comes when it goes on.
        await asyncio.sleep(0)

    def over(self, store: Any) -> SessionStore:
        failing, exchange = stepped(store, self.around), store.exchange
        failing.exchange = stepped(exchange, self.around, ("join", "leave"))

        async def send(message: bytes, *, to: str | None = None) -> bool:
            work = partial(exchange.send, message, to=to)
            return bool(await self.around("send", work, message))

        failing.exchange.send = send
        return cast("SessionStore", failing)
