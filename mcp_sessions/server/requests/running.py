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
from mcp_sessions.server.requests.questions import PendingCall, check_may_ask, may_ask
from mcp_sessions.server.upstream.port import OnProgress
from mcp_sessions.stores.records import SessionRecord

if TYPE_CHECKING:
    from mcp_sessions.server.requests.runner import Host


@dataclass(slots=True)
class Carrier:
    """One sending of a request: where its answer is heard."""

    request: Request
    inbound: Inbound
    named: bool
    """It named its session by rule 1, so its result carries the session's ``_meta``."""


class RunningRequest:
    """One request at work: the :class:`~mcp_sessions.server.upstream.port.Call` its handler has."""

    def __init__(
        self, carrier: Carrier, record: SessionRecord | None, key: RequestKey | None, host: Host
    ) -> None:
        self.request = carrier.request
        self.request_id: RequestId | None = carrier.request.id
        self.record = record
        self.handle: SessionHandle | None = None
        self.key = key
        self.carriers = [carrier]
        self.done = False
        self.started_at = host.clock()
        self.task: asyncio.Task[None] | None = None
        self.context: Any = carrier.inbound.context
        self._host = host
        self._asked: list[PendingCall] = []
        self._telling: set[asyncio.Task[None]] = set()

    @property
    def session_id(self) -> SessionId | None:
        """The protocol-mode session it belongs to."""
        return self.record.session_id if self.record is not None else None

    @property
    def transport(self) -> str:
        """The kind of transport that carries it now."""
        inbound = self.carriers[-1].inbound
        return inbound.connection.kind if inbound.connection is not None else inbound.kind

    @property
    def close_stream(self) -> Callable[[], Awaitable[None]] | None:
        """See :class:`~mcp_sessions.server.connection.RequestChannel`."""
        return self.carriers[-1].inbound.channel.close_stream

    @property
    def close_standalone_stream(self) -> Callable[[], Awaitable[None]] | None:
        """Closes the connection's GET stream so that the client comes back for it."""
        connection = self.carriers[-1].inbound.connection
        return connection.close_stream if connection is not None else None

    @property
    def can_send_request(self) -> bool:
        """Whether the client can be asked something while this runs."""
        inbound = self.carriers[-1].inbound
        return not self.done and inbound.asked is not None and not inbound.modern

    @property
    def is_heard(self) -> bool:
        """Whether anybody still listens for its answer."""
        return any(carrier.inbound.channel.is_open for carrier in self.carriers)

    async def notify(self, method: str, params: Mapping[str, Any] | None) -> None:
        """Send a notification on the request's own way back; no session event."""
        if not self.done:
            inbound = self.carriers[-1].inbound
            await inbound.channel.emit(inbound.notification(method, params))
        elif method not in ("notifications/progress", "notifications/cancelled"):
            # The request's way back is gone with its answer. What was meant for the client
            # and not for this request alone still reaches it.
            await self._host.standalone(self).notify(method, params)

    async def progress(self, progress: float, total: float | None, message: str | None) -> None:
        """Report progress under the token of the newest sending, if it has one."""
        token = progress_token(self.carriers[-1].request.params)
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
        inbound = self.carriers[-1].inbound
        check_may_ask(inbound.asked, method)
        call = self._host.calls.new(inbound.principal, None, method, params, on_progress)
        self._asked.append(call)
        try:
            return await self._host.calls.ask(
                call,
                lambda message: self._emit(message, call.log_key),
                timeout=timeout,
                tell=lambda message: self._tell(message, call.log_key),
            )
        finally:
            self._asked.remove(call)

    async def join(self, carrier: Carrier) -> None:
        """The request was sent again: from now on progress and questions go there, and the
        answer goes to both.
        """
        self.carriers.append(carrier)
        self._host.heard(self)
        for call in list(self._asked):
            # Each may be answered, or a new one be asked, while the one before it is sent.
            if not call.future.done() and may_ask(carrier.inbound.asked, call.method):
                await self._emit(call.message, call.log_key)

    def fail_open_calls(self, code: int, message: str) -> None:
        """Nobody waits for what the handler asked any more, and its client is told so."""
        for call in self._asked:
            withdrawal = None if call.future.done() else call.withdraw(message)
            self._host.calls.fail(call, code, message)
            if withdrawal is not None:
                self._tell(withdrawal, call.log_key)

    async def told(self, timeout: float) -> None:
        """Wait until what was withdrawn is on its way, ``timeout`` seconds at the most: nothing
        follows the answer.
        """
        if self._telling:
            await asyncio.wait(self._telling, timeout=timeout)

    def _tell(self, message: bytes, log_key: str) -> None:
        task = self._host.spawn(self._emit(message, log_key))
        self._telling.add(task)
        task.add_done_callback(self._telling.discard)

    async def _emit(self, message: bytes, log_key: str) -> None:
        await self.carriers[-1].inbound.channel.emit(message, log_key)
