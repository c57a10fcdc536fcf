"""Open a link, and take up on it each session of the table: handshake, start, resume, end.

Rules that must hold, and that ``tests/client/`` owns over real sockets:

1. The application's own ``initialize`` is repeated on each new connection of the handshake era,
   with the same params. A server that then speaks another version is not the same.
2. After a loss each session that was attached is resumed at the last event that the application was
   given: the client's own first. The application does not learn of the loss of its own sessions.
3. A session of the client's own that is gone is started again once (see `Lives`), and every waiting
   request learns of it.
4. If the resume of an application's session is refused, no later event of it passes (ATT10), and
   the application is notified. If it knows the extension, it gets the notification
   ``sessions/detached`` with ``evicted`` (TKO3), and resumes with its own position. Otherwise its
   connection ends.
   Its subscriptions outside of sessions are repeated, and their resources reported as changed.
5. At a server without sessions, this module does nothing.

A WebSocket, a pipe and a transport session over HTTP carry events by themselves. Over HTTP an
application of the modern era, or one that did no handshake, has none of these, and its own
connection is one that can be pushed to (ASC7). So a second link is opened to the same address, with
a handshake of this client: the application's sessions are started and resumed there, and their
events come on its notification stream. All else goes out on the first link.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from weakref import WeakKeyDictionary

import anyio

from mcp_sessions import method_names
from mcp_sessions.client import messages
from mcp_sessions.client.application import Application
from mcp_sessions.client.dialer import Dialer, Event, Failed, Failure, Link, LinkSettings
from mcp_sessions.client.reports import ResumeOutcome
from mcp_sessions.client.requests import Exchanges, PendingRequest, RequestRefused
from mcp_sessions.client.sessions import KnownServer, Session, session_of_create, session_of_start
from mcp_sessions.client.state import ClientState, Runtime
from mcp_sessions.core.messages import INSTANCE_META, SESSION_META, Json
from mcp_sessions.core.resume import AWAY, EventId, FailureCause, Step, after_status
from mcp_sessions.errors import METHOD_NOT_FOUND, SESSION_NOT_FOUND, Detached
from mcp_sessions.ids import digest
from mcp_sessions.protocol_versions import NEWEST_HANDSHAKE

logger = logging.getLogger(__name__)

_REFUSED, _UNAVAILABLE = 400, 503
"""The answers of some other servers for a session that they do not know."""

_PATIENCE = 2
"""How often a server that answers so is asked again for the same session."""

_CLIENT_INFO = {"name": "mcp-sessions", "version": "1"}

_HOLE = "a session missed events that the server does not have any more: start the bridge again"


class Hopeless(Exception):
    """The session is lost, and the session before it was lost without being of use."""


@dataclass(slots=True, eq=False)
class Connector:
    """Opens links."""

    _runtime: Runtime
    _peer: KnownServer
    _on_event: Callable[[Link, Event], Awaitable[None]]
    _dialers: WeakKeyDictionary[Link, Dialer] = field(
        default_factory=WeakKeyDictionary[Link, Dialer]
    )

    async def connect(self, dialer: Dialer) -> Link:
        link = dialer.link()
        link.configure(self._peer.first_settings())
        timeout = self._runtime.policy.connect_timeout
        try:
            with anyio.fail_after(timeout):
                await self._runtime.tasks.start(link.run, self._on_event)
        except TimeoutError:
            text = f"{link.name}: no connection within {timeout:g} s"
            raise Failed(Failure(FailureCause.SILENT, text)) from None
        self._dialers[link] = dialer
        return link

    def dialer_of(self, link: Link) -> Dialer:
        return self._dialers[link]


@dataclass(slots=True, eq=False)
class SessionControl:
    _runtime: Runtime
    _state: ClientState
    _peer: KnownServer
    _app: Application
    _exchanges: Exchanges
    _connector: Connector
    _has_no_handshake: bool = False
    """The server refused the link to push on: its events come on listen streams only."""

    async def _ask(
        self, link: Link, method: str, params: Json | None, within: float | None = None
    ) -> Json:
        is_pushed = link is self._state.pushed
        envelope = None if is_pushed else self._peer.modern_envelope
        return await self._exchanges.ask(link, method, params, envelope, within=within)

    # --- the connection ------------------------------------------------------------------------

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
        await link.send(messages.notification(method_names.INITIALIZED), headers)

    async def link_for_sessions(self, link: Link) -> Link:
        """Return the link for the sessions of an application with requests on ``link``.

        Raises:
            Failed: It could not be opened.
        """
        state = self._state
        if link.kind != "http" or self._peer.initialize is not None or self._has_no_handshake:
            return link
        if state.pushed is not None:
            return state.pushed
        pushed = await self._connector.connect(self._connector.dialer_of(link))
        try:
            await self._shake_own_hands(pushed)
        except RequestRefused as refused:
            logger.warning("%s pushes no events of sessions: %s", link.name, refused)
            self._has_no_handshake = True
            await pushed.close(leave=True)
            return link
        except BaseException:
            await pushed.close(leave=False)
            raise
        state.push_on(pushed)
        return pushed

    async def _shake_own_hands(self, link: Link) -> None:
        envelope = self._peer.envelope
        info = envelope.meta.get("io.modelcontextprotocol/clientInfo") if envelope else None
        params: Json = {
            "protocolVersion": NEWEST_HANDSHAKE,
            "capabilities": messages.declaring({}),
            "clientInfo": info or _CLIENT_INFO,
        }
        try:
            result = await self._exchanges.ask(link, method_names.INITIALIZE, params)
        except Failed as failed:
            failure = failed.failure
            if failure.cause is FailureCause.STATUS and failure.status == 400 and failure.error:
                raise RequestRefused(failure.error) from None
            raise
        version = result.get("protocolVersion")
        if not isinstance(version, str):
            text = f"{link.name}: the server agreed on no protocol version"
            raise Failed(Failure(FailureCause.STATUS, text))
        link.configure(LinkSettings(has_sessions=True, protocol_version=version))
        headers = {"mcp-protocol-version": version}
        await link.send(messages.notification(method_names.INITIALIZED), headers)
        link.listen()

    async def drop_pushed(self) -> None:
        pushed = self._state.push_on(None)
        if pushed is not None:
            await pushed.close(leave=True)

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

    # --- every session of the table --------------------------------------------------------------

    async def take_up(self, link: Link, *, is_new: bool = True) -> ResumeOutcome:
        """Continue on a link, with each session of the table: the client's own first.

        Args:
            is_new: The link was opened for it. Otherwise its transport session may be gone, which
                does not end a session (CLI10).

        Raises:
            Failed: The link is of no use; another may be.
            Hopeless: The session is gone once too often.
        """
        if self._peer.holds_sessions or self._peer.abilities.has_sessions or not is_new:
            outcome = await self.attach(link, is_new=is_new)
        else:
            # A transport session only, and it was lost.
            await self._look_for_server(link, is_new=True)
            self._begin_another_life()
            outcome = ResumeOutcome(
                False, is_new_session=True, reason="session_lost", connected_to=link.name
            )
        await self.attach_hosted(link, is_new=is_new)
        return outcome

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
        if session is None and not peer.sessions.is_manager:
            await self.start(link)
            return ResumeOutcome(False, is_new_session=True, connected_to=link.name)
        if session is None or not session.resumable:
            await self._look_for_server(link, is_new=is_new)
            return ResumeOutcome(True, connected_to=link.name)
        position = session.follower.position
        result = await self.resume(link, session.session_id, position, is_new=is_new)
        if result is None:
            return await self.restart(link)
        recovered = session.resumed(result)
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

    async def attach_hosted(self, link: Link, *, is_new: bool) -> None:
        """Resume on a link what is attached to the application's connection.

        Raises:
            Failed: The link is of no use; another may be.
        """
        peer = self._peer
        if not peer.sessions.is_manager:
            return
        if is_new and peer.session is None and not peer.is_modern:
            # Outside of sessions they ended with the connection.
            named: Json = {"_meta": {SESSION_META: None}} if peer.abilities.has_sessions else {}
            await self.subscribe_again(link, named)
            await self.report_everything_changed()
        if is_new:
            await self.drop_pushed()
        for held in list(peer.sessions.attached()):
            if link.kind == "http" and self.is_listened_to(held):
                # Its stream is asked for again, and says from where.
                continue
            held.taking()
            try:
                reason = await self._resume_hosted(link, held, is_new=is_new)
            finally:
                held.decided()
            if reason is not None:
                logger.warning(
                    "session %s could not be resumed at %s: %s",
                    digest(held.session_id),
                    link.name,
                    reason,
                )
                await self._report_refused(held)

    async def _resume_hosted(self, link: Link, held: Session, *, is_new: bool) -> str | None:
        position = held.follower.position
        link = await self.link_for_sessions(link)
        result = await self.resume(link, held.session_id, position, is_new=is_new)
        if result is None:
            self._peer.sessions.gone(held.session_id)
            return "it is gone"
        if held.resumed(result):
            logger.info("session %s resumed at %s", digest(held.session_id), link.name)
        elif position is not None:
            self._peer.sessions.missed_events(held)
            return f"a gap ({result.get('reason')})"
        # Else nothing of it was ever seen, so that nothing can be missed.
        return None

    async def before_listening(self, link: Link, pending: PendingRequest) -> None:
        """Over HTTP a listen stream of the application begins where ``session/resume`` says
        (CLI11, HTM9).

        Raises:
            Failed: The link is of no use.
        """
        held = self._peer.sessions.hosted(pending.session_id)
        position = held.follower.position if held is not None else None
        if link.kind != "http" or held is None or position is None:
            return
        held.taking()
        try:
            result = await self.resume(link, held.session_id, position, is_new=False)
            if result is not None and not held.resumed(result):
                self._peer.sessions.missed_events(held)
        finally:
            held.decided()
        if held.is_withheld:
            await self._report_refused(held)

    async def _report_refused(self, held: Session) -> None:
        if self._peer.sessions.is_declared:
            params = {"sessionId": held.session_id, "reason": Detached.EVICTED.value}
            await self._app.deliver(messages.notification(method_names.DETACHED, params))
        elif held.is_withheld:
            await self._app.end(_HOLE)

    def is_listened_to(self, held: Session) -> bool:
        return self._app.requests.listen_of(held.session_id, is_open=False) is not None

    async def report_everything_changed(self) -> None:
        """Ask the application to read everything again after a gap in its events (CLI4)."""
        peer, deliver = self._peer, self._app.deliver
        if peer.is_modern:
            for message in self._app.listens.everything():
                await deliver(message)
            return
        for name in () if peer.sessions.has_attached else peer.abilities.lists:
            # A session of its own tells it of the lists (EVT11).
            await deliver(messages.notification(method_names.CHANGED[name]))
        for uri in list(peer.subscribed):
            await deliver(messages.notification(method_names.RESOURCE_UPDATED, {"uri": uri}))

    # --- one session -------------------------------------------------------------------------

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
        if self._peer.sessions.is_manager:
            # The application went on to its own sessions: it needs no other.
            self._peer.sessions.leave()
            return ResumeOutcome(True, connected_to=link.name)
        self._begin_another_life()
        self._peer.sessions.leave()
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
                started = session_of_start(result) if result is not None else None
            if started is None and known.may("create"):
                result = await self._ask_quietly(link, method_names.CREATE_SESSION, None)
                if result is not None:
                    started = session_of_create(result, may_resume=known.may("resume"))
        finally:
            link.configure(peer.settings())
        if started is None:
            logger.info("%s advertises sessions, but refused to start one", link.name)
            return
        peer.sessions.begin(started)
        link.configure(peer.settings())
        logger.info("session %s started at %s", digest(started.session_id), link.name)

    async def _ask_quietly(self, link: Link, method: str, params: Json | None) -> Json | None:
        try:
            return await self._ask(link, method, params)
        except RequestRefused as refused:
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
