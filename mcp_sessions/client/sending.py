"""Sends what the application asks, and judges what becomes of each of its requests.

Rules that must hold, and that ``tests/client/`` owns over real sockets:

1. Nothing runs twice: what may be sent again is decided by `core.resume` alone, and what
   cannot be known is ``-31012`` (KEY3, CLI6). These prove that a request did not run: a connection
   that never opened, a 404 for the ``Mcp-Session-Id`` that the server gave, and ``data.started``
   ``false`` of a server that stops. Any other status, and every text, proves nothing.
2. Each request is answered, by the server or from here.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field

from mcp_sessions import method_names
from mcp_sessions.client import explaining, hosted_requests, pushing, rpc, stamping
from mcp_sessions.client.application import Application
from mcp_sessions.client.dialer import SHUTTING_DOWN, Failed, Failure, Json, Link
from mcp_sessions.client.hosted import REFUSALS
from mcp_sessions.client.known_server import KnownServer
from mcp_sessions.client.listener import Listener
from mcp_sessions.client.outbox import ClientOutbox
from mcp_sessions.client.recovery import Recovery, Way
from mcp_sessions.client.requests import PendingRequest
from mcp_sessions.client.state import ClientState, Phase, Runtime
from mcp_sessions.core.messages import RequestId, members_of
from mcp_sessions.core.resume import FailureCause, Step, after_status, may_send_again
from mcp_sessions.errors import SESSION_NOT_FOUND

logger = logging.getLogger(__name__)

_REFUSALS = 2
_REFUSED = 400

_WITHOUT_SESSION = method_names.OPENING | method_names.OF_SESSIONS


@dataclass(slots=True, eq=False)
class Sender:
    _runtime: Runtime
    _state: ClientState
    _peer: KnownServer
    _app: Application
    _recovery: Recovery
    _listener: Listener
    _outbox: ClientOutbox
    _waiting: set[PendingRequest] = field(init=False, default_factory=set[PendingRequest])
    """A delay runs before they are sent again."""

    # --- out -------------------------------------------------------------------------------

    async def request(self, pending: PendingRequest) -> None:
        link, peer = self._state.link, self._peer
        if link is None:
            raise AssertionError("requests are sent while there is a link")
        session = peer.session if pending.method not in _WITHOUT_SESSION else None
        if self._is_for_host(pending):
            standing = hosted_requests.refused(pending, peer)
            if standing is not None:
                await self._app.answer(pending, *REFUSALS[standing])
                return
            session = None
        if session is not None and peer.is_modern and pending.method == method_names.LISTEN:
            self._listener.add(pending)
            return
        message, headers = pending.message, dict(pending.headers)
        if pending.is_hosts:
            await self._request_of_host(pending, link)
            return
        if peer.modern_envelope is not None:
            headers = {**stamping.modern_headers(message, peer.modern_envelope), **headers}
        wire_id = self._app.requests.sending(pending, link, now=self._runtime.elapsed())
        if session is None or stamping.names_own_session(message):
            message = {**message, "id": wire_id}
        else:
            key = self._runtime.mint_key() if pending.key is None and peer.has_keys else pending.key
            pending.stamped(session, key, peer.lives.generation, peer.abilities.key_lifetime)
            message = stamping.stamped(message, wire_id, session, pending.key, peer.is_modern)
            if peer.is_modern:
                headers.update(stamping.session_headers(session))
        try:
            await link.send(message, headers)
        except Failed as failed:
            await self.unanswered(link, wire_id, failed.failure)

    async def _request_of_host(self, pending: PendingRequest, link: Link) -> None:
        message, headers = hosted_requests.prepared(pending, self._peer, self._runtime.mint_key)
        try:
            if pushing.goes_there(message):
                link = await self._recovery.hosted.pushing.link_for(link)
            elif pending.method == method_names.LISTEN:
                await self._recovery.hosted.before_listening(link, pending)
        except Failed as failed:
            # As if it could not be sent: it was not.
            wire_id = self._app.requests.sending(pending, link, now=self._runtime.elapsed())
            pending.forget_sending()
            await self.unanswered(link, wire_id, failed.failure)
            return
        if link is self._peer.pushed:
            message, headers = pushing.as_handshake(message), {}
        if not self._app.requests.is_open(pending):
            return
        wire_id = self._app.requests.sending(pending, link, now=self._runtime.elapsed())
        try:
            await link.send({**message, "id": wire_id}, {**headers, **pending.headers})
        except Failed as failed:
            await self.unanswered(link, wire_id, failed.failure)

    def _is_for_host(self, pending: PendingRequest) -> bool:
        hosted = self._peer.hosted
        if pending.is_hosts or not hosted.is_manager:
            return pending.is_hosts
        if self._peer.session is None:
            return True
        # Its subscriptions outside of sessions are kept in the client's own session.
        is_own = pending.method in method_names.SUBSCRIPTIONS
        return pending.session_id is None and not (is_own and self._is_outside(pending))

    def _is_outside(self, pending: PendingRequest) -> bool:
        is_named = stamping.names_own_session(pending.message)
        return not is_named and self._peer.hosted.session_of(pending.message)[0] is None

    async def request_or_give_up(self, pending: PendingRequest) -> None:
        if self._may_send_again(pending):
            await self.request(pending)
        else:
            await self._app.give_up_on(pending)

    async def flush(self, link: Link) -> None:
        """Send what waits for a link with a session (CLI1)."""
        await self._outbox.flush()
        if self._app.listens and not self._app.listens.is_covered():
            self._listener.see_to_it()
        for pending in self._app.requests:
            if self._state.phase is Phase.READY and self._is_to_send(pending, link):
                await self.request_or_give_up(pending)

    def _is_to_send(self, pending: PendingRequest, link: Link) -> bool:
        if pending in self._waiting or not self._app.requests.is_open(pending):
            return False
        if self._app.listens.has(pending):
            return False
        if pending.link is None:
            return True
        # A request with a key can be answered here too. Without a key, only the first link can
        # answer it.
        return (
            pending.link is not link and pending.key is not None and self._may_send_again(pending)
        )

    def _may_send_again(self, pending: PendingRequest) -> bool:
        """Whether a request may be sent, or sent again (KEY16, KEY17)."""
        is_same = pending.generation == self._peer.lives.generation
        if pending.is_hosts:
            may = hosted_requests.may_go_again(pending, self._peer)
            if may is not None:
                return may
            is_same = True
        return may_send_again(
            is_keyed=pending.key is not None,
            first_sent=pending.first_sent,
            same_session=is_same,
            now=self._runtime.elapsed(),
            key_lifetime=min(pending.key_lifetime, self._peer.abilities.key_lifetime),
        )

    # --- what becomes of it ------------------------------------------------------------------

    async def session_refused(self, pending: PendingRequest, error: Json) -> None:
        generation = pending.generation
        if self._may_have_started(pending, error):
            # CLI6: it was running when its session ended, and is not run again.
            await self._app.give_up_on(pending, explaining.SESSION_GONE)
        elif self._is_refused_for_good(pending):
            address = self._state.addresses.current.target
            text = explaining.not_sent(pending.message, f"{address}: {explaining.FORGETFUL}")
            await self._app.answer(pending, SESSION_NOT_FOUND, text)
            return
        else:
            pending.forget_sending()
        if generation == self._peer.lives.generation:
            # Single flight: whoever learned it first begins, the others name an older session.
            self._recovery.begin(Way.RESTART)
        await self._send_if_ready(pending)

    def _is_refused_for_good(self, pending: PendingRequest) -> bool:
        return pending.refused() > _REFUSALS or self._state.phase in (Phase.ENDED, Phase.CUT_OFF)

    async def _send_if_ready(self, pending: PendingRequest) -> None:
        if self._state.phase is Phase.READY and self._app.requests.is_open(pending):
            await self.request(pending)

    async def not_begun(self, link: Link, pending: PendingRequest) -> bool:
        """Handle a request that a stopping server refused before it began (ERR15). False: the
        refusal is the answer.
        """
        state = self._state
        if state.phase in (Phase.OPEN, Phase.ENDED, Phase.CUT_OFF):
            return False
        if not self._peer.holds_sessions:
            return False
        if state.is_too_long_in_trouble():
            return False
        pending.did_not_begin()
        if not state.uses(link):
            await self.orphaned(pending)
        elif state.phase is Phase.READY:
            self._recovery.lose(link, SHUTTING_DOWN)
        return True

    async def state_refused(self, pending: PendingRequest) -> bool:
        """Handle a refused ``state``. False: the refusal is the answer."""
        if self._is_refused_for_good(pending):
            return False
        if not self._peer.drop_state(pending.session_id, pending.state):
            return False
        pending.did_not_begin()
        await self._send_if_ready(pending)
        return True

    def _may_have_started(self, pending: PendingRequest, error: Json) -> bool:
        """Whether a request may have been running when it was answered that its session is gone
        (ERR13).

        The same code says "unknown" of a session and "ended" of one whose request ran; a
        refusal comes at once, and is all that comes.
        """
        if members_of(error.get("data")).get("started") is True:
            return True
        took = self._runtime.elapsed() - pending.last_sent
        is_late = pending.was_accepted or took > self._runtime.policy.refusal_time
        return pending.sent_before or (pending.method == method_names.CALL_TOOL and is_late)

    async def unanswered(self, link: Link, wire_id: RequestId, failure: Failure) -> None:
        pending = self._app.requests.find(wire_id)
        if pending is None or not self._app.requests.is_newest(pending, wire_id):
            return
        pending.lose_link(explaining.cause_of(failure, link.name))
        if pending.is_hosts and hosted_requests.is_answer(failure):
            await self._report_failure(pending, failure)
            return
        if failure.error is not None and rpc.says_state_refused(failure.error):
            # The modern era says it with a 400. Another connection would receive the same.
            if not await self.state_refused(pending):
                await self._report_failure(pending, failure)
            return
        never_ran = failure.never_ran or failure.cause is FailureCause.UNREACHABLE
        if never_ran and not pending.was_accepted and not pending.sent_before:
            pending.forget_sending()
        step = self._step_after(failure, pending)
        if step is Step.REPORT:
            await self._report_failure(pending, failure)
            if failure.status == _REFUSED and not failure.is_answer:
                # Some servers say so that they do not know the session. The resume finds out.
                self._look(link)
        elif not self._state.is_ready_on(link):
            await self.orphaned(pending)
        elif self._state.is_too_long_in_trouble():
            await self._app.give_up_on(pending)
        elif step is Step.RETRY:
            await self._retry(pending, failure)
        else:
            self._recovery.lose(link, failure)
            if not self._may_send_again(pending):
                await self._app.give_up_on(pending)

    def _step_after(self, failure: Failure, pending: PendingRequest) -> Step:
        if self._state.phase is Phase.OPEN:
            return Step.REPORT
        if pending.session_id is None and not self._peer.holds_sessions:
            # As the stock transport; but 2025-11-25 says of 404 that one initializes anew
            # (CLI10).
            is_lost = failure.never_ran and failure.status == 404
            return Step.RECONNECT if is_lost else Step.REPORT
        if failure.cause is FailureCause.STATUS and failure.status is not None:
            return after_status(
                failure.status,
                failures=self._runtime.backoff.failures,
                is_answer=failure.is_answer,
            )
        return Step.RECONNECT

    def _look(self, link: Link) -> None:
        if self._peer.holds_sessions and self._state.is_ready_on(link):
            self._recovery.begin(Way.REATTACH)

    async def _report_failure(self, pending: PendingRequest, failure: Failure) -> None:
        """Answer a request with a stock transport's code."""
        error = failure.error
        if pending.is_hosts and error is not None and failure.is_answer:
            self._peer.hosted.answered(pending, None, error)
        if error is None:
            await self._app.give_up_on(pending)
        elif failure.is_answer:
            await self._app.answer(pending, error["code"], error["message"], error.get("data"))
        else:
            text = explaining.failed(pending.message, failure, ran=pending.first_sent is not None)
            await self._app.answer(pending, error["code"], text, error.get("data"))

    async def orphaned(self, pending: PendingRequest) -> None:
        match self._state.phase:
            case Phase.READY:
                await self.request_or_give_up(pending)
            case Phase.ENDED | Phase.CUT_OFF:
                await self._app.give_up_on(pending)
            case _:
                pass

    async def _retry(self, pending: PendingRequest, failure: Failure) -> None:
        runtime = self._runtime
        if not self._may_send_again(pending):
            await self._app.give_up_on(pending)
            return
        asked = min(failure.retry_after or 0.0, runtime.policy.give_up_after)
        delay = max(runtime.backoff.failed(runtime.draw()), asked)
        self._waiting.add(pending)
        runtime.tasks.start_soon(self._send_later, pending, delay)

    async def _send_later(self, pending: PendingRequest, delay: float) -> None:
        await self._runtime.sleep(delay)
        self._waiting.discard(pending)
        if self._app.requests.is_open(pending):
            await self.orphaned(pending)
