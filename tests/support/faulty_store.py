"""A store, of any kind, that fails at one call of a conversation: at each, one run after the other.

A `Fault` says which call, counted from where `FaultyStore.arm` was called, and how:

* ``before``: it raises, and had no effect;
* ``after``: it had its effect, and its reply was lost;
* ``away``: from this call on, for some seconds, every call raises and has no effect;
* ``cut``: it has its effect, and what it is called over breaks (`tests.support.redis_wire`).

The calls of the store's exchange count too.
"""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Literal, cast

from mcp_sessions.errors import StoreUnavailable
from mcp_sessions.stores.contract import SessionStore
from tests.support.interposed import stepped
from tests.support.virtual_time import VirtualTimeLoop

How = Literal["before", "after", "away", "cut"]
HOWS: tuple[How, ...] = ("before", "after", "away")
"""How any store may fail."""

AWAY = 3.0
"""Seconds of the event loop's clock."""


@dataclass(frozen=True)
class Fault:
    """What goes wrong, once."""

    call: int
    how: How


class Plan:
    """Counts calls, and fails those that are to fail; shared by the stores of one run."""

    def __init__(self, fault: Fault | None) -> None:
        self.calls: list[str] = []
        """The calls since the plan was armed, in order."""

        self._fault = fault
        self._armed = False
        self._away_until: float | None = None

    def arm(self) -> None:
        self._armed = True

    def mend(self) -> None:
        """Nothing fails any more, and nothing is counted."""
        self._armed = False

    async def call(
        self,
        name: str,
        work: Callable[[], Awaitable[Any]],
        *,
        cut: Callable[[], None] | None = None,
    ) -> Any:
        """Do it, or fail as planned.

        Args:
            cut: Breaks what ``work`` is done over, after its effect.
        """
        loop = asyncio.get_running_loop()
        if not isinstance(loop, VirtualTimeLoop):
            return await self._call(name, work, cut)
        # Where time jumps, it stands still while a store on a disk or a network is running.
        here = object()
        loop.outside_work.add(here)
        try:
            return await self._call(name, work, cut)
        finally:
            loop.outside_work.discard(here)

    async def _call(
        self, name: str, work: Callable[[], Awaitable[Any]], cut: Callable[[], None] | None
    ) -> Any:
        if not self._armed:
            return await work()
        number = len(self.calls)
        self.calls.append(name)
        fault, now = self._fault, asyncio.get_running_loop().time()
        if fault is not None and fault.call == number:
            if fault.how == "before":
                raise StoreUnavailable("away")
            if fault.how == "after":
                await work()
                raise StoreUnavailable("the reply was lost")
            if fault.how == "cut":
                assert cut is not None
                cut()
                return await work()
            self._away_until = now + AWAY
        if self._away_until is not None and now < self._away_until:
            raise StoreUnavailable("away")
        return await work()


def faulty(store: SessionStore, plan: Plan) -> SessionStore:
    """A store whose every method fails as planned. To open and to close it, to join and to leave
    its exchange, is not part of a conversation.
    """

    async def exchanged(name: str, work: Callable[[], Awaitable[Any]]) -> Any:
        return await plan.call(f"exchange.{name}", work)

    failing = stepped(store, plan.call)
    if store.exchange is not None:
        failing.exchange = stepped(store.exchange, exchanged, ("join", "leave"))
    return cast("SessionStore", failing)
