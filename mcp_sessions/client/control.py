"""Resume the session on a link: handshake, start, resume, end.

Rules that must hold, and that ``tests/client/`` owns over real sockets:

1. The application's own ``initialize`` is repeated on each new connection of the handshake era,
   with the same params. A server that then speaks another version is not the same.
2. A session that is gone is started again once (see `Lives`), and every waiting request learns of
   it.
3. At a server without sessions, this module does nothing.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

from mcp_sessions import method_names
from mcp_sessions.client import rpc
from mcp_sessions.client.dialer import Failed, Failure, Json, Link
from mcp_sessions.client.known_server import KnownServer
from mcp_sessions.client.own_requests import Exchanges, RequestRefused
from mcp_sessions.client.resume_report import ResumeOutcome
from mcp_sessions.client.state import Runtime
from mcp_sessions.core.messages import INSTANCE_META, SESSION_META
from mcp_sessions.core.resume import AWAY, EventId, FailureCause, Step, after_status
from mcp_sessions.errors import METHOD_NOT_FOUND, SESSION_NOT_FOUND
from mcp_sessions.ids import digest

logger = logging.getLogger(__name__)

_REFUSED, _UNAVAILABLE = 400, 503
"""The answers of some other servers for a session that they do not know."""

_PATIENCE = 2
"""How often a server that answers so is asked again for the same session."""


class Hopeless(Exception):
    """The session is lost, and the session before it was lost without being of use."""


@dataclass(slots=True, eq=False)
class SessionControl:
    _runtime: Runtime
    _peer: KnownServer
    _exchanges: Exchanges

    async def _ask(
        self, link: Link, method: str, params: Json | None, within: float | None = None
    ) -> Json:
        is_pushed = link is self._peer.pushed
        envelope = None if is_pushed else self._peer.modern_envelope
        return await self._exchanges.ask(link, method, params, envelope, within=within)

    async def shake_hands(self, link: Link) -> None:
        """Repeat the application's handshake on a new link; nothing in the modern era.

        Raises:
            Failed: The server did not agree, or did not answer.
        """
        peer = self._peer
        if peer.initialize is None:
            return
        try:
            result = await self._ask(link, method_names.INITIALIZE, peer.initialize)
        except RequestRefused as refused:
            text = f"{link.name}: initialize was refused"
            failure = Failure(FailureCause.STATUS, text, error=refused.error)
            raise Failed(failure) from None
        if result.get("protocolVersion") != peer.protocol_version:
            text = f"{link.name}: the server speaks another protocol version than before"
            raise Failed(Failure(FailureCause.STATUS, text))
        peer.learn(result)
        link.configure(peer.settings())
        headers = {"mcp-protocol-version": peer.protocol_version or ""}
        await link.send(rpc.notification(method_names.INITIALIZED), headers)

    async def discover(self, link: Link) -> None:
        """Ask a modern server what it can do, if the application did not.

        Raises:
            Failed: The server did not answer.
        """
        try:
            self._peer.learn(await self._ask(link, method_names.DISCOVER, {}))
        except RequestRefused:
            self._peer.note_no_sessions()

    async def _look_for_server(self, link: Link, *, is_new: bool) -> None:
        """Check that a server answers on a link, by a request without an effect, if nothing else is
        sent to it.

        Raises:
            Failed: Nobody is.
        """
        method: str = method_names.DISCOVER
        params: Json | None = {}
        if not self._peer.is_modern:
            if is_new:
                # The handshake was answered there.
                return
            method, params = method_names.PING, None
        try:
            await self._ask(link, method, params)
        except RequestRefused as refused:
            logger.debug("%s: %s", method, refused)

    async def take_up(self, link: Link) -> ResumeOutcome:
        """Continue on a new link, with the session if the server has sessions.

        Raises:
            Failed: The link is of no use; another may be.
            Hopeless: The session is gone once too often.
        """
        if self._peer.holds_sessions or self._peer.abilities.has_sessions:
            return await self.attach(link)
        # A transport session only, and it was lost.
        await self._look_for_server(link, is_new=True)
        self._begin_another_life()
        return ResumeOutcome(
            False, is_new_session=True, reason="session_lost", connected_to=link.name
        )

    def _begin_another_life(self) -> None:
        now, rest = self._runtime.clock(), self._runtime.policy.backoff_cap
        if not self._peer.lives.restart(now=now, rest=rest):
            raise Hopeless

    async def attach(self, link: Link, *, is_new: bool = True) -> ResumeOutcome:
        """Resume the session on a link, or start one if there is none or it is gone.

        Args:
            is_new: The link was opened for it. Otherwise its transport session may be gone, which
                does not end the session (CLI10).

        Raises:
            Failed: The link is of no use; another may be.
            Hopeless: The session is gone once too often.
        """
        peer = self._peer
        session = peer.session
        if session is None and not peer.hosted.is_manager:
            await self.start(link)
            return ResumeOutcome(False, is_new_session=True, connected_to=link.name)
        if session is None or not session.resumable:
            await self._look_for_server(link, is_new=is_new)
            return ResumeOutcome(True, connected_to=link.name)
        position = peer.follower.position
        result = await self.resume(link, session.session_id, position, is_new=is_new)
        if result is None:
            return await self.restart(link)
        session.renewed(result.get("expiresAt"))
        recovered = peer.resumed(result)
        replayed, reason = result.get("replayed"), result.get("reason")
        logger.info(
            "session %s resumed at %s: %s",
            digest(session.session_id),
            link.name,
            f"{replayed or 0} missed events follow" if recovered else f"a gap ({reason})",
        )
        return ResumeOutcome(
            recovered,
            reason=reason if isinstance(reason, str) else None,
            replayed=replayed if isinstance(replayed, int) else 0,
            connected_to=link.name,
        )

    async def resume(
        self, link: Link, session_id: str, position: EventId | None, *, is_new: bool
    ) -> Json | None:
        """Send ``session/resume`` and return its result; None: the session is gone.

        Raises:
            Failed: The link is of no use; another may be.
        """
        instance = {INSTANCE_META: self._peer.attempts.instance}
        params: Json = {"sessionId": session_id, "_meta": instance}
        if position is not None:
            params["lastSessionEventId"] = position
        failures = 0
        while True:
            try:
                return await self._ask(link, method_names.RESUME_SESSION, params)
            except RequestRefused as refused:
                if refused.code in (SESSION_NOT_FOUND, METHOD_NOT_FOUND):
                    return None
                failure = Failure(FailureCause.STATUS, str(refused), error=refused.error)
                raise Failed(failure) from None
            except Failed as failed:
                failure = failed.failure
                self.gave_up_on_attempt(failure)
                if failure.status is None:
                    raise
                if failure.status in AWAY and (
                    self._peer.abilities.is_ours or failure.status != _UNAVAILABLE
                ):
                    # It keeps its sessions while it is away (HTP5, HTP6): perhaps at another
                    # server. Or a proxy does not reach it.
                    raise
                # The path to the server works, and it says no: 503, 400, 404, 410.
                step = after_status(failure.status, failures=failures, is_answer=failure.is_answer)
                if failure.status == _REFUSED:
                    step = Step.RECONNECT
                elif failure.status == _UNAVAILABLE and failures < _PATIENCE:
                    step = Step.RETRY
                if step is Step.REPORT or (step is Step.RECONNECT and not is_new):
                    raise
                if step is Step.RECONNECT:
                    return None
                failures += 1
                asked = min(failure.retry_after or 0.0, self._runtime.policy.give_up_after)
                await self._runtime.back_off(asked)

    def gave_up_on_attempt(self, failure: Failure) -> None:
        """Note that a request that takes the session has no answer. It may still be
        served (TKO13).
        """
        was_refused = failure.is_answer or failure.never_ran
        if failure.cause is not FailureCause.UNREACHABLE and not was_refused:
            self._peer.attempts.gave_up(now=self._runtime.clock())

    async def restart(self, link: Link) -> ResumeOutcome:
        """Replace a lost session, if the lost one was of use (CLI5).

        Raises:
            Failed: The link is of no use.
            Hopeless: It was not.
        """
        session = self._peer.session
        if session is not None:
            logger.info("session %s is gone", digest(session.session_id))
        if self._peer.hosted.is_manager:
            # The application went on to its own sessions: it needs no other.
            self._peer.lost()
            return ResumeOutcome(True, connected_to=link.name)
        self._begin_another_life()
        self._peer.lost()
        await self.start(link)
        session = self._peer.session
        if session is not None:
            await self.subscribe_again(link, {"_meta": {SESSION_META: session.metadata()}})
        return ResumeOutcome(
            False, is_new_session=True, reason="session_lost", connected_to=link.name
        )

    async def start(self, link: Link) -> None:
        """Start a session, if the server has any.

        Raises:
            Failed: The link is of no use.
        """
        peer, known = self._peer, self._peer.abilities
        if not known.has_sessions:
            return
        started = None
        try:
            if known.may("start"):
                result = await self._ask_quietly(link, method_names.START_SESSION, {})
                started = rpc.session_of_start(result) if result is not None else None
            if started is None and known.may("create"):
                result = await self._ask_quietly(link, method_names.CREATE_SESSION, None)
                if result is not None:
                    started = rpc.session_of_create(result, may_resume=known.may("resume"))
        finally:
            link.configure(peer.settings())
        if started is None:
            logger.info("%s advertises sessions, but refused to start one", link.name)
            return
        session, head = started
        peer.began(session, head)
        link.configure(peer.settings())
        logger.info("session %s started at %s", digest(session.session_id), link.name)

    async def _ask_quietly(self, link: Link, method: str, params: Json | None) -> Json | None:
        try:
            return await self._ask(link, method, params)
        except RequestRefused as refused:
            if rpc.says_not_begun(refused.error):
                failure = Failure(FailureCause.STATUS, str(refused), error=refused.error)
                raise Failed(failure) from None
            logger.debug("%s: %s", method, refused)
            return None
        except Failed as failed:
            if failed.failure.status in (400, 404, 405, 501):
                return None
            raise

    async def subscribe_again(self, link: Link, named: Json) -> None:
        """Repeat the application's subscriptions of the session or connection that is gone (CLI4).

        Args:
            named: Members of the params that name the session.
        """
        for uri in list(self._peer.subscribed):
            try:
                await self._exchanges.ask(link, method_names.SUBSCRIBE, {"uri": uri, **named})
            except RequestRefused as refused:
                logger.info("a subscription could not be restored: %s", refused)

    async def end(self, link: Link, *, within: float) -> None:
        """End the session at the server (END1, DEL1). Never fails.

        Args:
            within: Seconds.
        """
        session = self._peer.session
        if session is None:
            return
        try:
            if session.resumable and self._peer.abilities.may("end"):
                params: Json = {"sessionId": session.session_id}
                await self._ask(link, method_names.END_SESSION, params, within)
            else:
                params = {"_meta": {SESSION_META: session.metadata()}}
                await self._ask(link, method_names.DELETE_SESSION, params, within)
        except (RequestRefused, Failed) as error:
            logger.debug("the session could not be ended: %s", error)
