"""Turn long calls of tools into tasks, and serve the methods of tasks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from mcp_sessions import method_names
from mcp_sessions.core.message import Message
from mcp_sessions.core.messages import error_body, members_of
from mcp_sessions.core.named import header_value, name_in
from mcp_sessions.core.task import declares_tasks, missing_capability
from mcp_sessions.errors import HEADER_MISMATCH, MISSING_CAPABILITY, InvalidParams
from mcp_sessions.ids import SessionId
from mcp_sessions.server.calls.table import Call, Outcome, Stage, Tasking
from mcp_sessions.server.connection.connection import Inbound
from mcp_sessions.server.requests.tasks import Tasks
from mcp_sessions.server.upstream.port import UpstreamError

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
            tasking.running = await self._tasks.create(
                inbound.principal, inbound.peer, inbound.scope, call.record
            )
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
            text = "Mcp-Name does not match the taskId of the params"
            raise UpstreamError(error_body(HEADER_MISMATCH, text))


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
    text = "Missing required client capability"
    return UpstreamError(error_body(MISSING_CAPABILITY, text, missing_capability()))
