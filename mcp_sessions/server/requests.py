"""Requests at work: each runs once, in a task of its own, wherever its answer is heard.

A broken connection cancels nothing here. A request ends when its handler does, when its
client cancels it, when its session ends, or when a bound on unheard work is reached.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from dataclasses import dataclass
from typing import Any

from mcp_sessions.core.log import Draft
from mcp_sessions.core.messages import (
    Answer,
    Request,
    RequestId,
    error_body,
    error_outcome,
    meta_of,
    notification_message,
    progress_token,
    request_message,
    result_outcome,
    wire_error,
)
from mcp_sessions.errors import (
    INTERNAL_ERROR,
    INVALID_REQUEST,
    OutcomeUnknown,
    SessionNotFound,
    SessionsError,
    StoreUnavailable,
)
from mcp_sessions.ids import RequestKey, SessionId, digest
from mcp_sessions.policy import SessionPolicy
from mcp_sessions.principal import Principal
from mcp_sessions.security import mint_request_id
from mcp_sessions.server.connection import Inbound, TransportConnection
from mcp_sessions.server.handle import SessionHandle, enter_session
from mcp_sessions.server.hub import Hub
from mcp_sessions.server.upstream import OnProgress, PeerError, UpstreamError, UpstreamPeer
from mcp_sessions.stores.base import Peer, SessionRecord, SessionStore

logger = logging.getLogger(__name__)

REQUEST_CANCELLED = -32800
"""The SDK's answer to a cancelled request on the handshake era's HTTP wire, which ends a
response stream with a response only."""

REQUEST_TIMEOUT = -32001
"""The SDK's code for a client that did not answer in time."""

_NEEDS_CAPABILITY = {
    "sampling/createMessage": "sampling",
    "elicitation/create": "elicitation",
    "roots/list": "roots",
}

Stamp = Callable[[dict[str, Any], SessionRecord], dict[str, Any]]


@dataclass(slots=True)
class Carrier:
    """One sending of a request: where its answer is heard."""

    request: Request
    inbound: Inbound
    named: bool
    """It named its session by rule 1, so its result carries the session's ``_meta``."""


class PendingCall:
    """A request of ours to a client, open until the first answer."""

    __slots__ = ("future", "id", "message", "on_progress", "principal", "session_id")

    def __init__(
        self,
        principal: Principal,
        session_id: SessionId | None,
        method: str,
        params: Mapping[str, Any] | None,
        on_progress: OnProgress | None,
    ) -> None:
        self.id = mint_request_id()
        self.principal = principal
        self.session_id = session_id
        self.on_progress = on_progress
        if on_progress is not None:
            meta = {**(meta_of(params) or {}), "progressToken": self.id}
            params = {**(params or {}), "_meta": meta}
        self.message = request_message(self.id, method, params)
        self.future: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()


class PendingCalls:
    """The open requests to clients of this process.

    Ids are random and unique over all sessions, and kept when a request is sent again; the
    first answer from any of the owner's connections counts.
    """

    def __init__(self) -> None:
        self._open: dict[str, PendingCall] = {}

    async def ask(
        self,
        call: PendingCall,
        send: Callable[[bytes], Awaitable[None]],
        *,
        timeout: float | None,
    ) -> dict[str, Any]:
        """Send a request and wait for its answer.

        Raises:
            PeerError: See :meth:`Outbound.send_request`.
        """
        self._open[call.id] = call
        try:
            await send(call.message)
            async with asyncio.timeout(timeout):
                answer = await call.future
        except TimeoutError:
            message = notification_message(
                "notifications/cancelled", {"requestId": call.id, "reason": "timed out"}
            )
            await send(message)
            raise PeerError(REQUEST_TIMEOUT, "Request timed out") from None
        finally:
            self._open.pop(call.id, None)
        if answer.error is not None:
            error = answer.error
            raise PeerError(error["code"], error["message"], error.get("data"))
        return answer.result or {}

    def resolve(self, answer: Answer, principal: Principal) -> bool:
        """An answer came in; whether it was to an open request of that principal."""
        call = self._open.get(answer.id) if isinstance(answer.id, str) else None
        if call is None or call.principal != principal or call.future.done():
            return False
        call.future.set_result(answer)
        return True

    async def progress(self, params: Mapping[str, Any] | None, principal: Principal) -> None:
        """A client reported progress on a request of ours."""
        members = params or {}
        token, progress = members.get("progressToken"), members.get("progress")
        call = self._open.get(token) if isinstance(token, str) else None
        if call is None or call.on_progress is None or call.principal != principal:
            return
        if isinstance(progress, (int, float)) and not isinstance(progress, bool):
            total, message = members.get("total"), members.get("message")
            await call.on_progress(
                float(progress),
                float(total) if isinstance(total, (int, float)) else None,
                message if isinstance(message, str) else None,
            )

    def of_session(self, session_id: SessionId) -> list[PendingCall]:
        """The open requests that a session's standalone channel sent."""
        return [call for call in self._open.values() if call.session_id == session_id]

    def fail(self, call: PendingCall, code: int, message: str) -> None:
        """Nobody will answer ``call``."""
        if not call.future.done():
            call.future.set_result(Answer(call.id, None, error_body(code, message)))


class RunningRequest:
    """One request at work: the :class:`~mcp_sessions.server.upstream.Call` its handler has."""

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

    @property
    def session_id(self) -> SessionId | None:
        """The protocol-mode session it belongs to."""
        return self.record.session_id if self.record is not None else None

    @property
    def transport(self) -> str:
        """The kind of transport that carries it now."""
        connection = self.carriers[-1].inbound.connection
        return connection.kind if connection is not None else "http"

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
        return not self.done and inbound.connection is not None and not inbound.modern

    @property
    def is_heard(self) -> bool:
        """Whether anybody still listens for its answer."""
        return any(carrier.inbound.channel.is_open for carrier in self.carriers)

    async def notify(self, method: str, params: Mapping[str, Any] | None) -> None:
        """Send a notification on the request's own way back; no session event."""
        if not self.done:
            await self.carriers[-1].inbound.channel.emit(notification_message(method, params))
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
        check_may_ask(inbound.peer if inbound.connection is not None else None, method)
        call = PendingCall(inbound.principal, None, method, params, on_progress)
        self._asked.append(call)
        try:
            return await self._host.calls.ask(call, self._emit, timeout=timeout)
        finally:
            self._asked.remove(call)

    async def join(self, carrier: Carrier) -> None:
        """The request was sent again: from now on progress and questions go there, and the
        answer goes to both.
        """
        self.carriers.append(carrier)
        self._host.heard(self)
        for call in self._asked:
            if not call.future.done():
                await self._emit(call.message)

    def fail_open_calls(self, code: int, message: str) -> None:
        """Nobody will answer what the handler asked."""
        for call in self._asked:
            self._host.calls.fail(call, code, message)

    async def _emit(self, message: bytes) -> None:
        await self.carriers[-1].inbound.channel.emit(message)


def check_may_ask(peer: Peer | None, method: str) -> None:
    """Server-to-client requests go only to a handshake-era peer that declared it answers.

    Raises:
        PeerError: It did not, or there was no handshake.
    """
    params = peer.initialize_params if peer is not None and not peer.modern else None
    if params is None:
        raise PeerError(
            INVALID_REQUEST,
            f"Cannot send {method!r}: this transport context has no back-channel for "
            "server-initiated requests.",
        )
    capability = _NEEDS_CAPABILITY.get(method)
    if capability is not None and capability not in (params.get("capabilities") or {}):
        raise PeerError(INVALID_REQUEST, f"the client did not declare {capability!r}")


class Host:
    """Runs requests, and knows which run."""

    def __init__(
        self,
        store: SessionStore,
        hub: Hub,
        policy: SessionPolicy,
        clock: Callable[[], float],
        *,
        process: str,
        stamp: Stamp,
    ) -> None:
        """Take what it works with.

        Args:
            process: Names this process among those that share the store.
            stamp: Adds the session's ``_meta`` to a result.
        """
        self.clock = clock
        self.process = process
        self.calls = PendingCalls()
        self._store = store
        self._hub = hub
        self._policy = policy
        self._stamp = stamp
        self._running: dict[RunningRequest, None] = {}
        self._by_session: dict[SessionId, dict[RunningRequest, None]] = {}
        self._by_key: dict[tuple[SessionId, RequestKey], RunningRequest] = {}
        self._unheard: dict[RunningRequest, asyncio.TimerHandle] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        # Kept: asking for the running loop costs a system call per question.
        self._loop: asyncio.AbstractEventLoop | None = None
        self.standalone: Callable[[RunningRequest], Any] = _no_standalone
        hub.on_attached = self._ask_again

    @property
    def held(self) -> Mapping[SessionId, Any]:
        """The sessions, of both modes, that a request is at work in."""
        return self._by_session

    @property
    def running(self) -> int:
        """How many requests are at work."""
        return len(self._running)

    def by_key(self, session_id: SessionId, key: RequestKey) -> RunningRequest | None:
        """The running request with that key."""
        return self._by_key.get((session_id, key))

    def start(
        self,
        carrier: Carrier,
        peer: UpstreamPeer,
        *,
        record: SessionRecord | None,
        key: RequestKey | None,
        handle: SessionHandle | None,
        close_peer: bool = False,
    ) -> RunningRequest:
        """Run a request in a task of its own; the answer goes to its carriers.

        Args:
            close_peer: The peer was made for this request alone.
        """
        running = RunningRequest(carrier, record, key, self)
        self._running[running] = None
        for session_id in self._sessions_of(running):
            self._by_session.setdefault(session_id, {})[running] = None
        if record is not None and key is not None:
            self._by_key[record.session_id, key] = running
        connection = carrier.inbound.connection
        if connection is not None:
            connection.requests[carrier.request.id] = running
        self._listen(running, carrier)
        if self._loop is None:
            self._loop = asyncio.get_running_loop()
        task = self._loop.create_task(self._run(running, peer, handle, close_peer))
        running.task = task
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return running

    async def join(self, running: RunningRequest, carrier: Carrier) -> None:
        """Answer a request that was sent again when the one that runs is done."""
        connection = carrier.inbound.connection
        if connection is not None:
            connection.requests[carrier.request.id] = running
        self._listen(running, carrier)
        await running.join(carrier)

    async def abort(self, running: RunningRequest, error: dict[str, Any]) -> None:
        """Answer with ``error`` now and cancel the handler, however long that takes it."""
        if running.done:
            return
        await self._finish(running, None, error)
        if running.task is not None:
            running.task.cancel()

    async def abort_session(self, session_id: SessionId) -> None:
        """A session is over: its requests and its questions to the client fail."""
        error = wire_error(SessionNotFound(session_id))
        for call in self.calls.of_session(session_id):
            self.calls.fail(call, error["code"], error["message"])
        for running in list(self._by_session.get(session_id, ())):
            # A request of a protocol-mode session outlives the transport session that
            # carried it, as it outlives any connection.
            if running.session_id is None or running.session_id == session_id:
                await self.abort(running, error)

    async def _ask_again(self, session_id: SessionId, connection: TransportConnection) -> None:
        """A session has a new connection: what is open goes there too (pitfall C4)."""
        if not connection.peer.modern:
            for call in self.calls.of_session(session_id):
                await connection.send(Draft(call.message, None, None, session_id))

    def _closed(self, running: RunningRequest, carrier: Carrier) -> None:
        if not carrier.inbound.modern or running.key is not None:
            self.unheard(running)
        elif not running.done:
            # The modern era over HTTP: closing the response stream cancels the request.
            self._spawn(self.abort(running, error_body(REQUEST_CANCELLED, "Request cancelled")))

    def unheard(self, running: RunningRequest) -> None:
        """A carrier of the request is gone; if it was the last, its time is bounded."""
        if running.done or running.is_heard or running in self._unheard:
            return
        while len(self._unheard) >= self._policy.max_detached_requests:
            oldest = next(iter(self._unheard))
            self._unheard.pop(oldest).cancel()
            self._give_up(oldest)
        loop = asyncio.get_running_loop()
        self._unheard[running] = loop.call_later(
            self._policy.detached_timeout, self._give_up, running
        )

    def heard(self, running: RunningRequest) -> None:
        """Somebody listens for the request again."""
        timer = self._unheard.pop(running, None)
        if timer is not None:
            timer.cancel()

    async def drain(self, grace: float) -> int:
        """Let what runs finish for ``grace`` seconds, then end it; how much had to be."""
        waiting = [task for task in self._tasks if not task.done()]
        if waiting:
            await asyncio.wait(waiting, timeout=grace)
        left = list(self._running)
        for running in left:
            await self.abort(running, wire_error(OutcomeUnknown()))
        for task in list(self._tasks):
            task.cancel()
        if self._tasks:
            await asyncio.wait(list(self._tasks), timeout=5)
        return len(left)

    def _listen(self, running: RunningRequest, carrier: Carrier) -> None:
        channel = carrier.inbound.channel
        channel.on_closed = lambda: self._closed(running, carrier)
        channel.on_reopened = lambda: self.heard(running)

    def _give_up(self, running: RunningRequest) -> None:
        logger.warning("%s ran on unheard for too long; it is cancelled", running.request.method)
        self._spawn(self.abort(running, wire_error(OutcomeUnknown())))

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _sessions_of(self, running: RunningRequest) -> list[SessionId]:
        """What must not be reaped while the request runs."""
        connection = running.carriers[0].inbound.connection
        sessions = [running.session_id] if running.session_id is not None else []
        if connection is not None and connection.transport_session is not None:
            sessions.append(connection.transport_session)
        return sessions

    async def _run(
        self,
        running: RunningRequest,
        peer: UpstreamPeer,
        handle: SessionHandle | None,
        close_peer: bool,
    ) -> None:
        enter_session(handle)
        request = running.request
        result: dict[str, Any] | None = None
        error: dict[str, Any] | None = None
        try:
            result = await peer.request(running, request.method, request.params)
        except UpstreamError as failed:
            error = failed.error
        except asyncio.CancelledError:
            if running.done:
                # Answered and cancelled by ``abort``: this is the end of it.
                return
            await self._finish(running, None, wire_error(OutcomeUnknown()))
            raise
        finally:
            if close_peer:
                await peer.close()
        if result is not None and handle is not None:
            try:
                running.record = await handle.store_state() or running.record
            except (SessionsError, TypeError) as failed:
                logger.error("session.state could not be stored: %s", failed)
                result, error = None, error_body(INTERNAL_ERROR, "Internal error")
        await self._hub.settle()
        await self._finish(running, result, error)

    async def _finish(
        self,
        running: RunningRequest,
        result: dict[str, Any] | None,
        error: dict[str, Any] | None,
    ) -> None:
        if running.done:
            return
        running.done = True
        self._forget(running)
        running.fail_open_calls(INTERNAL_ERROR, "the request that asked is over")
        try:
            await self._remember(running, result, error)
        except StoreUnavailable:
            # The handler ran. Whoever still listens gets the answer; who asks again later
            # hears that the outcome is unknown.
            logger.exception("the outcome of %s could not be stored", running.request.method)
        record = running.record
        for carrier in running.carriers:
            inbound, request_id = carrier.inbound, carrier.request.id
            if result is None:
                failed = error or {}
                message = inbound.error(request_id, failed)
                await inbound.channel.answer(message, code=failed.get("code"))
                continue
            stamped = result
            if carrier.named and record is not None:
                stamped = self._stamp(result, record)
            await inbound.channel.answer(inbound.result(request_id, stamped))

    async def _remember(
        self,
        running: RunningRequest,
        result: dict[str, Any] | None,
        error: dict[str, Any] | None,
    ) -> None:
        now = self.clock()
        session_id = running.session_id
        if session_id is not None and running.key is not None:
            outcome = result_outcome(result) if result is not None else error_outcome(error or {})
            await self._store.finish_request(session_id, running.key, outcome, now=now)
        # Idle time counts from the end of the last request (pitfall D2). Admission moved
        # the deadline already; a store is written again only if that was a while ago.
        if now - running.started_at > self._policy.idle_timeout / 100:
            await self._store.touch(self._sessions_of(running), now=now)

    def _forget(self, running: RunningRequest) -> None:
        self._running.pop(running, None)
        self.heard(running)
        for session_id in self._sessions_of(running):
            at_work = self._by_session.get(session_id)
            if at_work is not None:
                at_work.pop(running, None)
                if not at_work:
                    del self._by_session[session_id]
        if running.session_id is not None and running.key is not None:
            self._by_key.pop((running.session_id, running.key), None)
        for carrier in running.carriers:
            connection = carrier.inbound.connection
            if connection is not None and connection.requests.get(carrier.request.id) is running:
                del connection.requests[carrier.request.id]

    def log_state(self) -> dict[str, int]:
        """How much is at work, for logs and tests."""
        return {"running": len(self._running), "unheard": len(self._unheard)}


def _no_standalone(running: RunningRequest) -> Any:
    raise AssertionError(f"no standalone channel for {digest(str(running.session_id))}")
