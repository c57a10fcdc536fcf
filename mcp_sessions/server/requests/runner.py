"""Run requests: each runs once, in its own task, wherever its answer is delivered.

A broken connection cancels nothing here. A request ends when its handler does, when its client
cancels it, when its session ends, or when a bound on calls without a connection is reached.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection, Coroutine, Mapping
from functools import partial
from typing import Any

from mcp_sessions.background import report
from mcp_sessions.core.messages import error_body, wire_error
from mcp_sessions.core.unheard import Unheard
from mcp_sessions.errors import (
    REQUEST_CANCELLED,
    OutcomeUnknown,
    SessionNotFound,
)
from mcp_sessions.ids import RequestKey, SessionId
from mcp_sessions.policy import SessionPolicy
from mcp_sessions.server.calls.call import Call
from mcp_sessions.server.calls.table import Calls
from mcp_sessions.server.connection import ClientConnection
from mcp_sessions.server.delivery.questions import PendingQuestions
from mcp_sessions.server.requests.outcome import Outcomes
from mcp_sessions.server.requests.running import RunningRequest
from mcp_sessions.server.requests.runs import Runs
from mcp_sessions.server.upstream.port import UpstreamPeer

logger = logging.getLogger(__name__)


class RequestRunner:
    """Runs requests, and knows which run."""

    def __init__(
        self,
        outcomes: Outcomes,
        questions: PendingQuestions,
        policy: SessionPolicy,
        *,
        process: str,
    ) -> None:
        self.process = process
        self.runs = Runs()
        self.calls = Calls(policy.max_running_requests)
        """The requests that came in and are not answered."""

        self.draining = False
        """No request is begun any more, but on a connection that is served until it is quiet, and
        what came before."""

        self.is_over = False
        """It has drained: no request is begun any more, wherever it came from."""

        self._questions = questions
        self.call = partial(RunningRequest, self, outcomes, questions)
        """A message as its handler sees it; see :class:`RunningRequest`."""

        self._running: dict[RunningRequest, None] = {}
        self._by_session: dict[SessionId, dict[RunningRequest, None]] = {}
        self._by_key: dict[tuple[SessionId, RequestKey], RunningRequest] = {}
        self._detached_timeout = policy.detached_timeout
        self._unheard = Unheard[RunningRequest](
            most=policy.max_detached_requests,
            most_of_one=policy.max_detached_requests_per_session,
        )
        self._timers: dict[RunningRequest, asyncio.TimerHandle] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        # Kept: asking for the running loop costs a system call per question.
        self._loop: asyncio.AbstractEventLoop | None = None

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
        """Return the number of running requests."""
        return len(self._running)

    def by_key(self, session_id: SessionId, key: RequestKey) -> RunningRequest | None:
        """The request with that key that runs, or is about to be answered."""
        return self._by_key.get((session_id, key))

    def start(
        self, running: RunningRequest, peer: UpstreamPeer, *, close_peer: bool, run: str | None
    ) -> None:
        """Run a request in a task of its own; the answer goes to its waiters.

        Args:
            peer: Its client, as the wrapped server sees it.
            close_peer: The peer was made for this request alone.
            run: Of a request with a key: the run that recorded it.
        """
        if run is not None:
            self.runs.settle(run)
        self._running[running] = None
        (waiter,) = running.waiters
        for session_id in running.sessions:
            self._by_session.setdefault(session_id, {})[running] = None
        if running.session_id is not None and running.key is not None:
            self._by_key[running.session_id, running.key] = running
        waiter.begins(running)
        channel = waiter.inbound.channel
        channel.watch(lambda: self._closed(running, waiter), lambda: self._heard(running))
        if self._loop is None:
            self._loop = asyncio.get_running_loop()
        task = running.start(
            peer, self._loop, close_peer=close_peer, is_cancelled=waiter.error is not None
        )
        self._watch("a request", task)
        if not channel.is_open:
            # It closed while the request was let in, when nobody listened for that yet.
            self._closed(running, waiter)

    async def join(self, running: RunningRequest, waiter: Call) -> None:
        """Answer a request that was sent again when the one that runs is done."""
        waiter.begins(running)
        channel = waiter.inbound.channel
        channel.watch(lambda: self._closed(running, waiter), lambda: self._heard(running))
        self._heard(running)
        await running.join(waiter)

    async def abort_session(self, session_id: SessionId) -> None:
        """A session is over: its requests and its questions to the client fail."""
        error = wire_error(SessionNotFound(session_id))
        if self._questions.rounds is not None:
            self._questions.rounds.session_over(session_id)
        for question in list(self._questions.by_session.get(session_id, ())):
            self._questions.fail(question, error["code"], error["message"])
        # Beside what every -32043 says: this request was begun, so it is not one to send
        # again in another session.
        error = {**error, "data": {**error["data"], "started": True}}
        for running in list(self._by_session.get(session_id, ())):
            if running.ends_with(session_id):
                await running.abort(error)

    def _closed(self, running: RunningRequest, waiter: Call) -> None:
        if not waiter.inbound.cancels or running.key is not None:
            self._unheard_by(running)
        elif not running.done:
            # The modern era over HTTP: closing the response stream cancels the request.
            self.spawn(running.abort(error_body(REQUEST_CANCELLED, "Request cancelled")))

    async def quiet(self, connection: ClientConnection, timeout: float) -> None:
        """Wait until nothing is at work that a connection asked for, ``timeout`` seconds at
        the most.
        """
        tasks = self.calls.tasks(connection.id)
        if tasks:
            await asyncio.wait(tasks, timeout=timeout)

    async def drain(self, grace: float, arriving: asyncio.Task[None]) -> int:
        """Let what runs finish for ``grace`` seconds, then end it; how much had to be.

        Args:
            arriving: Over when what came before is here.
        """
        self.draining = True
        if self._questions.rounds is not None:
            self._questions.rounds.leave()
        loop = asyncio.get_running_loop()
        until = loop.time() + grace
        # Again: a connection that is served until it is quiet may have asked for more.
        while waiting := [task for task in (arriving, *self._tasks) if not task.done()]:
            await asyncio.wait(waiting, timeout=max(0, until - loop.time()))
            if loop.time() >= until:
                break
        self.is_over = True
        left = list(self._running)
        for running in left:
            await running.abort(wire_error(OutcomeUnknown()))
        for task in list(self._tasks):
            task.cancel()
        if self._tasks:
            await asyncio.wait(list(self._tasks), timeout=5)
        return len(left)

    def _unheard_by(self, running: RunningRequest) -> None:
        """A waiter of a request is gone; if it was the last, its time begins."""
        if running.done or running.is_heard or running in self._unheard:
            return
        principal = running.waiters[0].inbound.principal
        given_up = self._unheard.add(running, principal, next(iter(running.sessions), None))
        loop = asyncio.get_running_loop()
        self._timers[running] = loop.call_later(self._detached_timeout, self._give_up, running)
        if given_up is not None:
            self._heard(given_up)
            self._give_up(given_up)

    def _heard(self, running: RunningRequest) -> None:
        """Somebody listens for a request again, or it is over."""
        self._unheard.remove(running)
        timer = self._timers.pop(running, None)
        if timer is not None:
            timer.cancel()

    def _give_up(self, running: RunningRequest) -> None:
        logger.warning("%s ran too long without a client; it is cancelled", running.request.method)
        self.spawn(running.abort(wire_error(OutcomeUnknown())))

    def spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Do something for a request beside what else is done; a drain waits for it."""
        return self._watch("a background task of a request", asyncio.create_task(work))

    def _watch(self, what: str, task: asyncio.Task[None]) -> asyncio.Task[None]:
        self._tasks.add(task)
        task.add_done_callback(partial(self._ended, what))
        return task

    def _ended(self, what: str, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        failed = None if task.cancelled() else task.exception()
        if failed is not None:
            report(what, failed)

    def handled(self, running: RunningRequest) -> None:
        self._running.pop(running, None)
        if running in self._timers:
            self._heard(running)
        for session_id in running.sessions:
            at_work = self._by_session.get(session_id)
            if at_work is not None:
                at_work.pop(running, None)
                if not at_work:
                    del self._by_session[session_id]

    def kept(self, running: RunningRequest) -> None:
        if running.session_id is not None and running.key is not None:
            self._by_key.pop((running.session_id, running.key), None)
        for waiter in running.waiters:
            self.calls.close(waiter)

    def log_state(self) -> dict[str, int]:
        """How much is at work, for logs and tests."""
        return {"running": len(self._running), "unheard": len(self._unheard)}
