"""Keep tasks: the calls of this process that were answered with a task, and all that is stored.

Rules, owned by ``tests/server/requests/test_tasks.py``:

1. A task is stored before its client learns of it, and so are its questions and its end.
2. A task is its owner's. To everybody else an unknown, an expired and a foreign task are the same.
3. A task whose process is gone has failed, with -31012. It never runs again.
4. What another process notes about a task reaches its runner by a message, or by the next round.
   What its runner stores reaches those who listen at other processes the same way.
5. The wrapped server may answer with a task of its own. Only its owner is noted: requests about it
   are the server's.

A task is a session of its own in the store (:attr:`~mcp_sessions.core.states.Mode.TASK`). Its id is
the task's, and its data is the :class:`~mcp_sessions.core.task.TaskRecord`.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import math
from collections.abc import Awaitable, Callable, Hashable, Mapping
from functools import partial
from typing import Any, Final, cast

from mcp_sessions import method_names
from mcp_sessions.background import Background
from mcp_sessions.core.life import has_come
from mcp_sessions.core.messages import wire_error
from mcp_sessions.core.resume import is_session_id
from mcp_sessions.core.states import Mode
from mcp_sessions.core.task import Json, TaskRecord, TaskStatus, declares_tasks, seconds_of
from mcp_sessions.errors import (
    InvalidParams,
    LimitReached,
    OutcomeUnknown,
    StoreRefused,
    StoreUnavailable,
)
from mcp_sessions.ids import SessionId, digest
from mcp_sessions.policy import TaskPolicy
from mcp_sessions.principal import Principal
from mcp_sessions.security import mint_session_id
from mcp_sessions.seldom import Seldom
from mcp_sessions.server.calls.shares import share_of
from mcp_sessions.server.cluster.replica import Replica
from mcp_sessions.server.cluster.replica_messages import TaskChanged
from mcp_sessions.server.connection.connection import Inbound
from mcp_sessions.server.requests.running_task import RunningTask, time_of
from mcp_sessions.server.requests.task_listeners import Say, TaskListeners
from mcp_sessions.server.upstream.accepted_questions import asks_of
from mcp_sessions.stores.limits import most_of_one
from mcp_sessions.stores.records import SessionRecord

Publish = Callable[[SessionId, str, Mapping[str, Any]], Awaitable[object]]
"""Stores an event of a session, and sends it."""

logger = logging.getLogger(__name__)
logger.addFilter(Seldom())

_STORED_AS: Final = Principal(issuer="mcp-sessions", client_id="tasks")
"""The principal of the sessions that are tasks. The task's own is in its record: so tasks do not
count as the sessions of a principal.
"""

_EVERY: Final = 30.0
"""Seconds between two looks at the tasks that are to be kept, or to be forgotten."""

_ENDING: Final = 1.0
"""Seconds that a poll waits until the end of a task, or its question, is stored."""

_AGAIN: Final = 1.0
"""Seconds until a task is stored, if the store was away."""

_PATIENCE: Final = 10.0
"""Seconds that a client without tasks waits for the end of one, at the most."""

_CLOSING: Final = 5.0
"""Seconds that the last writes have when the process stops."""

_NO_TASK: Final = "there is no such task"


class Tasks:
    def __init__(self, replica: Replica, policy: TaskPolicy, publish: Publish) -> None:
        self.store, self.bus, self.clock = replica.store, replica.bus, replica.clock
        self.policy, self._publish = policy, publish
        self._listeners, self._most_listened = TaskListeners(), replica.policy.max_subscriptions
        self.background = Background()
        self._process = replica.process
        self._every = min(_EVERY, replica.policy.idle_timeout / 10)
        self._here: dict[SessionId, RunningTask] = {}
        self._kept: dict[SessionId, float] = {}
        """Tasks of this process that have ended and are stored, or of which no client knows → when
        they are forgotten."""

        most = most_of_one(Mode.TASK, replica.policy) or policy.max_tasks
        self._most = min(policy.max_tasks, most)
        self._shares: dict[Hashable, dict[SessionId, None]] = {}
        """Client → its tasks, oldest first."""

        self._owners: dict[SessionId, Hashable] = {}

        self._found_here: dict[SessionId, float] = {}
        """Tasks that were there when this process started → when they are looked at again."""

        self._runners = set[str]()
        """Other processes that run tasks."""

        self._unannounced = set[SessionId]()
        """Tasks of dead processes that this one fails, until their end is announced."""

    # --- a call becomes a task ---------------------------------------------------------------

    async def create(
        self, inbound: Inbound, session: SessionRecord | None, waits: Callable[[], bool] | None
    ) -> RunningTask:
        """Store a new task of a caller.

        Args:
            session: The session of its call, which its client knows.
            waits: Whether it may still be stored later, if the store is away. However often that
                is tried, it has the room of one task. None: it may not.

        Raises:
            LimitReached: There are too many, or too many of the caller's.
            StoreUnavailable: It is not known whether it is stored.
        """
        task_id, principal, peer = mint_session_id(), inbound.principal, inbound.peer
        await self._make_room(task_id, share_of(principal, inbound.scope))
        # A log is read with fewer scopes than its session's in no case, but perhaps with fewer than
        # this call's.
        if session is not None and not session.principal.scopes >= principal.scopes:
            session = None
        record = self._new(principal, session.session_id if session is not None else None)
        # A client without tasks has no way to answer a question of one.
        knows = peer.modern and declares_tasks(peer.capabilities)
        asks = asks_of(peer.capabilities if knows else {})
        task = RunningTask(self, task_id, record, asks)
        self._here[task_id] = task
        try:
            while True:
                try:
                    await self._store(task_id, record)
                    break
                except StoreUnavailable as failed:
                    if waits is None or not waits():
                        raise
                    logger.warning("a call became no task yet: %s", failed)
                await asyncio.sleep(_AGAIN)
        except BaseException:
            # The store may have it.
            self.discard(task)
            raise
        task.version = 1
        return task

    async def _make_room(self, task_id: SessionId, share: Hashable) -> None:
        """Count a new task. If there are too many, the client with the most loses its oldest.

        Raises:
            LimitReached: The client itself has as many as any other, or as many as one may have.
            StoreUnavailable: It loses nothing. What was to go may not be stored any more.
        """
        most = self.policy.max_tasks_per_principal
        own = self._shares.get(share, {})
        if len(own) >= most:
            raise LimitReached("max_tasks_per_principal", most)
        loser = losing = None
        if len(self._owners) >= self._most:
            heaviest = max(self._shares.values(), key=len)
            if len(heaviest) <= len(own) + 1:
                raise LimitReached("max_tasks", self.policy.max_tasks)
            loser = next(iter(heaviest))
            losing = self._uncount(loser)
        self._shares.setdefault(share, {})[task_id] = None
        self._owners[task_id] = share
        if loser is not None:
            await self._lose(loser, losing, instead_for=task_id)

    async def _lose(self, loser: SessionId, share: Hashable, *, instead_for: SessionId) -> None:
        try:
            await self.store.end(loser)
        except BaseException:
            self._uncount(instead_for)
            if loser in self._here or loser in self._kept:
                # It stays, and is the oldest of its client again.
                self._owners[loser] = share
                self._shares[share] = {loser: None, **self._shares.get(share, {})}
            raise
        logger.warning(
            "task %s is forgotten: its owner has the most of too many",
            digest(loser),
        )
        here = self._here.pop(loser, None)
        if here is not None:
            here.stop(wire_error(LimitReached("max_tasks", self.policy.max_tasks)))
        self._kept.pop(loser, None)
        self._listeners.changed(loser)

    def _uncount(self, task_id: SessionId) -> Hashable:
        share = self._owners.pop(task_id, None)
        tasks = self._shares.get(share, {})
        tasks.pop(task_id, None)
        if not tasks:
            self._shares.pop(share, None)
        return share

    def _new(self, principal: Principal, session: SessionId | None = None) -> TaskRecord:
        return TaskRecord.new(
            principal,
            runner=self._process,
            now=self.clock(),
            poll_interval=self.policy.poll_interval,
            session=session,
        )

    async def _store(self, task_id: SessionId, record: TaskRecord) -> None:
        now = self.clock()
        await self.store.create(Mode.TASK, _STORED_AS, peer=None, now=now, session_id=task_id)
        await self.store.replace_data(task_id, record.written(), expected_version=0)
        if not record.is_of_server:
            # The others learn who runs tasks.
            await self.bus.try_send(TaskChanged(task_id=task_id))

    # --- tasks of the wrapped server's own ---------------------------------------------------

    async def note_of_server(self, created: Json, principal: Principal, scope: Any) -> None:
        """Note whose a task is with which the server answered. It raises as :meth:`create` does."""
        task_id, record = _of_server(created.get("taskId"), principal), self._new(principal)
        known, _ = await self._stored(task_id)
        if known is not None and known.may_be_used_by(principal):
            return
        await self._make_room(task_id, share_of(principal, scope))
        most = self.policy.max_time
        lasts = seconds_of(created.get("ttlMs"), most) or most
        record.is_of_server = True
        self._kept[task_id] = record.expires_at = self.clock() + lasts + self.policy.ttl
        try:
            await self._store(task_id, record)
        except BaseException:
            # The store may have it: the next round removes it, and frees its room.
            self._kept[task_id] = self.clock()
            raise

    async def is_of_server(self, task_id: object, principal: Principal) -> bool:
        """Whether this is a task of the server's own, and the principal's.

        Raises:
            StoreUnavailable: It is not known.
        """
        if not is_session_id(task_id) or SessionId(task_id) in self._here:
            return False
        record, _ = await self._stored(_of_server(task_id, principal))
        return record is not None and record.may_be_used_by(principal)

    def discard(self, task: RunningTask) -> None:
        """Remove a task of which no client knows: in the next round, as the store may be away."""
        if self._here.pop(task.id, None) is not None:
            self._kept[task.id] = self.clock()

    # --- what clients ask --------------------------------------------------------------------

    async def get(self, task_id: object, principal: Principal) -> Json:
        """Return the task as ``tasks/get`` shows it.

        Raises:
            InvalidParams: There is none, it has expired, or it is somebody else's.
            StoreUnavailable: It is not known.
        """
        known, record = await self._to_show(task_id, principal)
        return {"resultType": "complete", **record.shown_whole(known, time_of)}

    async def outcome(self, task_id: object, principal: Principal) -> TaskRecord:
        """Wait a while for the end of a task. Return it as it is then.

        It raises as :meth:`get` does.
        """
        known, _, _ = await self._found(task_id, principal)
        try:
            async with asyncio.timeout(_PATIENCE):
                await self._listeners.serve([known], partial(self._shown, principal), _ignore)
        except TimeoutError:
            pass
        return (await self._found(task_id, principal))[1]

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

    async def _to_show(self, task_id: object, principal: Principal) -> tuple[SessionId, TaskRecord]:
        known, record, _ = await self._found(task_id, principal)
        here = self._here.get(known)
        if here is None or not record.questions or not self.bus.is_shared:
            return known, record
        if not await here.settled(_ENDING):
            # Another process may get the answer. It would not know the question.
            raise StoreUnavailable("a question of a task is not stored yet")
        return known, here.record

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
            if self.bus.is_shared and not here.record.has_ended:
                # Others may have taken this process for dead, and have shown its end.
                await here.refresh()
            if here.record.has_ended and not await here.settled(_ENDING):
                # If this process died now, another end would be stored.
                raise StoreUnavailable("the end of a task is not stored yet")
            record, version = here.record, here.version
            if has_come(record.expires_at or math.inf, self.clock()):
                record = None
        else:
            record, version = await self._stored(known)
        if record is None or record.is_of_server or not record.may_be_used_by(principal):
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
            self._unannounced.discard(task_id)
            return None, 0
        if record.has_ended or record.is_of_server:
            if task_id in self._unannounced:
                await self.announce(task_id, record)
                self._unannounced.discard(task_id)
            return record, data.version
        if not await self.bus.is_alive(record.runner):
            record.ends(
                TaskStatus.FAILED,
                now=now,
                ttl=self.policy.ttl,
                error=wire_error(OutcomeUnknown()),
            )
            written, version = record.written(), data.version
            # If the reply is lost, the next look finds the end, and announces it.
            self._unannounced.add(task_id)
            if not await self.store.replace_data(task_id, written, expected_version=version):
                self._unannounced.discard(task_id)
            return await self._stored(task_id)
        if record.answers or record.is_unwanted:
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

    async def changed(self, task_id: SessionId, sender: str) -> None:
        """Another process noted something about a task of this one, or changed one of its own."""
        self._runners.add(sender)
        here = self._here.get(task_id)
        if here is not None:
            await here.refresh()
        self._listeners.changed(task_id)

    async def announce(self, task_id: SessionId, record: TaskRecord) -> None:
        """Report a change that is stored to those who listen, and to the log of its session."""
        self._listeners.changed(task_id)
        await self.bus.try_send(TaskChanged(task_id=task_id))
        if record.session is not None:
            shown = record.shown_whole(task_id, time_of)
            await self._publish(SessionId(record.session), method_names.TASK_CHANGED, shown)

    # --- listens -----------------------------------------------------------------------------

    async def agreed(
        self, wanted: object, principal: Principal, session: SessionId | None = None
    ) -> list[SessionId]:
        """Return those of some tasks that a listen of the principal reports.

        Args:
            session: The session whose log it reads. None: it is outside of sessions.

        Raises:
            InvalidParams: It names no tasks.
            LimitReached: It names more than ``max_subscriptions``.
            StoreUnavailable: It is not known.
        """
        named = cast("list[object]", wanted) if isinstance(wanted, list) else [None]
        if not all(isinstance(each, str) for each in named):
            raise InvalidParams("taskIds is no list of texts")
        if len(named) > self._most_listened:
            raise LimitReached("max_subscriptions", self._most_listened)
        agreed: list[SessionId] = []
        for task_id in dict.fromkeys(named):
            try:
                known, record, _ = await self._found(task_id, principal)
            except InvalidParams:
                continue
            if session is None or record.session == session:
                agreed.append(known)
        return agreed

    def report(
        self, task_ids: list[SessionId], principal: Principal, say: Say
    ) -> asyncio.Task[None]:
        """Report tasks on a listen of the principal, until the listen ends."""
        serving = self._listeners.serve(task_ids, partial(self._shown, principal), say)
        return self.background.run("a listen to tasks", serving)

    async def _shown(self, principal: Principal, task_id: SessionId) -> tuple[Json, bool] | None:
        try:
            _, record = await self._to_show(task_id, principal)
        except InvalidParams:
            return None
        return record.shown_whole(task_id, time_of), record.has_ended

    # --- time --------------------------------------------------------------------------------

    async def run(self) -> None:
        """Keep tasks while they count, and forget them afterwards."""
        await self._look_at_all()
        while True:
            await asyncio.sleep(self._every)
            await self.round()

    async def round(self) -> None:
        now = self.clock()
        for task_id, until in list(self._kept.items()):
            if has_come(until, now):
                await self.store.end(task_id)
                self._kept.pop(task_id, None)
                self._uncount(task_id)
        for task_id, until in list(self._found_here.items()):
            if has_come(until, now):
                await self._look_at(task_id)
        await self.store.touch([*self._here, *self._kept, *self._found_here], now=now)
        if self.bus.is_shared:
            await self.refresh()

    async def refresh(self) -> None:
        """Read what other processes noted about tasks of this one: a message may be lost."""
        for task in list(self._here.values()):
            await task.refresh()

    async def check_runners(self) -> None:
        """Fail the tasks of a process that is gone, also those that nobody asks for."""
        gone = [each for each in list(self._runners) if not await self.bus.is_alive(each)]
        if gone:
            await self._look_at_all()
            self._runners.difference_update(gone)

    async def _look_at_all(self) -> None:
        for session in await self.store.all_sessions(_STORED_AS):
            if session.session_id not in self._here and session.session_id not in self._kept:
                await self._look_at(session.session_id)

    async def _look_at(self, task_id: SessionId) -> None:
        """Forget a task of another process, now or when its time has passed. If that process is
        gone, it has failed.
        """
        try:
            record, _ = await self._stored(task_id)
        except (StoreRefused, TypeError, ValueError, LookupError) as failed:
            # Another release's, or sealed with a key that is gone. The others are looked at, too.
            logger.error("task %s is not kept: %s", digest(task_id), failed)
            record = None
        if record is None:
            self._found_here.pop(task_id, None)
        else:
            self._found_here[task_id] = record.expires_at or self.clock() + self.policy.ttl

    def stored_end(self, task: RunningTask) -> None:
        if self._here.pop(task.id, None) is not None:
            self._kept[task.id] = task.record.expires_at or self.clock()

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


def _of_server(task_id: object, principal: Principal) -> SessionId:
    """Return the name under which a task of the server's own is noted: its id is any text, and a
    server that has a process for each session may give two owners the same one.
    """
    name = repr(("task", principal.client_id, principal.issuer, principal.subject, task_id))
    return SessionId(hashlib.sha256(name.encode("utf-8", "surrogatepass")).hexdigest())


async def _ignore(shown: Json) -> None:
    """Its end alone is waited for."""


def _mark_unwanted(record: TaskRecord) -> bool:
    was, record.is_unwanted = record.is_unwanted, True
    return not was
