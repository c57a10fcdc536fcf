"""Run requests: each runs once, in its own task, wherever its answer is delivered.

A broken connection cancels nothing here. A request ends when its handler does, when its client
cancels it, when its session ends, or when a bound on calls without a connection is reached.

A key is recorded before its handler starts. If the reply to that is lost, or something fails in
between, the key is known and nothing runs. The process that recorded it knows which runs never
began. Such a run may begin anew (``KeyUse.instead_of``).
"""

from __future__ import annotations

import asyncio
import itertools
import secrets
import time
from collections.abc import Coroutine
from typing import Any

from mcp_sessions.background import Background, watched
from mcp_sessions.core.messages import wire_error
from mcp_sessions.core.recent import Recent
from mcp_sessions.errors import OutcomeUnknown, SessionNotFound
from mcp_sessions.ids import SessionId
from mcp_sessions.policy import SessionPolicy
from mcp_sessions.server.calls.detached import IN_BACKGROUND, DetachedRequests
from mcp_sessions.server.calls.shares import shares_of
from mcp_sessions.server.calls.table import Calls
from mcp_sessions.server.connection.connection import ClientConnection
from mcp_sessions.server.delivery.questions import PendingQuestions
from mcp_sessions.server.requests.outcome import Outcomes
from mcp_sessions.server.requests.running import RunningRequest
from mcp_sessions.server.requests.shared import Shared
from mcp_sessions.server.requests.tasks import Tasks

_MOST = 50_000
"""Runs that never began and are remembered, about 150 bytes each; of an older one nobody can
know any more."""


class Runs:
    """Names of runs. The holder of a key's lock may ask whether a run never started: then none is
    about to start.
    """

    def __init__(self, most: int = _MOST) -> None:
        self._prefix = secrets.token_urlsafe(9)
        self._numbers = itertools.count(1)
        self._not_begun = Recent[str, None](most)

    def mint(self) -> str:
        """Make the name of a run that has not started, unique over all processes."""
        run = f"{self._prefix}-{next(self._numbers)}"
        self._not_begun.keep(run, None)
        return run

    def settle(self, run: str) -> None:
        """Forget a run that starts now, or whose request recorded no key."""
        self._not_begun.pop(run, None)

    def never_began(self, run: str | None) -> bool:
        return run in self._not_begun


class RequestRunner:
    def __init__(
        self,
        outcomes: Outcomes,
        questions: PendingQuestions,
        policy: SessionPolicy,
        *,
        process: str,
        tasks: Tasks | None = None,
    ) -> None:
        self.process, self.tasks = process, tasks
        self.runs = Runs()
        self.calls = Calls[RunningRequest](
            policy.max_running_requests, shares_of(policy, time.monotonic)
        )
        """The requests that came in and are not answered, and those that run."""

        self.held, self.active = self.calls.held, self.calls.running
        self._questions = questions
        self._background = Background()
        self._detached = DetachedRequests(policy, self._background)
        self.shared = Shared(self.calls, self._detached, self._background, outcomes, questions)

    @property
    def draining(self) -> bool:
        return self.calls.draining

    @property
    def running(self) -> int:
        return len(self.active)

    async def abort_session(self, session_id: SessionId) -> None:
        error = wire_error(SessionNotFound(session_id))
        if self._questions.rounds is not None:
            self._questions.rounds.session_ended(session_id)
        # In addition to what every -32043 says: this request was begun, so it is not one to send
        # again in another session. It comes first: a handler whose question fails would answer.
        started = {**error, "data": {**error["data"], "started": True}}
        for running in list(self.held.get(session_id, ())):
            if running.ends_with(session_id):
                await running.abort(started)
        for question in list(self._questions.by_session.get(session_id, ())):
            self._questions.fail(question, error["code"], error["message"])
        self.calls.forget(session_id)

    async def quiet(self, connection: ClientConnection, timeout: float) -> None:
        tasks = self.calls.tasks(connection.id)
        if tasks:
            await asyncio.wait(tasks, timeout=timeout)

    async def drain(self, grace: float, arriving: asyncio.Task[None]) -> int:
        """Let what runs finish for ``grace`` seconds, then end it; how much had to be.

        A listen never finishes by itself: it lasts as long as the others run, and ends in order.

        Args:
            arriving: Over when what came before is here.
        """
        self.calls.drain()
        if self._questions.rounds is not None:
            self._questions.rounds.leave()
        loop, tasks = asyncio.get_running_loop(), self._background.tasks
        until = loop.time() + grace
        # Again: a connection that is served until it is quiet may have asked for more.
        while waiting := {task for task in (arriving, *tasks) if not task.done()} - {
            running.task for running in self.active if running.is_listen
        }:
            await asyncio.wait(waiting, timeout=max(0, until - loop.time()))
            if loop.time() >= until:
                break
        self.calls.drain(has_ended=True)
        left = list(self.active)
        for running in left:
            if running.is_listen:
                await running.end_listen()
            else:
                await running.abort(wire_error(OutcomeUnknown()))
        for task in list(tasks):
            task.cancel()
        if tasks:
            await asyncio.wait(list(tasks), timeout=2)
        if self._questions.rounds is not None:
            await self._questions.rounds.close()
        if self.tasks is not None:
            await self.tasks.close()
        return sum(not running.is_listen for running in left)

    def spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Do something for a request in the background; a drain waits for it."""
        task = asyncio.create_task(work)
        self._background.hold(task)
        watched(IN_BACKGROUND, task)
        return task
