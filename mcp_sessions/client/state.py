"""Hold the state of one client: its clocks, its addresses, its phase, its links, and the start of
its trouble.

``TRANSITIONS`` has every change of a client's phase; other changes cannot happen. All parts read
`ClientState`, and only its own methods change it.

Rules that must hold, and that ``tests/client/test_elapsed.py`` and
``tests/client/test_server_addresses.py`` own:

1. A promise of a server for so many seconds ends when they have passed at the server. Its clock
   does not stand still while a client's machine is suspended. ``time.monotonic`` does, on Linux
   and macOS. So `Elapsed` never goes back, and never stands still while one of its clocks goes on.
2. If the clocks disagree, the longer time is believed: a wall clock that is set forward makes a
   promise end early, which costs an answer; believed too long, a call runs twice.
3. An address that asked for a rest gets it, while another address may be asked. If there is no
   other address, it is asked when its rest has ended.
4. Each address has its own back-off: to go on to another one after a loss takes no longer
   than a first attempt. Only progress resets them.
"""

from __future__ import annotations

import random
import secrets
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import KW_ONLY, dataclass, field
from enum import Enum
from functools import partial
from types import MappingProxyType

import anyio
from anyio.abc import TaskGroup

from mcp_sessions.client.dialer import Dialer, Link
from mcp_sessions.client.reconnect_policy import ReconnectPolicy
from mcp_sessions.core.backoff import Backoff


def _since_boot() -> float:
    """Return seconds on a clock that counts suspend, if the system has one."""
    if sys.platform == "linux":
        return time.clock_gettime(time.CLOCK_BOOTTIME)
    if sys.platform == "darwin":
        # There it counts sleep, which what Python calls monotonic does not.
        return time.clock_gettime(time.CLOCK_MONOTONIC)
    return time.monotonic()


def _wall() -> float:
    return time.time()


class Elapsed:
    """Seconds since it was made: of each step between two readings, the longest that a clock
    shows.

    Args:
        clocks: By default the one that counts suspend, and the wall clock, which also sees that a
            virtual machine was paused.
    """

    __slots__ = ("_clocks", "_last", "_total")

    def __init__(self, clocks: Sequence[Callable[[], float]] = (_since_boot, _wall)) -> None:
        self._clocks = clocks
        self._last = [clock() for clock in clocks]
        self._total = 0.0

    def __call__(self) -> float:
        now = [clock() for clock in self._clocks]
        steps = (new - old for new, old in zip(now, self._last, strict=True))
        self._total += max(0.0, *steps)
        self._last = now
        return self._total


@dataclass(slots=True, eq=False, repr=False)
class Runtime:
    policy: ReconnectPolicy
    tasks: TaskGroup
    """Its tasks end with the client. The caller of `ResumingClient.close` cancels them."""

    _: KW_ONLY
    draw: Callable[[], float] = random.random
    """A random number from 0 to 1."""

    clock: Callable[[], float] = time.monotonic
    """Seconds, never going back. For how long this side waits."""

    elapsed: Callable[[], float] = field(default_factory=Elapsed)
    """Seconds, never going back, also those in which the machine slept. For how long a server
    keeps its promises; see `Elapsed`."""

    sleep: Callable[[float], Awaitable[None]] = anyio.sleep
    mint_key: Callable[[], str] = partial(secrets.token_urlsafe, 16)
    """A new request key."""

    backoff: Backoff = field(init=False)
    """The delays between attempts on one link."""

    def __post_init__(self) -> None:
        self.backoff = Backoff(base=self.policy.backoff_base, cap=self.policy.backoff_cap)

    async def back_off(self, at_least: float = 0.0) -> None:
        """Wait after a failed attempt (CLI2).

        Args:
            at_least: Seconds.
        """
        await self.sleep(max(at_least, self.backoff.failed(self.draw())))


@dataclass(slots=True)
class _Address:
    dialer: Dialer
    backoff: Backoff
    rests_until: float = 0.0

    def rest(self, until: float) -> None:
        self.rests_until = max(self.rests_until, until)

    def rested(self) -> None:
        self.rests_until = 0.0


class Addresses:
    """One client's.

    Args:
        dialers: In the order in which they are tried.
        base: Seconds; see `Backoff`.
        cap: Seconds; see `Backoff`.
        longest_rest: Seconds; whoever asks for a longer one gets this.
    """

    def __init__(
        self, dialers: Sequence[Dialer], *, base: float, cap: float, longest_rest: float
    ) -> None:
        self._base, self._cap, self._longest = base, cap, longest_rest
        self._all = [self._address(dialer) for dialer in dialers]
        self._turn = 0

    def _address(self, dialer: Dialer) -> _Address:
        return _Address(dialer, Backoff(base=self._base, cap=self._cap))

    def __len__(self) -> int:
        return len(self._all)

    @property
    def current(self) -> Dialer:
        return self._all[self._turn].dialer

    def has_other(self, *, now: float) -> bool:
        others = (a for n, a in enumerate(self._all) if n != self._turn)
        return any(address.rests_until <= now for address in others)

    def rest(self, seconds: float, *, now: float) -> None:
        self._all[self._turn].rest(now + min(max(0.0, seconds), self._longest))

    def move_on(self) -> None:
        self._turn = (self._turn + 1) % len(self._all)

    def next(self, *, now: float, random: float) -> tuple[Dialer, float]:
        """Choose whom to ask next; it is the current one then.

        Args:
            now: Seconds.
            random: From 0 to 1, equally distributed.

        Returns:
            The dialer, and after how many seconds.
        """
        order = [(self._turn + n) % len(self._all) for n in range(len(self._all))]
        rested = [number for number in order if self._all[number].rests_until <= now]
        self._turn = rested[0] if rested else min(order, key=lambda n: self._all[n].rests_until)
        address = self._all[self._turn]
        delay = address.backoff.failed(random)
        return address.dialer, max(delay, address.rests_until - now)

    def progressed(self) -> None:
        for address in self._all:
            address.backoff.progressed()

    def is_in_use(self) -> None:
        self._all[self._turn].rested()

    def move_to_front(self, dialer: Dialer) -> None:
        others = [address for address in self._all if address.dialer.target != dialer.target]
        self._all = [self._address(dialer), *others]
        self._turn = 0


class Phase(Enum):
    FRESH = "fresh"
    """Nothing was sent yet."""

    OPEN = "open"
    """A link is there, and no session yet: messages pass as they are."""

    BUSY = "busy"
    """A link is being opened, or a session started or taken up: requests wait."""

    READY = "ready"
    """With a session, or with a server that has none."""

    CUT_OFF = "cut_off"
    """Given up; the next request tries again."""

    ENDED = "ended"
    """Taken over, refused for good or closed: it does not come back by itself."""


class LinkChange(Enum):
    OPEN = "open"
    """The first request of all has a link opened, or is taken to another address."""

    OPENED = "opened"
    NOT_OPENED = "not_opened"
    """No address can be reached."""

    BEGIN = "begin"
    """A session is to be started, or taken up again."""

    MOVE = "move"
    """The application takes its session to another address."""

    STAY = "stay"
    """It could not be taken there."""

    READY = "ready"
    """The session is taken up, or the server has none."""

    GIVE_UP = "give_up"
    """Nothing was reached for long enough."""

    TAKEN_OVER = "taken_over"
    """Another client has the session (TKO7)."""

    END = "end"
    """The application is done, or the server refused for good."""


_ALL = frozenset(Phase)

TRANSITIONS = MappingProxyType(
    {
        LinkChange.OPEN: ({Phase.FRESH, Phase.OPEN, Phase.BUSY}, Phase.BUSY),
        LinkChange.OPENED: ({Phase.BUSY}, Phase.OPEN),
        LinkChange.NOT_OPENED: ({Phase.BUSY}, Phase.FRESH),
        LinkChange.BEGIN: ({Phase.OPEN, Phase.READY, Phase.CUT_OFF}, Phase.BUSY),
        LinkChange.MOVE: (_ALL - {Phase.BUSY}, Phase.BUSY),
        LinkChange.STAY: ({Phase.BUSY}, None),
        LinkChange.READY: ({Phase.BUSY}, Phase.READY),
        LinkChange.GIVE_UP: ({Phase.BUSY}, Phase.CUT_OFF),
        LinkChange.TAKEN_OVER: ({Phase.READY}, Phase.ENDED),
        LinkChange.END: (_ALL, Phase.ENDED),
    }
)
"""change → (the phases in which it can happen, the one that follows; None: as before the move)."""

_CONCLUSIONS = {
    LinkChange.OPENED,
    LinkChange.NOT_OPENED,
    LinkChange.STAY,
    LinkChange.READY,
    LinkChange.GIVE_UP,
}
"""Ends of work that was under way. They change nothing if the application is done meanwhile."""


@dataclass(slots=True, eq=False, repr=False)
class ClientState:
    _runtime: Runtime
    addresses: Addresses
    phase: Phase = Phase.FRESH
    link: Link | None = None
    """The one that requests go out on."""

    pushed: Link | None = None
    """The link for the application's own sessions, if it is separate (`Pushing`)."""

    _before_move: Phase = Phase.FRESH
    _trouble_since: float | None = None
    """When the first failure after the last progress was."""

    def may(self, change: LinkChange) -> bool:
        return self.phase in TRANSITIONS[change][0]

    def apply(self, change: LinkChange) -> None:
        if self.phase is Phase.ENDED and change in _CONCLUSIONS:
            return
        if not self.may(change):
            raise AssertionError(f"{change.value} cannot happen to a client that is {self.phase}")
        if change is LinkChange.MOVE:
            self._before_move = self.phase
        self.phase = TRANSITIONS[change][1] or self._before_move

    def use(self, link: Link | None) -> Link | None:
        previous, self.link = self.link, link
        return previous

    def push_on(self, link: Link | None) -> Link | None:
        """Note the link to which the application's own sessions are attached. None: the one that
        requests go out on.

        Returns:
            The one before.
        """
        previous, self.pushed = self.pushed, link
        return previous

    def uses(self, link: Link) -> bool:
        return link is self.link or link is self.pushed

    def is_ready_on(self, link: Link) -> bool:
        return self.phase is Phase.READY and self.uses(link)

    def progressed(self) -> None:
        """Note an answer or an event (CLI2)."""
        self._runtime.backoff.progressed()
        self.addresses.progressed()
        self._trouble_since = None

    def is_too_long_in_trouble(self) -> bool:
        """Note a failure. Return whether failures have lasted longer than anybody waits."""
        now = self._runtime.clock()
        if self._trouble_since is None:
            self._trouble_since = now
        return now - self._trouble_since >= self._runtime.policy.give_up_after

    def has_other_address(self) -> bool:
        return self.addresses.has_other(now=self._runtime.clock())
