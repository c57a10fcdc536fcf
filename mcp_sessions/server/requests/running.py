"""One request at work, as its handler sees it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Hashable, Mapping
from dataclasses import dataclass
from typing import Any

from mcp_sessions.core.messages import Request, RequestId, progress_token
from mcp_sessions.ids import RequestKey, SessionId
from mcp_sessions.server.connection import ClientConnection, Inbound
from mcp_sessions.server.delivery.questions import (
    PendingQuestion,
    PendingQuestions,
    check_may_ask,
    may_ask,
)
from mcp_sessions.server.requests.handle import SessionHandle
from mcp_sessions.server.upstream.port import OnProgress, Outbound
from mcp_sessions.stores.records import SessionRecord

Spawn = Callable[[Coroutine[Any, Any, None]], asyncio.Task[None]]


@dataclass(slots=True)
class Waiter:
    """One sending of a request: where its answer is heard."""

    request: Request
    inbound: Inbound
    named: bool
    """It named its session by rule 1, so its result carries the session's ``_meta``."""

    load: Hashable = None
    """Whose; see :func:`~mcp_sessions.core.load.load_of`."""


class RunningRequest:
    """One request at work: the :class:`~mcp_sessions.server.upstream.port.Call` its handler has."""

    def __init__(
        self,
        waiter: Waiter,
        record: SessionRecord | None,
        *,
        standalone: Callable[[], Outbound],
        questions: PendingQuestions,
        spawn: Spawn,
        started_at: float,
        key: RequestKey | None = None,
        handle: SessionHandle | None = None,
        is_notification: bool = False,
    ) -> None:
        """A request, or a notification, that is handled from now on.

        Args:
            standalone: Makes the way to its client that is left when it was answered.
            questions: Those of this process to its clients.
            spawn: Does something beside its handler.
            started_at: Seconds on the session clock.
        """
        self.request = waiter.request
        self.request_id: RequestId | None = None if is_notification else waiter.request.id
        self.record = record
        self.handle = handle
        self.key = key
        self.waiters = [waiter]
        self.done = False
        self.started_at = started_at
        self.task: asyncio.Task[None] | None = None
        self.context: Any = waiter.inbound.context
        self._standalone = standalone
        self._questions = questions
        self._spawn = spawn
        self._asked: list[PendingQuestion] = []
        self._withdrawals: set[asyncio.Task[None]] = set()

    def begin(self, task: asyncio.Task[None]) -> None:
        """Its handler runs in a task of its own."""
        self.task = task

    def end(self) -> None:
        """It is answered from now on, and does not use its own way back any more."""
        self.done = True

    @property
    def session_id(self) -> SessionId | None:
        """The protocol-mode session it belongs to."""
        return self.record.session_id if self.record is not None else None

    @property
    def sessions(self) -> list[SessionId]:
        """The sessions, of either mode, that must not expire while it runs."""
        connection = self.waiters[0].inbound.connection
        sessions = [self.session_id] if self.session_id is not None else []
        if connection is not None and connection.transport_session is not None:
            sessions.append(connection.transport_session)
        return sessions

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
        return connection.transport.close_stream if connection is not None else None

    @property
    def can_send_request(self) -> bool:
        """Whether the client can be asked something while this runs."""
        inbound = self.waiters[-1].inbound
        return not self.done and inbound.asked is not None and not inbound.modern

    def is_awaited_at(self, connection: ClientConnection, request_id: RequestId) -> bool:
        """Whether a connection still listens for its answer under that id."""
        return not self.done and any(
            waiter.inbound.connection is connection
            and waiter.request.id == request_id
            and waiter.inbound.channel.is_open
            for waiter in self.waiters
        )

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
            await self._standalone().notify(method, params)

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
        question = self._questions.new(inbound.principal, None, method, params, on_progress)
        self._asked.append(question)
        try:
            return await self._questions.ask(
                question,
                lambda message: self._emit(message, question.log_key),
                timeout=timeout,
                tell=lambda message: self._withdraw(message, question.log_key),
            )
        finally:
            self._asked.remove(question)

    async def join(self, waiter: Waiter) -> None:
        """The request was sent again: from now on progress and questions go there, and the
        answer goes to both.
        """
        self.waiters.append(waiter)
        for question in list(self._asked):
            # Each may be answered, or a new one be asked, while the one before it is sent.
            if not question.future.done() and may_ask(waiter.inbound.asked, question.method):
                await self._emit(question.message, question.log_key)

    async def store_state(self) -> None:
        """Apply what the handler changed of the session's state; see
        :meth:`SessionHandle.store_state`.
        """
        stored = await self.handle.store_state() if self.handle is not None else None
        if self.record is not None:
            self.record = stored or self.record

    def fail_open_questions(self, code: int, message: str) -> None:
        """Nobody waits for what the handler asked any more, and its client is told so."""
        for question in self._asked:
            withdrawal = None if question.future.done() else question.withdraw(message)
            self._questions.fail(question, code, message)
            if withdrawal is not None:
                self._withdraw(withdrawal, question.log_key)

    async def settled(self, timeout: float) -> None:
        """Wait until what was withdrawn is on its way, ``timeout`` seconds at the most: nothing
        follows the answer.
        """
        if self._withdrawals:
            await asyncio.wait(self._withdrawals, timeout=timeout)

    def _withdraw(self, message: bytes, log_key: str) -> None:
        task = self._spawn(self._emit(message, log_key))
        self._withdrawals.add(task)
        task.add_done_callback(self._withdrawals.discard)

    async def _emit(self, message: bytes, log_key: str) -> None:
        await self.waiters[-1].inbound.channel.emit(message, log_key)
