"""Gives what links report to the part that knows what it means."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import cast

from mcp_sessions.client import stamping, wire
from mcp_sessions.client.application import Application
from mcp_sessions.client.dialer import (
    Accepted,
    Down,
    Event,
    Failure,
    Json,
    Link,
    Missed,
    Received,
    StreamFailed,
    StreamRefused,
    StreamReopened,
    Unanswered,
)
from mcp_sessions.client.exchange import Exchanges
from mcp_sessions.client.listener import Listener
from mcp_sessions.client.losses import Losses
from mcp_sessions.client.opening import Opening
from mcp_sessions.client.outbox import Outbox
from mcp_sessions.client.outcome import ResumeOutcome
from mcp_sessions.client.peer import Peer
from mcp_sessions.client.recovery import Recovery, Way
from mcp_sessions.client.requests import Pending
from mcp_sessions.client.sending import SHUTTING_DOWN, Sender
from mcp_sessions.client.state import ClientState, Phase, Runtime
from mcp_sessions.core.messages import RequestId, meta_of
from mcp_sessions.core.resume import event_id_of, says_session_not_found
from mcp_sessions.errors import SESSION_NOT_FOUND

logger = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class Receiver:
    _runtime: Runtime
    _state: ClientState
    _peer: Peer
    _app: Application
    _exchanges: Exchanges
    _recovery: Recovery
    _listener: Listener
    _outbox: Outbox
    _sender: Sender
    _losses: Losses
    _opening: Opening

    async def on_event(self, link: Link, event: Event) -> None:
        """Take what a link reports."""
        state, app = self._state, self._app
        match event:
            case Received(message):
                await self._received(link, message)
            case Accepted(request_id):
                pending = app.requests.find(request_id)
                if pending is not None:
                    pending.accepted()
            case Unanswered(request_id, failure):
                await self._unanswered(link, request_id, failure)
            case StreamReopened(continued, was_lost):
                if not continued:
                    self._losses.stream_reopened(link)
                elif was_lost and state.is_ready_on(link):
                    await app.tell_outcome(ResumeOutcome(True, connected_to=link.name))
            case StreamFailed():
                if link is state.link:
                    self._recovery.try_another_address()
            case StreamRefused(failure):
                if state.is_ready_on(link):
                    logger.info("the notification stream is refused: %s", failure.explanation)
                    self._recovery.begin(Way.RECOVER)
            case Missed():
                if link is state.link and state.phase is not Phase.OVER:
                    # As after a gap: it does not come again in any other way.
                    await app.tell_everything_changed()
                    missed = ResumeOutcome(False, reason="too_large", connected_to=link.name)
                    await app.tell_outcome(missed)
            case Down(failure):
                await self._losses.down(link, failure)

    async def _unanswered(self, link: Link, request_id: RequestId, failure: Failure) -> None:
        if self._exchanges.failed(request_id, failure):
            return
        if request_id == self._app.listens.wire_id:
            self._listener.cut(failure)
            return
        pending = self._app.requests.find(request_id)
        if pending is None or not self._opening.failed(link, pending, failure):
            await self._sender.unanswered(link, request_id, failure)

    async def _received(self, link: Link, message: Json) -> None:
        if "method" not in message:
            await self._answer(link, message)
        elif "id" in message:
            is_new, answer = self._app.questions.asked(message["id"])
            if is_new:
                await self._app.deliver(message)
            elif answer is not None:
                # ASK5: it came again, the answer was lost on its way.
                self._runtime.tasks.start_soon(self._outbox.answer, message["id"], answer)
        else:
            await self._notification(link, message)

    async def _notification(self, link: Link, message: Json) -> None:
        app = self._app
        params = cast("Json | None", message.get("params"))
        match message["method"]:
            case wire.DETACHED:
                await self._losses.detached(link, params or {})
                return
            case wire.CANCELLED:
                app.questions.withdrawn((params or {}).get("requestId"))
            case "notifications/progress":
                pending = app.requests.asked((params or {}).get("progressToken"))
                if pending is not None:
                    pending.accepted()
            case _:
                pass
        session = self._peer.session
        if session is None:
            await app.deliver(message)
            return
        event_id = event_id_of(params, session.session_id)
        if event_id is not None or not app.names_sessions:
            message = stamping.without_session(message)
        if event_id is not None:
            if not self._peer.follower.admits(event_id):
                # CLI3: it was seen.
                return
            self._state.progressed()
        if not (self._peer.is_modern and app.listens):
            await app.deliver(message)
        elif app.listens.is_acknowledgement(message):
            self._state.progressed()
            for part in app.listens.acknowledged(params):
                await app.deliver(part)
        elif event_id is not None or stamping.SUBSCRIPTION_ID in (meta_of(params) or {}):
            for part in app.listens.parts(message):
                await app.deliver(part)
        else:
            await app.deliver(message)

    async def _answer(self, link: Link, message: Json) -> None:
        app, peer = self._app, self._peer
        if self._exchanges.answered(message):
            self._losses.was_answered()
            return
        wire_id = cast(RequestId, message.get("id"))
        if app.listens.wire_id is not None and wire_id == app.listens.wire_id:
            self._listener.ended(message)
            return
        pending = app.requests.find(wire_id)
        if pending is None:
            logger.debug("dropped an answer that nobody waits for")
            return
        result = cast("Json | None", message.get("result"))
        error = cast("Json", message.get("error") or {})
        if wire.says_not_begun(error):
            if self._opening.failed(link, pending, SHUTTING_DOWN):
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
                if peer.session is not None:
                    # STT3, CLI7
                    peer.session.merge(result)
                peer.lives.used()
                peer.note_subscription(pending.message)
        elif result is not None and pending.method in (wire.INITIALIZE, wire.DISCOVER):
            peer.learn(result)
        elif result is not None and peer.session is None:
            peer.lives.used()
        self._state.progressed()
        if pending.session_id is not None:
            message = stamping.without_session(message)
        if app.requests.done(pending):
            await app.deliver({**message, "id": pending.app_id})

    def _says_lost(self, pending: Pending, result: Json | None, error: Json) -> bool:
        if error.get("code") == SESSION_NOT_FOUND:
            return True
        if result is None or pending.method != wire.TOOL_CALL or self._peer.abilities.is_ours:
            return False
        # Some servers say it as the result of the tool.
        return says_session_not_found(result)
