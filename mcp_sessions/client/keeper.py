"""The session as the client holds it, and how it is taken up on a link.

Rules that must hold, and that ``tests/client/`` owns over real sockets:

1. The application's own ``initialize`` is repeated on each new connection of the handshake
   era, with the same params; a server that then speaks another version is not the same.
2. A session that is gone is started over once (see `Lives`), and whoever asks is told.
3. At a server that does not speak of sessions nothing of this happens.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from typing import cast

from mcp_sessions.client import wire
from mcp_sessions.client.dialer import Failed, Failure, Json, Link
from mcp_sessions.client.exchange import Exchanges, Refused
from mcp_sessions.client.jar import SavedSession
from mcp_sessions.client.outcome import ResumeOutcome
from mcp_sessions.client.policy import ReconnectPolicy
from mcp_sessions.core.backoff import Backoff
from mcp_sessions.core.messages import INSTANCE_META, SESSION_META
from mcp_sessions.core.resume import (
    AWAY,
    NEVER_RAN,
    Abilities,
    Attempts,
    Cause,
    Follower,
    Lives,
    SessionView,
    Step,
    abilities,
    after_status,
    is_sendable,
)
from mcp_sessions.errors import METHOD_NOT_FOUND, SESSION_NOT_FOUND
from mcp_sessions.ids import digest

logger = logging.getLogger(__name__)


class Hopeless(Exception):
    """The session is gone, and the one before it was of no use either."""


class SessionKeeper:
    """One client's session, if it has one."""

    def __init__(
        self,
        exchanges: Exchanges,
        policy: ReconnectPolicy,
        backoff: Backoff,
        draw: Callable[[], float],
        sleep: Callable[[float], Awaitable[None]],
        clock: Callable[[], float],
        attempts: Attempts,
    ) -> None:
        """Take what it works with; see `Situation`."""
        self.attempts = attempts
        self.session: SessionView | None = None
        self.follower = Follower()
        self.lives = Lives()
        self.abilities: Abilities | None = None
        """None: the server has not said yet."""

        self.initialize: Json | None = None
        """The params of the application's ``initialize``; None: the modern era."""

        self.protocol_version: str | None = None
        self.envelope: wire.Envelope | None = None
        self.subscribed: dict[str, None] = {}
        """Handshake era: what the application subscribed to in this session."""

        self.must_resume_before_listening = False
        """Modern era: the next listen stream starts where ``session/resume`` says."""

        self._exchanges = exchanges
        self._rest = policy.backoff_cap
        self._patience = policy.give_up_after
        self._backoff = backoff
        self._draw = draw
        self._sleep = sleep
        self._clock = clock

    @property
    def is_modern(self) -> bool:
        """Which era the application speaks."""
        return self.initialize is None and self.envelope is not None

    @property
    def _envelope(self) -> wire.Envelope | None:
        return self.envelope if self.is_modern else None

    def learn(self, result: Json) -> None:
        """Read an ``initialize`` or ``server/discover`` result."""
        self.abilities = abilities(result.get("capabilities"))
        version = result.get("protocolVersion")
        if isinstance(version, str) and is_sendable(version):
            self.protocol_version = version

    def configure(self, link: Link) -> None:
        """Tell a link what is known of its server."""
        link.settings.has_sessions = self.session is not None
        link.settings.has_keys = self.has_keys
        if self.initialize is not None:
            link.settings.protocol_version = self.protocol_version

    @property
    def has_keys(self) -> bool:
        """Whether requests are sent with a key."""
        known = self.abilities
        return (
            self.session is not None
            and known is not None
            and known.key_lifetime > 0
            and known.may("requestKey")
        )

    @property
    def is_ours(self) -> bool:
        """Whether the server is one of this project."""
        return self.abilities is not None and self.abilities.is_ours

    @property
    def key_lifetime(self) -> float:
        """Seconds for which the server knows a key."""
        return self.abilities.key_lifetime if self.abilities is not None else 0.0

    def headers(self, method: str | None = None) -> dict[str, str]:
        """The HTTP headers of a message that the application gave none for."""
        if self.initialize is not None or self.envelope is None:
            version = self.protocol_version
            return {"mcp-protocol-version": version} if version is not None else {}
        headers = {"mcp-protocol-version": self.envelope.protocol_version}
        if method is not None:
            headers["mcp-method"] = method
        return headers

    def note_subscription(self, message: Json) -> None:
        """A request was answered: was it about a subscription?"""
        uri = cast("Json", message.get("params") or {}).get("uri")
        if not isinstance(uri, str):
            return
        if message["method"] == wire.SUBSCRIBE:
            self.subscribed[uri] = None
        elif message["method"] == wire.UNSUBSCRIBE:
            self.subscribed.pop(uri, None)

    def forget_sessions(self) -> None:
        """The server has none, whatever it says."""
        self.session, self.abilities = None, Abilities()

    def drop_state(self, session_id: str | None, state: str | None) -> bool:
        """The server refused a ``state``; whether a request may be sent again without it.

        It may have lost the keys that it was sealed with. Then no request of the session would
        ever be served again, although the server has the session, and its state with it. Only
        of a server of this project that is known: of another the token may be all there is.

        Args:
            session_id: Whose it is.
            state: What was sent; a newer one is kept.
        """
        session = self.session
        if session is None or session.session_id != session_id or state is None:
            return False
        if not (self.is_ours and session.resumable):
            return False
        if session.state == state:
            logger.warning("session %s goes on without its state token", digest(session.session_id))
            session.state = None
        return True

    # --- taking it up ------------------------------------------------------------------------

    async def shake_hands(self, link: Link) -> None:
        """Repeat the application's handshake on a new link; nothing in the modern era.

        Raises:
            Failed: The server did not agree, or did not answer.
        """
        if self.initialize is None:
            return
        try:
            result = await self._exchanges.ask(link, wire.INITIALIZE, self.initialize)
        except Refused as refused:
            failure = Failure(Cause.STATUS, "initialize was refused", error=refused.error)
            raise Failed(failure) from None
        if result.get("protocolVersion") != self.protocol_version:
            text = "the server speaks another protocol version than before"
            raise Failed(Failure(Cause.STATUS, text))
        self.learn(result)
        self.configure(link)
        headers = {"mcp-protocol-version": self.protocol_version or ""}
        await link.send(wire.notification(wire.INITIALIZED), headers)

    async def discover(self, link: Link) -> None:
        """Ask a modern server what it can do, if the application did not.

        Raises:
            Failed: The server did not answer.
        """
        try:
            self.learn(await self._exchanges.ask(link, wire.DISCOVER, {}, self._envelope))
        except Refused:
            self.abilities = Abilities()

    async def _look_for_server(self, link: Link) -> None:
        """Modern era: see that somebody is there, where nothing else is asked of a new link.

        Raises:
            Failed: Nobody is.
        """
        if not self.is_modern:
            return
        try:
            await self._exchanges.ask(link, wire.DISCOVER, {}, self._envelope)
        except Refused as refused:
            logger.debug("%s: %s", wire.DISCOVER, refused)

    async def take_up(self, link: Link) -> ResumeOutcome:
        """Go on on a new link: with the session, or, at a server without, as well as can be.

        Raises:
            Failed: The link is of no use; another may be.
            Hopeless: The session is gone once too often.
        """
        has_sessions = self.abilities is not None and self.abilities.has_sessions
        if self.session is not None or has_sessions:
            return await self.attach(link)
        # A transport session only, and it was lost.
        await self._look_for_server(link)
        if not self.lives.start_over(now=self._clock(), rest=self._rest):
            raise Hopeless
        return ResumeOutcome(
            False, is_new_session=True, reason="session_lost", connected_to=link.name
        )

    async def attach(self, link: Link, *, is_new: bool = True) -> ResumeOutcome:
        """Resume the session on a link, or start one if there is none or it is gone.

        Args:
            is_new: The link was opened for it. Else its transport session may be gone, which
                is not the end of the session (CLI10).

        Raises:
            Failed: The link is of no use; another may be.
            Hopeless: The session is gone once too often.
        """
        session = self.session
        if session is None:
            await self.start(link)
            return ResumeOutcome(False, is_new_session=True, connected_to=link.name)
        if not session.resumable:
            await self._look_for_server(link)
            return ResumeOutcome(True, connected_to=link.name)
        params: Json = {
            "sessionId": session.session_id,
            "_meta": {INSTANCE_META: self.attempts.instance},
        }
        if self.follower.position is not None:
            params["lastSessionEventId"] = self.follower.position
        result = await self._resume(link, params, is_new=is_new)
        if result is None:
            return await self.start_over(link, "session_lost")
        expires_at = result.get("expiresAt")
        if isinstance(expires_at, str):
            session.expires_at = expires_at
        self.must_resume_before_listening = False
        recovered = result.get("catchup") is True
        replayed, reason = result.get("replayed"), result.get("reason")
        if not recovered:
            # Position and memory together: the head is where this log goes on.
            self.follower.restart(wire.head_of(result))
        logger.info(
            "session %s resumed at %s: %s",
            digest(session.session_id),
            link.name,
            "nothing missed" if recovered else f"a gap ({reason})",
        )
        return ResumeOutcome(
            recovered,
            reason=reason if isinstance(reason, str) else None,
            replayed=replayed if isinstance(replayed, int) else 0,
            connected_to=link.name,
        )

    async def _resume(self, link: Link, params: Json, *, is_new: bool) -> Json | None:
        """The result of ``session/resume``; None: the session is gone."""
        failures = 0
        while True:
            try:
                return await self._exchanges.ask(link, "session/resume", params, self._envelope)
            except Refused as refused:
                if refused.code in (SESSION_NOT_FOUND, METHOD_NOT_FOUND):
                    return None
                failure = Failure(Cause.STATUS, str(refused), error=refused.error)
                raise Failed(failure) from None
            except Failed as failed:
                failure = failed.failure
                self.gave_up_on_attempt(failure)
                if failure.status is None:
                    raise
                if failure.status in AWAY and self.is_ours:
                    # It keeps its sessions while it is away (HTP5, HTP6): perhaps elsewhere.
                    raise
                # The path to the server works, and it says no: 503, 400, 404, 410.
                step = after_status(
                    failure.status,
                    failures=failures,
                    says_session=failure.says_session or failure.status == 400,
                    is_answer=failure.is_answer,
                )
                if step is Step.TELL or (step is Step.RECONNECT and not is_new):
                    raise
                if step is Step.RECONNECT:
                    return None
                failures += 1
                asked = min(failure.retry_after or 0.0, self._patience)
                await self._sleep(max(asked, self._backoff.failed(self._draw())))

    def gave_up_on_attempt(self, failure: Failure) -> None:
        """A request that takes the session has no answer: it may be served all the same."""
        was_refused = failure.is_answer or failure.status in NEVER_RAN
        if failure.cause is not Cause.UNREACHABLE and not was_refused:
            self.attempts.gave_up(now=self._clock())

    async def start_over(self, link: Link, reason: str) -> ResumeOutcome:
        """The session is gone: another one, if the last was of use.

        Raises:
            Failed: The link is of no use.
            Hopeless: It was not.
        """
        if self.session is not None:
            logger.info("session %s is gone", digest(self.session.session_id))
        if not self.lives.start_over(now=self._clock(), rest=self._rest):
            raise Hopeless
        self.session = None
        self.follower.restart(None)
        await self.start(link)
        await self._subscribe_again(link)
        return ResumeOutcome(False, is_new_session=True, reason=reason, connected_to=link.name)

    async def start(self, link: Link) -> None:
        """Start a session, if the server has any.

        Raises:
            Failed: The link is of no use.
        """
        known = self.abilities
        if known is None or not known.has_sessions:
            return
        started = None
        try:
            if known.may("start"):
                result = await self._ask_quietly(link, "session/start", {})
                started = wire.session_of_start(result) if result is not None else None
            if started is None and known.may("create"):
                result = await self._ask_quietly(link, "sessions/create", None)
                started = wire.session_of_create(result) if result is not None else None
                if started is not None and not known.may("resume"):
                    started[0].resumable = False
        finally:
            self.configure(link)
        if started is None:
            logger.info("%s advertises sessions and gives none", link.name)
            return
        self.session, head = started
        self.follower.restart(head)
        self.must_resume_before_listening = False
        self.configure(link)
        logger.info("session %s started at %s", digest(self.session.session_id), link.name)

    async def _ask_quietly(self, link: Link, method: str, params: Json | None) -> Json | None:
        """The result; None: the server does not know the method, or refuses."""
        try:
            return await self._exchanges.ask(link, method, params, self._envelope)
        except Refused as refused:
            if wire.says_not_begun(refused.error):
                failure = Failure(Cause.STATUS, str(refused), error=refused.error)
                raise Failed(failure) from None
            logger.debug("%s: %s", method, refused)
            return None
        except Failed as failed:
            if failed.failure.status in (400, 404, 405, 501):
                return None
            raise

    async def _subscribe_again(self, link: Link) -> None:
        """What the application had subscribed to in the session that is gone."""
        session = self.session
        if session is None:
            return
        for uri in list(self.subscribed):
            params: Json = {"uri": uri, "_meta": {SESSION_META: session.metadata()}}
            try:
                await self._exchanges.ask(link, wire.SUBSCRIBE, params)
            except Refused as refused:
                logger.info("a subscription could not be taken up again: %s", refused)

    async def end(self, link: Link, *, within: float) -> None:
        """Take leave: the session is over for the server too. Never fails."""
        session = self.session
        if session is None:
            return
        try:
            if session.resumable and (self.abilities or Abilities()).may("end"):
                params: Json = {"sessionId": session.session_id}
                await self._exchanges.ask(
                    link, "session/end", params, self._envelope, within=within
                )
            else:
                params = {"_meta": {SESSION_META: session.metadata()}}
                await self._exchanges.ask(
                    link, "sessions/delete", params, self._envelope, within=within
                )
        except (Refused, Failed) as error:
            logger.debug("the session could not be ended: %s", error)

    # --- between runs ------------------------------------------------------------------------

    def restore(self, saved: SavedSession) -> None:
        """Go on with a session of an earlier run."""
        self.session = SessionView(
            saved.session_id, saved.state, saved.expires_at, resumable=saved.resumable
        )
        self.follower.restart(saved.position)
        self.must_resume_before_listening = True
        if saved.instance is not None:
            self.attempts.instance = saved.instance

    def saved(self) -> SavedSession | None:
        """What the next run needs."""
        session = self.session
        if session is None:
            return None
        return SavedSession(
            session.session_id,
            state=session.state,
            expires_at=session.expires_at,
            position=self.follower.position,
            resumable=session.resumable,
            instance=self.attempts.instance,
        )
