"""``mcp_sessions.core.task``: two tools for clients without tasks."""

from typing import Any

import pytest

from mcp_sessions.core.task import TaskRecord, TaskStatus, outcome_as_text, with_task_tools


def test_a_list_of_tools_ends_with_the_two() -> None:
    theirs = {"name": "echo", "outputSchema": {"type": "object"}}
    listed = with_task_tools({"tools": [theirs, {"name": "task_cancel", "x": 1}], "ttlMs": 5})
    assert listed is not None and listed["ttlMs"] == 5
    assert [tool["name"] for tool in listed["tools"]] == ["echo", "task_status", "task_cancel"]
    assert "outputSchema" not in listed["tools"][0] and "x" not in listed["tools"][2]


def test_only_the_last_page_has_them() -> None:
    listed = with_task_tools({"tools": [{"name": "echo"}], "nextCursor": "2"})
    assert listed is not None and [tool["name"] for tool in listed["tools"]] == ["echo"]


@pytest.mark.parametrize("tools", [None, {}, "echo"])
def test_what_is_no_list_of_tools_stays(tools: object) -> None:
    assert with_task_tools({"tools": tools}) is with_task_tools({}) is None


@pytest.mark.parametrize(
    ("status", "message", "said", "is_error"),
    [
        (TaskStatus.FAILED, "no disk", "The task failed: no disk", True),
        (TaskStatus.CANCELLED, "", "The task was cancelled.", True),
        (TaskStatus.WORKING, "", "The task still runs. Call task_status again.", False),
        (
            TaskStatus.INPUT_REQUIRED,
            "half",
            "The task still runs. Call task_status again. It says: half",
            False,
        ),
    ],
)
def test_what_became_of_a_task_is_said_in_words(
    status: TaskStatus, message: str, said: str, is_error: bool
) -> None:
    content = [{"type": "text", "text": said}]
    assert outcome_as_text(_task(status=status, message=message)) == {
        "content": content,
        "isError": is_error,
    }


def test_the_result_of_a_task_is_that_of_its_call() -> None:
    result: dict[str, Any] = {"content": [], "isError": True}
    assert outcome_as_text(_task(status=TaskStatus.COMPLETED, result=result)) == result


def _task(**members: Any) -> TaskRecord:
    return TaskRecord(
        owner=[None], scopes=[], runner="", created_at=1, updated_at=1, poll_interval=1, **members
    )
