from __future__ import annotations

import asyncio
from collections.abc import Generator, Iterable, Mapping
from contextlib import contextmanager
from typing import Any, Final

from mcp_sessions.principal import Principal
from mcp_sessions.server.upstream.external.child import Child
from mcp_sessions.server.upstream.external.slot import Slot

_SEVERAL: Final = 3.0
_LEAST: Final = 5.0
"""Seconds in which no start hangs."""

WAITS: Final = 15.0
"""Seconds that a start waits for room. Most hosts wait longer for an answer."""

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


def spare(slots: Iterable[Slot], living: Mapping[Child, Principal]) -> set[Slot]:
    """Return the children outside of sessions that may end first. Nothing lasts there between
    requests. A principal may have several there, for clients that accept different requests, and
    keeps the one used last.

    Args:
        living: Child → the principal that it was started for.
    """
    last: dict[Principal, Slot] = {}
    found: set[Slot] = set()
    for slot in slots:
        owner = living.get(slot.child) if slot.child is not None else None
        if owner is not None and slot.clients.is_sessionless:
            other = last.get(owner, slot)
            last[owner], older = sorted((other, slot), key=lambda it: -it.used_at)
            if older is not last[owner] and not older.outbounds and older.starting is None:
                found.add(older)
    return found


def can_share(
    slot: Slot, principal: Principal, slots: Iterable[Slot], living: Mapping[Child, Principal]
) -> bool:
    connection_peer = (other for other in slots if other.clients.is_sessionless)
    return slot.clients.is_sessionless and any(
        other.child is not None and living.get(other.child) == principal
        for other in connection_peer
    )
