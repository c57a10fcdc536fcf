"""Keep tasks: the calls of this process that were answered with a task, and all that is stored.

Rules, owned by ``tests/server/requests/test_tasks.py``:

1. A task is stored before its client learns of it.
2. A task is its owner's. To everybody else an unknown, an expired and a foreign task are the same.
3. A task whose process is gone has failed, with -31012. It never runs again.
4. What another process notes about a task reaches its runner by a message, or by the next poll.

A task is a session of its own in the store (:attr:`~mcp_sessions.core.states.Mode.TASK`). Its id is
the task's, and its data is the :class:`~mcp_sessions.core.task.TaskRecord`.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections import Counter
from collections.abc import Callable, Hashable, Mapping
from datetime import UTC, datetime
from typing import Any, Final, Protocol

from mcp_sessions.background import Background
from mcp_sessions.core.life import has_come
from mcp_sessions.core.messages import error_body, wire_error
from mcp_sessions.core.resume import is_session_id
from mcp_sessions.core.states import Mode
from mcp_sessions.core.task import Json, TaskRecord, TaskStatus
from mcp_sessions.errors import (
    INTERNAL_ERROR,
    InvalidParams,
    LimitReached,
    OutcomeUnknown,
    StoreUnavailable,
)
from mcp_sessions.ids import SessionId, digest
from mcp_sessions.principal import Principal
from mcp_sessions.security import mint_session_id
from mcp_sessions.server.calls.shares import share_of
from mcp_sessions.server.cluster.environment import Environment
from mcp_sessions.server.cluster.replica_messages import TaskChanged
from mcp_sessions.server.upstream.asks import Asks, accepts, asks_of
from mcp_sessions.server.upstream.call_in_rounds import written
from mcp_sessions.server.upstream.port import REQUEST_TIMEOUT, NotAskable, PeerError, PeerRequest
from mcp_sessions.task_policy import TaskPolicy

logger = logging.getLogger(__name__)

_STORED_AS: Final = Principal(issuer="mcp-sessions", client_id="tasks")
"""The principal of the sessions that are tasks. The task's own is in its record: so tasks do not
count as the sessions of a principal.
"""

_EVERY: Final = 30.0
"""Seconds between two looks at the tasks that are to be kept, or to be forgotten."""

_AGAIN: Final = 1.0
"""Seconds until a write is tried again, and between two writes of what a task says."""

_CLOSING: Final = 5.0
"""Seconds that the last writes have when the process stops."""

_MESSAGE: Final = 1_000
"""Characters of what a task says to people, at most."""

_NO_TASK: Final = "there is no such task"

INPUT_REQUIRED: Final = "input_required"


class Work(Protocol):
    """The running request of a task."""

    def stop_handler(self) -> object: ...


class RunningTask:
    """A task that runs in this process, or whose end is not stored yet."""

    def __init__(
        self, tasks: Tasks, task_id: SessionId, record: TaskRecord, asks: Asks, share: Hashable
    ) -> None:
        self.id, self.record, self.share = task_id, record, share
        self.version = 0
        self._tasks, self._asks = tasks, asks
        self._work: Work | None = None
        self._waiting: dict[str, asyncio.Future[Json]] = {}
        self._is_dirty = False
        self._writing: asyncio.Task[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._saying: asyncio.TimerHandle | None = None

    @property
    def created(self) -> Json:
        """``CreateTaskResult``."""
        return {"resultType": "task", **self.record.shown(self.id, _time)}

    def runs(self, work: Work) -> None:
        self._work = work
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(self._tasks.policy.max_time, self._took_too_long)

    # --- what its handler does ---------------------------------------------------------------

    def says(self, message: str) -> None:
        if not self.record.has_ended:
            self.record.says(message[:_MESSAGE], now=self._tasks.clock())
            if self._saying is None:
                # A handler may report often: polls here see each report at once.
                self._saying = asyncio.get_running_loop().call_later(_AGAIN, self._said)

    def _said(self) -> None:
        self._saying = None
        self.changed()

    @property
    def may_ask(self) -> bool:
        return bool(self._asks) and not self.record.has_ended

    async def ask(self, asked: PeerRequest) -> Json:
        """Ask the client, and return its result.

        Raises:
            NotAskable: It does not accept the question.
            PeerError: It did not answer in time.
        """
        if not accepts(self._asks, asked.method, asked.params) or self.record.has_ended:
            raise NotAskable(asked.method)
        return await self._answer_to(written(asked), asked.timeout)

    async def next_round(self, asked: Mapping[str, Any], params: Json | None) -> Json:
        """Ask what a result of a server asks for, and return the params of the next round."""
        requests: Mapping[str, Json] = asked.get("inputRequests") or {}
        for request in requests.values():
            if not accepts(self._asks, str(request.get("method")), request.get("params")):
                raise NotAskable(str(request.get("method")))
        if not requests:
            # The server asks for another turn, and for nothing else.
            await asyncio.sleep(self._tasks.policy.poll_interval)
        waiting = [self._answer_to(request, None, key=key) for key, request in requests.items()]
        answers = await asyncio.gather(*waiting)
        following = {**(params or {}), "inputResponses": dict(zip(requests, answers, strict=True))}
        following.pop("requestState", None)
        if "requestState" in asked:
            following["requestState"] = asked["requestState"]
        return following

    async def _answer_to(
        self, question: Json, timeout: float | None, *, key: str | None = None
    ) -> Json:
        clock = self._tasks.clock
        name = self.record.asks(question, now=clock(), key=key)
        future: asyncio.Future[Json] = asyncio.get_running_loop().create_future()
        self._waiting[name] = future
        self.changed()
        try:
            async with asyncio.timeout(timeout):
                return await future
        except TimeoutError:
            raise PeerError(REQUEST_TIMEOUT, "Request timed out") from None
        finally:
            self._waiting.pop(name, None)
            self.record.drops(name, now=clock())
            self.changed()

    def ends(self, result: Json | None, error: Json | None) -> None:
        """Its handler ended. Neither: it was cancelled."""
        self._work = None
        if self.record.has_ended:
            return
        for timer in (self._timer, self._saying):
            if timer is not None:
                timer.cancel()
        status = TaskStatus.COMPLETED if result is not None else TaskStatus.FAILED
        if result is None and error is None:
            if self.record.is_unwanted:
                status = TaskStatus.CANCELLED
            else:
                error = wire_error(OutcomeUnknown())
        policy = self._tasks.policy
        self.record.ends(
            status, now=self._tasks.clock(), ttl=policy.ttl, result=result, error=error
        )
        self.record.message = self.record.message[:_MESSAGE]
        self.changed()

    # --- what its client wants ---------------------------------------------------------------

    def answered(self, answers: Mapping[str, Any]) -> None:
        if self.record.takes(answers, now=self._tasks.clock()):
            self._deliver()
            self.changed()

    def _deliver(self) -> None:
        given, self.record.answers = self.record.answers, {}
        for key, answer in given.items():
            future = self._waiting.get(key)
            if future is not None and not future.done():
                future.set_result(answer)

    def unwanted(self) -> None:
        if not self.record.has_ended:
            self.record.is_unwanted = True
            if self._work is not None:
                self._work.stop_handler()

    def stop(self, reason: Json) -> None:
        """End it for this reason, and cancel its handler, however long that takes it."""
        work = self._work
        self.ends(None, reason)
        if work is not None:
            work.stop_handler()

    def _took_too_long(self) -> None:
        logger.warning(
            "task %s is cancelled: it ran for longer than TaskPolicy.max_time", digest(self.id)
        )
        self.stop(error_body(INTERNAL_ERROR, "the task ran for too long"))

    # --- the store ---------------------------------------------------------------------------

    def changed(self) -> None:
        """Store it as it is now, soon."""
        self._is_dirty = True
        if self._writing is None:
            self._writing = self._tasks.background.run("the write of a task", self._write())

    async def _write(self) -> None:
        try:
            while self._is_dirty:
                self._is_dirty = False
                if not await self._write_once():
                    self._is_dirty = True
                    await asyncio.sleep(_AGAIN)
        finally:
            self._writing = None
        if self.record.has_ended:
            self._tasks.stored_end(self)

    async def _write_once(self) -> bool:
        store = self._tasks.store
        try:
            written = self.record.written()
            if await store.replace_data(self.id, written, expected_version=self.version):
                self.version += 1
                return True
            await self.refresh()
            self._is_dirty = True
            return True
        except StoreUnavailable as failed:
            logger.warning("task %s is not stored yet: %s", digest(self.id), failed)
            return False
        except LimitReached as limit:
            logger.error(
                "the outcome of task %s is lost: it has more than %s (%d) bytes",
                *(digest(self.id), limit.limit, limit.most),
            )
            lost = error_body(INTERNAL_ERROR, "the outcome is too large to keep")
            self.stop(lost)
            self.record.loses(lost)
            self._is_dirty = True
            return True

    async def refresh(self) -> None:
        """Take what another process noted about it.

        Raises:
            StoreUnavailable: It is not known.
        """
        stored = await self._tasks.store.load_data(self.id)
        if stored is None or not stored.value:
            return
        self.version = stored.version
        noted = TaskRecord.read(stored.value)
        self.answered(noted.answers)
        if noted.is_unwanted and not self.record.is_unwanted:
            self.unwanted()

    async def settled(self) -> None:
        """Wait until it is stored as it is."""
        if self._writing is not None:
            await asyncio.wait({self._writing})


class Tasks:
    def __init__(self, environment: Environment, policy: TaskPolicy) -> None:
        self.store, self.bus, self.clock = environment.store, environment.bus, environment.clock
        self.policy = policy
        self.background = Background()
        self._process = environment.process
        self._every = min(_EVERY, environment.policy.idle_timeout / 10)
        self._here: dict[SessionId, RunningTask] = {}
        self._kept: dict[SessionId, tuple[float, Hashable]] = {}
        """Tasks of this process that have ended and are stored, or of which no client knows → when
        they are forgotten, and whose they are."""

        self._found_here: dict[SessionId, float] = {}
        """Tasks that were there when this process started → when they are looked at again."""

        self._shares = Counter[Hashable]()

    # --- a call becomes a task ---------------------------------------------------------------

    async def create(self, principal: Principal, peer: Any, scope: Any) -> RunningTask:
        """Store a new task of a caller.

        Raises:
            LimitReached: There are too many, or too many of the caller's.
            StoreUnavailable: It is not known whether it is stored.
        """
        policy, share = self.policy, share_of(principal, scope)
        if len(self._here) + len(self._kept) >= policy.max_tasks:
            raise LimitReached("max_tasks", policy.max_tasks)
        if self._shares[share] >= policy.max_tasks_per_principal:
            raise LimitReached("max_tasks_per_principal", policy.max_tasks_per_principal)
        now, task_id = self.clock(), mint_session_id()
        record = TaskRecord.new(
            principal, runner=self._process, now=now, poll_interval=policy.poll_interval
        )
        task = RunningTask(self, task_id, record, asks_of(peer.capabilities), share)
        self._shares[share] += 1
        self._here[task_id] = task
        try:
            await self.store.create(Mode.TASK, _STORED_AS, peer=None, now=now, session_id=task_id)
            await self.store.replace_data(task_id, record.written(), expected_version=0)
        except BaseException:
            # The store may have it.
            self.discard(task)
            raise
        task.version = 1
        return task

    def discard(self, task: RunningTask) -> None:
        """Remove a task of which no client knows: in the next round, as the store may be away."""
        if self._here.pop(task.id, None) is not None:
            self._kept[task.id] = self.clock(), task.share

    # --- what clients ask --------------------------------------------------------------------

    async def get(self, task_id: object, principal: Principal) -> Json:
        """Return the task as ``tasks/get`` shows it.

        Raises:
            InvalidParams: There is none, it has expired, or it is somebody else's.
            StoreUnavailable: It is not known.
        """
        known, record, _ = await self._found(task_id, principal)
        return {"resultType": "complete", **record.shown_whole(known, _time)}

    async def update(
        self, task_id: object, answers: Mapping[str, Any], principal: Principal
    ) -> Json:
        """Take answers to questions. It raises as :meth:`get` does."""
        known, _, _ = await self._found(task_id, principal)
        here = self._here.get(known)
        if here is not None:
            here.answered(answers)
        else:
            await self._note(known, lambda it: it.takes(answers, now=self.clock()))
        return {"resultType": "complete"}

    async def cancel(self, task_id: object, principal: Principal) -> Json:
        """Ask a task to end. It raises as :meth:`get` does."""
        known, _, _ = await self._found(task_id, principal)
        here = self._here.get(known)
        if here is not None:
            here.unwanted()
        else:
            await self._note(known, _mark_unwanted)
        return {"resultType": "complete"}

    async def _found(
        self, task_id: object, principal: Principal
    ) -> tuple[SessionId, TaskRecord, int]:
        if not isinstance(task_id, str):
            raise InvalidParams("taskId is no text")
        if not is_session_id(task_id):
            raise InvalidParams(_NO_TASK)
        known = SessionId(task_id)
        here = self._here.get(known)
        if here is not None:
            record, version = here.record, here.version
        else:
            record, version = await self._stored(known)
        is_over = record is None or has_come(record.expires_at or math.inf, self.clock())
        if record is None or is_over or not record.may_be_used_by(principal):
            raise InvalidParams(_NO_TASK)
        return known, record, version

    async def _stored(self, task_id: SessionId) -> tuple[TaskRecord | None, int]:
        now = self.clock()
        session = await self.store.load(task_id, now=now)
        if session is None or session.mode is not Mode.TASK:
            return None, 0
        data = await self.store.load_data(task_id)
        if data is None or not data.value:
            return None, 0
        record = TaskRecord.read(data.value)
        if has_come(record.expires_at or math.inf, now):
            await self.store.end(task_id)
            return None, 0
        if record.has_ended:
            return record, data.version
        if not await self.bus.is_alive(record.runner):
            record.ends(
                TaskStatus.FAILED,
                now=now,
                ttl=self.policy.ttl,
                error=wire_error(OutcomeUnknown()),
            )
            if not await self.store.replace_data(
                task_id, record.written(), expected_version=data.version
            ):
                return await self._stored(task_id)
        elif record.answers or record.is_unwanted:
            await self.bus.try_send(TaskChanged(task_id=task_id), to=record.runner)
        return record, data.version

    async def _note(self, task_id: SessionId, change: Callable[[TaskRecord], bool]) -> None:
        """Note something about a task of another process."""
        while True:
            record, version = await self._stored(task_id)
            if record is None or record.has_ended or not change(record):
                return
            written = record.written()
            if await self.store.replace_data(task_id, written, expected_version=version):
                await self.bus.try_send(TaskChanged(task_id=task_id), to=record.runner)
                return

    async def changed(self, task_id: SessionId) -> None:
        """Another process noted something about a task of this one."""
        here = self._here.get(task_id)
        if here is not None:
            await here.refresh()

    # --- time --------------------------------------------------------------------------------

    async def run(self) -> None:
        """Keep tasks while they count, and forget them afterwards."""
        for session in await self.store.all_sessions(_STORED_AS):
            if session.session_id not in self._here and session.session_id not in self._kept:
                await self._look_at(session.session_id)
        while True:
            await asyncio.sleep(self._every)
            await self.round()

    async def round(self) -> None:
        now = self.clock()
        for task_id, (until, share) in list(self._kept.items()):
            if has_come(until, now):
                await self.store.end(task_id)
                del self._kept[task_id]
                self._shares[share] -= 1
                if self._shares[share] <= 0:
                    del self._shares[share]
        for task_id, until in list(self._found_here.items()):
            if has_come(until, now):
                await self._look_at(task_id)
        await self.store.touch([*self._here, *self._kept, *self._found_here], now=now)
        for task in list(self._here.values()):
            if task.record.questions and self.bus.is_shared:
                await task.refresh()

    async def _look_at(self, task_id: SessionId) -> None:
        """Forget a task of another process, now or when its time has passed. If that process is
        gone, it has failed.
        """
        record, _ = await self._stored(task_id)
        if record is None:
            self._found_here.pop(task_id, None)
        else:
            self._found_here[task_id] = record.expires_at or self.clock() + self.policy.ttl

    def stored_end(self, task: RunningTask) -> None:
        if self._here.pop(task.id, None) is not None:
            until = task.record.expires_at or self.clock()
            self._kept[task.id] = until, task.share

    async def close(self) -> None:
        """Store the last changes, as long as the store takes them."""
        waiting = [task.settled() for task in self._here.values()]
        if waiting:
            try:
                async with asyncio.timeout(_CLOSING):
                    await asyncio.gather(*waiting)
            except TimeoutError:
                logger.error("the ends of %d tasks are not stored", len(self._here))
        await self.background.close()


def _time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="milliseconds")


def _mark_unwanted(record: TaskRecord) -> bool:
    was, record.is_unwanted = record.is_unwanted, True
    return not was
