"""What comes back over HTTP: the response to a request, and the notification stream.

`HttpExchange` sends one request and reads its response. `NotificationStream` keeps the GET open. A
stream that was open and broke is opened again soon, with ``Last-Event-ID``. If that fails, the
server or the way to it is away: the client is informed, and reconnects by another link. A stream
that was never open is no sign of that: a proxy before the server may block it. Both hand over by
`Incoming` what they read, and what is known of dropped messages.
"""

from __future__ import annotations

import logging
import random
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import aclosing
from dataclasses import dataclass

import anyio
import httpx2

from mcp_sessions import method_names
from mcp_sessions.client.dialer import (
    CONNECTION_CLOSED,
    Accepted,
    Event,
    Failure,
    Missed,
    Received,
    StreamBroke,
    StreamFailed,
    StreamReopened,
    StreamUnsure,
)
from mcp_sessions.client.messages import instead_of_dropped, received
from mcp_sessions.client.reconnect_policy import ReconnectPolicy
from mcp_sessions.core.backoff import Backoff
from mcp_sessions.core.messages import Json, Malformed, RequestId, decode, error_body, parse
from mcp_sessions.core.outline import Outline
from mcp_sessions.core.resume import FailureCause, is_away, is_sendable
from mcp_sessions.errors import INVALID_REQUEST, OUTCOME_UNKNOWN, PARSE_ERROR
from mcp_sessions.http_client.body import ResponseTooLarge, pieces, whole
from mcp_sessions.http_client.redirects import SESSION_HEADER, is_sse, unfollowed
from mcp_sessions.http_client.sse_reader import (
    EventTooLarge,
    ReadEvent,
    SseReader,
    position,
)
from mcp_sessions_transports.http.client.failures import describe, refusal
from mcp_sessions_transports.http.client.requester import Requester

logger = logging.getLogger(__name__)

_STOCK_ATTEMPTS = 2
"""How often the SDK's own transport opens a stream again, one after the other."""

_STOCK_DELAY = 1.0
"""Seconds that it waits before, if the server does not say."""


@dataclass(frozen=True, slots=True)
class Incoming:
    requester: Requester
    policy: ReconnectPolicy
    emit: Callable[[Event], Awaitable[None]]
    spawn: Callable[..., None]

    async def events(self, response: httpx2.Response) -> AsyncGenerator[ReadEvent]:
        reader = SseReader(max_bytes=self.policy.max_message, drops=True)
        async with aclosing(pieces(response)) as chunks:
            async for chunk in chunks:
                for event in reader.feed(chunk):
                    yield event

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


@dataclass(frozen=True, slots=True)
class HttpExchange:
    requester: Requester
    incoming: Incoming

    async def ask(self, message: Json, headers: Mapping[str, str]) -> Failure | None:
        try:
            return await self._ask(message, headers)
        except (httpx2.HTTPError, httpx2.StreamError, OSError) as error:
            return describe(error, name=self.requester.name)

    async def _ask(self, message: Json, headers: Mapping[str, str]) -> Failure | None:
        request_id: RequestId = message["id"]
        name = self.requester.name
        async with self.requester.stream("POST", message, headers) as response:
            status = response.status_code
            if status == 202:
                text = f"{name}: the server answered a request with 202 Accepted, and no result"
                return refusal(202, INVALID_REQUEST, text)
            redirect = unfollowed(response)
            if redirect is not None:
                return refusal(status, INVALID_REQUEST, f"{name}: {redirect}")
            if status >= 400:
                return await self.requester.refused(response, request_id)
            given = response.headers.get(SESSION_HEADER)
            if message.get("method") == method_names.INITIALIZE and given:
                if not is_sendable(given):
                    text = f"{name}: the server gave a transport session an id that cannot be sent"
                    return refusal(status, INVALID_REQUEST, text)
                self.requester.joined(given)
            content_type = response.headers.get("content-type", "").lower()
            if content_type.startswith("application/json"):
                return await self._read_json(response)
            if content_type.startswith("text/event-stream"):
                await self.incoming.emit(Accepted(request_id))
                return await self._read_answer(response, request_id)
            text = f"{name}: Unexpected content type: {content_type}. Does an MCP server run there?"
            return refusal(status, INVALID_REQUEST, text)

    async def _read_json(self, response: httpx2.Response) -> Failure | None:
        try:
            body = await whole(pieces(response), limit=self.incoming.policy.max_message)
        except ResponseTooLarge:
            return self.incoming.too_large("response")
        try:
            message = decode(body)
            parse(message)
        except (ValueError, Malformed) as error:
            text = f"{self.requester.name}: Failed to parse JSON response: {error}"
            return refusal(200, PARSE_ERROR, text)
        await self.incoming.emit(Received(message))
        return None

    async def _read_answer(
        self, response: httpx2.Response, request_id: RequestId
    ) -> Failure | None:
        last_id: str | None = None
        retry: int | None = None
        attempts = 0
        failure = Failure(
            FailureCause.CUT,
            f"{self.requester.name}: the response stream ended without an answer",
            error=error_body(CONNECTION_CLOSED, "SSE stream ended without a response"),
        )
        while True:
            try:
                async with aclosing(self.incoming.events(response)) as events:
                    async for event in events:
                        last_id = position(event, last_id)
                        retry = event.retry if event.retry is not None else retry
                        if await self.incoming.take(event, request_id):
                            return None
                attempts = 0
            except EventTooLarge:
                return self.incoming.too_large("SSE event")
            except (httpx2.HTTPError, httpx2.StreamError, OSError) as error:
                logger.debug("a response stream ended: %r", error)
                failure = describe(error, name=self.requester.name, was_sent=True)
            finally:
                # The first is closed by whoever opened it as well, which does no harm.
                with anyio.CancelScope(shield=True):
                    await response.aclose()
            if self.requester.settings.has_keys or last_id is None:
                return failure
            opened = None
            while opened is None:
                if attempts >= _STOCK_ATTEMPTS:
                    return failure
                attempts += 1
                await anyio.sleep(retry / 1000 if retry is not None else _STOCK_DELAY)
                opened = await self._reopen(last_id)
            response = opened

    async def _reopen(self, last_id: str) -> httpx2.Response | None:
        try:
            response = await self.requester.open("GET", None, {"last-event-id": last_id})
        except (httpx2.HTTPError, OSError) as error:
            logger.debug("a response stream could not be reopened: %r", error)
            return None
        if response.status_code == 200 and is_sse(response):
            return response
        await response.aclose()
        return None


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
    _last_id: str | None = None
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
        retry: int | None = None
        was_lost = was_open = False
        failures = 0
        while True:
            headers = {"accept": "text/event-stream", "cache-control": "no-store"}
            if self._last_id is not None:
                headers["last-event-id"] = self._last_id
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
                        continued = self._last_id is not None and not self._is_in_doubt
                        await self._incoming.emit(StreamReopened(continued, was_lost))
                    was_lost = False
                    async with aclosing(self._incoming.events(response)) as events:
                        async for event in events:
                            backoff.progressed()
                            self._last_id = position(event, self._last_id)
                            retry = event.retry if event.retry is not None else retry
                            await self._incoming.take(event, None)
                failures = 0
            except (httpx2.HTTPError, httpx2.StreamError, OSError, EventTooLarge) as error:
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
            if may_be_open and self._last_id is None:
                # The server may count it as opened (HTL7), now or when it comes to serve it, and
                # take what is attached here off: to go on from an event does not undo that.
                self._is_in_doubt = True
            if requester.settings.has_sessions:
                # As long as the server says, and then some: others were cut with us (TKO11).
                rest = (refused.retry_after or 0.0) if refused is not None else 0.0
                asked = min(max((retry or 0) / 1000, rest), self._policy.give_up_after)
                delay = asked + backoff.failed(random.random())
            elif failures >= _STOCK_ATTEMPTS:
                return
            else:
                delay = retry / 1000 if retry is not None else _STOCK_DELAY
            await anyio.sleep(delay)
