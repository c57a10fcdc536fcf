"""Hold the state of one client: its phase, its link, and the start of its trouble.

``TRANSITIONS`` has every change of a client's phase; other changes cannot happen. All parts read
`ClientState`, and only its own methods change it.
"""

from __future__ import annotations

import random
import secrets
import time
from collections.abc import Awaitable, Callable
from dataclasses import KW_ONLY, dataclass, field
from enum import Enum
from functools import partial
from types import MappingProxyType

import anyio
from anyio.abc import TaskGroup

from mcp_sessions.client.dialer import Link
from mcp_sessions.client.elapsed import Elapsed
from mcp_sessions.client.known_server import KnownServer
from mcp_sessions.client.reconnect_policy import ReconnectPolicy
from mcp_sessions.client.server_addresses import Addresses
from mcp_sessions.core.backoff import Backoff


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


@dataclass(slots=True, eq=False, repr=False)
class ClientState:
    _runtime: Runtime
    _peer: KnownServer
    addresses: Addresses
    phase: Phase = Phase.FRESH
    link: Link | None = None
    """The one that requests go out on."""

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

    def uses(self, link: Link) -> bool:
        return link is self.link or link is self._peer.pushed

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
