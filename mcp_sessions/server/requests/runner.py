"""Requests at work: each runs once, in a task of its own, wherever its answer is heard.

A broken connection cancels nothing here. A request ends when its handler does, when its
client cancels it, when its session ends, or when a bound on unheard work is reached.
"""

from __future__ import annotations

import asyncio
import logging
import sys
from collections.abc import Callable, Collection, Coroutine, Hashable, Mapping
from functools import partial
from typing import Any

from mcp_sessions.background import watched
from mcp_sessions.core.load import Load
from mcp_sessions.core.log import Draft
from mcp_sessions.core.messages import (
    error_body,
    error_outcome,
    result_outcome,
    wire_error,
    without_session,
)
from mcp_sessions.core.unheard import Unheard
from mcp_sessions.errors import (
    INTERNAL_ERROR,
    OutcomeUnknown,
    SessionNotFound,
    SessionsError,
    StoreUnavailable,
)
from mcp_sessions.ids import RequestKey, SessionId, digest
from mcp_sessions.policy import SessionPolicy
from mcp_sessions.principal import ANONYMOUS
from mcp_sessions.server.cluster.bus import ClusterBus
from mcp_sessions.server.connection import Inbound, TransportConnection
from mcp_sessions.server.delivery.announced import enter_request
from mcp_sessions.server.delivery.hub import Hub
from mcp_sessions.server.delivery.owed import Owed
from mcp_sessions.server.delivery.publisher import Publisher
from mcp_sessions.server.requests.handle import SessionHandle, enter_session
from mcp_sessions.server.requests.questions import PendingQuestions, may_ask
from mcp_sessions.server.requests.running import RunningRequest, Waiter
from mcp_sessions.server.requests.runs import Runs
from mcp_sessions.server.upstream.port import UpstreamError, UpstreamPeer
from mcp_sessions.stores.contract import SessionStore
from mcp_sessions.stores.records import SessionRecord

logger = logging.getLogger(__name__)

REQUEST_CANCELLED = -32800
"""The SDK's answer to a cancelled request on the handshake era's HTTP wire, which ends a
response stream with a response only."""

STORE_AWAY = "the session store is away: ask again later"
"""The text of an answer where a store that is away has no status of its own (HTP5)."""

Stamp = Callable[[dict[str, Any], SessionRecord], dict[str, Any]]

_MOST_OWED = 16_777_216
"""Bytes of outcomes that wait for a store that is away; of what ends then only the end is kept."""

_NOT_JSON = (TypeError, ValueError, RecursionError)
"""What JSON writers raise for a value that they cannot write."""


class RequestRunner:
    """Runs requests, and knows which run."""

    def __init__(
        self,
        store: SessionStore,
        hub: Hub,
        publisher: Publisher,
        policy: SessionPolicy,
        clock: Callable[[], float],
        owed: Owed,
        bus: ClusterBus,
        *,
        stamp: Stamp,
    ) -> None:
        """Take what it works with.

        Args:
            owed: Takes what the store must know of an end, also when it is away.
            stamp: Adds the session's ``_meta`` to a result.
        """
        self.clock = clock
        self.process = bus.process
        self.questions = PendingQuestions(bus.process if bus.is_shared else None)
        self.runs = Runs()
        self.load = Load(policy.max_running_requests)
        """What is being let in, runs, or waits for one that runs; by :func:`load_of`."""

        self.draining = False
        """No request is begun any more, but on a connection that is served until it is quiet."""

        self._store = store
        self._publisher = publisher
        self._policy = policy
        self._owed = owed
        self._stamp = stamp
        self._running: dict[RunningRequest, None] = {}
        self._by_session: dict[SessionId, dict[RunningRequest, None]] = {}
        self._by_key: dict[tuple[SessionId, RequestKey], RunningRequest] = {}
        self._unheard = Unheard[RunningRequest](
            most=policy.max_detached_requests,
            most_of_one=policy.max_detached_requests_per_session,
        )
        self._patience: dict[RunningRequest, asyncio.TimerHandle] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        # Kept: asking for the running loop costs a system question per question.
        self._loop: asyncio.AbstractEventLoop | None = None
        self.standalone: Callable[[RunningRequest], Any] = _no_standalone
        hub.on_attached = self._ask_again

    @property
    def held(self) -> Mapping[SessionId, Any]:
        """The sessions, of both modes, that a request is at work in."""
        return self._by_session

    @property
    def at_work(self) -> Collection[RunningRequest]:
        """The requests that run."""
        return self._running

    @property
    def running(self) -> int:
        """How many requests are at work."""
        return len(self._running)

    def by_key(self, session_id: SessionId, key: RequestKey) -> RunningRequest | None:
        """The request with that key that runs, or is about to be answered."""
        return self._by_key.get((session_id, key))

    def start(
        self,
        waiter: Waiter,
        peer: UpstreamPeer,
        *,
        record: SessionRecord | None,
        key: RequestKey | None,
        handle: SessionHandle | None,
        close_peer: bool = False,
        run: str | None = None,
    ) -> RunningRequest:
        """Run a request in a task of its own; the answer goes to its waiters.

        Args:
            close_peer: The peer was made for this request alone.
            run: Of a request with a key: the run that recorded it.
        """
        if run is not None:
            self.runs.settle(run)
        running = RunningRequest(waiter, record, key, self)
        self._running[running] = None
        for session_id in self._sessions_of(running):
            self._by_session.setdefault(session_id, {})[running] = None
        if record is not None and key is not None:
            self._by_key[record.session_id, key] = running
        connection = waiter.inbound.connection
        if connection is not None:
            connection.requests[waiter.request.id] = running
        self.load.add(load_of(waiter.inbound, running.session_id))
        self._listen(running, waiter)
        if self._loop is None:
            self._loop = asyncio.get_running_loop()
        task = _started(self._run(running, peer, handle, close_peer), self._loop)
        running.task = task
        watched("a request", task)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        if not waiter.inbound.channel.is_open:
            # It closed while the request was let in, when nobody listened for that yet.
            self._closed(running, waiter)
        return running

    async def join(self, running: RunningRequest, waiter: Waiter) -> None:
        """Answer a request that was sent again when the one that runs is done."""
        connection = waiter.inbound.connection
        if connection is not None:
            connection.requests[waiter.request.id] = running
        self.load.add(load_of(waiter.inbound, running.session_id))
        self._listen(running, waiter)
        await running.join(waiter)

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
        for question in self.questions.of_session(session_id):
            self.questions.fail(question, error["code"], error["message"])
        # Beside what every -32043 says: this request was begun, so it is not one to send
        # again in another session.
        error = {**error, "data": {**error["data"], "started": True}}
        for running in list(self._by_session.get(session_id, ())):
            # A request of a protocol-mode session outlives the transport session that
            # carried it, as it outlives any connection.
            if running.session_id is None or running.session_id == session_id:
                await self.abort(running, error)

    async def _ask_again(self, session_id: SessionId, connection: TransportConnection) -> None:
        """A session has a new connection: what is open goes there too (ASK2), if its
        client can answer it; else it waits for one that can.
        """
        for question in self.questions.of_session(session_id):
            if may_ask(connection.peer, question.method):
                await connection.send(Draft(question.message, None, question.log_key, session_id))

    async def ask_elsewhere(self, session_id: SessionId) -> None:
        """A session has a new connection in another process: what is open here goes there."""
        for question in self.questions.of_session(session_id):
            await self._publisher.push(session_id, question.message, question)

    def _closed(self, running: RunningRequest, waiter: Waiter) -> None:
        if not waiter.inbound.cancels or running.key is not None:
            self.unheard(running)
        elif not running.done:
            # The modern era over HTTP: closing the response stream cancels the request.
            self.spawn(self.abort(running, error_body(REQUEST_CANCELLED, "Request cancelled")))

    def unheard(self, running: RunningRequest) -> None:
        """A waiter of the request is gone; if it was the last, its time is bounded, and the
        number of its like.
        """
        if running.done or running.is_heard or running in self._unheard:
            return
        principal = running.waiters[0].inbound.principal
        session = next(iter(self._sessions_of(running)), None)
        given_up = self._unheard.add(running, principal, session)
        loop = asyncio.get_running_loop()
        self._patience[running] = loop.call_later(
            self._policy.detached_timeout, self._give_up, running
        )
        if given_up is not None:
            self.heard(given_up)
            self._give_up(given_up)

    def heard(self, running: RunningRequest) -> None:
        """Somebody listens for the request again."""
        self._unheard.remove(running)
        timer = self._patience.pop(running, None)
        if timer is not None:
            timer.cancel()

    async def quiet(self, connection: TransportConnection, timeout: float) -> None:
        """Wait until nothing is at work that a connection asked for, ``timeout`` seconds at
        the most.
        """
        tasks = [running.task for running in connection.requests.values() if running.task]
        if tasks:
            await asyncio.wait(tasks, timeout=timeout)

    async def drain(self, grace: float) -> int:
        """Let what runs finish for ``grace`` seconds, then end it; how much had to be."""
        self.draining = True
        loop = asyncio.get_running_loop()
        until = loop.time() + grace
        # Again: a connection that is served until it is quiet may have asked for more.
        while waiting := [task for task in self._tasks if not task.done()]:
            await asyncio.wait(waiting, timeout=max(0, until - loop.time()))
            if loop.time() >= until:
                break
        left = list(self._running)
        for running in left:
            await self.abort(running, wire_error(OutcomeUnknown()))
        for task in list(self._tasks):
            task.cancel()
        if self._tasks:
            await asyncio.wait(list(self._tasks), timeout=5)
        return len(left)

    def _listen(self, running: RunningRequest, waiter: Waiter) -> None:
        channel = waiter.inbound.channel
        channel.on_closed = lambda: self._closed(running, waiter)
        channel.on_reopened = lambda: self.heard(running)

    def _give_up(self, running: RunningRequest) -> None:
        logger.warning("%s ran on unheard for too long; it is cancelled", running.request.method)
        self.spawn(self.abort(running, wire_error(OutcomeUnknown())))

    def spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Do something for a request beside what else is done; a drain waits for it."""
        task = asyncio.create_task(work)
        watched("what is done beside a request", task)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def _sessions_of(self, running: RunningRequest) -> list[SessionId]:
        """What must not be reaped while the request runs."""
        connection = running.waiters[0].inbound.connection
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
        announced = enter_request()
        request = running.request
        result: dict[str, Any] | None = None
        error: dict[str, Any] | None = None
        is_away = False
        try:
            # A handler is not told the credential by which its client names the session.
            seen = without_session(request.params)
            result = await peer.request(running, request.method, seen)
        except UpstreamError as failed:
            error = failed.error
        except StoreUnavailable as failed:
            # What the layer serves itself. A key is used up; else it may be asked again.
            logger.error("%s may not be stored: %s", request.method, failed)
            is_away = running.key is None
            error = (
                error_body(INTERNAL_ERROR, STORE_AWAY) if is_away else wire_error(OutcomeUnknown())
            )
        except Exception:
            # The boundary to the wrapped server: whatever comes out of it, its client is
            # answered.
            logger.exception("%s failed inside the wrapped server", request.method)
            error = error_body(INTERNAL_ERROR, "Internal error")
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
            except StoreUnavailable as failed:
                # Its handler is done, and whether its state is stored nobody knows (KEY11).
                logger.error("session.state may not be stored: %s", failed)
                result, error = None, wire_error(OutcomeUnknown())
            except (SessionsError, TypeError) as failed:
                logger.error("session.state could not be stored: %s", failed)
                result, error = None, error_body(INTERNAL_ERROR, "Internal error")
        await announced.settled()
        await self._finish(running, result, error, is_away=is_away)

    async def _finish(
        self,
        running: RunningRequest,
        result: dict[str, Any] | None,
        error: dict[str, Any] | None,
        *,
        is_away: bool = False,
    ) -> None:
        if running.done:
            return
        running.done = True
        self._forget(running)
        running.fail_open_questions(INTERNAL_ERROR, "the request that asked is over")
        try:
            await self._remember(running, result, error)
        except StoreUnavailable as failed:
            # The handler ran: whoever still listens gets the answer.
            logger.warning("the end of %s moved no deadline: %s", running.request.method, failed)
        finally:
            # Until here the same request, sent again, could join: the store did not know better.
            self._forget_waiters(running)
        await running.told(self._policy.slow_timeout)
        for waiter in running.waiters:
            message, code = self._written(running, waiter, result, error)
            try:
                await waiter.inbound.channel.answer(message, code=code, is_away=is_away)
            except StoreUnavailable as failed:
                # It was told; what the store keeps of its stream is looked after there. The
                # other senders are owed the answer all the same (KEY5).
                logger.error("a response stream was not put away: %s", failed)

    def _written(
        self,
        running: RunningRequest,
        waiter: Waiter,
        result: dict[str, Any] | None,
        error: dict[str, Any] | None,
    ) -> tuple[bytes, int | None]:
        """The answer for one waiter, and its error's code."""
        inbound, request_id, record = waiter.inbound, waiter.request.id, running.record
        if result is not None:
            try:
                if waiter.named and record is not None:
                    result = self._stamp(result, record)
                if waiter is not running.waiters[0]:
                    result = inbound.of_its_era(result)
                return inbound.result(request_id, result), None
            except (SessionsError, *_NOT_JSON):
                logger.exception("the result of %s cannot be sent", running.request.method)
                error = error_body(INTERNAL_ERROR, "Internal error")
        failed = error or {}
        try:
            return inbound.error(request_id, failed), failed.get("code")
        except _NOT_JSON:
            logger.exception("the error of %s cannot be sent", running.request.method)
            return inbound.error(
                request_id, error_body(INTERNAL_ERROR, "Internal error")
            ), INTERNAL_ERROR

    async def _remember(
        self,
        running: RunningRequest,
        result: dict[str, Any] | None,
        error: dict[str, Any] | None,
    ) -> None:
        now = self.clock()
        session_id = running.session_id
        if session_id is not None and running.key is not None:
            outcome = None
            try:
                outcome = (
                    result_outcome(result) if result is not None else error_outcome(error or {})
                )
            except _NOT_JSON:
                logger.exception("the outcome of %s cannot be kept", running.request.method)
            size = len(outcome) if outcome is not None else 0
            if size and self._owed.size + size > _MOST_OWED:
                outcome, size = None, 0
            finish = partial(self._store.finish_request, session_id, running.key, outcome, now=now)
            await self._owed.settle({("finish", session_id, running.key): finish}, size=size)
        # Idle time counts from the end of the last request (SES14). Admission moved
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

    def _forget_waiters(self, running: RunningRequest) -> None:
        if running.session_id is not None and running.key is not None:
            self._by_key.pop((running.session_id, running.key), None)
        for waiter in running.waiters:
            self.load.remove(load_of(waiter.inbound, running.session_id))
            connection = waiter.inbound.connection
            if connection is not None and connection.requests.get(waiter.request.id) is running:
                del connection.requests[waiter.request.id]

    def log_state(self) -> dict[str, int]:
        """How much is at work, for logs and tests."""
        return {"running": len(self._running), "unheard": len(self._unheard)}


def load_of(inbound: Inbound, session_id: SessionId | None) -> Hashable:
    """Whose load a message is: its connection's; without one its session's; without that its
    principal's. None: nobody's, without authentication: there it is everybody's.

    Args:
        inbound: Where it came from.
        session_id: The session that it belongs to, or names.
    """
    if inbound.connection is not None:
        return inbound.connection.id
    if session_id is not None:
        return session_id
    return inbound.principal if inbound.principal != ANONYMOUS else None


def _started(
    work: Coroutine[Any, Any, None], loop: asyncio.AbstractEventLoop
) -> asyncio.Task[None]:
    """A task for ``work``. Where Python can, its first step is done at once: a handler that
    waits for nothing then costs no turn of the event loop.
    """
    if sys.version_info >= (3, 12):
        return asyncio.Task(work, loop=loop, eager_start=True)
    return loop.create_task(work)


def _no_standalone(running: RunningRequest) -> Any:
    raise AssertionError(f"no standalone channel for {digest(str(running.session_id))}")
