from mcp_sessions_conformance.fault import Case, Fault, Rewritten
from mcp_sessions_conformance.faults.shared_faults import (
    LISTEN,
    code_of,
    in_results,
    one_principal,
    params_of,
    strip,
    tool,
)
from mcp_sessions_conformance.values import KEY, Json, as_object

_CHANGED = "notifications/tasks"
_ACKNOWLEDGED = "notifications/subscriptions/acknowledged"


def _knows_foreign_ones(case: Case) -> Rewritten:
    known = case.memory.setdefault("tasks", set())
    task_id = as_object(case.message.get("result")).get("taskId")
    if task_id is not None:
        known.add(task_id)
    asked = params_of(case.asked or {}).get("taskId")
    if code_of(case.message) != -32602 or asked not in known:
        return None
    case.message["error"]["message"] = "This task is not yours"
    return [case.message]


def _runs_on(result: Json, case: Case) -> None:
    if as_object(result.get("error")).get("code") == -32043:
        del result["error"]
        result["status"] = "working"


def _learns_filter(case: Case) -> Rewritten:
    if case.message.get("method") == LISTEN:
        wanted = as_object(params_of(case.message).get("notifications"))
        case.memory["wanted"] = wanted.get("taskIds")
    return None


def _agrees_to_all(case: Case) -> Rewritten:
    if case.message.get("method") != _ACKNOWLEDGED:
        return None
    params_of(case.message)["notifications"]["taskIds"] = case.memory["wanted"]
    return [case.message]


def _first_task_is_replaced(case: Case) -> Rewritten:
    created = as_object(case.message.get("result"))
    if created.get("resultType") == "task":
        case.memory.setdefault("first", created["taskId"])
    is_first = params_of(case.message).get("taskId") == case.memory.get("first")
    return [] if case.message.get("method") == _CHANGED and is_first else None


CAUGHT_BY: tuple[tuple[Fault, str], ...] = (
    (
        Fault("tasks-are-everybodys", "asks nobody who names a task", http=one_principal),
        "a-task-is-its-principals",
    ),
    (
        Fault(
            "knows-foreign-tasks",
            "says that a task is somebody else's",
            to_client=_knows_foreign_ones,
        ),
        "a-task-is-its-principals",
    ),
    (
        Fault(
            "a-task-for-each-sending",
            "makes a task each time that a call is sent",
            to_server=strip(KEY, lambda case: tool(case.message) == "hold"),
        ),
        "a-repeated-call-has-the-same-task",
    ),
    (
        Fault(
            "tasks-outlive-sessions",
            "lets a task run on after its session",
            to_client=in_results(("tasks/get",), _runs_on),
        ),
        "a-task-ends-with-its-session",
    ),
    (
        Fault(
            "silent-tasks",
            "stores no event of a task",
            to_client=lambda case: [] if case.message.get("method") == _CHANGED else None,
        ),
        "a-session-hears-of-its-task",
    ),
    (
        Fault(
            "reports-all-tasks",
            "agrees to report any task in a session",
            to_server=_learns_filter,
            to_client=_agrees_to_all,
        ),
        "a-session-hears-of-no-other-task",
    ),
    (
        Fault(
            "one-event-for-all-tasks",
            "replaces what it said of one task by what it says of another one",
            to_client=_first_task_is_replaced,
        ),
        "changes-of-two-tasks-both-stay",
    ),
)
"""Fault, and the id of a vector that fails because of it."""
