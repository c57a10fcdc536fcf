from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import Callable, Generator, Hashable, Mapping
from contextlib import contextmanager
from typing import Any, Final

from mcp_sessions.external_server import ExternalServer
from mcp_sessions.principal import Principal
from mcp_sessions.server.upstream.external.child import Child
from mcp_sessions.server.upstream.external.slot import Slot

_SEVERAL: Final = 3.0
_LEAST: Final = 5.0
"""Seconds in which no start hangs."""

WAITS: Final = 15.0
"""Seconds that a start waits for room. Most hosts wait longer for an answer."""

EVICTABLE: Final = 60.0
"""Seconds after its last request in which a child is not ended to make room for another."""

MOST: Final = "max_children"
OF_ONE: Final = "max_children_per_principal"

LOOKS: Final = 0.5
"""Seconds between two checks for room."""


class Starts:
    """Track the starts that have not succeeded yet, and find those that hang.

    Args:
        timeout: Seconds that a start has.
    """

    def __init__(self, timeout: float) -> None:
        self._timeout = timeout
        self._longest: float | None = None
        """Seconds of the longest start that succeeded."""

        self._began: dict[Slot, tuple[float, Principal]] = {}
        self._made_room: set[Slot] = set()

    @contextmanager
    def one(self, slot: Slot, principal: Principal) -> Generator[None]:
        loop = asyncio.get_running_loop()
        began = loop.time()
        self._began[slot] = began, principal
        try:
            yield
            self._longest = max(self._longest or 0.0, loop.time() - began)
        finally:
            del self._began[slot]

    def oldest(self, of: Principal | None) -> asyncio.Task[Any] | None:
        """Return the oldest start that hangs, to make room now. None: none hangs.

        Args:
            of: The principal of the start. None: any.
        """
        patience = self._timeout / 2
        if self._longest is not None:
            patience = min(patience, max(_LEAST, _SEVERAL * self._longest))
        now = asyncio.get_running_loop().time()
        for slot, (began, principal) in self._began.items():
            if now - began < patience:
                return None
            is_one = principal.is_user_of(of) and slot not in self._made_room
            if is_one and slot.starting is not None:
                self._made_room.add(slot)
                return slot.starting
        return None

    def made_room(self, slot: Slot) -> bool:
        try:
            self._made_room.remove(slot)
        except KeyError:
            return False
        return True


class Room:
    """Count the children of one layer against its limits, and choose which of them ends first.

    Args:
        server: Returns the server, which has the limits.
        slots: All slots of the layer.
    """

    def __init__(
        self, server: Callable[[], ExternalServer], slots: Mapping[Hashable, Slot]
    ) -> None:
        self.living: dict[Child, Principal] = {}
        """Child → the principal that it was started for."""

        self.ending: set[Child] = set()
        """Living children that are ending. A start that needs their room waits for it."""

        self._server, self._slots = server, slots
        self._starts = Counter[Principal]()

    @contextmanager
    def of_start(self, principal: Principal) -> Generator[None]:
        """Count a child that is started."""
        self._starts[principal] += 1
        try:
            yield
        finally:
            self._starts[principal] -= 1
            if not self._starts[principal]:
                del self._starts[principal]

    def count(self, of: Principal | None = None) -> int:
        if of is None:
            return len(self.living) + self._starts.total()
        living = sum(owner.is_user_of(of) for owner in self.living.values())
        return living + sum(n for owner, n in self._starts.items() if owner.is_user_of(of))

    def limit(self, principal: Principal, more: int = 0) -> str | None:
        """Return the name of the limit that is reached. None: there is room for one more."""
        server = self._server()
        own = server.max_children_per_principal
        if own is not None and self.count(principal) + more >= own:
            return OF_ONE
        return MOST if self.count() + more >= server.max_children else None

    def has(self, principal: Principal) -> bool:
        """Whether there is room for one more without ending a child."""
        return self.limit(principal) is None

    def ended(self, of: Principal | None) -> Child | None:
        """Return a child that has ended or is ending."""
        for child, owner in self.living.items():
            if (child.has_ended or child in self.ending) and owner.is_user_of(of):
                return child
        return None

    def first(self, of: Principal | None) -> Slot | None:
        """Return the slot whose child may end first: one whose client has left, then one outside of
        sessions, then the one that is idle for longest. None: none may end.
        """
        now = asyncio.get_running_loop().time()
        idle = (
            slot
            for slot in self._idle(of)
            if slot.is_replaceable or now - slot.used_at >= EVICTABLE
        )
        return min(
            idle,
            key=lambda it: (not it.is_left, not it.is_replaceable, it.used_at),
            default=None,
        )

    def free_at(self, of: Principal | None) -> float:
        """Return the time at which one may end."""
        return min((slot.used_at + EVICTABLE for slot in self._idle(of)), default=math.inf)

    def _idle(self, of: Principal | None) -> list[Slot]:
        found = list[Slot]()
        for slot in self._slots.values():
            if slot.child is not None and not slot.calls:
                owner = self.living.get(slot.child)
                if of is None or (owner is not None and owner.is_user_of(of)):
                    found.append(slot)
        return found
