"""Reach a working session: at first, after a loss, and when the application moves it.

Rules that must hold, and that ``tests/client/`` owns over real sockets:

1. One recovery runs at a time. Requests wait for its end (CLI1).
2. A recovery ends with a session, or after ``give_up_after`` with an error for every waiting
   request.
3. The application learns of each loss once (``on_lost``), and then once of its end
   (``on_resume``), in each era and over each transport.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from enum import Enum

import anyio

from mcp_sessions.client.application import Application
from mcp_sessions.client.connecting import Connector
from mcp_sessions.client.control import Hopeless, SessionControl
from mcp_sessions.client.dialer import Dialer, Failed, Failure, Link
from mcp_sessions.client.known_server import KnownServer
from mcp_sessions.client.reattaching import Reattaching
from mcp_sessions.client.resume_report import ResumeOutcome
from mcp_sessions.client.state import ClientState, LinkChange, Phase, Runtime
from mcp_sessions.core.resume import AWAY, FailureCause

logger = logging.getLogger(__name__)

_LINGER = 1.0
"""Seconds between two looks whether an old link is still needed."""


class Way(Enum):
    SETTLE = "settle"
    """The first time, on the link that is there."""

    REATTACH = "reattach"
    """``session/resume`` on the link that is there."""

    RESTART = "restart"
    """A new session on the link that is there."""

    REPLACE = "replace"
    """Another link, while this one works; if there is none, this one."""

    RECOVER = "recover"
    """Another link."""


@dataclass(slots=True, eq=False)
class Recovery:
    """The recovery of one client's connection.

    Args:
        on_ready: Called with the link that the client goes on on, last.
    """

    _runtime: Runtime
    _state: ClientState
    _peer: KnownServer
    _app: Application
    _control: SessionControl
    hosted: Reattaching
    connector: Connector
    _on_ready: Callable[[Link], Awaitable[None]]
    _not_before: float = field(init=False, default=0.0)
    """When a server that drains asks us to come back, unless somebody waits for an answer."""

    _asked: anyio.Event = field(init=False, default_factory=anyio.Event)
    """Set when somebody asks something; a new one for each recovery."""

    _settled: anyio.Event = field(init=False, default_factory=anyio.Event)
    """Set when the recovery that is under way ends; a new one for each."""

    def begin(self, way: Way) -> None:
        if self._state.may(LinkChange.BEGIN):
            self._state.apply(LinkChange.BEGIN)
            self._settled = anyio.Event()
            self._runtime.tasks.start_soon(self._run, way)

    def lose(self, link: Link, failure: Failure) -> None:
        state = self._state
        if not state.is_ready_on(link):
            return
        self._app.lost(link.name, failure)
        if failure.cause is FailureCause.UNREACHABLE or failure.status in AWAY:
            # After a cut or a silence the same address is tried once more.
            state.addresses.rest(failure.retry_after or 0.0, now=self._runtime.clock())
            if state.has_other_address():
                state.addresses.move_on()
        self.begin(Way.RECOVER)

    def postpone(self, until: float) -> None:
        """Reconnect no sooner, since the server drains, unless a request waits (TKO11)."""
        self._not_before = until

    def hurry(self) -> None:
        """Stop polite waits: the application sent a request."""
        self._asked.set()

    async def until_settled(self) -> None:
        while self._state.phase is Phase.BUSY:
            await self._settled.wait()

    async def _run(self, way: Way) -> None:
        link = self._state.link
        if link is None or way is Way.RECOVER:
            await self._recover()
            return
        if way is Way.REPLACE:
            await self._replace(link)
            return
        try:
            match way:
                case Way.SETTLE:
                    outcome = await self._settle(link)
                case Way.REATTACH:
                    outcome = await self._attach(link, is_new=False)
                case Way.RESTART:
                    outcome = await self._control.restart(link)
                    await self.hosted.take_up(link, is_new=False)
            if way is not Way.SETTLE and outcome is not None and outcome.is_new_session:
                await self._app.forget_questions()
        except Hopeless:
            await self._no_session()
        except Failed as failed:
            self._app.lost(link.name, failed.failure)
            await self._recover()
        else:
            await self._ready(link, outcome)

    async def _replace(self, old: Link) -> None:
        link = None
        try:
            link = await self.connector.connect(self.connector.dialer_of(old))
            await self._control.shake_hands(link)
            outcome = await self._attach(link)
            if outcome.is_new_session:
                await self._app.forget_questions()
        except Hopeless:
            await _drop(link)
            await self._no_session()
        except Failed as failed:
            logger.info("%s: no other connection: %s", old.name, failed)
            await _drop(link)
            if self._state.link is old:
                await self._ready(old, None)
            else:
                await self._recover()
        else:
            await self._ready(link, outcome)

    async def _attach(self, link: Link, *, is_new: bool = True) -> ResumeOutcome:
        outcome = await self._control.attach(link, is_new=is_new)
        await self.hosted.take_up(link, is_new=is_new)
        return outcome

    async def _settle(self, link: Link) -> ResumeOutcome | None:
        peer = self._peer
        was_saved = peer.session is not None
        if peer.is_modern and not peer.has_said:
            await self._control.discover(link)
        if not peer.abilities.has_sessions:
            peer.leave_session()
            return None
        if peer.hosted.is_manager and not was_saved:
            # It has sessions of its own, or means to.
            return None
        try:
            outcome = await self._control.attach(link)
        except Failed as failed:
            if (
                was_saved
                or failed.failure.cause is not FailureCause.SILENT
                or self._state.link is None
            ):
                raise
            # It advertises sessions and makes none: as the stock transport.
            logger.warning("%s advertises sessions, but did not start one", link.name)
            peer.note_no_sessions()
            return None
        return outcome if was_saved else None

    async def _recover(self) -> None:
        runtime, state, app = self._runtime, self._state, self._app
        patience = runtime.policy.give_up_after
        since = runtime.clock()
        self._asked = anyio.Event()
        if all(p.link is not None or app.listens.has(p) for p in app.requests):
            await self._wait_politely(self._not_before - since)
        has_tried = False
        while True:
            # The first attempt waits too: clients that were cut at once do not come back at once
            # (CLI2). A server that accepts and dies is left alone for longer each time.
            dialer, delay = state.addresses.next(now=runtime.clock(), random=runtime.draw())
            left = max(0.0, since + patience - runtime.clock())
            await runtime.sleep(min(delay, left))
            if delay > left and has_tried:
                await self._cut_off()
                return
            has_tried = True
            link = None
            try:
                link = await self.connector.connect(dialer)
                await self._control.shake_hands(link)
                outcome = await self._control.take_up(link)
                await self.hosted.take_up(link, is_new=True)
                if outcome.is_new_session:
                    await app.forget_questions()
            except Failed as failed:
                runtime.tasks.start_soon(_drop, link)
                logger.info("%s", failed)
                app.lost(dialer.target, failed.failure)
                state.addresses.rest(failed.failure.retry_after or 0.0, now=runtime.clock())
                state.addresses.move_on()
            except Hopeless:
                await _drop(link)
                await self._no_session()
                return
            else:
                await self._ready(link, outcome)
                return

    async def _wait_politely(self, seconds: float) -> None:
        if seconds <= 0:
            return
        async with anyio.create_task_group() as waiting:

            async def until_then() -> None:
                await self._runtime.sleep(seconds)
                waiting.cancel_scope.cancel()

            waiting.start_soon(until_then)
            await self._asked.wait()
            waiting.cancel_scope.cancel()

    async def _no_session(self) -> None:
        text = "the server forgets each session at once"
        self._app.lost(self._state.addresses.current.target, Failure(FailureCause.CLOSED, text))
        await self._cut_off()

    async def _cut_off(self) -> None:
        loss, now = self._app.loss, self._runtime.clock()
        logger.warning("gave up: %s", loss.lasted(now) if loss is not None else "no session")
        self._state.apply(LinkChange.GIVE_UP)
        self._settled.set()
        for pending in self._app.requests:
            if pending.link is None:
                await self._app.give_up_on(pending)
        await self._app.report_outcome(ResumeOutcome(False, reason="gave_up"))

    async def _ready(self, link: Link, outcome: ResumeOutcome | None) -> None:
        """Continue on this link: report the outcome, and send what waits (CLI1)."""
        previous = self._state.use(link)
        link.configure(self._peer.settings())
        link.listen()
        self._not_before = 0.0
        self._state.addresses.is_in_use()
        if previous is not link or (outcome is not None and outcome.is_new_session):
            self._app.listens.cut()
        self._state.apply(LinkChange.READY)
        self._settled.set()
        if previous is not None and previous is not link:
            self._runtime.tasks.start_soon(self._retire, previous)
        if outcome is not None:
            if not outcome.recovered:
                await self._app.report_everything_changed()
            await self._app.report_outcome(outcome)
        await self._on_ready(link)

    async def _retire(self, link: Link) -> None:
        clock, requests = self._runtime.clock, self._app.requests
        until = clock() + self._runtime.policy.answer_timeout
        # Requests of the application go out first.
        await self._runtime.sleep(_LINGER)
        while any(p.link is link for p in requests) and clock() < until:
            await self._runtime.sleep(_LINGER)
        await link.close(leave=True)
        for pending in requests:
            if pending.link is link:
                pending.lose_link(f"{link.name}: no answer came before its connection was closed")
                await self._app.give_up_on(pending)

    async def move_to(self, dialer: Dialer) -> ResumeOutcome:
        """Take the session to another address, while it lives (RES9).

        Raises:
            Failed: It could not be taken there; it stays where it is. Or there is none.
        """
        state = self._state
        with anyio.move_on_after(self._runtime.policy.give_up_after):
            await self.until_settled()
        if not self._peer.holds_sessions or state.phase is Phase.BUSY:
            text = f"{dialer.target}: there is no session to move there"
            raise Failed(Failure(FailureCause.CLOSED, text))
        state.apply(LinkChange.MOVE)
        self._settled = anyio.Event()
        link = None
        try:
            link = await self.connector.connect(dialer)
            await self._control.shake_hands(link)
            outcome = await self._attach(link)
            if outcome.is_new_session:
                await self._app.forget_questions()
        except (Failed, Hopeless, anyio.get_cancelled_exc_class()) as error:
            # If the application stops waiting, requests continue on the connection before.
            with anyio.CancelScope(shield=True):
                await _drop(link)
            self._stay()
            if not isinstance(error, Hopeless):
                raise
            text = f"{dialer.target}: the session is not known there"
            raise Failed(Failure(FailureCause.CLOSED, text)) from error
        state.addresses.move_to_front(dialer)
        await self._ready(link, outcome)
        return outcome

    def _stay(self) -> None:
        self._state.apply(LinkChange.STAY)
        self._settled.set()
        if self._state.phase is Phase.READY:
            # It may have been attached there for a moment.
            self.begin(Way.RECOVER if self._state.link is None else Way.REATTACH)


async def _drop(link: Link | None) -> None:
    if link is not None:
        await link.close(leave=True)
