"""What the parts of the resuming client share: where it stands, and what it works with.

`sending` sends the application's requests and judges what becomes of them, `listener` keeps
the modern era's event stream, `recovery` opens links and takes the session up on them, and
`resuming` is the door that messages come and go by. Each of them reads and changes this.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from anyio.abc import TaskGroup

from mcp_sessions.client import wire
from mcp_sessions.client.addresses import Addresses
from mcp_sessions.client.dialer import Json, Link
from mcp_sessions.client.exchange import Exchanges
from mcp_sessions.client.keeper import SessionKeeper
from mcp_sessions.client.listening import Listens
from mcp_sessions.client.outcome import OnResume, ResumeOutcome
from mcp_sessions.client.policy import ReconnectPolicy
from mcp_sessions.client.requests import Pending, Questions, Requests
from mcp_sessions.core.backoff import Backoff
from mcp_sessions.errors import OUTCOME_UNKNOWN

logger = logging.getLogger(__name__)

CONNECTION_CLOSED = -32000
"""The SDK's code for a request that a lost connection leaves without an answer."""


class Phase(Enum):
    """Where the client is."""

    FRESH = "fresh"
    """Nothing was sent yet."""

    OPEN = "open"
    """A link is there, and no session yet: messages pass as they are."""

    BUSY = "busy"
    """A session is being started, or taken up: requests wait."""

    READY = "ready"
    """With a session, or with a server that has none."""

    CUT_OFF = "cut_off"
    """Given up; the next request tries again."""

    OVER = "over"
    """Taken over, or refused for good: it does not come back by itself."""


class Way(Enum):
    """How to get to a session that works."""

    SETTLE = "settle"
    """The first time, on the link that is there."""

    REATTACH = "reattach"
    """``session/resume`` on the link that is there."""

    START_OVER = "start_over"
    """A new session on the link that is there."""

    RECOVER = "recover"
    """Another link."""


def _nothing_begins(way: Way) -> None:
    raise AssertionError(f"nobody begins to {way.value}")


@dataclass(slots=True)
class Situation:
    """See the module."""

    policy: ReconnectPolicy
    deliver: Callable[[Json], Awaitable[None]]
    """Gives the application a message."""

    hang_up: Callable[[], Awaitable[None]]
    """Ends the application's side, as a stock transport does whose connection is gone."""

    on_resume: OnResume | None
    draw: Callable[[], float]
    """A random number from 0 to 1."""

    clock: Callable[[], float]
    """Seconds, never going back. For how long this side waits."""

    elapsed: Callable[[], float]
    """Seconds, never going back, also those in which the machine slept. For how long a server
    keeps its promises; see `Elapsed`."""

    sleep: Callable[[float], Awaitable[None]]
    backoff: Backoff
    addresses: Addresses
    exchanges: Exchanges
    keeper: SessionKeeper
    requests: Requests = field(default_factory=Requests)
    questions: Questions = field(default_factory=Questions)
    listens: Listens = field(default_factory=Listens)
    phase: Phase = Phase.FRESH
    link: Link | None = None
    trouble_since: float | None = None
    """When the first failure after the last progress was."""

    tasks: TaskGroup | None = None
    begin: Callable[[Way], None] = _nothing_begins
    """Starts a recovery, unless one is under way. Set by `recovery`."""

    def spawn(self, work: Callable[..., Coroutine[Any, Any, None]], *args: object) -> None:
        """Run ``work`` until it is done or the client is closed."""
        if self.tasks is None:
            raise AssertionError("the client is used before it runs")
        self.tasks.start_soon(work, *args)

    def progressed(self) -> None:
        """An answer or an event came."""
        self.backoff.progressed()
        self.addresses.progressed()
        self.trouble_since = None

    def try_another_address(self) -> bool:
        """This one cannot be reached: take the session up at another, if there is one to ask."""
        has_other = self.addresses.has_other(now=self.clock())
        if self.phase is not Phase.READY or self.keeper.session is None or not has_other:
            return False
        self.addresses.move_on()
        self.begin(Way.RECOVER)
        return True

    async def answer(self, pending: Pending, code: int, text: str, data: Any = None) -> None:
        """Answer a request from here, unless it was answered."""
        if self.requests.done(pending):
            self.listens.remove(pending.app_id)
            await self.deliver(wire.error_answer(pending.app_id, code, text, data))

    async def give_up_on(self, pending: Pending) -> None:
        """Answer what the server will not answer any more."""
        if pending.first_sent is not None:
            await self.answer(pending, OUTCOME_UNKNOWN, "Outcome unknown")
        else:
            await self.answer(pending, CONNECTION_CLOSED, "Connection closed: it was never sent")

    async def tell_everything_changed(self) -> None:
        """There was a gap: what the application may have missed, it reads again (G5)."""
        if self.keeper.is_modern:
            for message in self.listens.everything():
                await self.deliver(message)
            return
        known = self.keeper.abilities
        for name in known.lists if known is not None else ():
            await self.deliver(wire.notification(f"notifications/{name}/list_changed"))
        for uri in list(self.keeper.subscribed):
            await self.deliver(wire.notification(wire.RESOURCE_UPDATED, {"uri": uri}))

    async def forget_questions(self) -> None:
        """Whoever asked them is gone, with its session: the application need not think on."""
        for question_id in self.questions.forget():
            params = {"requestId": question_id, "reason": "the session of the server is over"}
            await self.deliver(wire.notification(wire.CANCELLED, params))

    async def tell_outcome(self, outcome: ResumeOutcome) -> None:
        """Call the application's ``on_resume``."""
        if self.on_resume is None:
            return
        try:
            told = self.on_resume(outcome)
            if inspect.isawaitable(told):
                await told
        except Exception:
            # The application's own function: what is wrong with it must not end the session.
            logger.exception("on_resume raised")
