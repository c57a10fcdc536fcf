"""Streamable HTTP, the client side of both eras: a `mcp_sessions.client.dialer.Link`.

Without sessions it does what the SDK's own transport does: the same headers, the same
errors, the same two attempts with ``Last-Event-ID``. With sessions, a broken response is
reported at once, and the notification stream is opened again for as long as the link lasts,
also when it is only silent.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Coroutine, Mapping
from typing import Any

import anyio
import httpx2
from anyio.abc import TaskGroup, TaskStatus

from mcp_sessions.client.dialer import Event, Failed, Failure, LinkSettings, Sink, Unanswered
from mcp_sessions.client.reconnect_policy import ReconnectPolicy
from mcp_sessions.core.messages import Json, RequestId
from mcp_sessions.core.resume import FailureCause
from mcp_sessions.http_client.connect_errors import without_credentials
from mcp_sessions_transports.http.client.requester import Access, Requester
from mcp_sessions_transports.http.client.streams import HttpExchange, Incoming, NotificationStream

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
        self._exchange = HttpExchange(requester, incoming)
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
            failure = await self._exchange.ask(message, headers)
        if scope.cancel_called:
            return
        if self._posts.get(request_id) is scope:
            del self._posts[request_id]
        if failure is not None:
            await self._emit(Unanswered(request_id, failure))

    def listen(self) -> None:
        if self._requester.transport_session is None or self._tasks is None:
            return
        if self._notifications.begin():
            self._tasks.start_soon(self._notifications.read)

    def abandon(self, request_id: RequestId) -> None:
        scope = self._posts.pop(request_id, None)
        if scope is not None:
            scope.cancel()

    async def close(self, *, leave: bool) -> None:
        is_in_session = self._requester.transport_session is not None
        if leave and is_in_session and not self._done.is_set():
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
