"""Share few questions to a service among the addresses that ask.

Rules, owned by ``tests/authentication/test_lane.py``:

1. Some questions are asked at once, and one address has some of them at most. So others find room.
2. Addresses take turns, and each has its questions in the order in which they came.
3. What waits has a bound. If it is full, the address with the most waiting loses its newest.
"""

from __future__ import annotations

import asyncio
from collections import Counter, OrderedDict, deque
from collections.abc import AsyncGenerator, Hashable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field


class GaveWay(Exception):
    """There is no room for a question: its address has the most."""


@dataclass(slots=True, eq=False, repr=False)
class Place:
    address: Hashable
    has_turn: asyncio.Future[bool] = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )
    """False: it gave way."""


class Lane:
    """A line for each address.

    Args:
        at_once: Questions that are asked at once.
        of_one: Those of one address.
        waiting: Questions that wait, at most.
    """

    def __init__(self, *, at_once: int, of_one: int, waiting: int) -> None:
        self._free = at_once
        self._of_one = of_one
        self._room = waiting
        self._lines = OrderedDict[Hashable, deque[Place]]()
        """Address → what waits of it. The address whose turn is next is the first."""

        self._asked = Counter[Hashable]()

    def enter(self, address: Hashable) -> Place:
        """Take a place. It must be asked or left in :meth:`turn`.

        Raises:
            GaveWay: There is none.
        """
        place = Place(address)
        if not self._room:
            line = max(self._lines.values(), key=len)
            if len(line) <= len(self._lines.get(address, ())) + 1:
                raise GaveWay
            newest = line[-1]
            self._leave(newest)
            newest.has_turn.set_result(False)
        self._room -= 1
        self._lines.setdefault(address, deque()).append(place)
        self._next()
        return place

    @asynccontextmanager
    async def turn(self, place: Place) -> AsyncGenerator[None]:
        """Wait for the turn of a place, and have it while the block runs.

        Raises:
            GaveWay: Another address needed the room.
        """
        try:
            # Its turn may come while its task is being cancelled.
            if not await asyncio.shield(place.has_turn):
                raise GaveWay
            yield
        finally:
            if not place.has_turn.done():
                self._leave(place)
            elif place.has_turn.result():
                self._free += 1
                self._asked[place.address] -= 1
                if not self._asked[place.address]:
                    del self._asked[place.address]
                self._next()

    def _leave(self, place: Place) -> None:
        line = self._lines[place.address]
        line.remove(place)
        self._room += 1
        if not line:
            del self._lines[place.address]

    def _next(self) -> None:
        """Let those ask whose turn it is."""
        while self._free:
            ready = (line for each, line in self._lines.items() if self._asked[each] < self._of_one)
            line = next(ready, None)
            if line is None:
                return
            place = line[0]
            address = place.address
            self._leave(place)
            if address in self._lines:
                self._lines.move_to_end(address)
            self._free -= 1
            self._asked[address] += 1
            place.has_turn.set_result(True)
