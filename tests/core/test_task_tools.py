"""``mcp_sessions.core.task_tools``: two tools for clients without tasks."""

import pytest

from mcp_sessions.core.task_tools import with_task_tools


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
