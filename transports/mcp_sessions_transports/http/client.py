"""Streamable HTTP, the client side of both eras: a `mcp_sessions.client.dialer.Link`.

Without sessions it does what the SDK's own transport does: the same headers, the same
errors, the same two attempts with ``Last-Event-ID``. With sessions, a broken response is
reported at once, and the notification stream is opened again for as long as the link lasts,
also when it is only silent (CLI10).
"""

from __future__ import annotations

import logging
import random
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import aclosing, asynccontextmanager
from typing import Any

import anyio
import httpx2
from anyio.abc import TaskGroup, TaskStatus

from mcp_sessions.client.dialer import (
    CONNECTION_CLOSED,
    Accepted,
    Event,
    Failed,
    Failure,
    Json,
    Link,
    LinkSettings,
    Missed,
    Received,
    StreamFailed,
    StreamRefused,
    StreamReopened,
    Unanswered,
)
from mcp_sessions.client.policy import ReconnectPolicy
from mcp_sessions.client.wire import in_place_of_dropped, received
from mcp_sessions.core.backoff import Backoff
from mcp_sessions.core.messages import (
    Malformed,
    RequestId,
    decode,
    encode,
    error_body,
    parse,
)
from mcp_sessions.core.outline import Outline
from mcp_sessions.core.resume import NEVER_RAN, Cause, is_sendable
from mcp_sessions.errors import INVALID_REQUEST, OUTCOME_UNKNOWN, PARSE_ERROR
from mcp_sessions_transports.http.bounded_body import ACCEPTED, BodyTooLarge, pieces, whole
from mcp_sessions_transports.http.failures import (
    describe,
    failure_of,
    is_sse,
    onward_request,
    refusal,
    unfollowed,
)
from mcp_sessions_transports.http.sse_reader import EventTooLarge, ReadEvent, SseReader

logger = logging.getLogger(__name__)

Sink = Callable[[Link, Event], Awaitable[None]]

_SESSION_HEADER = "mcp-session-id"
_VERSION_HEADER = "mcp-protocol-version"
_TIMEOUT = 30.0
_STOCK_ATTEMPTS = 2
_STOCK_DELAY = 1.0


class HttpDialer:
    """Makes links to one URL."""

    def __init__(
        self,
        url: str,
        *,
        client: httpx2.AsyncClient | None = None,
        headers: Mapping[str, str] | None = None,
        auth: httpx2.Auth | None = None,
        policy: ReconnectPolicy,
        draw: Callable[[], float] = random.random,
    ) -> None:
        """Take what its links work with.

        Args:
            client: Used and never closed; None: each link has its own.
            draw: A random number from 0 to 1.
        """
        self.url = url
        self.target = without_credentials(url)
        self._client = client
        self._headers = dict(headers or {})
        self._auth = auth
        self._policy = policy
        self._draw = draw

    def link(self) -> HttpLink:
        """See `Dialer`."""
        return HttpLink(self.url, self._client, self._headers, self._auth, self._policy, self._draw)


def _position(event: ReadEvent, before: str | None) -> str | None:
    """The ``Last-Event-ID`` after an event; None: it has an id that cannot be sent."""
    if not event.id:
        return before
    return event.id if is_sendable(event.id) else None


def _may_have_been_served(error: Exception) -> bool:
    """Whether a request that failed may have had an effect at the server, or may have it yet."""
    if isinstance(error, httpx2.HTTPStatusError):
        return error.response.status_code >= 500 and error.response.status_code not in NEVER_RAN
    return describe(error, name="").cause is not Cause.UNREACHABLE


def without_credentials(url: str) -> str:
    """The URL for people and jars: no user, no password, no query."""
    parsed = httpx2.URL(url)
    return str(parsed.copy_with(userinfo=b"", query=None, fragment=None))


class HttpLink:
    """One transport session over HTTP, or what goes to a URL without one."""

    kind = "http"

    def __init__(
        self,
        url: str,
        client: httpx2.AsyncClient | None,
        headers: Mapping[str, str],
        auth: httpx2.Auth | None,
        policy: ReconnectPolicy,
        draw: Callable[[], float],
    ) -> None:
        self.name = without_credentials(url)
        self._settings = LinkSettings()
        self.transport_session: str | None = None
        self._url = url
        self._given_client = client
        self._client_or_none: httpx2.AsyncClient | None = client
        self._headers = dict(headers)
        self._auth = auth
        self._policy = policy
        self._draw = draw
        self._sink: Sink | None = None
        self._tasks: TaskGroup | None = None
        self._done = anyio.Event()
        self._posts: dict[RequestId, anyio.CancelScope] = {}
        self._version: str | None = None
        self._listens = False

    # --- the port ---------------------------------------------------------------------------

    async def run(self, sink: Sink, *, task_status: TaskStatus[None]) -> None:
        """See `Link`."""
        self._sink = sink
        if self._given_client is None:
            timeout = httpx2.Timeout(_TIMEOUT, read=self._policy.response_silence)
            self._client_or_none = httpx2.AsyncClient(timeout=timeout)
        try:
            async with anyio.create_task_group() as tasks:
                self._tasks = tasks
                task_status.started()
                await self._done.wait()
                tasks.cancel_scope.cancel()
        finally:
            self._tasks = None
            if self._given_client is None and self._client_or_none is not None:
                with anyio.CancelScope(shield=True):
                    await self._client_or_none.aclose()

    async def send(self, message: Json, headers: Mapping[str, str]) -> None:
        """See `Link`."""
        if self._tasks is None or self._done.is_set():
            raise Failed(Failure(Cause.CLOSED, "the link is closed"))
        method = message.get("method")
        if method == "initialize":
            # It is the negotiation: what a probe before it said does not hold.
            self._version = None
        version = next((v for k, v in headers.items() if k.lower() == _VERSION_HEADER), None)
        if version is not None:
            self._version = version
        if method is not None and "id" in message:
            scope = anyio.CancelScope()
            self._posts[message["id"]] = scope
            self._tasks.start_soon(self._post_request, message, dict(headers), scope)
            return
        failure = await self._post_other(message, headers)
        if failure is not None:
            raise Failed(failure)

    def configure(self, settings: LinkSettings) -> None:
        """See `Link`."""
        self._settings = settings

    def listen(self) -> None:
        """See `Link`: the GET stream, if there is a transport session."""
        if self.transport_session is None:
            return
        if not self._listens and self._tasks is not None:
            self._listens = True
            self._tasks.start_soon(self._read_notifications)

    def abandon(self, request_id: RequestId) -> None:
        """See `Link`: the response stream is closed."""
        scope = self._posts.pop(request_id, None)
        if scope is not None:
            scope.cancel()

    async def close(self, *, leave: bool) -> None:
        """See `Link`."""
        if leave and self.transport_session is not None and not self._done.is_set():
            with anyio.move_on_after(self._policy.closing_timeout, shield=True):
                try:
                    async with self._stream("DELETE", None, {}) as response:
                        logger.debug("transport session left: %d", response.status_code)
                except (httpx2.HTTPError, OSError) as error:
                    logger.debug("the transport session could not be left: %r", error)
        self._done.set()

    # --- requests ---------------------------------------------------------------------------

    async def _post_request(
        self, message: Json, headers: Mapping[str, str], scope: anyio.CancelScope
    ) -> None:
        request_id: RequestId = message["id"]
        failure: Failure | None = None
        with scope:
            try:
                failure = await self._exchange(message, headers)
            except (httpx2.HTTPError, httpx2.StreamError, OSError) as error:
                failure = describe(error, name=self.name)
        if scope.cancel_called:
            return
        if self._posts.get(request_id) is scope:
            del self._posts[request_id]
        if failure is not None:
            await self._tell(Unanswered(request_id, failure))

    async def _exchange(self, message: Json, headers: Mapping[str, str]) -> Failure | None:
        request_id: RequestId = message["id"]
        async with self._stream("POST", message, headers) as response:
            if response.status_code == 202:
                return refusal(202, INVALID_REQUEST, "server answered a request with 202 Accepted")
            redirect = unfollowed(response)
            if redirect is not None:
                return refusal(response.status_code, INVALID_REQUEST, redirect)
            if response.status_code >= 400:
                return await self._refused(response, request_id)
            if message.get("method") == "initialize":
                given = response.headers.get(_SESSION_HEADER)
                if given and not is_sendable(given):
                    text = "the server gave a transport session an id that cannot be sent"
                    return refusal(response.status_code, INVALID_REQUEST, text)
                if given:
                    self.transport_session = given
            content_type = response.headers.get("content-type", "").lower()
            if content_type.startswith("application/json"):
                return await self._read_json(response, request_id)
            if content_type.startswith("text/event-stream"):
                await self._tell(Accepted(request_id))
                return await self._read_answer(response, request_id)
            return refusal(
                response.status_code, INVALID_REQUEST, f"Unexpected content type: {content_type}"
            )

    async def _read_json(self, response: httpx2.Response, request_id: RequestId) -> Failure | None:
        limit = self._policy.max_message
        try:
            body = await whole(response, limit=limit)
        except BodyTooLarge:
            return self._too_large("response")
        try:
            message = decode(body)
            parse(message)
        except (ValueError, Malformed) as error:
            return refusal(200, PARSE_ERROR, f"Failed to parse JSON response: {error}")
        await self._tell(Received(message))
        return None

    def _too_large(self, what: str) -> Failure:
        """A server's message that this side does not take: the request is answered so."""
        limit = self._policy.max_message
        logger.warning(
            "%s: a %s of more than %d bytes was dropped (ReconnectPolicy.max_message)",
            self.name,
            what,
            limit,
        )
        text = f"Outcome unknown: the {what} is too large: more than {limit} bytes (max_message)"
        return refusal(200, OUTCOME_UNKNOWN, text, {"reason": "too_large", "limit": limit})

    async def _read_answer(
        self, response: httpx2.Response, request_id: RequestId
    ) -> Failure | None:
        """Hand over a response stream up to its answer; what is wrong if it has none."""
        last_id: str | None = None
        retry: int | None = None
        attempts = 0
        failure = Failure(
            Cause.CUT,
            "the response stream ended without an answer",
            error=error_body(CONNECTION_CLOSED, "SSE stream ended without a response"),
        )
        while True:
            try:
                async with aclosing(self._events(response)) as events:
                    async for event in events:
                        last_id = _position(event, last_id)
                        retry = event.retry if event.retry is not None else retry
                        if await self._is_answer(event, request_id):
                            return None
                attempts = 0
            except EventTooLarge:
                return self._too_large("SSE event")
            except (httpx2.HTTPError, httpx2.StreamError, OSError) as error:
                logger.debug("a response stream ended: %r", error)
                failure = describe(error, name=self.name, was_sent=True)
            finally:
                # The first is closed by whoever opened it as well, which does no harm.
                with anyio.CancelScope(shield=True):
                    await response.aclose()
            if self._settings.has_keys or last_id is None:
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
            response = await self._open("GET", None, {"last-event-id": last_id})
        except (httpx2.HTTPError, OSError) as error:
            logger.debug("a response stream could not be reopened: %r", error)
            return None
        if response.status_code == 200 and is_sse(response):
            return response
        await response.aclose()
        return None

    async def _is_answer(self, event: ReadEvent, request_id: RequestId) -> bool:
        """Hand over one event of a response stream; whether it was the answer."""
        if event.dropped is not None:
            return await self._was_dropped(event.dropped, request_id)
        message = self._message(event)
        if message is None:
            return False
        is_answer = "method" not in message
        if is_answer:
            # As the SDK does: what answers on this stream answers this request.
            message["id"] = request_id
        await self._tell(Received(message))
        return is_answer

    async def _notified(self, event: ReadEvent) -> None:
        """Hand over one event of the notification stream."""
        if event.dropped is not None:
            await self._was_dropped(event.dropped, None)
            return
        message = self._message(event)
        if message is not None:
            await self._tell(Received(message))

    async def _was_dropped(self, outline: Outline, request_id: RequestId | None) -> bool:
        """Tell of a message that was too large; whether it was the answer to that request."""
        limit = self._policy.max_message
        answer = in_place_of_dropped(outline, self.name, limit, answers=request_id)
        if answer is None:
            await self._tell(Missed())
        elif not outline.has_method:
            await self._tell(Received(answer))
        elif self._tasks is not None:
            # Its asker waits; and what is read here need not wait for that.
            self._tasks.start_soon(self._refuse, answer)
        return not outline.has_method

    async def _refuse(self, answer: Json) -> None:
        failure = await self._post_other(answer, {})
        if failure is not None:
            logger.info("a question was not refused: %s", failure.explanation)

    async def _post_other(self, message: Json, headers: Mapping[str, str]) -> Failure | None:
        """Send a notification or an answer: the server only takes it."""
        try:
            with anyio.fail_after(self._policy.connect_timeout):
                async with self._stream("POST", message, headers) as response:
                    if response.status_code >= 400:
                        return await self._refused(response, None)
        except TimeoutError:
            return Failure(Cause.SILENT, "the server did not take a message in time")
        except (httpx2.HTTPError, httpx2.StreamError, OSError) as error:
            return describe(error, name=self.name)
        return None

    async def _refused(self, response: httpx2.Response, request_id: RequestId | None) -> Failure:
        is_in_session = self.transport_session is not None
        return await failure_of(response, request_id, name=self.name, is_in_session=is_in_session)

    # --- the notification stream ------------------------------------------------------------

    async def _read_notifications(self) -> None:
        """Keep the GET stream open. Without sessions: for as long as the SDK would try."""
        backoff = Backoff(base=self._policy.backoff_base, cap=self._policy.backoff_cap)
        last_id: str | None = None
        retry: int | None = None
        was_tried = is_in_doubt = was_lost = False
        failures = 0
        while True:
            headers = {"accept": "text/event-stream", "cache-control": "no-store"}
            if last_id is not None:
                headers["last-event-id"] = last_id
            may_be_open = False
            try:
                async with self._stream("GET", None, headers, silent=True) as response:
                    if response.status_code == 405:
                        logger.debug("the server has no notification stream")
                        return
                    if response.status_code in (400, 404, 410) and self._settings.has_sessions:
                        # Should this link be gone on with after all, so is the stream.
                        self._listens = False
                        await self._tell(StreamRefused(await self._refused(response, None)))
                        return
                    response.raise_for_status()
                    if not is_sse(response):
                        return
                    may_be_open = True
                    if was_tried:
                        continued = last_id is not None and not is_in_doubt
                        await self._tell(StreamReopened(continued, was_lost))
                    was_lost = False
                    async with aclosing(self._events(response)) as events:
                        async for event in events:
                            backoff.progressed()
                            last_id = _position(event, last_id)
                            retry = event.retry if event.retry is not None else retry
                            await self._notified(event)
                failures = 0
            except (httpx2.HTTPError, httpx2.StreamError, OSError, EventTooLarge) as error:
                logger.debug("the notification stream ended: %r", error)
                if isinstance(error, EventTooLarge):
                    self._too_large("SSE event")
                failures += 1
                was_lost = True
                if not may_be_open:
                    await self._tell(StreamFailed(describe(error, name=self.name)))
                may_be_open = may_be_open or _may_have_been_served(error)
            was_tried = was_tried or may_be_open
            if may_be_open and last_id is None:
                # The server may count it as opened (HTL7), now or when it comes to serve it, and
                # take what is attached here off: to go on from an event does not undo that.
                is_in_doubt = True
            if self._settings.has_sessions:
                # As long as the server says, and then some: others were cut with us.
                asked = min((retry or 0) / 1000, self._policy.give_up_after)
                delay = asked + backoff.failed(self._draw())
            elif failures >= _STOCK_ATTEMPTS:
                return
            else:
                delay = retry / 1000 if retry is not None else _STOCK_DELAY
            await anyio.sleep(delay)

    async def _events(self, response: httpx2.Response) -> AsyncGenerator[ReadEvent]:
        reader = SseReader(max_bytes=self._policy.max_message, drops=True)
        async with aclosing(pieces(response)) as chunks:
            async for chunk in chunks:
                for event in reader.feed(chunk):
                    yield event

    def _message(self, event: ReadEvent) -> Json | None:
        if not event.data or event.event != "message":
            return None
        return received(event.data)

    async def _tell(self, event: Event) -> None:
        if self._sink is not None and not self._done.is_set():
            await self._sink(self, event)

    # --- HTTP -------------------------------------------------------------------------------

    @asynccontextmanager
    async def _stream(
        self,
        method: str,
        message: Json | None,
        headers: Mapping[str, str],
        *,
        silent: bool = False,
    ) -> AsyncGenerator[httpx2.Response]:
        response = await self._open(method, message, headers, silent=silent)
        try:
            yield response
        finally:
            with anyio.CancelScope(shield=True):
                await response.aclose()

    async def _open(
        self,
        method: str,
        message: Json | None,
        headers: Mapping[str, str],
        *,
        silent: bool = False,
    ) -> httpx2.Response:
        """Send a request, following redirects only while they stay with this server.

        Args:
            silent: A stream on which nothing may come for long, but not for too long.
        """
        client = self._client_or_none
        if client is None:
            raise AssertionError("a link is used before it runs")
        fields = {
            **self._headers,
            "accept": "application/json, text/event-stream",
            "accept-encoding": ACCEPTED,
            "content-type": "application/json",
        }
        if self.transport_session is not None:
            fields[_SESSION_HEADER] = self.transport_session
        version = self._version or self._settings.protocol_version
        if version is not None and (message or {}).get("method") != "initialize":
            fields[_VERSION_HEADER] = version
        fields.update({name.lower(): value for name, value in headers.items()})
        options: dict[str, Any] = {}
        is_request = method == "POST" and "id" in (message or {}) and "method" in (message or {})
        if (silent and self._settings.has_sessions) or (is_request and self._settings.has_keys):
            # A server with keys shows a sign of life on each open response.
            options["timeout"] = httpx2.Timeout(_TIMEOUT, read=self._policy.stream_silence)
        content = encode(message) if message is not None else None
        request = client.build_request(
            method, self._url, content=content, headers=fields, **options
        )
        followed = 0
        while True:
            if self._auth is not None:
                response = await client.send(
                    request, stream=True, follow_redirects=False, auth=self._auth
                )
            else:
                response = await client.send(request, stream=True, follow_redirects=False)
            onward = onward_request(response)
            if onward is None or followed >= client.max_redirects:
                return response
            # Unread: nothing in it is for us, and nobody says how long it is.
            await response.aclose()
            request = onward
            followed += 1
