"""Streamable HTTP, the client side of both eras: a `mcp_sessions.client.dialer.Link`.

Without sessions it does what the SDK's own transport does: the same headers, the same
errors, the same two attempts with ``Last-Event-ID``. With sessions, a broken response is
reported at once, and the notification stream is opened again for as long as the link lasts,
also when it is only silent.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping
from contextlib import asynccontextmanager
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
    Received,
    Sink,
    Unanswered,
)
from mcp_sessions.client.reconnect_policy import ReconnectPolicy
from mcp_sessions.core.messages import Json, Malformed, RequestId, decode, error_body, parse
from mcp_sessions.core.resume import FailureCause
from mcp_sessions.errors import INVALID_REQUEST, PARSE_ERROR
from mcp_sessions.http_client.body import ResponseTooLarge
from mcp_sessions.http_client.connect_errors import without_credentials
from mcp_sessions.http_client.exchange import FAILURES, Exchange
from mcp_sessions.http_client.session import unfollowed
from mcp_sessions.http_client.sse_reader import EventTooLarge, ReadEvent
from mcp_sessions_transports.http.client.failures import describe, refusal
from mcp_sessions_transports.http.client.notification_stream import (
    STOCK_ATTEMPTS,
    Incoming,
    NotificationStream,
)
from mcp_sessions_transports.http.client.requester import Access, Requester

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
            except (ValueError, Malformed) as error:
                text = f"{self.name}: Failed to parse JSON response: {error}"
                raise Failed(refusal(200, PARSE_ERROR, text)) from None
            await self._emit(Received(said))

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
