"""Streamable HTTP, the client side of both eras: a `mcp_sessions.client.dialer.Link`.

Without sessions it does what the SDK's own transport does: the same headers, the same
errors, the same two attempts with ``Last-Event-ID``. With sessions, a broken response is
reported at once, and the notification stream is opened again for as long as the link lasts,
also when it is only silent.

`Incoming` hands over what was read on a response or the notification stream, and what is known of
dropped messages. `NotificationStream` keeps the GET open. A stream that was open and broke is
opened again soon, with ``Last-Event-ID``. If that fails, the server or the way to it is away: the
client is informed, and reconnects by another link. A stream that was never open is no sign of
that: a proxy before the server may block it.
"""

from __future__ import annotations

import logging
import random
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Mapping
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import anyio
import httpx2
from anyio.abc import TaskGroup, TaskStatus

from mcp_sessions import method_names
from mcp_sessions.client.dialer import (
    CONNECTION_CLOSED,
    Accepted,
    Event,
    Failed,
    Failure,
    LinkSettings,
    Missed,
    Received,
    Sink,
    StreamBroke,
    StreamFailed,
    StreamReopened,
    StreamUnsure,
    Unanswered,
)
from mcp_sessions.client.messages import instead_of_dropped, received
from mcp_sessions.client.reconnect_policy import ReconnectPolicy
from mcp_sessions.core.backoff import Backoff
from mcp_sessions.core.messages import Json, Malformed, RequestId, decode, error_body, parse
from mcp_sessions.core.outline import Outline
from mcp_sessions.core.resume import FailureCause, is_away
from mcp_sessions.errors import INVALID_REQUEST, OUTCOME_UNKNOWN, PARSE_ERROR
from mcp_sessions.http_client.body import ResponseTooLarge
from mcp_sessions.http_client.connect_errors import without_credentials
from mcp_sessions.http_client.exchange import FAILURES, Exchange, events_of
from mcp_sessions.http_client.session import is_sse, unfollowed
from mcp_sessions.http_client.sse_reader import EventTooLarge, Position, ReadEvent
from mcp_sessions_transports.http.client.requester import Access, Requester, describe, refusal

logger = logging.getLogger(__name__)


class HttpDialer:
    def __init__(self, access: Access) -> None:
        self.target = without_credentials(access.url)
        self._access = access

    def link(self) -> HttpLink:
        return HttpLink(Requester(self._access), self._access.policy)


class HttpLink:
    kind = "http"

    def __init__(self, requester: Requester, policy: ReconnectPolicy) -> None:
        self.name = requester.name
        self._requester = requester
        self._policy = policy
        incoming = Incoming(requester, policy, self._emit, self._spawn)
        self._incoming = incoming
        self._notifications = NotificationStream(requester, incoming, policy)
        self._sink: Sink | None = None
        self._tasks: TaskGroup | None = None
        self._done = anyio.Event()
        self._posts: dict[RequestId, anyio.CancelScope] = {}

    async def run(self, sink: Sink, *, task_status: TaskStatus[None]) -> None:
        self._sink = sink
        async with self._requester.running():
            try:
                async with anyio.create_task_group() as tasks:
                    self._tasks = tasks
                    task_status.started()
                    await self._done.wait()
                    tasks.cancel_scope.cancel()
            finally:
                self._tasks = None

    def configure(self, settings: LinkSettings) -> None:
        self._requester.configure(settings)

    async def send(self, message: Json, headers: Mapping[str, str]) -> None:
        if self._tasks is None or self._done.is_set():
            raise Failed(Failure(FailureCause.CLOSED, f"{self.name}: the connection is closed"))
        self._requester.note_version(message, headers)
        if "method" in message and "id" in message:
            scope = anyio.CancelScope()
            self._posts[message["id"]] = scope
            self._tasks.start_soon(self._ask, message, dict(headers), scope)
            return
        failure = await self._requester.post(message, headers)
        if failure is not None:
            raise Failed(failure)

    async def _ask(
        self, message: Json, headers: Mapping[str, str], scope: anyio.CancelScope
    ) -> None:
        request_id: RequestId = message["id"]
        failure: Failure | None = None
        with scope:
            failure = await self._exchanged(message, headers)
        if scope.cancel_called:
            return
        if self._posts.get(request_id) is scope:
            del self._posts[request_id]
        if failure is not None:
            await self._emit(Unanswered(request_id, failure))

    async def _exchanged(self, message: Json, headers: Mapping[str, str]) -> Failure | None:
        request_id: RequestId = message["id"]
        incoming = self._incoming

        async def on_event(event: ReadEvent) -> None:
            if await incoming.take(event, request_id):
                exchange.answered()

        async def take(body: bytes) -> None:
            exchange.answered()
            try:
                said: Json = decode(body)
                parse(said)
                if "method" in said:
                    raise Malformed("it is no answer")
            except (ValueError, Malformed) as error:
                text = f"{self.name}: Failed to parse JSON response: {error}"
                raise Failed(refusal(200, PARSE_ERROR, text)) from None
            # As on a stream: what answers in this response answers this request.
            await self._emit(Received({**said, "id": request_id}))

        exchange = Exchange(
            opens=partial(self._opened, message, headers),
            refusal=Failed,
            begun=partial(self._begun, message),
            on_event=on_event,
            take=take,
            longest=self._policy.max_message,
            # What has a key is sent again.
            attempts=0 if self._requester.settings.has_keys else STOCK_ATTEMPTS,
        )
        try:
            await exchange.run()
        except Failed as failed:
            return failed.failure
        except ResponseTooLarge:
            return incoming.too_large("response")
        except EventTooLarge:
            return incoming.too_large("SSE event")
        except FAILURES as error:
            return describe(error, name=self.name, was_sent=exchange.is_open)
        if exchange.is_answered:
            return None
        return Failure(
            FailureCause.CUT,
            f"{self.name}: the response stream ended without an answer",
            error=error_body(CONNECTION_CLOSED, "SSE stream ended without a response"),
        )

    @asynccontextmanager
    async def _opened(
        self, message: Json, headers: Mapping[str, str], last_event_id: str | None
    ) -> AsyncGenerator[httpx2.Response]:
        if last_event_id is None:
            async with self._requester.stream("POST", message, headers) as response:
                await self._check(response, message["id"])
                yield response
            return
        again = {"last-event-id": last_event_id}
        async with self._requester.stream("GET", None, again) as response:
            if response.status_code >= 500:
                raise httpx2.RemoteProtocolError(f"HTTP status {response.status_code}")
            if response.status_code != 200:
                raise Failed(await self._requester.refused(response, None))
            yield response

    async def _check(self, response: httpx2.Response, request_id: RequestId) -> None:
        status, redirect = response.status_code, unfollowed(response)
        if status == 202:
            text = f"{self.name}: the server answered a request with 202 Accepted, and no result"
            raise Failed(refusal(202, INVALID_REQUEST, text))
        if redirect is not None:
            raise Failed(refusal(status, INVALID_REQUEST, f"{self.name}: {redirect}"))
        if status >= 400:
            raise Failed(await self._requester.refused(response, request_id))

    async def _begun(self, message: Json, response: httpx2.Response) -> None:
        status = response.status_code
        if message.get("method") == method_names.INITIALIZE:
            if not self._requester.session.joined(response):
                text = f"{self.name}: the server gave a transport session an id that cannot be sent"
                raise Failed(refusal(status, INVALID_REQUEST, text))
        content_type = response.headers.get("content-type", "").lower()
        if content_type.startswith("text/event-stream"):
            await self._emit(Accepted(message["id"]))
        elif not content_type.startswith("application/json"):
            text = f"{self.name}: Unexpected content type: {content_type}."
            text = f"{text} Does an MCP server run there?"
            raise Failed(refusal(status, INVALID_REQUEST, text))

    def listen(self) -> None:
        if not self._requester.is_in_session or self._tasks is None:
            return
        if self._notifications.begin():
            self._tasks.start_soon(self._notifications.read)

    def abandon(self, request_id: RequestId) -> None:
        scope = self._posts.pop(request_id, None)
        if scope is not None:
            scope.cancel()

    async def close(self, *, leave: bool) -> None:
        if leave and self._requester.is_in_session and not self._done.is_set():
            with anyio.move_on_after(self._policy.closing_timeout, shield=True):
                try:
                    async with self._requester.stream("DELETE", None, {}) as response:
                        logger.debug("transport session left: %d", response.status_code)
                except (httpx2.HTTPError, OSError) as error:
                    logger.debug("the transport session could not be left: %r", error)
        self._done.set()

    async def _emit(self, event: Event) -> None:
        if self._sink is not None and not self._done.is_set():
            await self._sink(self, event)

    def _spawn(self, work: Callable[..., Coroutine[Any, Any, None]], *args: object) -> None:
        if self._tasks is not None:
            self._tasks.start_soon(work, *args)


STOCK_ATTEMPTS = 2
"""How often the SDK's own transport opens a stream again, one after the other."""

_STOCK_DELAY = 1.0
"""Seconds that it waits before, if the server does not say."""


@dataclass(frozen=True, slots=True)
class Incoming:
    requester: Requester
    policy: ReconnectPolicy
    emit: Callable[[Event], Awaitable[None]]
    spawn: Callable[..., None]

    async def take(self, event: ReadEvent, request_id: RequestId | None) -> bool:
        """Hand over one event. Return whether it is the answer.

        Args:
            request_id: The request that the stream responds to; None: the notification stream.
        """
        if event.dropped is not None:
            return await self._was_dropped(event.dropped, request_id)
        if not event.data or event.event != "message":
            return False
        message = received(event.data)
        if message is None:
            return False
        is_answer = request_id is not None and "method" not in message
        if is_answer:
            # As the SDK does: what answers on this stream answers this request.
            message["id"] = request_id
        await self.emit(Received(message))
        return is_answer

    async def _was_dropped(self, outline: Outline, request_id: RequestId | None) -> bool:
        """Report a message that was too large. Return whether it answers that request."""
        limit = self.policy.max_message
        answer = instead_of_dropped(outline, self.requester.name, limit, answers=request_id)
        if answer is None:
            await self.emit(Missed())
        elif not outline.has_method:
            await self.emit(Received(answer))
        else:
            # Its asker waits; and what is read here need not wait for that.
            self.spawn(self._refuse, answer)
        return not outline.has_method

    async def _refuse(self, answer: Json) -> None:
        failure = await self.requester.post(answer, {})
        if failure is not None:
            logger.info("the refusal of a question could not be sent: %s", failure.explanation)

    def too_large(self, what: str) -> Failure:
        limit = self.policy.max_message
        logger.warning(
            "%s: a %s of more than %d bytes was dropped (ReconnectPolicy.max_message)",
            self.requester.name,
            what,
            limit,
        )
        text = f"Outcome unknown: the {what} is too large: more than {limit} bytes (max_message)"
        text = f"{text}, from {self.requester.name}"
        return refusal(200, OUTCOME_UNKNOWN, text, {"reason": "too_large", "limit": limit})


def _may_have_been_served(failure: Failure) -> bool:
    """Whether a failed GET may have had an effect, or may still have one."""
    if failure.status is not None:
        return failure.status >= 500 and not failure.never_ran
    return failure.cause is not FailureCause.UNREACHABLE


@dataclass(slots=True, eq=False)
class NotificationStream:
    _requester: Requester
    _incoming: Incoming
    _policy: ReconnectPolicy
    _is_read: bool = False
    _position: Position = field(default_factory=Position)
    _was_tried: bool = False
    """A GET went out, and the server may have served it."""

    _is_in_doubt: bool = False
    """The server may have served a GET without a position, so that the next GET may detach the
    sessions (HTL7)."""

    def begin(self) -> bool:
        """Return whether the caller has to call `read` now. False: another caller reads."""
        was_read, self._is_read = self._is_read, True
        return not was_read

    def _failure(self, error: Exception) -> Failure:
        if isinstance(error, EventTooLarge):
            return self._incoming.too_large("SSE event")
        return describe(error, name=self._requester.name)

    async def read(self) -> None:
        """Keep the stream open. Without sessions: for as long as the SDK would try."""
        requester = self._requester
        backoff = Backoff(base=self._policy.backoff_base, cap=self._policy.backoff_cap)
        position = self._position
        position.retry = None
        was_lost = was_open = False
        failures = 0
        while True:
            headers = {"accept": "text/event-stream", "cache-control": "no-store"}
            if position.id is not None:
                headers["last-event-id"] = position.id
            may_be_open = False
            refused: Failure | None = None
            try:
                async with requester.stream("GET", None, headers, silent=True) as response:
                    status, has_sessions = response.status_code, requester.settings.has_sessions
                    if status != 200:
                        refused = await requester.refused(response, None)
                    if status == 405 and not (was_open and has_sessions):
                        logger.debug("the server has no notification stream")
                        return
                    if refused is not None and status in (400, 404, 405, 410) and has_sessions:
                        # Should this link be gone on with after all, so is the stream.
                        self._is_read = False
                        await self._incoming.emit(StreamFailed(refused))
                        return
                    response.raise_for_status()
                    if not is_sse(response):
                        return
                    if self._is_in_doubt and has_sessions and requester.settings.may_resume:
                        # A request may have attached a session again, behind events that are
                        # not sent here (ATT3). So nothing is read.
                        self._is_read = False
                        await self._incoming.emit(StreamUnsure())
                        return
                    may_be_open = was_open = True
                    if self._was_tried:
                        continued = position.id is not None and not self._is_in_doubt
                        await self._incoming.emit(StreamReopened(continued, was_lost))
                    was_lost = False
                    async with aclosing(events_of(response, self._policy.max_message)) as events:
                        async for event in events:
                            backoff.progressed()
                            position.note(event)
                            await self._incoming.take(event, None)
                failures = 0
            except (*FAILURES, EventTooLarge) as error:
                logger.debug("the notification stream ended: %r", error)
                failures += 1
                failure = refused or self._failure(error)
                if requester.settings.has_sessions and was_open:
                    if may_be_open:
                        await self._incoming.emit(StreamBroke(failure))
                    elif is_away(failure.cause, failure.status):
                        # Should this link be gone on with after all, so is the stream.
                        self._is_read = False
                        await self._incoming.emit(StreamFailed(failure))
                        return
                was_lost = True
                may_be_open = may_be_open or _may_have_been_served(failure)
            self._was_tried = self._was_tried or may_be_open
            if may_be_open and position.id is None:
                # The server may count it as opened (HTL7), now or when it comes to serve it, and
                # take what is attached here off: to go on from an event does not undo that.
                self._is_in_doubt = True
            if requester.settings.has_sessions:
                # As long as the server says, and then some: others were cut with us (TKO11).
                rest = (refused.retry_after or 0.0) if refused is not None else 0.0
                asked = min(max(position.retry or 0, rest), self._policy.give_up_after)
                delay = asked + backoff.failed(random.random())
            elif failures >= STOCK_ATTEMPTS:
                return
            else:
                delay = position.retry if position.retry is not None else _STOCK_DELAY
            await anyio.sleep(delay)
