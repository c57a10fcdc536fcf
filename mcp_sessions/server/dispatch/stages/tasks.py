"""Turn long calls of tools into tasks, and serve the methods of tasks.

Clients that know no tasks have two plain tools, which ask for a task and cancel it. Rules, owned by
``tests/server/dispatch/stages/test_task_tools.py``:

1. A client that does not declare the extension has the two tools. Their names are the layer's: a
   tool of the server with such a name is not listed, and not called.
2. A call of such a client that runs long is answered with a text that has the task's id. So no tool
   of its list says what it answers (``outputSchema``).
3. What ``task_status`` answers of a task that completed is the result of its call.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from mcp_sessions import method_names
from mcp_sessions.core.message import Message
from mcp_sessions.core.messages import error_body, members_of
from mcp_sessions.core.named import header_value, name_in
from mcp_sessions.core.task import (
    CANCEL,
    TASK_ID,
    TASK_TOOLS,
    Json,
    declares_tasks,
    missing_capability,
    outcome_as_text,
    text,
    with_task_tools,
)
from mcp_sessions.errors import HEADER_MISMATCH, MISSING_CAPABILITY, InvalidParams
from mcp_sessions.ids import SessionId
from mcp_sessions.server.calls.table import Call, Outcome, Stage, Tasking
from mcp_sessions.server.connection.connection import Inbound
from mcp_sessions.server.requests.tasks import Tasks
from mcp_sessions.server.upstream.port import UpstreamError
from mcp_sessions.stores.records import SessionRecord

_NAME_HEADER = "mcp-name"


@dataclass(slots=True, eq=False, repr=False)
class TaskCalls(Stage):
    """Decides whether a call may become a task. Which one does is a matter of time, or of its tool.

    It comes last: a call that is refused, or answered again, starts no task.
    """

    _tasks: Tasks

    async def before(self, call: Call) -> Outcome | None:
        request, inbound, policy = call.request, call.inbound, self._tasks.policy
        if request.method == method_names.LISTEN:
            ids = await listened(self._tasks, request, inbound)
            call.tasking = Tasking(self._tasks, ids=ids)
        if request.method != method_names.CALL_TOOL:
            return None
        tool = name_in(request.method, request.params)
        if tool is None:
            return None
        is_told = not knows_tasks(inbound)
        if is_told and not policy.tools:
            if tool in policy.required:
                raise _refused()
            return None
        call.tasking = tasking = Tasking(self._tasks, is_told=is_told)
        if tool in policy.always or tool in policy.required:
            tasking.running = await self._tasks.create(inbound, call.record, None)
        elif tool not in policy.never:
            tasking.after = policy.after
        return None


@dataclass(slots=True, eq=False, repr=False)
class TaskMethods(Stage):
    """Answers ``tasks/get``, ``tasks/update`` and ``tasks/cancel``. A task of the server's own is
    the server's: its requests go on to it.
    """

    _tasks: Tasks

    async def before(self, call: Call) -> Outcome | None:
        request, inbound = call.request, call.inbound
        if not declares_tasks(inbound.peer.capabilities):
            raise _refused()
        params: dict[str, Any] = request.params or {}
        task_id: object = params.get("taskId")
        self._check_header(call, task_id)
        if await self._tasks.is_of_server(task_id, inbound.principal):
            return None
        match request.method:
            case method_names.GET_TASK:
                result = await self._tasks.get(task_id, inbound.principal)
            case method_names.UPDATE_TASK:
                if not isinstance(params.get("inputResponses"), dict):
                    raise InvalidParams("inputResponses is no object")
                answers = members_of(params["inputResponses"])
                result = await self._tasks.update(task_id, answers, inbound.principal)
            case _:
                result = await self._tasks.cancel(task_id, inbound.principal)
        return Outcome(result, None)

    def may_have_begun(self, call: Call) -> bool:
        return call.request.method != method_names.GET_TASK

    def _check_header(self, call: Call, task_id: object) -> None:
        request = call.inbound.http.request
        if request is None or not isinstance(task_id, str):
            return
        if request.headers.get(_NAME_HEADER) != header_value(task_id):
            why = "Mcp-Name does not match the taskId of the params"
            raise UpstreamError(error_body(HEADER_MISMATCH, why))


@dataclass(slots=True, eq=False, repr=False)
class TaskTools(Stage):
    """Gives tasks to clients that know none. Stands before the stage that makes tasks.

    Args:
        stamp: Adds the session's ``_meta`` to a result (ASC12).
    """

    _tasks: Tasks
    _stamp: Callable[[Json, SessionRecord], Json]

    async def before(self, call: Call) -> Outcome | None:
        request = call.request
        if knows_tasks(call.inbound):
            return None
        if request.method == method_names.LIST_TOOLS:
            call.stages = (*call.stages, self)
        tool = name_in(request.method, request.params)
        if request.method != method_names.CALL_TOOL or tool not in TASK_TOOLS:
            return None
        task_id = members_of((request.params or {}).get("arguments")).get(TASK_ID)
        result = await self._answer(call, tool, task_id)
        if call.inbound.peer.modern:
            result = {"resultType": "complete", **result}
        if call.named and call.record is not None:
            result = self._stamp(result, call.record)
        return Outcome(result, None)

    async def _answer(self, call: Call, tool: str | None, task_id: object) -> Json:
        principal = call.inbound.principal
        try:
            if tool == CANCEL:
                await self._tasks.cancel(task_id, principal)
                return text("The task is asked to stop.")
            return outcome_as_text(await self._tasks.outcome(task_id, principal))
        except InvalidParams:
            return text("There is no such task.", is_error=True)

    def may_have_begun(self, call: Call) -> bool:
        return name_in(call.request.method, call.request.params) == CANCEL

    def after(self, call: Call, outcome: Outcome) -> Outcome:
        listed = with_task_tools(outcome.result or {})
        return outcome if listed is None else outcome._replace(result=listed)


def knows_tasks(inbound: Inbound) -> bool:
    return inbound.peer.modern and declares_tasks(inbound.peer.capabilities)


async def listened(
    tasks: Tasks, request: Message, inbound: Inbound, session: SessionId | None = None
) -> list[SessionId] | None:
    """Return the tasks that a listen reports. None: it names none.

    It raises as :meth:`Tasks.agreed` does.

    Raises:
        UpstreamError: It names tasks, and its client does not declare the extension.
    """
    wanted = members_of((request.params or {}).get("notifications")).get("taskIds")
    if wanted is None:
        return None
    if not declares_tasks(inbound.peer.capabilities):
        raise _refused()
    return await tasks.agreed(wanted, inbound.principal, session)


def _refused() -> UpstreamError:
    why = "Missing required client capability"
    return UpstreamError(error_body(MISSING_CAPABILITY, why, missing_capability()))
