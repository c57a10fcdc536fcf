from __future__ import annotations

import asyncio
import math
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

        self._began: dict[Slot, float] = {}
        self._made_room: set[Slot] = set()

    @contextmanager
    def one(self, slot: Slot) -> Generator[None]:
        loop = asyncio.get_running_loop()
        began = self._began[slot] = loop.time()
        try:
            yield
            self._longest = max(self._longest or 0.0, loop.time() - began)
        finally:
            del self._began[slot]

    def oldest(self) -> asyncio.Task[Any] | None:
        """Return the oldest start that hangs, to make room now. None: none hangs."""
        patience = self._timeout / 2
        if self._longest is not None:
            patience = min(patience, max(_LEAST, _SEVERAL * self._longest))
        now = asyncio.get_running_loop().time()
        for slot, began in self._began.items():
            if now - began < patience:
                return None
            if slot not in self._made_room and slot.starting is not None:
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
    """Count the children of one layer against its limit, and choose which of them ends first.

    Args:
        server: Returns the server, which has the limit.
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
        self._starts = 0

    @contextmanager
    def of_start(self) -> Generator[None]:
        """Count a child that is started."""
        self._starts += 1
        try:
            yield
        finally:
            self._starts -= 1

    @property
    def count(self) -> int:
        return len(self.living) + self._starts

    @property
    def left(self) -> int:
        """How many more there is room for, without ending a child."""
        return self._server().max_children - self.count

    def ended(self) -> Child | None:
        """Return a child that has ended or is ending."""
        return next((it for it in self.living if it.has_ended or it in self.ending), None)

    def first(self) -> Slot | None:
        """Return the slot whose child may end first: one whose client has left, then one outside of
        sessions, then the one that is idle for longest. None: none may end.
        """
        now = asyncio.get_running_loop().time()
        idle = (
            slot for slot in self._idle() if slot.is_replaceable or now - slot.used_at >= EVICTABLE
        )
        return min(
            idle,
            key=lambda it: (not it.is_left, not it.is_replaceable, it.used_at),
            default=None,
        )

    def free_at(self) -> float:
        """Return the time at which one may end."""
        return min((slot.used_at + EVICTABLE for slot in self._idle()), default=math.inf)

    def _idle(self) -> list[Slot]:
        return [it for it in self._slots.values() if it.child is not None and not it.calls]
