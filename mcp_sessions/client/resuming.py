"""The resuming client: an application's messages on one side, links on the other.

The door: every message comes and goes here, and is given to the part that knows what it
means. See `situation` for the parts.
"""

from __future__ import annotations

import logging
import random
import secrets
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import cast

import anyio
import anyio.to_thread
from anyio.abc import TaskStatus

from mcp_sessions.client import wire
from mcp_sessions.client.addresses import Addresses
from mcp_sessions.client.dialer import (
    Accepted,
    Dialer,
    Down,
    Event,
    Json,
    Link,
    Missed,
    Received,
    StreamFailed,
    StreamRefused,
    StreamReopened,
    Unanswered,
)
from mcp_sessions.client.elapsed import Elapsed
from mcp_sessions.client.exchange import Exchanges
from mcp_sessions.client.jar import JarSlot, SavedSession
from mcp_sessions.client.keeper import SessionKeeper
from mcp_sessions.client.listener import Listener
from mcp_sessions.client.outcome import KnownSession, OnResume, ResumeOutcome
from mcp_sessions.client.policy import ReconnectPolicy
from mcp_sessions.client.recovery import Recovery
from mcp_sessions.client.requests import Pending
from mcp_sessions.client.sending import SHUTTING_DOWN, Sender
from mcp_sessions.client.situation import Phase, Situation, Way
from mcp_sessions.core.backoff import Backoff
from mcp_sessions.core.messages import RequestId, meta_of
from mcp_sessions.core.resume import Attempts, event_id_of, says_session_not_found
from mcp_sessions.errors import SESSION_DETACHED, SESSION_NOT_FOUND
from mcp_sessions.ids import digest

logger = logging.getLogger(__name__)


def _mint_key() -> str:
    return secrets.token_urlsafe(16)


class ResumingClient:
    """One application's session with one server."""

    def __init__(
        self,
        dialers: Sequence[Dialer],
        *,
        policy: ReconnectPolicy,
        deliver: Callable[[Json], Awaitable[None]],
        hang_up: Callable[[], Awaitable[None]],
        slot: JarSlot | None = None,
        on_resume: OnResume | None = None,
        draw: Callable[[], float] = random.random,
        clock: Callable[[], float] = time.monotonic,
        elapsed: Callable[[], float] | None = None,
        sleep: Callable[[float], Awaitable[None]] = anyio.sleep,
        mint_key: Callable[[], str] = _mint_key,
    ) -> None:
        """Take what it works with; see `Situation` and `Recovery`."""
        attempts = Attempts(mint_key())
        addresses = Addresses(
            dialers,
            base=policy.backoff_base,
            cap=policy.backoff_cap,
            longest_rest=policy.give_up_after,
        )
        backoff = Backoff(base=policy.backoff_base, cap=policy.backoff_cap)
        exchanges = Exchanges(timeout=policy.connect_timeout)
        self._at = Situation(
            policy,
            deliver,
            hang_up,
            on_resume,
            draw,
            clock,
            elapsed or Elapsed(),
            sleep,
            backoff,
            addresses,
            exchanges,
            SessionKeeper(exchanges, policy, backoff, draw, sleep, clock, attempts),
        )
        self._listener = Listener(self._at)
        self._sender = Sender(self._at, self._listener, mint_key)
        self._recovery = Recovery(self._at, self._sender)
        self._recovery.on_event = self._on_event
        self._slot = slot
        self._jar_content: SavedSession | None = None
        self._finished = anyio.Event()
        self._names_sessions = False
        """The application speaks of sessions of its own."""

    # --- lifetime ----------------------------------------------------------------------------

    async def run(self, *, task_status: TaskStatus[None] = anyio.TASK_STATUS_IGNORED) -> None:
        """Work until `close`."""
        async with anyio.create_task_group() as tasks:
            self._at.tasks = tasks
            if self._slot is not None:
                saved = await anyio.to_thread.run_sync(self._slot.load)
                if saved is not None:
                    self._at.keeper.restore(saved)
                    self._jar_content = saved
            tasks.start_soon(self._keep_house)
            task_status.started()
            await self._finished.wait()
            tasks.cancel_scope.cancel()

    async def close(self) -> None:
        """The application is done: the session is kept if there is a jar, else it ends."""
        at = self._at
        link, limit = at.link, at.policy.closing_timeout
        if link is not None:
            if self._slot is None and at.phase is Phase.READY:
                with anyio.move_on_after(limit):
                    await at.keeper.end(link, within=limit)
            await link.close(leave=True)
        if self._slot is not None:
            await self._save()
            await anyio.to_thread.run_sync(self._slot.close)
        at.phase = Phase.OVER
        self._finished.set()

    async def _keep_house(self) -> None:
        """Answer what waits too long; write the jar."""
        at = self._at
        while True:
            await at.sleep(at.policy.jar_interval)
            await self._save()
            oldest = at.clock() - at.policy.answer_timeout
            for pending in at.requests:
                if pending.asked_at < oldest and not at.listens.has(pending):
                    await at.give_up_on(pending)

    async def _save(self) -> None:
        if self._slot is None:
            return
        content = self._at.keeper.saved()
        if content == self._jar_content:
            return
        try:
            await anyio.to_thread.run_sync(self._slot.save, content)
            self._jar_content = content
        except OSError as error:
            logger.warning("the jar could not be written: %s", error.strerror)

    async def move_to(self, dialer: Dialer) -> ResumeOutcome:
        """See `Recovery.move_to`."""
        return await self._recovery.move_to(dialer)

    @property
    def session(self) -> KnownSession | None:
        """The session; None: there is none now."""
        keeper = self._at.keeper
        session = keeper.session
        if session is None:
            return None
        return KnownSession(
            session.session_id,
            digest(session.session_id),
            session.expires_at,
            keeper.follower.position,
            session.resumable,
        )

    # --- from the application ------------------------------------------------------------------

    async def take(self, message: Json, headers: Mapping[str, str]) -> None:
        """Take one message of the application."""
        if "method" not in message:
            question_id = cast(RequestId, message.get("id"))
            if self._at.questions.answered(question_id, message):
                await self._sender.answer(question_id, message)
        elif "id" in message:
            await self._take_request(message, headers)
        elif message["method"] == wire.CANCELLED:
            await self._sender.cancel(message, headers)
        else:
            await self._sender.notification(message, headers)
            if message["method"] == wire.INITIALIZED and self._at.phase is Phase.OPEN:
                self._at.begin(Way.SETTLE)

    async def _take_request(self, message: Json, headers: Mapping[str, str]) -> None:
        at, keeper = self._at, self._at.keeper
        if message["method"] == wire.INITIALIZE:
            message = wire.declared(message)
            keeper.initialize = cast("Json", message.get("params") or {})
            keeper.abilities = None
        elif keeper.initialize is None:
            keeper.envelope = wire.envelope_of(message) or keeper.envelope
        if message["method"] in wire.OUR_METHODS or wire.names_own_session(message):
            self._names_sessions = True
        pending = Pending(message["id"], message, headers, at.clock())
        at.requests.add(pending)
        self._recovery.is_asked()
        if at.phase is Phase.FRESH and not await self._recovery.open_first(pending):
            return
        if at.phase is Phase.OPEN and keeper.is_modern and pending.method != wire.DISCOVER:
            # The modern era's first request: it shall have a session.
            at.begin(Way.SETTLE)
        if at.phase is Phase.CUT_OFF:
            # Somebody asks: that is worth another try.
            keeper.lives.used()
            at.begin(Way.RECOVER)
        if at.phase is Phase.OVER:
            await at.answer(
                pending, SESSION_DETACHED, "Session detached: this transport is not attached"
            )
        elif at.phase in (Phase.OPEN, Phase.READY):
            await self._sender.request_or_give_up(pending)

    # --- from the server -----------------------------------------------------------------------

    async def _on_event(self, link: Link, event: Event) -> None:
        at = self._at
        match event:
            case Received(message):
                await self._received(link, message)
            case Accepted(request_id):
                pending = at.requests.find(request_id)
                if pending is not None:
                    pending.was_accepted = True
            case Unanswered(request_id, failure):
                if at.exchanges.failed(request_id, failure):
                    return
                if request_id == at.listens.wire_id:
                    self._listener.cut(failure)
                    return
                pending = at.requests.find(request_id)
                if pending is not None and self._recovery.failed_opening(link, pending, failure):
                    return
                await self._sender.unanswered(link, request_id, failure)
            case StreamReopened(continued, was_lost):
                if not continued:
                    self._recovery.stream_reopened(link)
                elif was_lost and link is at.link and at.phase is Phase.READY:
                    await at.tell_outcome(ResumeOutcome(True, connected_to=link.name))
            case StreamFailed():
                if link is at.link:
                    at.try_another_address()
            case StreamRefused(failure):
                if link is at.link and at.phase is Phase.READY:
                    logger.info("the notification stream is refused: %s", failure.explanation)
                    at.begin(Way.RECOVER)
            case Missed():
                if link is at.link and at.phase is not Phase.OVER:
                    # As after a gap: it does not come again in any other way.
                    await at.tell_everything_changed()
                    missed = ResumeOutcome(False, reason="too_large", connected_to=link.name)
                    await at.tell_outcome(missed)
            case Down(failure):
                await self._recovery.down(link, failure)

    async def _received(self, link: Link, message: Json) -> None:
        at = self._at
        if "method" not in message:
            await self._received_answer(link, message)
        elif "id" in message:
            is_new, answer = at.questions.asked(message["id"])
            if is_new:
                await at.deliver(message)
            elif answer is not None:
                # It came again: the answer was lost on its way.
                at.spawn(self._sender.answer, message["id"], answer)
        else:
            await self._received_notification(link, message)

    async def _received_notification(self, link: Link, message: Json) -> None:
        at = self._at
        params = cast("Json | None", message.get("params"))
        match message["method"]:
            case wire.DETACHED:
                await self._recovery.detached(link, params or {})
                return
            case wire.CANCELLED:
                at.questions.withdrawn((params or {}).get("requestId"))
            case "notifications/progress":
                pending = at.requests.asked((params or {}).get("progressToken"))
                if pending is not None:
                    pending.was_accepted = True
            case _:
                pass
        session = at.keeper.session
        if session is None:
            await at.deliver(message)
            return
        event_id = event_id_of(params, session.session_id)
        if event_id is not None or not self._names_sessions:
            message = wire.without_session(message)
        if event_id is not None:
            if not at.keeper.follower.admits(event_id):
                return
            at.progressed()
        if not (at.keeper.is_modern and at.listens):
            await at.deliver(message)
        elif at.listens.is_acknowledgement(message):
            at.progressed()
            for part in at.listens.acknowledged(params):
                await at.deliver(part)
        elif event_id is not None or wire.SUBSCRIPTION_ID in (meta_of(params) or {}):
            for part in at.listens.parts(message):
                await at.deliver(part)
        else:
            await at.deliver(message)

    async def _received_answer(self, link: Link, message: Json) -> None:
        at, keeper = self._at, self._at.keeper
        if at.exchanges.answered(message):
            self._recovery.was_answered()
            return
        wire_id = cast(RequestId, message.get("id"))
        if at.listens.wire_id is not None and wire_id == at.listens.wire_id:
            self._listener.ended(message)
            return
        pending = at.requests.find(wire_id)
        if pending is None:
            logger.debug("dropped an answer that nobody waits for")
            return
        result = cast("Json | None", message.get("result"))
        error = cast("Json", message.get("error") or {})
        if wire.says_not_begun(error):
            if self._recovery.failed_opening(link, pending, SHUTTING_DOWN):
                return
            if await self._sender.not_begun(link, pending):
                return
        if pending.session_id is not None:
            if self._says_lost(pending, result, error):
                if await self._sender.session_refused(pending, error):
                    return
            elif wire.says_state_refused(error):
                if await self._sender.state_refused(pending):
                    return
            elif result is not None:
                if keeper.session is not None:
                    keeper.session.merge(result)
                keeper.lives.used()
                keeper.note_subscription(pending.message)
        elif result is not None and pending.method in (wire.INITIALIZE, wire.DISCOVER):
            keeper.learn(result)
        elif result is not None and keeper.session is None:
            keeper.lives.used()
        at.progressed()
        if pending.session_id is not None:
            message = wire.without_session(message)
        if at.requests.done(pending):
            await at.deliver({**message, "id": pending.app_id})

    def _says_lost(self, pending: Pending, result: Json | None, error: Json) -> bool:
        if error.get("code") == SESSION_NOT_FOUND:
            return True
        known = self._at.keeper.abilities
        if result is None or pending.method != wire.TOOL_CALL or (known and known.is_ours):
            return False
        # Some servers say it as the result of the tool.
        return says_session_not_found(result)
