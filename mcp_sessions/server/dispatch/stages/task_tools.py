"""Give tasks to clients that know none: two plain tools ask for a task, and cancel it.

Rules, owned by ``tests/server/dispatch/stages/test_task_tools.py``:

1. A client that does not declare the extension has the two tools. Their names are the layer's: a
   tool of the server with such a name is not listed, and not called.
2. A call of such a client that runs long is answered with a text that has the task's id. So no tool
   of its list says what it answers (``outputSchema``).
3. What ``task_status`` answers of a task that completed is the result of its call.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from mcp_sessions import method_names
from mcp_sessions.core.messages import members_of
from mcp_sessions.core.named import name_in
from mcp_sessions.core.task import Json
from mcp_sessions.core.task_tools import (
    CANCEL,
    TASK_ID,
    TASK_TOOLS,
    outcome_as_text,
    text,
    with_task_tools,
)
from mcp_sessions.errors import InvalidParams
from mcp_sessions.server.calls.table import Call, Outcome, Stage
from mcp_sessions.server.dispatch.stages.tasks import knows_tasks
from mcp_sessions.server.requests.tasks import Tasks
from mcp_sessions.stores.records import SessionRecord


@dataclass(slots=True, eq=False, repr=False)
class TaskTools(Stage):
    """Stands before the stage that makes tasks.

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
