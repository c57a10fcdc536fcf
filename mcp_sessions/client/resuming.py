"""The resuming client: an application's messages on one side, links on the other.

It knows in which phase the whole is, what is sent when, and what a loss means for each open
request; how a session is taken up is in `keeper`, what may be sent again in `core.resume`.

Rules that must hold, and that ``tests/client/`` owns over real sockets:

1. Nothing waits for ever: each request is answered, by the server or from here.
2. Nothing runs twice: see `core.resume`. What cannot be known is ``-31012``.
3. One recovery at a time; whatever is asked meanwhile waits for its end.
4. Whoever took the session over keeps it: this client stops, and says so (pitfall B6).
"""

from __future__ import annotations

import inspect
import logging
import random
import secrets
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from enum import Enum
from typing import Any, cast

import anyio
import anyio.to_thread
from anyio.abc import TaskGroup, TaskStatus

from mcp_sessions.client import wire
from mcp_sessions.client.dialer import (
    Accepted,
    Dialer,
    Down,
    Event,
    Failed,
    Failure,
    Json,
    Link,
    Received,
    StreamRefused,
    StreamReopened,
    Unanswered,
)
from mcp_sessions.client.exchange import Exchanges, Refused
from mcp_sessions.client.jar import JarSlot, SavedSession
from mcp_sessions.client.keeper import Hopeless, SessionKeeper
from mcp_sessions.client.listening import Listens
from mcp_sessions.client.outcome import OnResume, ResumeOutcome
from mcp_sessions.client.policy import ReconnectPolicy
from mcp_sessions.client.requests import Pending, Questions, Requests
from mcp_sessions.core.backoff import Backoff, spread
from mcp_sessions.core.messages import (
    REQUEST_KEY_META,
    SESSION_META,
    RequestId,
    meta_of,
)
from mcp_sessions.core.resume import (
    Cause,
    Step,
    after_status,
    event_id_of,
    may_send_again,
    says_session_not_found,
)
from mcp_sessions.errors import OUTCOME_UNKNOWN, SESSION_DETACHED, SESSION_NOT_FOUND, Detached

logger = logging.getLogger(__name__)

CONNECTION_CLOSED = -32000
"""The SDK's code for a request that a lost connection leaves without an answer."""

_NEVER_RAN = (400, 404, 405, 410, 429, 503)
"""HTTP statuses by which a server, or what stands before it, refuses before it runs."""

_REFUSALS = 2
_OUTBOX = 1_000
"""Notifications of the application that wait for a connection; then the oldest is dropped."""


class Phase(Enum):
    """Where the client is."""

    FRESH = "fresh"
    """Nothing was sent yet."""

    OPEN = "open"
    """A link is there, and no session yet: messages pass as they are."""

    BUSY = "busy"
    """A session is being started, or taken up: requests wait."""

    READY = "ready"
    """With a session, or with a server that has none."""

    CUT_OFF = "cut_off"
    """Given up; the next request tries again."""

    OVER = "over"
    """Taken over, or refused for good: it does not come back by itself."""


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
        sleep: Callable[[float], Awaitable[None]] = anyio.sleep,
        mint_key: Callable[[], str] = lambda: secrets.token_urlsafe(16),
    ) -> None:
        """Take what it works with.

        Args:
            dialers: The addresses of the one server, in the order in which they are tried.
            deliver: Gives the application a message.
            hang_up: Ends the application's side, as a stock transport does whose connection
                is gone.
        """
        self._dialers = list(dialers)
        self._at = 0
        self._policy = policy
        self._deliver = deliver
        self._hang_up = hang_up
        self._slot = slot
        self._on_resume = on_resume
        self._draw = draw
        self._clock = clock
        self._sleep = sleep
        self._mint_key = mint_key
        self._backoff = Backoff(base=policy.backoff_base, cap=policy.backoff_cap)
        self._exchanges = Exchanges(timeout=policy.connect_timeout)
        self._keeper = SessionKeeper(self._exchanges, policy, self._backoff, draw, sleep)
        self._requests = Requests()
        self._questions = Questions()
        self._listens = Listens()
        self._phase = Phase.FRESH
        self._link: Link | None = None
        self._outbox: list[tuple[Json, Mapping[str, str]]] = []
        self._not_before = 0.0
        self._trouble_since: float | None = None
        self._jar_content: SavedSession | None = None
        self._relistening = False
        self._finished = anyio.Event()
        self._settled = anyio.Event()
        self._tasks_or_none: TaskGroup | None = None

    # --- lifetime ----------------------------------------------------------------------------

    async def run(self, *, task_status: TaskStatus[None] = anyio.TASK_STATUS_IGNORED) -> None:
        """Work until `close`."""
        async with anyio.create_task_group() as tasks:
            self._tasks_or_none = tasks
            if self._slot is not None:
                saved = await anyio.to_thread.run_sync(self._slot.load)
                if saved is not None:
                    self._keeper.restore(saved)
                    self._jar_content = saved
            tasks.start_soon(self._keep_house)
            task_status.started()
            await self._finished.wait()
            tasks.cancel_scope.cancel()

    async def close(self) -> None:
        """The application is done: the session is kept if there is a jar, else it ends."""
        link = self._link
        if link is not None:
            if self._slot is None and self._phase is Phase.READY:
                with anyio.move_on_after(self._policy.closing_timeout):
                    await self._keeper.end(link, within=self._policy.closing_timeout)
            await link.close(leave=True)
        if self._slot is not None:
            await self._save()
            await anyio.to_thread.run_sync(self._slot.close)
        self._phase = Phase.OVER
        self._finished.set()

    @property
    def _tasks(self) -> TaskGroup:
        if self._tasks_or_none is None:
            raise AssertionError("the client is used before it runs")
        return self._tasks_or_none

    async def _keep_house(self) -> None:
        """Answer what waits too long; write the jar."""
        while True:
            await self._sleep(self._policy.jar_interval)
            await self._save()
            oldest = self._clock() - self._policy.answer_timeout
            for pending in self._requests:
                if pending.asked_at < oldest and pending.method != wire.LISTEN:
                    await self._give_up_on(pending)

    async def _save(self) -> None:
        if self._slot is None:
            return
        content = self._keeper.saved()
        if content == self._jar_content:
            return
        try:
            await anyio.to_thread.run_sync(self._slot.save, content)
            self._jar_content = content
        except OSError as error:
            logger.warning("the jar could not be written: %s", error.strerror)

    # --- from the application ------------------------------------------------------------------

    async def take(self, message: Json, headers: Mapping[str, str]) -> None:
        """Take one message of the application."""
        if "method" not in message:
            await self._take_answer(message)
        elif "id" in message:
            await self._take_request(message, headers)
        else:
            await self._take_notification(message, headers)

    async def _take_request(self, message: Json, headers: Mapping[str, str]) -> None:
        keeper = self._keeper
        if message["method"] == wire.INITIALIZE:
            message = wire.declared(message)
            keeper.initialize = cast("Json", message.get("params") or {})
            keeper.abilities = None
        elif keeper.initialize is None:
            keeper.envelope = wire.envelope_of(message) or keeper.envelope
        pending = Pending(message["id"], message, headers, self._clock())
        self._requests.add(pending)
        if self._phase is Phase.FRESH and not await self._open_first(pending):
            return
        if self._phase is Phase.OPEN and self._may_settle(pending):
            self._begin(self._settle)
        if self._phase is Phase.CUT_OFF:
            self._begin(self._recover)
        if self._phase is Phase.OVER:
            await self._answer(
                pending, SESSION_DETACHED, "Session detached: another connection took it over"
            )
        elif self._phase in (Phase.OPEN, Phase.READY):
            await self._send(pending)

    def _may_settle(self, pending: Pending) -> bool:
        """Whether the modern era's first request is here, for which a session is needed."""
        keeper = self._keeper
        if not keeper.is_modern or pending.method == wire.DISCOVER:
            return False
        return wire.envelope_of(pending.message) is not None

    async def _take_notification(self, message: Json, headers: Mapping[str, str]) -> None:
        if message["method"] == wire.CANCELLED:
            await self._cancel(message, headers)
            return
        await self._send_other(message, headers)
        if message["method"] == wire.INITIALIZED and self._phase is Phase.OPEN:
            self._begin(self._settle)

    async def _take_answer(self, message: Json) -> None:
        question_id = cast(RequestId, message.get("id"))
        self._questions.answered(question_id, message)
        await self._send_answer(question_id, message)

    async def _send_answer(self, question_id: RequestId, message: Json) -> None:
        link = self._link
        if link is None:
            return
        try:
            await link.send(message, self._own_headers())
            self._questions.delivered(question_id)
        except Failed as failed:
            logger.debug("an answer waits for a connection: %s", failed)

    async def _send_other(self, message: Json, headers: Mapping[str, str]) -> None:
        link = self._link
        if link is None or self._phase not in (Phase.OPEN, Phase.READY):
            if message["method"] != wire.INITIALIZED:
                self._outbox.append((message, headers))
                del self._outbox[:-_OUTBOX]
            return
        try:
            await link.send(message, headers)
        except Failed as failed:
            logger.info("%s was not taken: %s", message["method"], failed)

    async def _cancel(self, message: Json, headers: Mapping[str, str]) -> None:
        params = cast("Json", message.get("params") or {})
        pending = self._requests.asked(params.get("requestId"))
        if pending is None:
            if not self._keeper.is_modern:
                await self._send_other(message, headers)
            return
        self._requests.done(pending)
        if self._listens.remove(pending.app_id):
            await self._stop_listening()
            return
        link = pending.link
        if link is None or not pending.wire_ids:
            return
        wire_id = pending.wire_ids[-1]
        message = {**message, "params": {**params, "requestId": wire_id}}
        session = self._keeper.session
        if pending.key is not None and session is not None:
            named = {SESSION_META: session.metadata(), REQUEST_KEY_META: pending.key}
            if self._keeper.is_modern and self._keeper.envelope is not None:
                message = wire.with_meta(message, self._keeper.envelope.meta)
            message = wire.with_meta(message, named)
        try:
            # Over HTTP the modern era cancels by closing the stream, unless there is a key.
            if not (self._keeper.is_modern and link.kind == "http" and pending.key is None):
                await link.send(message, {**headers, **self._own_headers(wire.CANCELLED)})
        except Failed as failed:
            logger.info("a cancellation was not taken: %s", failed)
        if self._keeper.is_modern:
            link.abandon(wire_id)

    def _own_headers(self, method: str | None = None) -> dict[str, str]:
        envelope = self._keeper.envelope
        if not self._keeper.is_modern or envelope is None:
            version = self._keeper.protocol_version
            return {"mcp-protocol-version": version} if version is not None else {}
        headers = {"mcp-protocol-version": envelope.protocol_version}
        if method is not None:
            headers["mcp-method"] = method
        return headers

    # --- to the server -------------------------------------------------------------------------

    async def _open_first(self, pending: Pending) -> bool:
        """Open a link for the first request; False: there is none, and it has its answer."""
        self._phase = Phase.BUSY
        for _ in self._dialers:
            try:
                self._link = await self._connect(self._dialer())
            except Failed as failed:
                logger.info("%s", failed)
                self._at += 1
            else:
                self._phase = Phase.OPEN
                return True
        self._phase = Phase.FRESH
        await self._answer(
            pending, CONNECTION_CLOSED, "Connection closed: no server can be reached"
        )
        return False

    def _dialer(self) -> Dialer:
        return self._dialers[self._at % len(self._dialers)]

    async def _connect(self, dialer: Dialer) -> Link:
        link = dialer.link()
        try:
            with anyio.fail_after(self._policy.connect_timeout):
                await self._tasks.start(link.run, self._on_event)
        except TimeoutError:
            raise Failed(Failure(Cause.SILENT, "no connection in time")) from None
        return link

    async def _send(self, pending: Pending) -> None:
        """Send a request on the link, stamped if there is a session."""
        link, session = self._link, self._keeper.session
        if link is None:
            raise AssertionError("requests are sent while there is a link")
        message = pending.message
        modern = self._keeper.is_modern
        headers = pending.headers
        is_ours = session is not None and pending.method not in (
            wire.INITIALIZE,
            wire.DISCOVER,
            *wire.OUR_METHODS,
        )
        if is_ours and modern and pending.method == wire.LISTEN:
            pending.session_id = session.session_id if session else None
            self._listens.add(pending)
            self._listen_again()
            return
        wire_id = self._requests.sending(pending, link)
        pending.sent_before = pending.first_sent is not None
        if pending.first_sent is None:
            pending.first_sent = self._clock()
        if not is_ours or session is None or wire.names_own_session(message):
            message = {**message, "id": wire_id}
        else:
            if pending.key is None and self._keeper.has_keys and pending.method != wire.LISTEN:
                pending.key = self._mint_key()
            pending.session_id = session.session_id
            pending.generation = self._keeper.lives.generation
            message = wire.stamped(message, wire_id, session, pending.key, modern)
            if modern:
                # Document 004 wants the id mirrored in the header.
                headers = {**headers, wire.SESSION_HEADER: session.session_id}
        try:
            await link.send(message, headers)
        except Failed as failed:
            await self._unanswered(link, wire_id, failed.failure)

    async def _answer(self, pending: Pending, code: int, text: str, data: Any = None) -> None:
        """Answer from here."""
        if self._requests.done(pending):
            self._listens.remove(pending.app_id)
            await self._deliver(wire.error_answer(pending.app_id, code, text, data))

    async def _give_up_on(self, pending: Pending) -> None:
        """Answer what the server will not answer any more."""
        if pending.first_sent is not None:
            await self._answer(pending, OUTCOME_UNKNOWN, "Outcome unknown")
        else:
            await self._answer(pending, CONNECTION_CLOSED, "Connection closed: it was never sent")

    # --- from the server -----------------------------------------------------------------------

    async def _on_event(self, link: Link, event: Event) -> None:
        match event:
            case Received(message):
                await self._received(link, message)
            case Accepted(request_id):
                pending = self._requests.find(request_id)
                if pending is not None:
                    pending.was_accepted = True
            case Unanswered(request_id, failure):
                await self._unanswered(link, request_id, failure)
            case StreamReopened(continued):
                if not continued and link is self._link and self._phase is Phase.READY:
                    self._begin(self._reattach)
            case StreamRefused(failure):
                if link is self._link and self._phase is Phase.READY:
                    logger.info("the notification stream is refused: %s", failure.explanation)
                    self._begin(self._recover)
            case Down(failure):
                await self._down(link, failure)

    async def _received(self, link: Link, message: Json) -> None:
        if "method" not in message:
            await self._received_answer(message)
        elif "id" in message:
            is_new, answer = self._questions.asked(message["id"])
            if is_new:
                await self._deliver(message)
            elif answer is not None:
                # It came again: the answer was lost on its way.
                self._tasks.start_soon(self._send_answer, message["id"], answer)
        else:
            await self._received_notification(link, message)

    async def _received_notification(self, link: Link, message: Json) -> None:
        params = cast("Json | None", message.get("params"))
        match message["method"]:
            case wire.DETACHED:
                await self._detached(link, params or {})
                return
            case wire.CANCELLED:
                self._questions.withdrawn((params or {}).get("requestId"))
            case "notifications/progress":
                pending = self._requests.asked((params or {}).get("progressToken"))
                if pending is not None:
                    pending.was_accepted = True
            case _:
                pass
        session = self._keeper.session
        if session is not None:
            event_id = event_id_of(params, session.session_id)
            if event_id is not None:
                if not self._keeper.follower.admits(event_id):
                    return
                self._progressed()
            if self._keeper.is_modern and self._listens:
                if self._listens.is_acknowledgement(message):
                    self._progressed()
                    for part in self._listens.acknowledged(params):
                        await self._deliver(part)
                    return
                if event_id is not None or wire.SUBSCRIPTION_ID in (meta_of(params) or {}):
                    for part in self._listens.parts(message):
                        await self._deliver(part)
                    return
        await self._deliver(message)

    async def _received_answer(self, message: Json) -> None:
        if self._exchanges.answered(message):
            return
        answered = message.get("id")
        if answered is not None and answered == self._listens.wire_id:
            await self._listening_ended()
            return
        pending = self._requests.find(cast(RequestId, answered))
        if pending is None:
            logger.debug("dropped an answer that nobody waits for")
            return
        result = cast("Json | None", message.get("result"))
        error = cast("Json", message.get("error") or {})
        if pending.session_id is not None:
            foreign = not (self._keeper.abilities and self._keeper.abilities.is_ours)
            is_lost = error.get("code") == SESSION_NOT_FOUND or (
                foreign
                and result is not None
                and pending.method == wire.TOOL_CALL
                and says_session_not_found(result)
            )
            if is_lost and await self._session_refused(pending, error):
                return
            if result is not None:
                if self._keeper.session is not None:
                    self._keeper.session.merge(result)
                self._keeper.lives.used()
                self._note_subscription(pending)
        elif result is not None and pending.method in (wire.INITIALIZE, wire.DISCOVER):
            self._keeper.learn(result)
        elif result is not None and self._keeper.session is None:
            self._keeper.lives.used()
        self._progressed()
        if self._requests.done(pending):
            await self._deliver({**message, "id": pending.app_id})

    def _note_subscription(self, pending: Pending) -> None:
        uri = cast("Json", pending.message.get("params") or {}).get("uri")
        if isinstance(uri, str) and pending.method == wire.SUBSCRIBE:
            self._keeper.subscribed[uri] = None
        elif isinstance(uri, str) and pending.method == wire.UNSUBSCRIBE:
            self._keeper.subscribed.pop(uri, None)

    def _progressed(self) -> None:
        self._backoff.progressed()
        self._trouble_since = None

    # --- losses --------------------------------------------------------------------------------

    async def _session_refused(self, pending: Pending, error: Json) -> bool:
        """The server does not know the session of a request; False: let it be the answer."""
        pending.refusals += 1
        if pending.refusals > _REFUSALS or self._phase in (Phase.OVER, Phase.CUT_OFF):
            return False
        generation = pending.generation
        data = error.get("data")
        has_started = isinstance(data, dict) and cast("Json", data).get("started") is True
        if has_started or (pending.was_accepted and pending.method == wire.TOOL_CALL):
            # It was at work when its session ended: it is not run again (pitfall C2).
            await self._answer(pending, OUTCOME_UNKNOWN, "Outcome unknown")
        else:
            pending.forget_sending()
        if generation == self._keeper.lives.generation:
            # Single flight: whoever heard it first begins, the others name an older session.
            self._begin(self._start_over)
        if self._phase is Phase.READY and self._requests.is_open(pending):
            await self._send(pending)
        return True

    async def _unanswered(self, link: Link, wire_id: RequestId, failure: Failure) -> None:
        """A request's own way back is gone."""
        if self._exchanges.failed(wire_id, failure):
            return
        if wire_id == self._listens.wire_id:
            self._listens.wire_id = None
            self._listen_again(delayed=True)
            return
        pending = self._requests.find(wire_id)
        if pending is None or not self._requests.is_newest(pending, wire_id):
            return
        pending.link = None
        refused = failure.cause is Cause.STATUS and failure.status in _NEVER_RAN
        if (refused or failure.cause is Cause.UNREACHABLE) and not pending.was_accepted:
            if not pending.sent_before:
                pending.forget_sending()
        if self._phase is Phase.OPEN:
            await self._failed_opening(pending, failure)
            return
        step = self._step_after(failure, pending)
        if step is Step.TELL:
            await self._tell_failure(pending, failure)
        elif link is not self._link or self._phase is not Phase.READY:
            await self._await_recovery(pending)
        elif step is Step.RETRY:
            await self._retry(pending, failure)
        else:
            if self._may_send_again(pending):
                self._begin(self._recover)
            else:
                self._begin(self._recover)
                await self._give_up_on(pending)

    def _step_after(self, failure: Failure, pending: Pending) -> Step:
        if pending.session_id is None and self._keeper.session is None:
            # As the stock transport; but 2025-11-25 says of 404 that one initializes anew.
            is_lost = failure.status == 404 and self._keeper.initialize is not None
            return Step.RECONNECT if is_lost and not failure.is_answer else Step.TELL
        if failure.cause is Cause.STATUS and failure.status is not None:
            return after_status(
                failure.status,
                failures=self._backoff.failures,
                says_session=failure.says_session,
                is_answer=failure.is_answer,
            )
        return Step.RETRY

    async def _tell_failure(self, pending: Pending, failure: Failure) -> None:
        error = failure.error
        if error is None:
            await self._give_up_on(pending)
            return
        await self._answer(pending, error["code"], error["message"], error.get("data"))

    async def _failed_opening(self, pending: Pending, failure: Failure) -> None:
        """The first request of all failed: at another address it may not."""
        link = self._link
        if failure.cause is Cause.UNREACHABLE and self._at + 1 < len(self._dialers):
            self._at += 1
            if link is not None:
                await link.close(leave=False)
            if await self._open_first(pending):
                await self._send(pending)
            return
        await self._tell_failure(pending, failure)

    async def _await_recovery(self, pending: Pending) -> None:
        if self._phase is Phase.READY:
            await self._send_or_give_up(pending)
        elif self._phase in (Phase.OVER, Phase.CUT_OFF):
            await self._give_up_on(pending)

    async def _retry(self, pending: Pending, failure: Failure) -> None:
        """Send it again on the same link after a delay, if it may be."""
        now = self._clock()
        self._trouble_since = self._trouble_since if self._trouble_since is not None else now
        if not self._may_send_again(pending):
            await self._give_up_on(pending)
            return
        if now - self._trouble_since >= self._policy.give_up_after:
            await self._give_up_on(pending)
            return
        if len(self._dialers) > 1 and failure.cause is Cause.UNREACHABLE:
            self._at += 1
            self._begin(self._recover)
            return
        delay = max(self._backoff.failed(self._draw()), failure.retry_after or 0.0)
        pending.is_waiting = True
        self._tasks.start_soon(self._send_later, pending, delay)

    async def _send_later(self, pending: Pending, delay: float) -> None:
        await self._sleep(delay)
        pending.is_waiting = False
        if self._phase is Phase.READY and self._requests.is_open(pending):
            await self._send_or_give_up(pending)

    def _may_send_again(self, pending: Pending) -> bool:
        return may_send_again(
            is_keyed=pending.key is not None,
            first_sent=pending.first_sent,
            same_session=pending.generation == self._keeper.lives.generation,
            now=self._clock(),
            key_lifetime=self._keeper.key_lifetime,
        )

    async def _send_or_give_up(self, pending: Pending) -> None:
        if self._may_send_again(pending):
            await self._send(pending)
        else:
            await self._give_up_on(pending)

    async def _down(self, link: Link, failure: Failure) -> None:
        """A link is gone."""
        self._exchanges.down(link, failure)
        for pending in self._requests:
            if pending.link is link:
                pending.link = None
        if link is not self._link:
            for pending in self._requests:
                if pending.link is None and not pending.is_waiting:
                    await self._await_recovery(pending)
            return
        self._link = None
        logger.info("%s: %s", link.name, failure.explanation)
        if self._phase is Phase.BUSY:
            return
        session = self._keeper.session
        if self._phase is Phase.OVER or session is None or not failure.may_return:
            # Without a session there is nothing to come back to: as a stock transport.
            await self._stop(failure)
        else:
            self._begin(self._recover)

    async def _stop(self, failure: Failure) -> None:
        was_over = self._phase is Phase.OVER
        self._phase = Phase.OVER
        for pending in self._requests:
            await self._give_up_on(pending)
        if self._keeper.session is not None and not was_over:
            await self._tell_outcome(ResumeOutcome(False, reason="refused", is_over=True))
        await self._hang_up()

    async def _detached(self, link: Link, params: Json) -> None:
        session = self._keeper.session
        if session is None or link is not self._link or self._phase is not Phase.READY:
            return
        if params.get("sessionId") != session.session_id:
            return
        match params.get("reason"):
            case Detached.TAKEN_OVER.value:
                logger.info("%s: the session was taken over", link.name)
                self._phase = Phase.OVER
                for pending in self._requests:
                    if pending.link is None:
                        await self._give_up_on(pending)
                await self._tell_outcome(
                    ResumeOutcome(False, reason="taken_over", connected_to=link.name, is_over=True)
                )
            case Detached.DRAINING.value:
                after = params.get("retryAfter")
                seconds = float(after) if isinstance(after, (int, float)) else 0.0
                delay = spread(seconds, self._draw())
                self._not_before = self._clock() + delay
                self._tasks.start_soon(self._come_back, link, delay)
            case _:
                self._begin(self._reattach)

    async def _come_back(self, link: Link, delay: float) -> None:
        """The server drains: another connection, when it is our turn."""
        await self._sleep(delay)
        if self._link is link and self._phase is Phase.READY:
            self._begin(self._recover)

    # --- recovery ------------------------------------------------------------------------------

    def _begin(self, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Start a recovery, unless one is under way."""
        if self._phase in (Phase.BUSY, Phase.OVER, Phase.FRESH):
            return
        self._phase = Phase.BUSY
        self._settled = anyio.Event()
        self._tasks.start_soon(work)

    async def _settle(self) -> None:
        """The handshake is done: start a session, or go on with the jar's."""
        keeper, link = self._keeper, self._link
        was_saved = keeper.session is not None
        try:
            if link is None:
                raise Failed(Failure(Cause.CLOSED, "the link is gone"))
            if keeper.abilities is None and keeper.is_modern:
                await keeper.discover(link)
            if keeper.abilities is None or not keeper.abilities.has_sessions:
                keeper.session = None
                await self._ready(link)
                return
            outcome = await keeper.attach(link)
        except (Failed, Hopeless) as failed:
            logger.info("no session yet: %s", failed)
            if was_saved or keeper.session is not None or self._link is None:
                await self._recover()
            elif link is not None:
                # It advertises sessions and cannot make one: as the stock transport.
                keeper.abilities = None
                await self._ready(link)
            return
        await self._ready(link, outcome if was_saved else None)

    async def _reattach(self) -> None:
        """Resume on the link that is there."""
        link = self._link
        try:
            if link is None:
                raise Failed(Failure(Cause.CLOSED, "the link is gone"))
            outcome = await self._keeper.attach(link)
        except (Failed, Hopeless):
            await self._recover()
            return
        await self._ready(link, outcome)

    async def _start_over(self) -> None:
        """The session is gone and the link is not: a new session there."""
        link = self._link
        try:
            if link is None:
                raise Failed(Failure(Cause.CLOSED, "the link is gone"))
            outcome = await self._keeper.start_over(link, "session_lost")
        except Hopeless:
            await self._no_session()
            return
        except Failed:
            await self._recover()
            return
        await self._ready(link, outcome)

    async def _recover(self) -> None:
        """Open another link and take up the session there; try until it is time to give up."""
        since = self._clock()
        await self._sleep(max(0.0, self._not_before - since))
        while True:
            link = None
            try:
                link = await self._connect(self._dialer())
                await self._keeper.shake_hands(link)
                outcome = await self._take_up(link)
            except Failed as failed:
                await self._drop(link)
                logger.info("%s", failed)
                self._at += 1
                if self._clock() - since >= self._policy.give_up_after:
                    await self._cut_off()
                    return
                delay = self._backoff.failed(self._draw())
                await self._sleep(max(delay, failed.failure.retry_after or 0.0))
            except Hopeless:
                await self._drop(link)
                await self._no_session()
                return
            else:
                await self._ready(link, outcome)
                return

    async def _take_up(self, link: Link) -> ResumeOutcome:
        keeper = self._keeper
        if keeper.session is None and not (keeper.abilities and keeper.abilities.has_sessions):
            # A transport session only, and it was lost.
            if not keeper.lives.start_over():
                raise Hopeless
            return ResumeOutcome(
                False, is_new_session=True, reason="session_lost", connected_to=link.name
            )
        return await keeper.attach(link)

    async def _drop(self, link: Link | None) -> None:
        if link is not None:
            await link.close(leave=True)

    async def _no_session(self) -> None:
        """Each session is lost as soon as it is made: no more of them."""
        logger.warning("the server forgets each session at once: giving up")
        await self._cut_off()

    async def _cut_off(self) -> None:
        self._phase = Phase.CUT_OFF
        self._settled.set()
        for pending in self._requests:
            if pending.link is None:
                await self._give_up_on(pending)
        await self._tell_outcome(ResumeOutcome(False, reason="gave_up"))

    async def _ready(self, link: Link, outcome: ResumeOutcome | None = None) -> None:
        """Go on, on this link: send what waits, and tell what happened."""
        keeper = self._keeper
        previous, self._link = self._link, link
        keeper.configure(link)
        if keeper.session is not None and link.kind == "http":
            self._listens.wire_id = self._listens.wire_id if previous is link else None
        self._not_before = 0.0
        self._phase = Phase.READY
        self._settled.set()
        if previous is not None and previous is not link:
            self._tasks.start_soon(self._retire, previous)
        if outcome is not None:
            if previous is not link or outcome.is_new_session:
                self._listens.wire_id = None
            if not outcome.recovered:
                await self._tell_everything_changed()
            await self._tell_outcome(outcome)
        for message, headers in self._outbox[:]:
            self._outbox.remove((message, headers))
            await self._send_other(message, headers)
        for question_id, answer in self._questions.undelivered():
            await self._send_answer(question_id, answer)
        if self._listens and not self._listens.is_covered():
            self._listen_again()
        for pending in self._requests:
            if self._phase is Phase.READY and self._is_to_send(pending, link):
                await self._send_or_give_up(pending)

    def _is_to_send(self, pending: Pending, link: Link) -> bool:
        if pending.is_waiting or not self._requests.is_open(pending):
            return False
        if pending.method == wire.LISTEN and pending in self._listens.requests():
            return False
        if pending.link is None:
            return True
        # What runs with a key can be answered here too; what has none, only where it was sent.
        return (
            pending.link is not link and pending.key is not None and self._may_send_again(pending)
        )

    async def _retire(self, link: Link) -> None:
        """Leave an old link, when nothing is expected there any more."""
        until = self._clock() + self._policy.give_up_after
        while any(p.link is link for p in self._requests) and self._clock() < until:
            await self._sleep(min(1.0, self._policy.jar_interval))
        await link.close(leave=True)
        for pending in self._requests:
            if pending.link is link:
                pending.link = None
                await self._give_up_on(pending)

    async def _tell_everything_changed(self) -> None:
        """There was a gap: what the application may have missed, it reads again (G5)."""
        if self._keeper.is_modern:
            for message in self._listens.everything():
                await self._deliver(message)
            return
        known = self._keeper.abilities
        for name in known.lists if known is not None else ():
            await self._deliver(wire.notification(f"notifications/{name}/list_changed"))
        for uri in self._keeper.subscribed:
            await self._deliver(wire.notification(wire.RESOURCE_UPDATED, {"uri": uri}))

    async def _tell_outcome(self, outcome: ResumeOutcome) -> None:
        if self._on_resume is None:
            return
        try:
            told = self._on_resume(outcome)
            if inspect.isawaitable(told):
                await told
        except Exception:
            # The application's own function: what is wrong with it must not end the session.
            logger.exception("on_resume raised")

    async def move_to(self, dialer: Dialer) -> ResumeOutcome:
        """Take the session to another address, while it lives.

        Raises:
            Failed: It could not be taken there; it stays where it is. Or there is none.
        """
        with anyio.fail_after(self._policy.give_up_after):
            while self._phase is Phase.BUSY:
                await self._settled.wait()
        if self._keeper.session is None:
            raise Failed(Failure(Cause.CLOSED, "there is no session to move"))
        before, self._phase = self._phase, Phase.BUSY
        self._settled = anyio.Event()
        link = None
        try:
            link = await self._connect(dialer)
            await self._keeper.shake_hands(link)
            outcome = await self._keeper.attach(link)
        except (Failed, Hopeless) as error:
            await self._drop(link)
            self._phase = before
            self._settled.set()
            if self._link is not None and before is Phase.READY:
                await self._ready(self._link)
            elif before is Phase.READY:
                self._begin(self._recover)
            if isinstance(error, Failed):
                raise
            raise Failed(Failure(Cause.CLOSED, "the session is gone")) from error
        self._dialers = [dialer, *(d for d in self._dialers if d.target != dialer.target)]
        self._at = 0
        await self._ready(link, outcome)
        return outcome

    # --- listen streams (modern era) -------------------------------------------------------------

    def _listen_again(self, *, delayed: bool = False) -> None:
        """See to it that the stream on the wire brings what is asked for."""
        if not self._relistening:
            self._relistening = True
            self._tasks.start_soon(self._relisten, delayed)

    async def _relisten(self, delayed: bool) -> None:
        try:
            if delayed:
                await self._sleep(self._backoff.failed(self._draw()))
            while self._listens and not self._listens.is_covered():
                link, keeper = self._link, self._keeper
                if self._phase is not Phase.READY or link is None:
                    return
                try:
                    await self._listen_on(link)
                except (Failed, Refused, Hopeless) as error:
                    logger.info("listening failed: %s", error)
                    self._listens.wire_id = None
                    if isinstance(error, Hopeless) or keeper.session is None:
                        return
                    await self._sleep(self._backoff.failed(self._draw()))
        finally:
            self._relistening = False
        for part in self._listens.not_yet_acknowledged():
            await self._deliver(part)

    async def _listen_on(self, link: Link) -> None:
        keeper = self._keeper
        if self._listens.wire_id is not None:
            # Our own resume would take the session from it, and it would say so.
            link.abandon(self._listens.wire_id)
            self._listens.wire_id = None
        if keeper.must_resume_before_listening:
            generation = keeper.lives.generation
            outcome = await keeper.attach(link)
            if not outcome.recovered:
                await self._tell_everything_changed()
                await self._tell_outcome(outcome)
            elif generation == keeper.lives.generation:
                await self._tell_outcome(outcome)
        session = keeper.session
        if session is None or not self._listens:
            return
        keeper.must_resume_before_listening = True
        message = self._listens.next_request()
        wire_id = cast(str, message["id"])
        headers = {**self._listens.headers(), wire.SESSION_HEADER: session.session_id}
        await link.send(wire.stamped(message, wire_id, session, None, modern=True), headers)

    async def _stop_listening(self) -> None:
        wire_id, link = self._listens.wire_id, self._link
        if self._listens or wire_id is None or link is None:
            return
        self._listens.wire_id = None
        if link.kind != "http":
            cancelled = wire.notification(wire.CANCELLED, {"requestId": wire_id})
            await self._send_other(cancelled, {})
        link.abandon(wire_id)

    async def _listening_ended(self) -> None:
        """The server ended the stream in order: it stops, or somebody else listens now."""
        self._listens.wire_id = None
        if self._phase is Phase.READY and self._listens:
            self._listen_again(delayed=True)
