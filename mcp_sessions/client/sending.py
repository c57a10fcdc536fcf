"""Sends what the application sends, and judges what becomes of each of its requests.

Rules that must hold, and that ``tests/client/`` owns over real sockets:

1. Nothing runs twice: what may be sent again is decided by `core.resume` alone, and what
   cannot be known is ``-31012`` (KEY3).
2. Each request is answered, by the server or from here (CLI1).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import cast

from mcp_sessions.client import wire
from mcp_sessions.client.dialer import Failed, Failure, Json, Link
from mcp_sessions.client.listener import Listener
from mcp_sessions.client.requests import Pending
from mcp_sessions.client.situation import Phase, Situation, Way
from mcp_sessions.core.messages import REQUEST_KEY_META, SESSION_META, RequestId
from mcp_sessions.core.resume import AWAY, NEVER_RAN, Cause, Step, after_status, may_send_again
from mcp_sessions.errors import OUTCOME_UNKNOWN

logger = logging.getLogger(__name__)

SHUTTING_DOWN = Failure(Cause.STATUS, "the server is shutting down", status=503)
"""What it means that a server which shuts down refuses a request on an open connection."""

_REFUSALS = 2
_OUTBOX = 1_000
"""Notifications of the application that wait for a connection; then the oldest is dropped."""

_WITHOUT_SESSION = frozenset({wire.INITIALIZE, wire.DISCOVER, *wire.OUR_METHODS})


class Sender:
    """One client's sending."""

    def __init__(
        self, situation: Situation, listener: Listener, mint_key: Callable[[], str]
    ) -> None:
        """Take what it works with.

        Args:
            mint_key: A new request key.
        """
        self._at = situation
        self._listener = listener
        self._mint_key = mint_key
        self._outbox: list[tuple[Json, Mapping[str, str]]] = []

    # --- out -------------------------------------------------------------------------------

    async def request(self, pending: Pending) -> None:
        """Send a request on the link, stamped if there is a session."""
        at = self._at
        link, keeper = at.link, at.keeper
        if link is None:
            raise AssertionError("requests are sent while there is a link")
        session = keeper.session if pending.method not in _WITHOUT_SESSION else None
        if session is not None and keeper.is_modern and pending.method == wire.LISTEN:
            pending.session_id = session.session_id
            self._listener.add(pending)
            return
        message, headers = pending.message, dict(pending.headers)
        if keeper.is_modern and keeper.envelope is not None:
            headers = {**wire.modern_headers(message, keeper.envelope), **headers}
        wire_id = at.requests.sending(pending, link)
        pending.sent_before = pending.first_sent is not None
        pending.last_sent = at.elapsed()
        if pending.first_sent is None:
            pending.first_sent = pending.last_sent
        if session is None or wire.names_own_session(message):
            message = {**message, "id": wire_id}
        else:
            if pending.key is None and keeper.has_keys:
                pending.key = self._mint_key()
            pending.key_lifetime = min(pending.key_lifetime, keeper.key_lifetime)
            pending.session_id = session.session_id
            pending.state = session.state
            pending.generation = keeper.lives.generation
            message = wire.stamped(message, wire_id, session, pending.key, keeper.is_modern)
            if keeper.is_modern:
                headers.update(wire.session_headers(session))
        try:
            await link.send(message, headers)
        except Failed as failed:
            await self.unanswered(link, wire_id, failed.failure)

    async def request_or_give_up(self, pending: Pending) -> None:
        """Send a request (again), if it may be; else answer it."""
        if self.may_send_again(pending):
            await self.request(pending)
        else:
            await self._at.give_up_on(pending)

    async def notification(self, message: Json, headers: Mapping[str, str]) -> None:
        """Send a notification, or keep it until there is a link."""
        at = self._at
        if at.link is None or at.phase not in (Phase.OPEN, Phase.READY):
            if message["method"] != wire.INITIALIZED:
                self._outbox.append((message, headers))
                del self._outbox[:-_OUTBOX]
            return
        try:
            await at.link.send(message, headers)
        except Failed as failed:
            logger.info("%s was not taken: %s", message["method"], failed)

    async def answer(self, question_id: RequestId, message: Json) -> None:
        """Answer a question of the server; kept until it was taken."""
        at = self._at
        if at.link is None:
            return
        try:
            await at.link.send(message, at.keeper.headers())
            at.questions.delivered(question_id)
        except Failed as failed:
            logger.debug("an answer waits for a connection: %s", failed)

    async def cancel(self, message: Json, headers: Mapping[str, str]) -> None:
        """The application does not want the answer to a request any more."""
        at, keeper = self._at, self._at.keeper
        params = cast("Json", message.get("params") or {})
        pending = at.requests.asked(params.get("requestId"))
        if pending is None:
            if not keeper.is_modern:
                await self.notification(message, headers)
            return
        at.requests.done(pending)
        if at.listens.remove(pending.app_id):
            await self._listener.stop()
            return
        link = pending.link
        if link is None or not pending.wire_ids:
            return
        wire_id = pending.wire_ids[-1]
        message = {**message, "params": {**params, "requestId": wire_id}}
        if keeper.is_modern and keeper.envelope is not None:
            message = wire.with_meta(message, keeper.envelope.meta)
        if pending.key is not None and pending.session_id is not None:
            named = {"sessionId": pending.session_id}
            added = {SESSION_META: named, REQUEST_KEY_META: pending.key}
            message = wire.with_meta(message, added)
        # Over HTTP the modern era cancels by closing the stream, unless there is a key.
        is_said = not (keeper.is_modern and link.kind == "http" and pending.key is None)
        try:
            if is_said:
                await link.send(message, {**headers, **keeper.headers(wire.CANCELLED)})
        except Failed as failed:
            logger.info("a cancellation was not taken: %s", failed)
        if keeper.is_modern:
            link.abandon(wire_id)

    async def flush(self, link: Link) -> None:
        """There is a link again, with a session: send what waits for it."""
        at = self._at
        waiting, self._outbox = self._outbox, []
        for message, headers in waiting:
            await self.notification(message, headers)
        for question_id, answer in at.questions.undelivered():
            await self.answer(question_id, answer)
        if at.listens and not at.listens.is_covered():
            self._listener.see_to_it()
        for pending in at.requests:
            if at.phase is Phase.READY and self._is_to_send(pending, link):
                await self.request_or_give_up(pending)

    def _is_to_send(self, pending: Pending, link: Link) -> bool:
        if pending.is_waiting or not self._at.requests.is_open(pending):
            return False
        if self._at.listens.has(pending):
            return False
        if pending.link is None:
            return True
        # What has a key can be answered here too; what has none, only where it was sent.
        return pending.link is not link and pending.key is not None and self.may_send_again(pending)

    def may_send_again(self, pending: Pending) -> bool:
        """Whether a request may be sent (again)."""
        at = self._at
        return may_send_again(
            is_keyed=pending.key is not None,
            first_sent=pending.first_sent,
            same_session=pending.generation == at.keeper.lives.generation,
            now=at.elapsed(),
            key_lifetime=min(pending.key_lifetime, at.keeper.key_lifetime),
        )

    # --- what becomes of it ------------------------------------------------------------------

    async def session_refused(self, pending: Pending, error: Json) -> bool:
        """The server does not know the session of a request; False: let it be the answer."""
        at = self._at
        pending.refusals += 1
        if pending.refusals > _REFUSALS or at.phase in (Phase.OVER, Phase.CUT_OFF):
            return False
        generation = pending.generation
        if self._may_have_started(pending, error):
            # It was at work when its session ended: it is not run again (KEY3).
            await at.answer(pending, OUTCOME_UNKNOWN, "Outcome unknown")
        else:
            pending.forget_sending()
        if generation == at.keeper.lives.generation:
            # Single flight: whoever heard it first begins, the others name an older session.
            at.begin(Way.START_OVER)
        if at.phase is Phase.READY and at.requests.is_open(pending):
            await self.request(pending)
        return True

    async def not_begun(self, link: Link, pending: Pending) -> bool:
        """The server shuts down, and refused a request before it began (ERR15); False: let
        that be the answer.
        """
        at = self._at
        if at.keeper.session is None or at.phase in (Phase.OPEN, Phase.OVER, Phase.CUT_OFF):
            return False
        if self._is_too_long():
            return False
        if pending.sent_before:
            # Its key may have an answer already.
            pending.link = None
        else:
            pending.forget_sending()
        if link is not at.link:
            await self.orphaned(pending)
        elif at.phase is Phase.READY:
            at.addresses.move_on()
            at.begin(Way.RECOVER)
        return True

    def _is_too_long(self) -> bool:
        """Note that there is trouble; whether it has been for longer than anybody waits."""
        at = self._at
        now = at.clock()
        at.trouble_since = at.trouble_since if at.trouble_since is not None else now
        return now - at.trouble_since >= at.policy.give_up_after

    async def state_refused(self, pending: Pending) -> bool:
        """The server does not take the ``state`` of a request; False: let it be the answer."""
        at = self._at
        pending.refusals += 1
        if pending.refusals > _REFUSALS or at.phase in (Phase.OVER, Phase.CUT_OFF):
            return False
        if not at.keeper.drop_state(pending.session_id, pending.state):
            return False
        if pending.sent_before:
            # Its key may have an answer already.
            pending.link = None
        else:
            # It is refused before anything runs.
            pending.forget_sending()
        if at.phase is Phase.READY and at.requests.is_open(pending):
            await self.request(pending)
        return True

    def _may_have_started(self, pending: Pending, error: Json) -> bool:
        """Whether a request may have been at work when it was told that its session is gone.

        The same code says "unknown" of a session and "ended" of one whose request ran; a
        refusal comes at once, and is all that comes.
        """
        data = error.get("data")
        if isinstance(data, dict) and cast("Json", data).get("started") is True:
            return True
        took = self._at.elapsed() - pending.last_sent
        is_late = pending.was_accepted or took > self._at.policy.refusal_time
        return pending.sent_before or (pending.method == wire.TOOL_CALL and is_late)

    async def unanswered(self, link: Link, wire_id: RequestId, failure: Failure) -> None:
        """A request's own way back is gone."""
        at = self._at
        pending = at.requests.find(wire_id)
        if pending is None or not at.requests.is_newest(pending, wire_id):
            return
        pending.link = None
        if failure.error is not None and wire.says_state_refused(failure.error):
            # The modern era says it with a 400. Another connection would hear the same.
            if not await self.state_refused(pending):
                await self.tell_failure(pending, failure)
            return
        refused = failure.cause is Cause.STATUS and failure.status in NEVER_RAN
        never_ran = refused or failure.cause is Cause.UNREACHABLE
        if never_ran and not pending.was_accepted and not pending.sent_before:
            pending.forget_sending()
        step = self._step_after(failure, pending)
        if step is Step.TELL:
            await self.tell_failure(pending, failure)
        elif link is not at.link or at.phase is not Phase.READY:
            await self.orphaned(pending)
        elif step is Step.RETRY:
            await self._retry(pending, failure)
        else:
            at.begin(Way.RECOVER)
            if not self.may_send_again(pending):
                await at.give_up_on(pending)

    def _step_after(self, failure: Failure, pending: Pending) -> Step:
        at = self._at
        if at.phase is Phase.OPEN:
            return Step.TELL
        if pending.session_id is None and at.keeper.session is None:
            # As the stock transport; but 2025-11-25 says of 404 that one initializes anew.
            is_lost = failure.status == 404 and at.keeper.initialize is not None
            return Step.RECONNECT if is_lost and not failure.is_answer else Step.TELL
        if failure.cause is Cause.STATUS and failure.status is not None:
            return after_status(
                failure.status,
                failures=at.backoff.failures,
                says_session=failure.says_session,
                is_answer=failure.is_answer,
            )
        return Step.RETRY

    async def tell_failure(self, pending: Pending, failure: Failure) -> None:
        """Answer a request as a stock transport would."""
        error = failure.error
        if error is None:
            await self._at.give_up_on(pending)
        else:
            await self._at.answer(pending, error["code"], error["message"], error.get("data"))

    async def orphaned(self, pending: Pending) -> None:
        """A request has no link: it waits for one if one is coming."""
        match self._at.phase:
            case Phase.READY:
                await self.request_or_give_up(pending)
            case Phase.OVER | Phase.CUT_OFF:
                await self._at.give_up_on(pending)
            case _:
                pass

    async def _retry(self, pending: Pending, failure: Failure) -> None:
        """Send it again on the same link after a delay, if it may be."""
        at = self._at
        if self._is_too_long() or not self.may_send_again(pending):
            await at.give_up_on(pending)
            return
        is_away = failure.cause is Cause.UNREACHABLE or failure.status in AWAY
        if is_away and at.addresses.has_other(now=at.clock()):
            at.addresses.rest(failure.retry_after or 0.0, now=at.clock())
            at.addresses.move_on()
            at.begin(Way.RECOVER)
            return
        asked = min(failure.retry_after or 0.0, at.policy.give_up_after)
        delay = max(at.backoff.failed(at.draw()), asked)
        pending.is_waiting = True
        at.spawn(self._send_later, pending, delay)

    async def _send_later(self, pending: Pending, delay: float) -> None:
        await self._at.sleep(delay)
        pending.is_waiting = False
        if self._at.phase is Phase.READY and self._at.requests.is_open(pending):
            await self.request_or_give_up(pending)
        elif self._at.requests.is_open(pending):
            await self.orphaned(pending)
