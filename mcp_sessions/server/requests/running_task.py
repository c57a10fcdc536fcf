"""A task that runs in this process: what its handler asks and says, and how it is stored.

:mod:`mcp_sessions.server.requests.tasks` keeps it, and has the rules.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from datetime import UTC, datetime
from typing import Any, Final, Protocol

from mcp_sessions import method_names
from mcp_sessions.background import Background
from mcp_sessions.core.messages import error_body, wire_error
from mcp_sessions.core.task import TASK, Json, TaskRecord, TaskStatus, pause_of, told
from mcp_sessions.errors import (
    INTERNAL_ERROR,
    REQUEST_CANCELLED,
    LimitReached,
    OutcomeUnknown,
    StoreUnavailable,
)
from mcp_sessions.ids import SessionId, digest
from mcp_sessions.policy import TaskPolicy
from mcp_sessions.seldom import Seldom
from mcp_sessions.server.calls.table import NOT_JSON
from mcp_sessions.server.upstream.accepted_questions import Askable, accepts
from mcp_sessions.server.upstream.call_in_rounds import written
from mcp_sessions.server.upstream.port import (
    REQUEST_TIMEOUT,
    NotAskable,
    PeerError,
    PeerRequest,
    UpstreamError,
)
from mcp_sessions.stores.contract import SessionStore

logger = logging.getLogger(__name__)
logger.addFilter(Seldom())

_AGAIN: Final = 1.0
"""Seconds until a write is tried again, and between two writes of what a task says."""

_CANCELLING: Final = 5.0
"""Seconds that a server has to cancel a task of its own."""

_MESSAGE: Final = 1_000
"""Characters of what a task says to people, at most."""

Ask = Callable[[str, Json], Awaitable[Json]]


class Keeper(Protocol):
    """What a task needs of those who keep it."""

    store: SessionStore
    clock: Callable[[], float]
    policy: TaskPolicy
    background: Background

    async def announce(self, task_id: SessionId, record: TaskRecord) -> None: ...

    def stored_end(self, task: RunningTask) -> None: ...


class Work(Protocol):
    """The running request of a task."""

    def stop_handler(self) -> object: ...


class RunningTask:
    """A task that runs in this process, or whose end is not stored yet."""

    def __init__(
        self, tasks: Keeper, task_id: SessionId, record: TaskRecord, asks: Askable
    ) -> None:
        self.id, self.record = task_id, record
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
        return {"resultType": TASK, **self.record.shown(self.id, time_of)}

    @property
    def told(self) -> Json:
        """The same for a client that knows no tasks."""
        return told(self.id)

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
        answers = await self._answers(asked)
        if not answers:
            # The server asks for another turn, and for nothing else.
            await asyncio.sleep(self._tasks.policy.poll_interval)
        following = {**(params or {}), "inputResponses": answers}
        following.pop("requestState", None)
        if "requestState" in asked:
            following["requestState"] = asked["requestState"]
        return following

    async def follow(self, created: Json, params: Json | None, ask: Ask) -> Json:
        """Wait for a task of the server's own. Its call had become a task here before.

        Args:
            params: Of the call.
            ask: Sends a request to the server.

        Raises:
            UpstreamError: It failed, or was cancelled.
        """
        named: Json = {"taskId": created["taskId"], "_meta": (params or {}).get("_meta") or {}}
        shown = created
        try:
            while True:
                match shown.get("status"):
                    case TaskStatus.COMPLETED.value:
                        return dict(shown["result"])
                    case TaskStatus.FAILED.value:
                        raise UpstreamError(shown["error"])
                    case TaskStatus.CANCELLED.value:
                        raise UpstreamError(error_body(REQUEST_CANCELLED, "Request cancelled"))
                    case TaskStatus.INPUT_REQUIRED.value if shown.get("inputRequests"):
                        answers = await self._answers(shown)
                        given = {**named, "inputResponses": answers}
                        await _surely(ask, method_names.UPDATE_TASK, given)
                    case _:
                        pass
                await asyncio.sleep(pause_of(shown, self._tasks.policy.poll_interval))
                shown = await _surely(ask, method_names.GET_TASK, named)
        except (asyncio.CancelledError, NotAskable):
            await cancel_there(created, params, ask)
            raise

    async def _answers(self, asked: Mapping[str, Any]) -> Json:
        """Ask the questions of a server's result. Return the answers by its keys."""
        requests: Mapping[str, Json] = asked.get("inputRequests") or {}
        for request in requests.values():
            if not accepts(self._asks, str(request.get("method")), request.get("params")):
                raise NotAskable(str(request.get("method")))
        waiting = [self._answer_to(request, None, key=key) for key, request in requests.items()]
        return dict(zip(requests, await asyncio.gather(*waiting), strict=True))

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
            if not self.record.has_ended:
                self.record.drops(name, now=clock())
                self.changed()

    def ends(self, result: Json | None, error: Json | None) -> None:
        """Its handler ended. Neither: it was cancelled."""
        self._ends_work()
        if self.record.has_ended:
            return
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

    def _ends_work(self) -> None:
        self._work = None
        for timer in (self._timer, self._saying):
            if timer is not None:
                timer.cancel()
        for future in self._waiting.values():
            if not future.done():
                # A server may have meant another of its calls.
                future.set_exception(PeerError(INTERNAL_ERROR, "the request that asks has ended"))

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
            if self.record.has_ended and not self._is_dirty:
                self._tasks.stored_end(self)

    async def _write_once(self) -> bool:
        store = self._tasks.store
        try:
            written = self.record.written()
            if await store.replace_data(self.id, written, expected_version=self.version):
                self.version += 1
                await self._tasks.announce(self.id, self.record)
                return True
            # If it is not there any more, there is nothing to write.
            self._is_dirty = await self.refresh()
            if self.record.has_ended and not self._is_dirty:
                # Perhaps by a write before this one, whose reply was lost.
                await self._tasks.announce(self.id, self.record)
            return True
        except StoreUnavailable as failed:
            logger.warning("task %s is not stored yet: %s", digest(self.id), failed)
            return False
        except (LimitReached, *NOT_JSON) as failed:
            logger.error("the outcome of task %s is lost: %s", digest(self.id), failed)
            lost = error_body(INTERNAL_ERROR, "the outcome is too large to keep")
            self.stop(lost)
            self.record.loses(lost)
            self._is_dirty = True
            return True

    async def refresh(self) -> bool:
        """Take what another process noted about it. Return whether it is still there to be written.

        Raises:
            StoreUnavailable: It is not known.
        """
        stored = await self._tasks.store.load_data(self.id)
        if stored is None or not stored.value:
            return False
        self.version = stored.version
        noted = TaskRecord.read(stored.value)
        if noted.has_ended:
            self._ended_there(noted)
            return False
        self.answered(noted.answers)
        if noted.is_unwanted and not self.record.is_unwanted:
            self.unwanted()
        return True

    def _ended_there(self, noted: TaskRecord) -> None:
        """It has failed: another process took this one for dead. It ends once."""
        work = self._work
        self._ends_work()
        self.record, self._is_dirty = noted, False
        self._tasks.stored_end(self)
        if work is not None:
            logger.warning(
                "task %s is cancelled: another process took this one for dead", digest(self.id)
            )
            work.stop_handler()

    async def settled(self, timeout: float | None = None) -> bool:
        """Wait until it is stored as it is. Return whether it is."""
        if self._writing is not None:
            await asyncio.wait({self._writing}, timeout=timeout)
        return self._writing is None


async def cancel_there(created: Json, params: Json | None, ask: Ask) -> None:
    """Cancel a task of the server's own, of which no client gets the outcome.

    Args:
        params: Of its call.
        ask: Sends a request to the server.
    """
    named: Json = {"taskId": created["taskId"], "_meta": (params or {}).get("_meta") or {}}
    with suppress(UpstreamError, TimeoutError):
        async with asyncio.timeout(_CANCELLING):
            await _surely(ask, method_names.CANCEL_TASK, named)


async def _surely(ask: Ask, method: str, params: Json) -> Json:
    """Ask a server about a task of its own. If the store is away, it may not be known which process
    has the server.
    """
    while True:
        try:
            return await ask(method, params)
        except StoreUnavailable as failed:
            logger.warning("a server is asked later about a task of its own: %s", failed)
            await asyncio.sleep(_AGAIN)


def time_of(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="milliseconds")
