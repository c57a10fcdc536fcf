"""One of all clients that wait for an address tries it; the others follow when it answers.

All clients of one event loop share this. Without it, each of them would try on its own: a short
wait between two attempts would be many attempts, and a long wait would be a late return.

Rules that must hold, and that ``tests/client/test_scouting.py`` owns:

1. While an address is away, one client at a time tries it. The next one tries after a random
   time from zero to a bound (full jitter, CLI2). A client that hangs does not delay the next one
   for longer than `OVERDUE`.
2. The bound is short at first and grows with the outage, so that a client comes back soon after
   the server does, and a server that is away for long is asked less often.
3. When an address answers, all that wait for it follow: `RATE` of them in a second at the
   most, each at a random moment after its turn.
4. A server that asks for a rest (``Retry-After``) is left alone by all of them for as long.
5. A client that leaves the line, for whatever reason, does not hold it up.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import anyio
from anyio.lowlevel import RunVar

from mcp_sessions.client.reconnect_policy import ReconnectPolicy
from mcp_sessions.core.backoff import spread

RATE = 100.0
"""Clients that return to one address in a second, at the most."""

OVERDUE = 1.0
"""Seconds after which the next client tries, although the one before has no result."""

_LEAST = 1.5
"""The bound at first, in `ReconnectPolicy.backoff_base`."""

_GROWTH = 80.0
"""The bound is this part of the outage, once that is more."""

_SOON = 4.0
"""A bound below `_STEADY` is this part of the outage: a short base is for short outages only."""

_STEADY = 0.75
"""Seconds: the bound of most of an outage."""

_FOLLOW = 0.2
"""Seconds: each of the others follows at a random moment up to this after its turn."""

_KEPT = 60.0
"""Seconds for which an address is remembered that nobody waits for."""


@dataclass(slots=True, eq=False)
class ScoutedAddress:
    is_away: bool = False
    """The last attempt got no answer from the server."""

    _used_at: float = 0.0
    _away_since: float = 0.0
    _next_try: float = 0.0
    """Not before this does the next client try."""

    _answered_at: float = 0.0
    _next_slot: float = 0.0
    """When the last of those that may return had its turn."""

    _here: int = 0
    """Clients that wait to return, in line or not."""

    _line: list[anyio.Event] = field(default_factory=list[anyio.Event])
    """The clients that wait while it is away. The first one tries next."""

    def used(self, *, now: float) -> None:
        self._used_at = now

    def is_forgotten(self, *, now: float) -> bool:
        return not self._here and now - self._used_at > _KEPT

    def failed(
        self,
        *,
        now: float,
        random: float,
        policy: ReconnectPolicy,
        began: float | None = None,
        rest: float = 0.0,
    ) -> None:
        """An attempt got no answer from the server.

        Args:
            now: Seconds.
            began: When it began; None: now. The address may have answered another one since.
            random: From 0 to 1, equally distributed.
            rest: Seconds that the server, or a proxy before it, asked to wait.
        """
        if began is not None and began < self._answered_at:
            return
        if not self.is_away:
            self.is_away, self._away_since, self._next_try = True, now, now
        least, outage = _LEAST * policy.backoff_base, now - self._away_since
        soon = min(_STEADY, outage / _SOON)
        bound = min(policy.backoff_cap, max(least, soon, outage / _GROWTH))
        self._next_try = now + max(spread(bound, random), rest)
        self._call_first()

    def answered(self, *, now: float) -> None:
        self.is_away, self._answered_at = False, now
        for waiting in self._line:
            waiting.set()

    async def first_turn(
        self, delay: float, *, clock: Callable[[], float], draw: Callable[[], float]
    ) -> None:
        """Wait after a loss, before the first attempt to come back.

        Args:
            delay: Seconds that this client waits in any case.
        """
        self._here += 1
        try:
            await anyio.sleep(self._slot(clock()) + delay)
        finally:
            self._here -= 1
        if self.is_away:
            await self.turn(clock=clock, draw=draw)

    async def turn(self, *, clock: Callable[[], float], draw: Callable[[], float]) -> None:
        """Wait until this client may try: as the one that tries, or since the server answered."""
        self._here += 1
        mine = anyio.Event()
        self._line.append(mine)
        try:
            while self.is_away:
                is_first = self._line[0] is mine
                left = self._next_try - clock()
                if is_first and left <= 0:
                    self._next_try = clock() + OVERDUE
                    return
                with anyio.move_on_after(left if is_first else None):
                    await mine.wait()
                if self.is_away and mine.is_set():
                    # Called to the front, or the time changed. The position in the line is kept.
                    renewed = anyio.Event()
                    self._line[self._line.index(mine)] = renewed
                    mine = renewed
            await anyio.sleep(self._slot(clock()) + spread(_FOLLOW, draw()))
        finally:
            self._here -= 1
            if mine in self._line:
                self._line.remove(mine)
            self._call_first()

    def _slot(self, now: float) -> float:
        self._next_slot = max(now, self._next_slot + 1 / RATE)
        return self._next_slot - now

    def _call_first(self) -> None:
        if self._line:
            self._line[0].set()


class ScoutedAddresses:
    def __init__(self) -> None:
        self._scouted_addresses: dict[str, ScoutedAddress] = {}

    def address_of(self, target: str, *, now: float) -> ScoutedAddress:
        for name, scouted in list(self._scouted_addresses.items()):
            if scouted.is_forgotten(now=now):
                del self._scouted_addresses[name]
        found = self._scouted_addresses.setdefault(target, ScoutedAddress())
        found.used(now=now)
        return found


_SHARED = RunVar[ScoutedAddresses]("mcp_sessions.client.scouting.scouted_addresses")


def shared_addresses() -> ScoutedAddresses:
    try:
        return _SHARED.get()
    except LookupError:
        scouted_addresses = ScoutedAddresses()
        _SHARED.set(scouted_addresses)
        return scouted_addresses
