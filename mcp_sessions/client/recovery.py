"""Opens links and takes the session up on them: at first, after a loss, and on request.

Rules that must hold, and that ``tests/client/`` owns over real sockets:

1. One recovery at a time; whatever is asked meanwhile waits for its end (CLI5).
2. Whoever took the session over keeps it: this client stops, and says so (TKO7).
3. A recovery ends: with a session, or after ``give_up_after`` with an answer for everybody.
"""

from __future__ import annotations

import logging

import anyio

from mcp_sessions.client import wire
from mcp_sessions.client.dialer import Dialer, Event, Failed, Failure, Json, Link
from mcp_sessions.client.keeper import Hopeless
from mcp_sessions.client.outcome import ResumeOutcome
from mcp_sessions.client.requests import Pending
from mcp_sessions.client.sending import Sender
from mcp_sessions.client.situation import CONNECTION_CLOSED, Phase, Situation, Way
from mcp_sessions.core.backoff import spread
from mcp_sessions.core.resume import AWAY, Cause, seconds_of
from mcp_sessions.errors import Detached

logger = logging.getLogger(__name__)

_MOVE_WITHIN = 1.0
"""Seconds over which the clients of a server that drains go to another address."""

_LINGER = 1.0
"""Seconds between two looks whether an old link is still needed."""


class Recovery:
    """One client's links."""

    def __init__(self, situation: Situation, sender: Sender) -> None:
        self._at = situation
        self._sender = sender
        self._not_before = 0.0
        """When a server that drains asks us to come back, unless somebody waits for an answer."""

        self._asked = anyio.Event()
        """Set when somebody asks something; a new one for each recovery."""

        self._failed_first = 0
        """At how many addresses the first request of all got nowhere."""

        self._settled = anyio.Event()
        self._heard_meanwhile: tuple[Link, Json] | None = None
        """A detachment that was told while the session was taken up, after the newest answer."""

        self._reopened_meanwhile: Link | None = None
        """Whose notification stream was opened anew while the session was taken up."""

        situation.begin = self._begin

    # --- links -------------------------------------------------------------------------------

    async def open_first(self, pending: Pending) -> bool:
        """Open a link for the first request; False: there is none, and it has its answer."""
        at = self._at
        at.phase = Phase.BUSY
        reason = ""
        for _ in range(len(at.addresses)):
            try:
                at.link = await self._connect(at.addresses.current)
            except Failed as failed:
                # For who sees no more than the log: one is told of the last address only.
                logger.warning("%s", failed)
                reason = f": {failed}"
                at.addresses.move_on()
            else:
                at.phase = Phase.OPEN
                return True
        at.phase = Phase.FRESH
        text = f"Connection closed: no server can be reached{reason}"
        await at.answer(pending, CONNECTION_CLOSED, text)
        return False

    def failed_opening(self, link: Link, pending: Pending, failure: Failure) -> bool:
        """The first request of all got nowhere; whether it goes to another address."""
        at = self._at
        if at.phase is not Phase.OPEN or pending.method not in (wire.INITIALIZE, wire.DISCOVER):
            return False
        is_refused = failure.cause is Cause.STATUS and failure.status not in AWAY
        if not is_refused or pending.method == wire.INITIALIZE:
            logger.warning("%s", failure.explanation)
        if is_refused:
            return False
        self._failed_first += 1
        if self._failed_first >= len(at.addresses):
            return False
        at.addresses.move_on()
        at.phase = Phase.BUSY
        # Not here: a task of the link told us, and ends with it.
        self._at.spawn(self._open_elsewhere, link, pending)
        return True

    async def _open_elsewhere(self, link: Link, pending: Pending) -> None:
        await link.close(leave=False)
        if await self.open_first(pending):
            pending.forget_sending()
            await self._sender.request(pending)

    async def _connect(self, dialer: Dialer) -> Link:
        at = self._at
        if at.tasks is None:
            raise AssertionError("the client is used before it runs")
        link = dialer.link()
        try:
            with anyio.fail_after(at.policy.connect_timeout):
                await at.tasks.start(link.run, self.on_event)
        except TimeoutError:
            text = f"{link.name}: no connection within {at.policy.connect_timeout:g} s"
            raise Failed(Failure(Cause.SILENT, text)) from None
        return link

    async def on_event(self, link: Link, event: Event) -> None:
        """Where links report to. Set by `resuming`."""
        raise AssertionError("nobody listens to the links")

    # --- losses ------------------------------------------------------------------------------

    async def down(self, link: Link, failure: Failure) -> None:
        """A link is gone."""
        at = self._at
        at.exchanges.down(link, failure)
        left = [pending for pending in at.requests if pending.link is link]
        for pending in left:
            pending.link = None
        if link is not at.link:
            for pending in left:
                await self._sender.orphaned(pending)
            return
        at.link = None
        at.listens.wire_id = None
        logger.info("%s: %s", link.name, failure.explanation)
        if at.phase is Phase.BUSY:
            return
        if at.phase is Phase.OVER or at.keeper.session is None or not failure.may_return:
            # Without a session there is nothing to come back to: as a stock transport.
            await self._stop()
        else:
            self._begin(Way.RECOVER)

    async def _stop(self) -> None:
        at = self._at
        was_over, at.phase = at.phase is Phase.OVER, Phase.OVER
        for pending in at.requests:
            await at.give_up_on(pending)
        if at.keeper.session is not None and not was_over:
            await at.tell_outcome(ResumeOutcome(False, reason="refused", is_over=True))
        await at.hang_up()

    async def detached(self, link: Link, params: Json) -> None:
        """The server took the session from this connection."""
        at = self._at
        session = at.keeper.session
        if at.phase is Phase.BUSY:
            self._heard_meanwhile = (link, params)
            return
        if session is None or link is not at.link or at.phase is not Phase.READY:
            return
        if params.get("sessionId") != session.session_id:
            return
        match params.get("reason"):
            case Detached.TAKEN_OVER.value if at.keeper.attempts.is_own(
                params.get("instance"), now=at.clock()
            ):
                # TKO13: something that was given up was served after all.
                logger.info("%s: taken over by a late request of this client", link.name)
                at.spawn(self._take_back, link)
            case Detached.TAKEN_OVER.value:
                logger.info("%s: the session was taken over", link.name)
                at.phase = Phase.OVER
                for pending in at.requests:
                    # What runs is still answered here.
                    if pending.link is None:
                        await at.give_up_on(pending)
                await at.tell_outcome(
                    ResumeOutcome(False, reason="taken_over", connected_to=link.name, is_over=True)
                )
            case Detached.DRAINING.value:
                seconds = seconds_of(params.get("retryAfter"), most=at.policy.give_up_after)
                now = at.clock()
                if at.addresses.has_other(now=now):
                    # It need not be waited for, and its clients need not arrive there at once.
                    at.addresses.rest(seconds, now=now)
                    seconds = min(seconds, _MOVE_WITHIN)
                delay = spread(seconds, at.draw())
                self._not_before = now + delay
                at.spawn(self._come_back, link, delay)
            case _:
                at.spawn(self._take_back, link)

    def stream_reopened(self, link: Link) -> None:
        """A link's notification stream is open again, and the session may have left it (HTL7)."""
        at = self._at
        if at.phase is Phase.BUSY:
            # It may have left after the resume that is under way was served.
            self._reopened_meanwhile = link
        elif link is at.link and at.phase is Phase.READY:
            self._begin(Way.REATTACH)

    def was_answered(self) -> None:
        """The server answered a request of our own: what was told before is older."""
        self._heard_meanwhile = None

    async def _take_back(self, link: Link) -> None:
        """The session left this connection, and nobody else has it: resume it here.

        With back-off, as a server may take it away each time.
        """
        at = self._at
        await at.sleep(at.backoff.failed(at.draw()))
        if at.link is link:
            self._begin(Way.REATTACH)

    async def _come_back(self, link: Link, delay: float) -> None:
        """The server drains: another connection, when it is our turn."""
        await self._at.sleep(delay)
        if self._at.link is link:
            self._begin(Way.RECOVER)

    # --- recovery ----------------------------------------------------------------------------

    def _begin(self, way: Way) -> None:
        """See `Situation.begin`."""
        at = self._at
        if at.phase in (Phase.BUSY, Phase.OVER, Phase.FRESH):
            return
        at.phase = Phase.BUSY
        self._settled = anyio.Event()
        at.spawn(self._run, way)

    async def _run(self, way: Way) -> None:
        link = self._at.link
        if link is None or way is Way.RECOVER:
            await self._recover()
            return
        try:
            match way:
                case Way.SETTLE:
                    outcome = await self._settle(link)
                case Way.REATTACH:
                    outcome = await self._at.keeper.attach(link, is_new=False)
                case Way.START_OVER:
                    outcome = await self._at.keeper.start_over(link, "session_lost")
            if way is not Way.SETTLE and outcome is not None and outcome.is_new_session:
                await self._at.forget_questions()
        except Hopeless:
            await self._no_session()
        except Failed as failed:
            logger.info("%s", failed)
            await self._recover()
        else:
            await self._ready(link, outcome)

    async def _settle(self, link: Link) -> ResumeOutcome | None:
        """Start a session, or go on with the jar's; None: nothing to tell."""
        keeper = self._at.keeper
        was_saved = keeper.session is not None
        if keeper.abilities is None and keeper.is_modern:
            await keeper.discover(link)
        if keeper.abilities is None or not keeper.abilities.has_sessions:
            keeper.session = None
            return None
        try:
            outcome = await keeper.attach(link)
        except Failed as failed:
            if was_saved or failed.failure.cause is not Cause.SILENT or self._at.link is None:
                raise
            # It advertises sessions and makes none: as the stock transport.
            logger.warning("%s advertises sessions and does not start one", link.name)
            keeper.forget_sessions()
            return None
        return outcome if was_saved else None

    async def _recover(self) -> None:
        """Open another link and take up the session there; try until it is time to give up."""
        at = self._at
        since = at.clock()
        self._asked = anyio.Event()
        if all(p.link is not None or at.listens.has(p) for p in at.requests):
            await self._wait_politely(self._not_before - since)
        while True:
            # The first attempt waits too: clients that were cut at once do not come back at once.
            dialer, delay = at.addresses.next(now=at.clock(), random=at.draw())
            left = max(0.0, since + at.policy.give_up_after - at.clock())
            await at.sleep(min(delay, left))
            link = None
            try:
                link = await self._connect(dialer)
                await at.keeper.shake_hands(link)
                outcome = await at.keeper.take_up(link)
                if outcome.is_new_session:
                    await at.forget_questions()
            except Failed as failed:
                at.spawn(_drop, link)
                logger.info("%s", failed)
                now = at.clock()
                at.addresses.rest(failed.failure.retry_after or 0.0, now=now)
                at.addresses.move_on()
                if now - since >= at.policy.give_up_after:
                    logger.warning("gave up after %g s: %s", at.policy.give_up_after, failed)
                    await self._cut_off()
                    return
            except Hopeless:
                await _drop(link)
                await self._no_session()
                return
            else:
                await self._ready(link, outcome)
                return

    def is_asked(self) -> None:
        """The application asks something: whoever waits out of politeness stops waiting."""
        self._asked.set()

    async def _wait_politely(self, seconds: float) -> None:
        """Wait, as long as nobody asks something."""
        if seconds <= 0:
            return
        async with anyio.create_task_group() as waiting:

            async def until_then() -> None:
                await self._at.sleep(seconds)
                waiting.cancel_scope.cancel()

            waiting.start_soon(until_then)
            await self._asked.wait()
            waiting.cancel_scope.cancel()

    async def _no_session(self) -> None:
        logger.warning("the server forgets each session at once: giving up")
        await self._cut_off()

    async def _cut_off(self) -> None:
        at = self._at
        at.phase = Phase.CUT_OFF
        self._settled.set()
        for pending in at.requests:
            if pending.link is None:
                await at.give_up_on(pending)
        await at.tell_outcome(ResumeOutcome(False, reason="gave_up"))

    async def _ready(self, link: Link, outcome: ResumeOutcome | None = None) -> None:
        """Go on, on this link: send what waits, and tell what happened."""
        at = self._at
        previous, at.link = at.link, link
        at.keeper.configure(link)
        link.listen()
        self._not_before = 0.0
        at.addresses.is_in_use()
        if previous is not link or (outcome is not None and outcome.is_new_session):
            at.listens.wire_id = None
        at.phase = Phase.READY
        self._settled.set()
        if previous is not None and previous is not link:
            at.spawn(self._retire, previous)
        if outcome is not None:
            if not outcome.recovered:
                await at.tell_everything_changed()
            await at.tell_outcome(outcome)
        heard, self._heard_meanwhile = self._heard_meanwhile, None
        reopened, self._reopened_meanwhile = self._reopened_meanwhile, None
        if heard is not None and heard[0] is link:
            await self.detached(*heard)
        elif reopened is link:
            self.stream_reopened(link)
        await self._sender.flush(link)

    async def _retire(self, link: Link) -> None:
        """Leave an old link, when nothing is expected there any more."""
        at = self._at
        until = at.clock() + at.policy.give_up_after
        while any(p.link is link for p in at.requests) and at.clock() < until:
            await at.sleep(_LINGER)
        await link.close(leave=True)
        for pending in at.requests:
            if pending.link is link:
                pending.link = None
                await at.give_up_on(pending)

    async def move_to(self, dialer: Dialer) -> ResumeOutcome:
        """Take the session to another address, while it lives.

        Raises:
            Failed: It could not be taken there; it stays where it is. Or there is none.
        """
        at = self._at
        with anyio.move_on_after(at.policy.give_up_after):
            while at.phase is Phase.BUSY:
                await self._settled.wait()
        if at.keeper.session is None or at.phase is Phase.BUSY:
            raise Failed(Failure(Cause.CLOSED, "there is no session to move"))
        before, at.phase = at.phase, Phase.BUSY
        self._settled = anyio.Event()
        link = None
        try:
            link = await self._connect(dialer)
            await at.keeper.shake_hands(link)
            outcome = await at.keeper.attach(link)
            if outcome.is_new_session:
                await at.forget_questions()
        except (Failed, Hopeless) as error:
            await _drop(link)
            await self._stay(before)
            if isinstance(error, Failed):
                raise
            raise Failed(Failure(Cause.CLOSED, "the session is gone")) from error
        at.addresses.put_first(dialer)
        await self._ready(link, outcome)
        return outcome

    async def _stay(self, phase: Phase) -> None:
        at = self._at
        at.phase = phase
        self._settled.set()
        if phase is Phase.READY and at.link is None:
            self._begin(Way.RECOVER)
        elif phase is Phase.READY:
            # It may have been attached over there for a moment.
            self._begin(Way.REATTACH)


async def _drop(link: Link | None) -> None:
    if link is not None:
        await link.close(leave=True)
