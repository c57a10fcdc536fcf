"""What the params of a request name, and how a header says it."""

from typing import Any

import pytest

from mcp_sessions.core.named import LISTS, header_value, name_in, repeated_name, updated_uri
from mcp_sessions.method_names import RESOURCE_UPDATED, TOOLS_CHANGED


@pytest.mark.parametrize(
    ("method", "params", "name"),
    [
        ("tools/call", {"name": "echo", "uri": "x:y"}, "echo"),
        ("prompts/get", {"name": "greet"}, "greet"),
        ("resources/read", {"uri": "note:1", "name": "echo"}, "note:1"),
        ("tools/call", {"name": 7}, None),
        ("tools/call", {}, None),
        ("tools/call", None, None),
        ("ping", {"name": "echo"}, None),
    ],
)
def test_the_name_in_params(method: str, params: Any, name: str | None) -> None:
    assert name_in(method, params) == name


def test_what_a_list_has_is_as_mcp_says() -> None:
    """Rules of visibility are looked up by the kind, and a result by the other members."""
    assert LISTS == {
        "tools/list": ("tools", "tools", "name", "tools/call"),
        "prompts/list": ("prompts", "prompts", "name", "prompts/get"),
        "resources/list": ("resources", "resources", "uri", "resources/read"),
        "resources/templates/list": (
            "resources", "resourceTemplates", "uriTemplate", "resources/read",
        ),
    }  # fmt: skip


@pytest.mark.parametrize("method", ["tasks/get", "tasks/update", "tasks/cancel"])
def test_a_header_repeats_the_id_of_a_task(method: str) -> None:
    """A task has no name (SEP-2663)."""
    assert repeated_name(method, {"taskId": "t", "name": "echo", "uri": "x:y"}) == "t"
    assert repeated_name(method, {"taskId": 7}) is repeated_name(method, None) is None


def test_a_header_repeats_the_name_of_anything_else() -> None:
    assert repeated_name("tools/call", {"taskId": "t", "name": "echo"}) == "echo"
    assert repeated_name("tools/list", {"taskId": "t", "name": "echo"}) is None


def test_the_resource_of_an_update() -> None:
    assert updated_uri(RESOURCE_UPDATED, {"uri": "note:1"}) == "note:1"
    assert updated_uri(RESOURCE_UPDATED, {}) == updated_uri(RESOURCE_UPDATED, None) == ""
    assert updated_uri(TOOLS_CHANGED, {"uri": "note:1"}) is None


@pytest.mark.parametrize(
    ("text", "header"),
    [
        ("echo now", "echo now"),
        ("", ""),
        (" echo", "=?base64?IGVjaG8=?="),
        ("echo ", "=?base64?ZWNobyA=?="),
        ("é", "=?base64?w6k=?="),
        ("=?base64?x", "=?base64?PT9iYXNlNjQ/eA==?="),
    ],
)
def test_a_name_in_a_header(text: str, header: str) -> None:
    """A text that no header may have, or that looks encoded, is encoded."""
    assert header_value(text) == header
