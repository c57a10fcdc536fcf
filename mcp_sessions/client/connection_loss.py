"""What happens when a connection is lost, or the session's attachment to it.

`Recovery` notices it (``down``, ``lose``, ``detached``, ``stream_…``), and gets to a session that
works: on the link that is there, or on another one. So it does at first, and when the application
moves its session.

Rules that must hold, and that ``tests/client/`` owns over real sockets:

1. One recovery runs at a time. Requests wait for its end (CLI1).
2. A recovery ends with a session, or after ``give_up_after`` with an error for every waiting
   request.
3. The application learns of each loss once (``on_lost``), and then once of its end
   (``on_resume``), in each era and over each transport.
4. A client that took the session over keeps it: this client stops, and says so (TKO7).
5. A loss that is reported while the session is being resumed is checked afterwards.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from enum import Enum

import anyio

from mcp_sessions import method_names
from mcp_sessions.client import messages, reports
from mcp_sessions.client.application import Application
from mcp_sessions.client.control import Connector, Hopeless, SessionControl
from mcp_sessions.client.dialer import CONNECTION_CLOSED, Dialer, Failed, Failure, Link
from mcp_sessions.client.reports import ResumeOutcome
from mcp_sessions.client.requests import PendingRequest
from mcp_sessions.client.sessions import KnownServer
from mcp_sessions.client.state import ClientState, LinkChange, Phase, Runtime
from mcp_sessions.core.backoff import Backoff, spread
from mcp_sessions.core.messages import Json
from mcp_sessions.core.resume import AWAY, FailureCause, seconds_of
from mcp_sessions.errors import Detached

logger = logging.getLogger(__name__)

_LINGER = 1.0
"""Seconds between two looks whether an old link is still needed."""

_MOVE_WITHIN = 1.0
"""Seconds over which the clients of a server that drains go to another address."""


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
        send: Sends a request of the application.
    """

    _runtime: Runtime
    _state: ClientState
    _peer: KnownServer
    _app: Application
    _control: SessionControl
    _connector: Connector
    _on_ready: Callable[[Link], Awaitable[None]]
    _send: Callable[[PendingRequest], Awaitable[None]]
    _not_before: float = field(init=False, default=0.0)
    """When a server that drains asks us to come back, unless somebody waits for an answer."""

    _asked: anyio.Event = field(init=False, default_factory=anyio.Event)
    """Set when somebody asks something; a new one for each recovery."""

    _settled: anyio.Event = field(init=False, default_factory=anyio.Event)
    """Set when the recovery that is under way ends; a new one for each."""

    _detached_meanwhile: tuple[Link, Json] | None = field(init=False, default=None)
    """A detachment that was reported while the session was taken up, after the newest answer."""

    _reopened_meanwhile: Link | None = field(init=False, default=None)
    """The link whose notification stream was opened again while the client was busy."""

    _unsure: set[Link] = field(init=False, default_factory=set[Link])
    """Links that are to be replaced, since their notification streams cannot continue."""

    _streams: Backoff = field(init=False)
    """The delays between links whose notification streams bring nothing."""

    _not_opened: int = field(init=False, default=0)
    """At how many addresses the first request of all got nowhere."""

    def __post_init__(self) -> None:
        policy = self._runtime.policy
        self._streams = Backoff(base=policy.backoff_base, cap=policy.backoff_cap)

    # --- the first link ----------------------------------------------------------------------

    async def open_for(self, pending: PendingRequest) -> bool:
        """Open a link for the first request; False: there is none, and it has its answer."""
        state = self._state
        state.apply(LinkChange.OPEN)
        reason = ""
        for _ in range(len(state.addresses)):
            try:
                state.use(await self._connector.connect(state.addresses.current))
            except Failed as failed:
                # For who sees no more than the log: one is notified of the last address only.
                logger.warning("%s", failed)
                reason = str(failed)
                state.addresses.move_on()
            else:
                state.apply(LinkChange.OPENED)
                return True
        state.apply(LinkChange.NOT_OPENED)
        text = reports.not_sent(pending.message, reason)
        await self._app.answer(pending, CONNECTION_CLOSED, text)
        return False

    def first_failed(self, link: Link, pending: PendingRequest, failure: Failure) -> bool:
        """Take the failure of the first request of all to the next address. False: it is none, or
        there is no other address.
        """
        state = self._state
        if state.phase is not Phase.OPEN or pending.method not in method_names.OPENING:
            return False
        is_refused = failure.cause is FailureCause.STATUS and failure.status not in AWAY
        if not is_refused or pending.method == method_names.INITIALIZE:
            logger.warning("%s", failure.explanation)
        if is_refused:
            return False
        self._not_opened += 1
        if self._not_opened >= len(state.addresses):
            return False
        state.addresses.move_on()
        state.apply(LinkChange.OPEN)
        # Not here: a task of the link called this, and ends with it.
        self._runtime.tasks.start_soon(self._open_another_link, link, pending)
        return True

    async def _open_another_link(self, link: Link, pending: PendingRequest) -> None:
        await link.close(leave=False)
        if await self.open_for(pending):
            pending.forget_sending()
            await self._send(pending)

    # --- a link is lost ------------------------------------------------------------------------

    async def down(self, link: Link, failure: Failure) -> list[PendingRequest]:
        """Note that a link is gone. Return its requests, if another link is in use."""
        state = self._state
        left = [pending for pending in self._app.requests if pending.link is link]
        for pending in left:
            pending.lose_link(reports.cause_of(failure, link.name))
        if link is not state.link:
            return left
        state.use(None)
        self._app.listens.cut()
        if state.phase is not Phase.ENDED:
            self._app.lost(link.name, failure)
        if state.phase is Phase.BUSY:
            return []
        if state.phase is Phase.ENDED or not self._peer.holds_sessions or not failure.may_return:
            # Without a session there is nothing to come back to: as a stock transport.
            await self._stop()
        else:
            self.begin(Way.RECOVER)
        return []

    async def _stop(self) -> None:
        had_ended = self._state.phase is Phase.ENDED
        self._state.apply(LinkChange.END)
        for pending in self._app.requests:
            await self._app.give_up_on(pending)
        if self._peer.session is not None and not had_ended:
            await self._app.report_outcome(ResumeOutcome(False, reason="refused", has_ended=True))
        await self._app.hang_up()

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

    # --- a session is detached -----------------------------------------------------------------

    async def detached(self, link: Link, params: Json) -> None:
        """Take ``notifications/sessions/detached``, of any session of the table."""
        state, sessions = self._state, self._peer.sessions
        held = sessions.hosted(params.get("sessionId"))
        if held is not None:
            if not state.uses(link) and state.phase is not Phase.BUSY:
                return
            if link is state.pushed and self._control.is_listened_to(held):
                # HTM16: by a listen stream of the application.
                return
        else:
            if state.phase is Phase.BUSY:
                self._detached_meanwhile = (link, params)
                return
            session = sessions.own
            if session is None or not state.is_ready_on(link):
                return
            if params.get("sessionId") != session.session_id:
                return
        match params.get("reason"):
            case Detached.TAKEN_OVER.value if not self._peer.attempts.is_own(
                params.get("instance"), now=self._runtime.clock()
            ):
                if held is not None:
                    sessions.left(held.session_id)
                    if sessions.is_declared:
                        await self._app.deliver(
                            messages.notification(method_names.DETACHED, params)
                        )
                elif sessions.is_manager:
                    # The application goes on in its own sessions.
                    self._peer.sessions.leave()
                else:
                    await self._taken_over(link)
            case Detached.DRAINING.value:
                self._come_back_later(link, params)
            case reason:
                if reason == Detached.TAKEN_OVER.value:
                    # TKO13: something that was given up was served after all.
                    logger.info("%s: taken over by a late request of this client", link.name)
                self._runtime.tasks.start_soon(self._take_back, link)

    async def _taken_over(self, link: Link) -> None:
        logger.info("%s: the session was taken over", link.name)
        self._state.apply(LinkChange.TAKEN_OVER)
        for pending in self._app.requests:
            # Running requests are still answered here.
            if pending.link is None:
                await self._app.give_up_on(pending, reports.taken_over(link.name))
        await self._app.report_outcome(
            ResumeOutcome(False, reason="taken_over", connected_to=link.name, has_ended=True)
        )

    def _come_back_later(self, link: Link, params: Json) -> None:
        """Plan a reconnect in our turn: the server drains (TKO11)."""
        runtime = self._runtime
        seconds = seconds_of(params.get("retryAfter"), most=runtime.policy.give_up_after)
        now = runtime.clock()
        if self._state.addresses.has_other(now=now):
            # It need not be waited for, and its clients need not arrive there at once.
            self._state.addresses.rest(seconds, now=now)
            seconds = min(seconds, _MOVE_WITHIN)
        delay = spread(seconds, runtime.draw())
        self._not_before = now + delay
        runtime.tasks.start_soon(self._come_back, link, delay)

    async def _come_back(self, link: Link, delay: float) -> None:
        await self._runtime.sleep(delay)
        if self._state.uses(link):
            self.begin(Way.RECOVER)

    async def _take_back(self, link: Link) -> None:
        """Resume a session that left this connection and that nobody else has.

        With back-off, as a server may take it away each time.
        """
        await self._runtime.back_off()
        if self._state.uses(link):
            self.begin(Way.REATTACH)

    # --- a notification stream is lost ---------------------------------------------------------

    def stream_reopened(self, link: Link) -> None:
        """Report a gap: the server has no sessions, and the stream did not continue."""
        if self._state.phase is Phase.BUSY:
            self._reopened_meanwhile = link
        elif self._state.is_ready_on(link):
            self.begin(Way.REATTACH)

    def stream_unsure(self, link: Link) -> None:
        """Take another link: on this one the notification stream would skip events."""
        if link not in self._unsure:
            self._unsure.add(link)
            self._runtime.tasks.start_soon(self._replace_soon, link)

    async def _replace_soon(self, link: Link) -> None:
        await self._runtime.sleep(self._streams.failed(self._runtime.draw()))
        await self.until_settled()
        self._unsure.remove(link)
        if self._state.is_ready_on(link):
            self.begin(Way.REPLACE if link is self._state.link else Way.RECOVER)

    def stream_works(self) -> None:
        """Forget the failures of notification streams: an event came."""
        self._streams.progressed()

    def was_answered(self) -> None:
        """Note that the server answered our own request: earlier reports are out of date."""
        self._detached_meanwhile = None

    async def catch_up(self, link: Link) -> None:
        detached, self._detached_meanwhile = self._detached_meanwhile, None
        reopened, self._reopened_meanwhile = self._reopened_meanwhile, None
        if detached is not None and detached[0] is link:
            await self.detached(*detached)
        elif reopened is link:
            self.stream_reopened(link)

    # --- the recovery --------------------------------------------------------------------------

    def begin(self, way: Way) -> None:
        """Start a recovery, unless one runs."""
        if self._state.may(LinkChange.BEGIN):
            self._state.apply(LinkChange.BEGIN)
            self._settled = anyio.Event()
            self._runtime.tasks.start_soon(self._run, way)

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
                    outcome = await self._control.take_up(link, is_new=False)
                case Way.RESTART:
                    outcome = await self._control.restart(link)
                    await self._control.attach_hosted(link, is_new=False)
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
        try:
            link, outcome = await self._connect(self._connector.dialer_of(old))
        except Hopeless:
            await self._no_session()
        except Failed as failed:
            logger.info("%s: no other connection: %s", old.name, failed)
            if self._state.link is old:
                await self._ready(old, None)
            else:
                await self._recover()
        else:
            await self._ready(link, outcome)

    async def _connect(self, dialer: Dialer) -> tuple[Link, ResumeOutcome]:
        """Open another link, and take up the sessions on it.

        Raises:
            Failed: The link is of no use; another may be.
            Hopeless: The session is gone once too often.
        """
        link = await self._connector.connect(dialer)
        try:
            await self._control.shake_hands(link)
            outcome = await self._control.take_up(link)
            if outcome.is_new_session:
                await self._app.forget_questions()
        except BaseException:
            if self._state.phase is not Phase.ENDED:
                # Not here: nobody waits for a server that does not answer.
                self._runtime.tasks.start_soon(_leave, link)
            raise
        return link, outcome

    async def _settle(self, link: Link) -> ResumeOutcome | None:
        peer = self._peer
        was_saved = peer.session is not None
        if peer.is_modern and not peer.has_said:
            await self._control.discover(link)
        if not peer.abilities.has_sessions:
            peer.sessions.leave()
            return None
        if peer.sessions.is_manager and not was_saved:
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
            try:
                link, outcome = await self._connect(dialer)
            except Failed as failed:
                logger.info("%s", failed)
                app.lost(dialer.target, failed.failure)
                state.addresses.rest(failed.failure.retry_after or 0.0, now=runtime.clock())
                state.addresses.move_on()
            except Hopeless:
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
                await self._control.report_everything_changed()
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
        try:
            link, outcome = await self._connect(dialer)
        except (Failed, Hopeless, anyio.get_cancelled_exc_class()) as error:
            # If the application stops waiting, requests continue on the connection before.
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


async def _leave(link: Link) -> None:
    await link.close(leave=True)
