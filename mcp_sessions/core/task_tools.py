"""What clients without tasks have instead: two plain tools, and texts.

:mod:`mcp_sessions.server.dispatch.stages.tasks` serves them, and has the rules.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, cast

from mcp_sessions.core.messages import members_of
from mcp_sessions.core.task import Json, TaskRecord, TaskStatus

STATUS: Final = "task_status"
CANCEL: Final = "task_cancel"
TASK_ID: Final = "task_id"

_INPUT: Final = {
    "type": "object",
    "properties": {
        TASK_ID: {"type": "string", "description": "What the answer to the call named."}
    },
    "required": [TASK_ID],
}
_TOOLS: Final[list[Json]] = [
    {
        "name": STATUS,
        "description": "Waits a few seconds for a task that runs in the background. Returns the "
        "result of its call, or says that it still runs: then call this again.",
        "inputSchema": _INPUT,
        "annotations": {"readOnlyHint": True, "openWorldHint": False},
    },
    {
        "name": CANCEL,
        "description": "Cancels a task that runs in the background.",
        "inputSchema": _INPUT,
        "annotations": {"idempotentHint": True, "openWorldHint": False},
    },
]
TASK_TOOLS: Final = frozenset({STATUS, CANCEL})


def with_task_tools(listed: Mapping[str, Any]) -> Json | None:
    """Return a list of tools with the layer's own. None: it is no such list."""
    tools = listed.get("tools")
    if not isinstance(tools, list):
        return None
    theirs = [_without_output(tool) for tool in cast("list[Any]", tools)]
    ours = _TOOLS if listed.get("nextCursor") is None else []
    kept = [tool for tool in theirs if members_of(tool).get("name") not in TASK_TOOLS]
    return {**listed, "tools": [*kept, *ours]}


def _without_output(tool: Any) -> Any:
    if not isinstance(tool, dict):
        return tool
    known = cast("Json", tool)
    return {name: value for name, value in known.items() if name != "outputSchema"}


def outcome_as_text(record: TaskRecord) -> Json:
    match record.status:
        case TaskStatus.COMPLETED:
            return dict(record.result or {})
        case TaskStatus.FAILED:
            return text(f"The task failed: {record.message}", is_error=True)
        case TaskStatus.CANCELLED:
            return text("The task was cancelled.", is_error=True)
        case _:
            said = f" It says: {record.message}" if record.message else ""
            return text(f"The task still runs. Call {STATUS} again.{said}")


def told(task_id: str) -> Json:
    """Return what a call is answered that became a task."""
    return text(
        f"The call still runs in the background, as task {task_id}. "
        f"Call {STATUS} with this {TASK_ID} for its result, or {CANCEL} to stop it."
    )


def text(said: str, *, is_error: bool = False) -> Json:
    return {"content": [{"type": "text", "text": said}], "isError": is_error}
