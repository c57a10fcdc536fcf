"""Keep what a service says about tokens, and ask it about few of them at once.

Rules, owned by ``tests/authentication/test_introspection.py`` and
``tests/server/upstream/sdk/test_provided.py``:

1. All requests with one token share one question.
2. Questions are bounded in time, and in how many are open: see :class:`Lane`.
   The address that asked first about a token has its question. A token that was accepted before has
   slots of its own.
3. If there is no answer, a token that was accepted before counts on, for :data:`KEPT` seconds in
   all. It waits for :data:`PATIENCE` seconds only. Any other token cannot be verified.
4. Verdicts are kept by a hash of the token, with a bound.

Few questions to a service are shared among the addresses that ask. Rules, owned by
``tests/authentication/test_lane.py``:

1. Some questions are asked at once, and one address has some of them at most. So others find room.
2. Addresses take turns, and each has its questions in the order in which they came.
3. What waits has a bound. If it is full, the address with the most waiting loses its newest.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections import Counter, OrderedDict, deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Hashable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Final, Generic, TypeVar

from mcp_sessions.authentication.credential import ASKER, CannotVerify, NotAllowed
from mcp_sessions.core.addresses import address_of
from mcp_sessions.core.recent import Recent


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


KEPT: Final = 300.0
"""Seconds for which a good token counts if the service does not answer any more."""

WITHIN: Final = 10.0
"""Seconds for one question, with the time before it is sent."""

PATIENCE: Final = 1.0
"""Seconds for which a request waits whose token was good before."""

REMEMBERED: Final = 10_000
"""Good tokens that are kept, at most, and as many bad ones."""

WAITING: Final = 1_000
"""Tokens that wait for an answer, at most: new ones, and as many that were good before."""

RETRY: Final = 5.0
"""Seconds after which the service is asked again about a token of which nothing is known."""

_OF_ONE: Final = 16
"""Questions of one address at once."""

_AT_ONCE: Final = 2 * _OF_ONE

Good = TypeVar("Good")


@dataclass(frozen=True, slots=True)
class _Known(Generic[Good]):
    good: Good
    asked_at: float
    """When the service said so."""

    look_after: float
    """When it is asked again."""


class _Questions(Generic[Good]):
    def __init__(self) -> None:
        self.asking: dict[bytes, asyncio.Task[Good | CannotVerify | NotAllowed | None]] = {}
        self.lane = Lane(at_once=_AT_ONCE, of_one=_OF_ONE, waiting=WAITING)


class Verdicts(Generic[Good]):
    """The verdicts of one service about tokens.

    Args:
        ask: Asks the service. None: the token is not good. ``NotAllowed``: its owner may not use
            the server. ``CannotVerify``: there was no answer.
        late: Called if the service takes :data:`WITHIN` seconds.
        expires_at: When a good token ends, by the clock.
        clock: Seconds since 1970.
        fresh: Seconds for which a good token counts.
        refused: Seconds for which a bad one counts.
    """

    def __init__(
        self,
        ask: Callable[[str], Awaitable[Good | None]],
        late: Callable[[], None],
        expires_at: Callable[[Good], float | None],
        *,
        clock: Callable[[], float],
        fresh: float,
        refused: float,
    ) -> None:
        self._ask, self._late, self._expires_at = ask, late, expires_at
        self._clock = clock
        self._fresh, self._refused = fresh, refused
        self._known = Recent[bytes, _Known[Good]](REMEMBERED)
        self._bad = Recent[bytes, tuple[float, bool]](REMEMBERED)
        """When a token was refused, and whether its owner is known and not allowed."""

        self._new, self._again = _Questions[Good](), _Questions[Good]()

    async def verdict_on(self, token: str) -> Good | None:
        """Return what the token stands for. None: it is not good.

        Raises:
            CannotVerify: The service does not answer.
            NotAllowed: The owner of the token may not use the server.
        """
        now, name = self._clock(), hashlib.sha256(token.encode()).digest()
        known = self._kept(name, now)
        if known is None:
            bad = self._bad.get(name)
            # A clock that was set back does not make a verdict older than it is.
            if bad is not None and 0 <= now - bad[0] < self._refused:
                return _refusal(is_known=bad[1])
            return await self._answered(self._new, name, token, None)
        if known.asked_at <= now < known.look_after:
            return known.good
        try:
            return await self._answered(self._again, name, token, PATIENCE)
        except CannotVerify:
            now = self._clock()
            if (known := self._kept(name, now)) is None:
                raise
            self._known[name] = replace(known, look_after=now + RETRY)
            return known.good

    def _kept(self, name: bytes, now: float) -> _Known[Good] | None:
        known = self._known.get(name)
        if known is None:
            return None
        ends = self._expires_at(known.good)
        if now - known.asked_at >= KEPT or (ends is not None and ends <= now):
            del self._known[name]
            return None
        self._known.move_to_end(name)
        return known

    async def _answered(
        self, questions: _Questions[Good], name: bytes, token: str, patience: float | None
    ) -> Good | None:
        task = questions.asking.get(name)
        if task is None:
            try:
                place = questions.lane.enter(address_of(ASKER.get()))
            except GaveWay:
                raise CannotVerify(RETRY) from None
            work = self._ask_in(questions, place, name, token)
            task = questions.asking[name] = asyncio.create_task(work, name="asking about a token")
        # The client that asked first may leave: the others still wait for it.
        await asyncio.wait([task], timeout=patience)
        if not task.done():
            raise CannotVerify(RETRY)
        answer = task.result()
        if isinstance(answer, CannotVerify):
            raise CannotVerify(answer.retry_after)
        return _refusal(is_known=True) if isinstance(answer, NotAllowed) else answer

    async def _ask_in(
        self, questions: _Questions[Good], place: Place, name: bytes, token: str
    ) -> Good | CannotVerify | NotAllowed | None:
        """Ask the service. Nothing is raised: perhaps no request waits any more."""
        waited = not place.has_turn.done()
        try:
            async with asyncio.timeout(WITHIN), questions.lane.turn(place):
                asked_at = self._clock()
                good = await self._ask(token)
        except TimeoutError:
            # Of a question that waited for its turn, the service had only the rest of the time.
            if not waited:
                self._late()
            return CannotVerify(RETRY)
        except GaveWay:
            return CannotVerify(RETRY)
        except CannotVerify as unknown:
            return unknown
        except NotAllowed as refused:
            self._refuse(name, is_known=True)
            return refused
        finally:
            del questions.asking[name]
        if good is None:
            self._refuse(name, is_known=False)
            return None
        self._bad.pop(name, None)
        self._known.keep(name, _Known(good, asked_at, asked_at + self._fresh))
        return good

    def _refuse(self, name: bytes, *, is_known: bool) -> None:
        self._known.pop(name, None)
        self._bad.keep(name, (self._clock(), is_known))


def _refusal(*, is_known: bool) -> None:
    if is_known:
        raise NotAllowed
