"""The argument that names a session, in schemas and answers."""

from typing import Any

import pytest
from jsonschema import Draft202012Validator

from mcp_sessions.core.handles import (
    carried_in,
    carrying,
    extended,
    is_extensible,
    not_a_handle,
    with_handle,
    without_handle,
)

OPEN: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "nothing said": ({"type": "object"}, {}),
    "closed": ({"type": "object", "additionalProperties": False}, {}),
    "of numbers": ({"type": "object", "additionalProperties": {"type": "number"}}, {"n": 1}),
    "closed at last": ({"type": "object", "unevaluatedProperties": False}, {}),
    "members": (
        {
            "type": "object",
            "properties": {"n": {}},
            "required": ["n"],
            "additionalProperties": False,
        },
        {"n": 1},
    ),
    "either": (
        {"type": "object", "anyOf": [{"required": ["a"]}, {"required": ["b"]}]},
        {"a": 1},
    ),
    "named deeper": (
        {"type": "object", "properties": {"in": {"type": "object", "properties": {"session": {}}}}},
        {"in": {"session": 1}},
    ),
    "refers deeper": (
        {"type": "object", "properties": {"n": {"$ref": "#/$defs/n"}}, "$defs": {"n": {}}},
        {"n": 1},
    ),
}

NOT: dict[str, Any] = {
    "no schema": None,
    "true": True,
    "a list": {"type": "array"},
    "anything": {},
    "or null": {"type": ["object", "null"]},
    "has it": {"type": "object", "properties": {"session": {}}},
    "wants it": {"type": "object", "required": ["session"]},
    "no properties": {"type": "object", "properties": [1]},
    "part has it": {"type": "object", "oneOf": [{"properties": {"session": {}}}]},
    "closed part": {"type": "object", "allOf": [{"additionalProperties": False}]},
    "part closed at last": {"type": "object", "anyOf": [{"unevaluatedProperties": False}]},
    "elsewhere": {"type": "object", "$ref": "#/$defs/closed"},
    "part elsewhere": {"type": "object", "anyOf": [{"$ref": "#/$defs/closed"}]},
    "patterns": {"type": "object", "patternProperties": {"^s": {"type": "number"}}},
    "names": {"type": "object", "propertyNames": {"maxLength": 3}},
    "few": {"type": "object", "maxProperties": 1},
}


@pytest.mark.parametrize(("schema", "value"), OPEN.values(), ids=list(OPEN))
def test_what_was_valid_is_valid_with_a_handle_and_without(
    schema: dict[str, Any], value: dict[str, Any]
) -> None:
    assert is_extensible(schema, "session")
    more = extended(schema, "session", "Says which.")
    Draft202012Validator.check_schema(more)
    valid: Any = Draft202012Validator(more)
    assert valid.is_valid(value) and valid.is_valid({**value, "session": "x"})
    assert not valid.is_valid({**value, "session": 1})


@pytest.mark.parametrize("schema", NOT.values(), ids=list(NOT))
def test_where_a_handle_may_make_a_value_invalid_there_is_none(schema: Any) -> None:
    assert not is_extensible(schema, "session")


@pytest.mark.parametrize("params", [None, {}, {"arguments": None}, {"arguments": [1]}])
def test_params_without_arguments_stay_as_they_are(params: Any) -> None:
    assert without_handle(params, "session") is params


@pytest.mark.parametrize(
    "result", [{"resultType": "input_required"}, {"task": {"taskId": "t"}}, {"content": None}]
)
def test_what_is_no_answer_yet_says_no_handle(result: Any) -> None:
    assert with_handle(result, "session", "h", ["t"], is_structured=True) is result


def test_an_error_says_its_handle_in_its_text() -> None:
    """It needs no structured content, of which a schema may say that it is something else."""
    failed: dict[str, Any] = {"content": [], "isError": True}
    notified = with_handle(failed, "session", "h", ["t"], is_structured=True)
    assert "structuredContent" not in notified and '"h"' in notified["content"][0]["text"]


def test_texts_alone_become_structured_content_beside_the_handle() -> None:
    """A host may show its model nothing else."""
    texts = [{"type": "text", "text": text} for text in ("a", "b")]
    result: dict[str, Any] = {"content": [texts[0], {"type": "image", "text": "x"}, texts[1]]}
    for is_structured in (True, False):
        notified = with_handle(result, "session", "h", ["t"], is_structured=is_structured)
        assert notified["structuredContent"] == {"result": "a\nb", "session": "h"}


def test_what_can_have_no_member_says_it_in_its_text() -> None:
    cases: list[tuple[Any, bool]] = [([1], True), ({"n": 1}, False), ({"session": 1}, True)]
    for made, is_structured in cases:
        result: dict[str, Any] = {"content": [], "structuredContent": made}
        notified = with_handle(result, "session", "h", ["t"], is_structured=is_structured)
        assert notified["structuredContent"] is made and '"h"' in notified["content"][0]["text"]


HANDLE = "0123456789abcdef" * 2


@pytest.mark.parametrize("own", [None, "", "v1.theirs", "mcp-sessions-handle:theirs", "a.b\n"])
def test_another_round_carries_the_handle_in_addition_to_the_servers_own_state(
    own: str | None,
) -> None:
    state = {} if own is None else {"requestState": own}
    asks: dict[str, Any] = {"resultType": "input_required", "inputRequests": {}, **state}
    again: dict[str, Any] = {
        "arguments": {"a": 1},
        "requestState": carrying(asks, HANDLE)["requestState"],
    }
    assert carried_in(again) == HANDLE
    assert without_handle(again, "session") == {"arguments": {"a": 1}, **state}


@pytest.mark.parametrize(
    "state",
    [None, 3, "", "v1.x", f"mcp-sessions-handle:{HANDLE}x", f" mcp-sessions-handle:{HANDLE}"],
)
def test_a_state_that_is_the_servers_alone_stays_as_it_is(state: Any) -> None:
    params = {"requestState": state}
    assert carried_in(params) is None
    assert without_handle(params, "session") is params


def test_a_handle_of_no_session_is_an_error_of_the_tool() -> None:
    """Its model reads what to do."""
    answer = not_a_handle("session")
    assert answer["isError"] is True
    assert "Call again without session" in answer["content"][0]["text"]
