"""Send what the application says, and judge what becomes of each of its requests.

A request of an application that manages its sessions goes out as it is, so that the server judges
it as on any connection, but for two things. It gets a request key if its session is followed, so
that it survives the connection. And it names the session that the application's connection gives
it, where the connection to the server may have another one: nothing (ASC4) where there is none, and
its session when it is sent again. Any other request gets the client's own session, and a key.

Rules that must hold, and that ``tests/client/`` owns over real sockets:

1. Nothing runs twice: what may be sent again is decided by `core.resume` alone, and what
   cannot be known is ``-31012`` (KEY3, CLI6). These prove that a request did not run: a connection
   that never opened, a 404 for the ``Mcp-Session-Id`` if ``ping`` is answered 404, too, and
   ``data.started`` ``false`` of a server that stops or whose store is away. Any other status, and
   every text, proves nothing.
2. Each request is answered, by the server or from here.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import cast

from mcp_sessions import method_names
from mcp_sessions.client import messages, reports
from mcp_sessions.client.application import Application
from mcp_sessions.client.connection_loss import Recovery, Way
from mcp_sessions.client.control import SessionControl
from mcp_sessions.client.dialer import Failed, Failure, Link
from mcp_sessions.client.listening import Listener
from mcp_sessions.client.requests import PendingRequest
from mcp_sessions.client.sessions import REFUSALS, TAKING, UNNAMED, KnownServer, Standing
from mcp_sessions.client.state import ClientState, Phase, Runtime
from mcp_sessions.core.backoff import Backoff
from mcp_sessions.core.messages import (
    REQUEST_KEY_META,
    SESSION_META,
    Json,
    RequestId,
    members_of,
    meta_of,
)
from mcp_sessions.core.resume import FailureCause, Step, after_status, is_away, may_send_again
from mcp_sessions.errors import KEY_BYTES, LIMIT_REACHED, REQUEST_CANCELLED, SESSION_NOT_FOUND

logger = logging.getLogger(__name__)

_REFUSALS = 2
_REFUSED = 400

_MOST_WAITING = 1_000
"""Notifications of the application that wait for a connection; then the oldest is dropped."""

_TRIES = 200
"""How often an answer, or a cancellation, is sent on one connection: for some minutes."""

_WITHOUT_SESSION = method_names.OPENING | method_names.OF_SESSIONS

_WITHOUT_KEY = (method_names.LISTEN, method_names.DELETE_SESSION)


@dataclass(slots=True, eq=False)
class Sender:
    _runtime: Runtime
    _state: ClientState
    _peer: KnownServer
    _app: Application
    _control: SessionControl
    _recovery: Recovery
    _listener: Listener
    _waiting: set[PendingRequest] = field(init=False, default_factory=set[PendingRequest])
    """A delay runs before they are sent again."""

    _notifications: list[tuple[Json, Mapping[str, str]]] = field(
        init=False, default_factory=list[tuple[Json, Mapping[str, str]]]
    )
    """They wait for a connection."""

    # --- requests ------------------------------------------------------------------------------

    async def request(self, pending: PendingRequest) -> None:
        link, peer = self._state.link, self._peer
        if link is None:
            raise AssertionError("requests are sent while there is a link")
        if self._is_for_host(pending):
            standing = peer.sessions.admit(pending)
            if standing is not Standing.HERE:
                await self._app.answer(pending, *REFUSALS[standing])
                return
            message, headers = self._prepared_for_host(pending)
            try:
                if pending.method in TAKING:
                    link = await self._control.link_for_sessions(link)
                elif pending.method == method_names.LISTEN:
                    await self._control.before_listening(link, pending)
            except Failed as failed:
                # As if it could not be sent: it was not.
                wire_id = self._app.requests.sending(pending, link, now=self._runtime.elapsed())
                pending.forget_sending()
                await self.unanswered(link, wire_id, failed.failure)
                return
            if link is self._state.pushed:
                message, headers = messages.as_handshake(message), {}
            if not self._app.requests.is_open(pending):
                return
        elif pending.method == method_names.LISTEN and peer.is_modern and peer.session is not None:
            self._listener.add(pending)
            return
        else:
            message, headers = self._prepared(pending)
        wire_id = self._app.requests.sending(pending, link, now=self._runtime.elapsed())
        try:
            await link.send({**message, "id": wire_id}, {**headers, **pending.headers})
        except Failed as failed:
            await self.unanswered(link, wire_id, failed.failure)

    def _prepared(self, pending: PendingRequest) -> tuple[Json, Mapping[str, str]]:
        """Return a request in the client's own session, and the HTTP headers that it needs."""
        peer, message = self._peer, pending.message
        headers: dict[str, str] = {}
        if peer.modern_envelope is not None:
            headers = messages.modern_headers(message, peer.modern_envelope)
        session = peer.session if pending.method not in _WITHOUT_SESSION else None
        if session is None or messages.names_own_session(message):
            return message, headers
        key = self._runtime.mint_key() if pending.key is None and peer.has_keys else pending.key
        pending.stamped(session, key, peer.lives.generation, peer.abilities.key_lifetime)
        if peer.is_modern:
            headers.update(messages.session_headers(session.session_id))
        return messages.stamped(message, session, pending.key, peer.is_modern), headers

    def _prepared_for_host(self, pending: PendingRequest) -> tuple[Json, Mapping[str, str]]:
        """Return a request of an application that manages its sessions, and its HTTP headers."""
        peer, message, session_id = self._peer, pending.message, pending.session_id
        envelope, is_named = messages.envelope_of(message), messages.names_own_session(message)
        headers: dict[str, str] = {}
        if envelope is not None:
            headers = messages.modern_headers(message, envelope)
        elif peer.protocol_version is not None and peer.initialize is not None:
            # Other requests on that link may be of the other era.
            headers = {"mcp-protocol-version": peer.protocol_version}
        added: Json = {}
        if is_named:
            if envelope is not None and session_id is not None:
                headers.update(messages.session_headers(session_id))
        elif pending.method in UNNAMED:
            pass
        elif session_id is None:
            if envelope is None and peer.abilities.has_sessions:
                added[SESSION_META] = None
        elif pending.first_sent is not None or self._state.pushed is not None:
            # The current session may be another one by now.
            added[SESSION_META] = {"sessionId": session_id}
            pending.is_named_here = True
        if session_id is not None and pending.method not in _WITHOUT_KEY:
            meta = meta_of(cast("Json | None", message.get("params")))
            key, held = meta.get(REQUEST_KEY_META), peer.sessions.find(session_id)
            if isinstance(key, str):
                pending.key = key
            elif (
                REQUEST_KEY_META not in meta
                and pending.may_be_keyed
                and peer.has_keys
                and held is not None
            ):
                pending.key = added[REQUEST_KEY_META] = pending.key or self._runtime.mint_key()
            pending.key_lifetime = min(pending.key_lifetime, peer.abilities.key_lifetime)
        peer.sessions.asking(pending)
        return (messages.marked(message, added) if added else message), headers

    def _is_for_host(self, pending: PendingRequest) -> bool:
        sessions = self._peer.sessions
        if pending.is_hosts or not sessions.is_manager:
            return pending.is_hosts
        if self._peer.session is None:
            return True
        # Its subscriptions outside of sessions are kept in the client's own session.
        is_own = pending.method in method_names.SUBSCRIPTIONS
        return pending.session_id is None and not (is_own and self._is_outside(pending))

    def _is_outside(self, pending: PendingRequest) -> bool:
        is_named = messages.names_own_session(pending.message)
        return not is_named and self._peer.sessions.session_of(pending.message)[0] is None

    async def request_or_give_up(self, pending: PendingRequest) -> None:
        if self._may_send_again(pending) or self._app.begins_anew(pending):
            await self.request(pending)
        else:
            await self._app.give_up_on(pending)

    async def flush(self, link: Link) -> None:
        """Send what waits for a link with a session (CLI1)."""
        waiting, self._notifications = self._notifications, []
        for message, headers in waiting:
            await self.notification(message, headers)
        for question_id, answer in self._app.questions.undelivered():
            await self.answer(question_id, answer)
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
            # A request that takes a session may be repeated. Any other request needs a key.
            if pending.method in (method_names.LISTEN, method_names.RESUME_SESSION):
                return True
            if self._peer.sessions.find(pending.session_id) is None:
                return pending.first_sent is None
            is_same = True
        return may_send_again(
            is_keyed=pending.key is not None,
            first_sent=pending.first_sent,
            same_session=is_same,
            now=self._runtime.elapsed(),
            key_lifetime=min(pending.key_lifetime, self._peer.abilities.key_lifetime),
        )

    # --- what becomes of a request -------------------------------------------------------------

    async def without_room(self, pending: PendingRequest, error: Json) -> bool:
        """Handle a request that was refused for a key that this client gave it: it goes without
        (KEY13). The keys that there is room for are the application's. False: the refusal is the
        answer.
        """
        said = members_of(error.get("data"))
        if error.get("code") != LIMIT_REACHED or said.get("limit") != KEY_BYTES:
            return False
        meta = meta_of(cast("Json | None", pending.message.get("params")))
        is_ours = pending.is_hosts and pending.key is not None and REQUEST_KEY_META not in meta
        if said.get("started") is True or not (is_ours and pending.may_be_keyed):
            return False
        pending.may_be_keyed = False
        pending.forget_sending()
        await self.orphaned(pending)
        return True

    async def session_refused(self, pending: PendingRequest, error: Json) -> None:
        generation, is_for_good = pending.generation, self._is_refused_for_good(pending)
        if self._may_have_started(pending, error):
            if is_for_good or not self._app.begins_anew(pending):
                # CLI6: it was running when its session ended, and is not run again.
                await self._app.give_up_on(pending, reports.SESSION_GONE)
        elif is_for_good:
            address = self._state.addresses.current.target
            text = reports.not_sent(pending.message, f"{address}: {reports.FORGETFUL}")
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
        (END6).

        The same code says "unknown" of a session and "ended" of one whose request ran; a
        refusal comes at once, and is all that comes.
        """
        if members_of(error.get("data")).get("started") is True:
            return True
        took = self._runtime.elapsed() - pending.last_sent
        is_late = pending.was_accepted or took > self._runtime.policy.refusal_time
        is_late = is_late and pending.method == method_names.CALL_TOOL
        return pending.may_have_run_before or is_late

    async def unanswered(self, link: Link, wire_id: RequestId, failure: Failure) -> None:
        pending = self._app.requests.find(wire_id)
        if pending is None or not self._app.requests.is_newest(pending, wire_id):
            return
        pending.lose_link(reports.cause_of(failure, link.name))
        if pending.is_hosts and _is_answer(failure):
            await self._report_failure(pending, failure)
            return
        if failure.error is not None and messages.says_state_refused(failure.error):
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
            if not (self._may_send_again(pending) or self._app.begins_anew(pending)):
                await self._app.give_up_on(pending)

    def _step_after(self, failure: Failure, pending: PendingRequest) -> Step:
        if self._state.phase is Phase.OPEN:
            return Step.REPORT
        if not self._peer.holds_sessions and (pending.session_id is None or pending.is_hosts):
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
            self._peer.sessions.answered(pending, None, error)
        if error is None or (pending.may_have_run_before and messages.says_not_begun(error)):
            await self._app.give_up_on(pending)
        elif failure.is_answer:
            await self._app.answer(pending, error["code"], error["message"], error.get("data"))
        else:
            text = reports.failed(pending.message, failure, ran=pending.may_have_run)
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
        if not (self._may_send_again(pending) or self._app.begins_anew(pending)):
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

    # --- other messages ------------------------------------------------------------------------

    async def notification(self, message: Json, headers: Mapping[str, str]) -> None:
        link = self._state.link
        if link is None or self._state.phase not in (Phase.OPEN, Phase.READY):
            if message["method"] != method_names.INITIALIZED:
                self._notifications.append((message, headers))
                del self._notifications[:-_MOST_WAITING]
            return
        await self._send(message, headers, link)

    async def _send(
        self, message: Json, headers: Mapping[str, str], link: Link, failures: int = 0
    ) -> None:
        try:
            await link.send(message, headers)
        except Failed as failed:
            logger.info("the server did not accept %s: %s", message["method"], failed)
            if message["method"] == method_names.CANCELLED:
                send = partial(self._send, message, headers, link)
                self._try_again(link, failed.failure, failures, send)

    async def answer(self, question_id: RequestId, message: Json, failures: int = 0) -> None:
        """Answer a question of the server. The answer is kept until it is delivered (ASK5).

        Args:
            failures: How often the server could not take it on this connection.
        """
        link = self._state.link
        is_again = failures > 0
        if link is None or (is_again and not self._app.questions.waits(question_id, message)):
            return
        try:
            await link.send(message, self._peer.headers())
            self._app.questions.delivered(question_id)
        except Failed as failed:
            logger.debug("an answer is not delivered yet: %s", failed)
            send = partial(self.answer, question_id, message)
            self._try_again(link, failed.failure, failures, send)

    def _try_again(
        self, link: Link, failure: Failure, failures: int, send: Callable[[int], Awaitable[None]]
    ) -> None:
        """Send a message again that the server could not take, after a pause, on its connection.
        Another connection gets an answer by :meth:`flush`.
        """
        if is_away(failure.cause, failure.status) and failures < _TRIES:
            self._runtime.tasks.start_soon(self._send_again, link, failure, failures + 1, send)

    async def _send_again(
        self, link: Link, failure: Failure, failures: int, send: Callable[[int], Awaitable[None]]
    ) -> None:
        policy = self._runtime.policy
        backoff = Backoff(base=policy.backoff_base, cap=policy.backoff_cap, failures=failures - 1)
        asked = min(failure.retry_after or 0.0, policy.give_up_after)
        await self._runtime.sleep(max(asked, backoff.failed(self._runtime.draw())))
        if self._state.link is link:
            await send(failures)

    async def cancel(self, message: Json, headers: Mapping[str, str]) -> None:
        """Cancel a request of the application (REQ7)."""
        peer, app = self._peer, self._app
        params = cast("Json", message.get("params") or {})
        meta = meta_of(params)
        is_by_key = peer.sessions.is_manager and {SESSION_META, REQUEST_KEY_META} <= meta.keys()
        if is_by_key:
            # REQ7: it is about a key of the application, and looks at no id.
            await self.notification(message, headers)
            return
        pending = app.requests.asked(params.get("requestId"))
        if pending is None:
            if not peer.is_modern or peer.sessions.is_manager:
                await self.notification(message, headers)
            return
        is_host = pending.is_hosts or peer.sessions.is_manager
        if not is_host:
            app.requests.done(pending)
            pending.settled.set()
            if app.listens.remove(pending.app_id):
                await self._listener.stop()
                return
        ends_here = not await self._cancel(pending, message, headers)
        if is_host and ends_here:
            # As on any connection: it is answered, by who ends it (REQ6).
            await app.answer(pending, REQUEST_CANCELLED, "Request cancelled")
            self.listen_ended(pending)

    async def _cancel(
        self, pending: PendingRequest, message: Json, headers: Mapping[str, str]
    ) -> bool:
        """Cancel a request at the server. False: no answer follows."""
        link = pending.link
        if pending.first_sent is None:
            return False
        wire_id, envelope = pending.wire_ids[-1], messages.envelope_of(pending.message)
        message = {**message, "params": {**message["params"], "requestId": wire_id}}
        if envelope is not None:
            message = messages.marked(message, envelope.meta)
        is_keyed = pending.key is not None and pending.session_id is not None
        if is_keyed:
            named = {"sessionId": pending.session_id}
            message = messages.marked(message, {SESSION_META: named, REQUEST_KEY_META: pending.key})
        if link is None:
            # It may be running. By its key it is cancelled from any connection (REQ7).
            if is_keyed:
                headers = {**headers, **self._peer.headers(method_names.CANCELLED)}
                await self.notification(message, headers)
            return False
        # Over HTTP the modern era cancels by closing the stream, unless there is a key (REQ5).
        is_by_stream = envelope is not None and link.kind == "http" and not is_keyed
        if not is_by_stream:
            headers = {**headers, **self._peer.headers(method_names.CANCELLED)}
            await self._send(message, headers, link)
        if is_by_stream or (envelope is not None and not self._app.requests.is_open(pending)):
            link.abandon(wire_id)
        return not is_by_stream

    def listen_ended(self, pending: PendingRequest) -> None:
        """Note that a request was answered. If it is a listen stream over HTTP, its session is
        attached nowhere, and stays the application's (WSS19).
        """
        is_listen = pending.is_hosts and pending.method == method_names.LISTEN
        if is_listen and pending.session_id is not None and self._state.pushed is not None:
            self._recovery.begin(Way.REATTACH)


def _is_answer(failure: Failure) -> bool:
    """Whether an HTTP status came with the server's own answer to a request."""
    error = failure.error
    return failure.is_answer and error is not None and not messages.says_not_begun(error)
