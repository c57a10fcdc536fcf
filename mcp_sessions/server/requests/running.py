"""One request at work, as its handler sees it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mcp_sessions.core.messages import Request, RequestId, progress_token
from mcp_sessions.ids import RequestKey, SessionId
from mcp_sessions.server.connection import Inbound
from mcp_sessions.server.requests.handle import SessionHandle
from mcp_sessions.server.requests.questions import PendingQuestion, check_may_ask, may_ask
from mcp_sessions.server.upstream.port import OnProgress
from mcp_sessions.stores.records import SessionRecord

if TYPE_CHECKING:
    from mcp_sessions.server.requests.runner import RequestRunner


@dataclass(slots=True)
class Waiter:
    """One sending of a request: where its answer is heard."""

    request: Request
    inbound: Inbound
    named: bool
    """It named its session by rule 1, so its result carries the session's ``_meta``."""


class RunningRequest:
    """One request at work: the :class:`~mcp_sessions.server.upstream.port.Call` its handler has."""

    def __init__(
        self,
        waiter: Waiter,
        record: SessionRecord | None,
        key: RequestKey | None,
        runner: RequestRunner,
    ) -> None:
        self.request = waiter.request
        self.request_id: RequestId | None = waiter.request.id
        self.record = record
        self.handle: SessionHandle | None = None
        self.key = key
        self.waiters = [waiter]
        self.done = False
        self.started_at = runner.clock()
        self.task: asyncio.Task[None] | None = None
        self.context: Any = waiter.inbound.context
        self._runner = runner
        self._asked: list[PendingQuestion] = []
        self._telling: set[asyncio.Task[None]] = set()

    @property
    def session_id(self) -> SessionId | None:
        """The protocol-mode session it belongs to."""
        return self.record.session_id if self.record is not None else None

    @property
    def transport(self) -> str:
        """The kind of transport that carries it now."""
        inbound = self.waiters[-1].inbound
        return inbound.connection.kind if inbound.connection is not None else inbound.kind

    @property
    def close_stream(self) -> Callable[[], Awaitable[None]] | None:
        """See :class:`~mcp_sessions.server.connection.RequestChannel`."""
        return self.waiters[-1].inbound.channel.close_stream

    @property
    def close_standalone_stream(self) -> Callable[[], Awaitable[None]] | None:
        """Closes the connection's GET stream so that the client comes back for it."""
        connection = self.waiters[-1].inbound.connection
        return connection.close_stream if connection is not None else None

    @property
    def can_send_request(self) -> bool:
        """Whether the client can be asked something while this runs."""
        inbound = self.waiters[-1].inbound
        return not self.done and inbound.asked is not None and not inbound.modern

    @property
    def is_heard(self) -> bool:
        """Whether anybody still listens for its answer."""
        return any(waiter.inbound.channel.is_open for waiter in self.waiters)

    async def notify(self, method: str, params: Mapping[str, Any] | None) -> None:
        """Send a notification on the request's own way back; no session event."""
        if not self.done:
            inbound = self.waiters[-1].inbound
            await inbound.channel.emit(inbound.notification(method, params))
        elif method not in ("notifications/progress", "notifications/cancelled"):
            # The request's way back is gone with its answer. What was meant for the client
            # and not for this request alone still reaches it.
            await self._runner.standalone(self).notify(method, params)

    async def progress(self, progress: float, total: float | None, message: str | None) -> None:
        """Report progress under the token of the newest sending, if it has one."""
        token = progress_token(self.waiters[-1].request.params)
        if token is None or self.done:
            return
        params: dict[str, Any] = {"progressToken": token, "progress": progress}
        if total is not None:
            params["total"] = total
        if message is not None:
            params["message"] = message
        await self.notify("notifications/progress", params)

    async def send_request(
        self,
        method: str,
        params: Mapping[str, Any] | None,
        *,
        timeout: float | None,
        on_progress: OnProgress | None,
    ) -> dict[str, Any]:
        """Ask the client on the request's own way back; see :class:`Outbound`."""
        inbound = self.waiters[-1].inbound
        check_may_ask(inbound.asked, method)
        question = self._runner.questions.new(inbound.principal, None, method, params, on_progress)
        self._asked.append(question)
        try:
            return await self._runner.questions.ask(
                question,
                lambda message: self._emit(message, question.log_key),
                timeout=timeout,
                tell=lambda message: self._tell(message, question.log_key),
            )
        finally:
            self._asked.remove(question)

    async def join(self, waiter: Waiter) -> None:
        """The request was sent again: from now on progress and questions go there, and the
        answer goes to both.
        """
        self.waiters.append(waiter)
        self._runner.heard(self)
        for question in list(self._asked):
            # Each may be answered, or a new one be asked, while the one before it is sent.
            if not question.future.done() and may_ask(waiter.inbound.asked, question.method):
                await self._emit(question.message, question.log_key)

    def fail_open_questions(self, code: int, message: str) -> None:
        """Nobody waits for what the handler asked any more, and its client is told so."""
        for question in self._asked:
            withdrawal = None if question.future.done() else question.withdraw(message)
            self._runner.questions.fail(question, code, message)
            if withdrawal is not None:
                self._tell(withdrawal, question.log_key)

    async def told(self, timeout: float) -> None:
        """Wait until what was withdrawn is on its way, ``timeout`` seconds at the most: nothing
        follows the answer.
        """
        if self._telling:
            await asyncio.wait(self._telling, timeout=timeout)

    def _tell(self, message: bytes, log_key: str) -> None:
        task = self._runner.spawn(self._emit(message, log_key))
        self._telling.add(task)
        task.add_done_callback(self._telling.discard)

    async def _emit(self, message: bytes, log_key: str) -> None:
        await self.waiters[-1].inbound.channel.emit(message, log_key)
