"""React to the loss of a link, or of the session's attachment to it.

Rules that must hold, and that ``tests/client/`` owns over real sockets:

1. A client that took the session over keeps it: this client stops, and says so (TKO7).
2. A loss that is reported while the session is being resumed is checked afterwards.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field

from mcp_sessions import method_names
from mcp_sessions.client import explaining, rpc
from mcp_sessions.client.application import Application
from mcp_sessions.client.dialer import Failure, Json, Link
from mcp_sessions.client.hosted import HostedSession
from mcp_sessions.client.known_server import KnownServer
from mcp_sessions.client.own_requests import Exchanges
from mcp_sessions.client.recovery import Recovery, Way
from mcp_sessions.client.resume_report import ResumeOutcome
from mcp_sessions.client.sending import Sender
from mcp_sessions.client.state import ClientState, LinkChange, Phase, Runtime
from mcp_sessions.core.backoff import Backoff, spread
from mcp_sessions.core.resume import seconds_of
from mcp_sessions.errors import Detached

logger = logging.getLogger(__name__)

_MOVE_WITHIN = 1.0
"""Seconds over which the clients of a server that drains go to another address."""


@dataclass(slots=True, eq=False)
class Losses:
    _runtime: Runtime
    _state: ClientState
    _peer: KnownServer
    _app: Application
    _exchanges: Exchanges
    _recovery: Recovery
    _sender: Sender
    _detached_meanwhile: tuple[Link, Json] | None = field(init=False, default=None)
    """A detachment that was reported while the session was taken up, after the newest answer."""

    _reopened_meanwhile: Link | None = field(init=False, default=None)
    """The link whose notification stream was opened again while the client was busy."""

    _unsure: set[Link] = field(init=False, default_factory=set[Link])
    """Links that are to be replaced, since their notification streams cannot continue."""

    _streams: Backoff = field(init=False)
    """The delays between links whose notification streams bring nothing."""

    def __post_init__(self) -> None:
        policy = self._runtime.policy
        self._streams = Backoff(base=policy.backoff_base, cap=policy.backoff_cap)

    async def down(self, link: Link, failure: Failure) -> None:
        state = self._state
        self._exchanges.down(link, failure)
        left = [pending for pending in self._app.requests if pending.link is link]
        for pending in left:
            pending.lose_link(explaining.cause_of(failure, link.name))
        if link is not state.link:
            for pending in left:
                await self._sender.orphaned(pending)
            return
        state.use(None)
        self._app.listens.cut()
        if state.phase is not Phase.ENDED:
            self._app.lost(link.name, failure)
        if state.phase is Phase.BUSY:
            return
        if state.phase is Phase.ENDED or not self._peer.holds_sessions or not failure.may_return:
            # Without a session there is nothing to come back to: as a stock transport.
            await self._stop()
        else:
            self._recovery.begin(Way.RECOVER)

    async def _stop(self) -> None:
        had_ended = self._state.phase is Phase.ENDED
        self._state.apply(LinkChange.END)
        for pending in self._app.requests:
            await self._app.give_up_on(pending)
        if self._peer.session is not None and not had_ended:
            await self._app.report_outcome(ResumeOutcome(False, reason="refused", has_ended=True))
        await self._app.hang_up()

    async def detached(self, link: Link, params: Json) -> None:
        held = self._peer.hosted.find(params.get("sessionId"))
        if held is not None:
            await self._hosted_detached(link, held, params)
            return
        session = self._peer.session
        if self._state.phase is Phase.BUSY:
            self._detached_meanwhile = (link, params)
            return
        if session is None or not self._state.is_ready_on(link):
            return
        if params.get("sessionId") != session.session_id:
            return
        match params.get("reason"):
            case Detached.TAKEN_OVER.value if self._peer.attempts.is_own(
                params.get("instance"), now=self._runtime.clock()
            ):
                # TKO13: something that was given up was served after all.
                logger.info("%s: taken over by a late request of this client", link.name)
                self._runtime.tasks.start_soon(self._take_back, link)
            case Detached.TAKEN_OVER.value if self._peer.hosted.is_manager:
                # The application goes on in its own sessions.
                self._peer.leave_session()
            case Detached.TAKEN_OVER.value:
                logger.info("%s: the session was taken over", link.name)
                self._state.apply(LinkChange.TAKEN_OVER)
                for pending in self._app.requests:
                    # Running requests are still answered here.
                    if pending.link is None:
                        await self._app.give_up_on(pending, explaining.taken_over(link.name))
                await self._app.report_outcome(
                    ResumeOutcome(
                        False, reason="taken_over", connected_to=link.name, has_ended=True
                    )
                )
            case Detached.DRAINING.value:
                self._come_back_later(link, params)
            case _:
                self._runtime.tasks.start_soon(self._take_back, link)

    async def _hosted_detached(self, link: Link, held: HostedSession, params: Json) -> None:
        if not self._state.uses(link) and self._state.phase is not Phase.BUSY:
            return
        if link is self._peer.pushed and self._recovery.hosted.is_listened_to(held.session_id):
            # HTM16: by a listen stream of the application.
            return
        instance = params.get("instance")
        match params.get("reason"):
            case Detached.TAKEN_OVER.value if not self._peer.attempts.is_own(
                instance, now=self._runtime.clock()
            ):
                self._peer.hosted.left(held.session_id)
                if self._peer.hosted.is_declared:
                    await self._app.deliver(rpc.notification(method_names.DETACHED, params))
            case Detached.DRAINING.value:
                self._come_back_later(link, params)
            case _:
                self._runtime.tasks.start_soon(self._take_back, link)

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
        self._recovery.postpone(now + delay)
        runtime.tasks.start_soon(self._come_back, link, delay)

    async def _come_back(self, link: Link, delay: float) -> None:
        await self._runtime.sleep(delay)
        if self._state.uses(link):
            self._recovery.begin(Way.RECOVER)

    async def _take_back(self, link: Link) -> None:
        """Resume a session that left this connection and that nobody else has.

        With back-off, as a server may take it away each time.
        """
        await self._runtime.back_off()
        if self._state.uses(link):
            self._recovery.begin(Way.REATTACH)

    def stream_reopened(self, link: Link) -> None:
        """Report a gap: the server has no sessions, and the stream did not continue."""
        if self._state.phase is Phase.BUSY:
            self._reopened_meanwhile = link
        elif self._state.is_ready_on(link):
            self._recovery.begin(Way.REATTACH)

    def stream_unsure(self, link: Link) -> None:
        """Take another link: on this one the notification stream would skip events."""
        if link not in self._unsure:
            self._unsure.add(link)
            self._runtime.tasks.start_soon(self._replace, link)

    async def _replace(self, link: Link) -> None:
        await self._runtime.sleep(self._streams.failed(self._runtime.draw()))
        await self._recovery.until_settled()
        self._unsure.remove(link)
        if self._state.is_ready_on(link):
            self._recovery.begin(Way.REPLACE if link is self._state.link else Way.RECOVER)

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
