"""``mcp_sessions.core.listen_messages``: what a listen asked to receive, and the messages of it."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mcp_sessions.core.listen_messages import (
    LEVELS,
    SUBSCRIPTION_ID,
    Filter,
    acknowledgement,
    completion,
    level_of,
    stamped,
)
from mcp_sessions.core.log import LoggedEvent
from mcp_sessions.core.messages import SESSION_META, EventTemplate, encode
from mcp_sessions.ids import SessionEventId

IDS = st.integers(-(2**40), 2**40) | st.text(max_size=10)
ASKED = {"toolsListChanged": True, "promptsListChanged": False, "resourceSubscriptions": ["a:1"]}


def event(method: str) -> LoggedEvent:
    payload = encode({"jsonrpc": "2.0", "method": method})
    return LoggedEvent(SessionEventId("1"), 1, payload, 0.0, None, None)


def test_what_was_asked_for_is_acknowledged_and_nothing_else() -> None:
    """HTM2: the first message of a listen says what is received from now on."""
    first = acknowledgement(Filter({"notifications": ASKED}), "listen-1")

    assert first["method"] == "notifications/subscriptions/acknowledged"
    assert first["params"] == {
        "notifications": {"toolsListChanged": True, "resourceSubscriptions": ["a:1"]},
        "_meta": {SUBSCRIPTION_ID: "listen-1"},
    }


@pytest.mark.parametrize(
    ("params", "level"),
    [
        ({"level": "debug"}, "debug"),
        ({"level": "emergency"}, "emergency"),
        ({"level": "loud"}, None),
        ({"level": ["info"]}, None),
        ({}, None),
        (None, None),
    ],
)
def test_a_level_is_one_of_those_of_mcp(params: Any, level: str | None) -> None:
    assert level_of(params) == level


@pytest.mark.parametrize("params", [{}, {"notifications": None}, {"notifications": {}}], ids=str)
def test_who_asks_for_nothing_gets_no_list_change(params: dict[str, Any]) -> None:
    wanted = Filter(params)

    assert wanted.honored() == {}
    assert (wanted.uris, wanted.lists) == (frozenset(), frozenset())


@pytest.mark.parametrize(
    ("method", "is_awaited"),
    [
        ("notifications/tools/list_changed", True),
        ("notifications/prompts/list_changed", False),
        ("notifications/resources/list_changed", False),
        ("notifications/resources/updated", True),
        ("notifications/message", True),
    ],
)
def test_a_list_change_is_received_by_who_asked_for_it_and_all_else_by_everyone(
    method: str, is_awaited: bool
) -> None:
    assert Filter({"notifications": ASKED}).admits(event(method)) is is_awaited


def test_the_last_message_is_the_requests_answer() -> None:
    def with_type(members: dict[str, Any]) -> dict[str, Any]:
        return {"resultType": "complete", **members}

    ended = completion(7, None, with_type)
    failed = completion(7, {"code": -32000, "message": "over"}, with_type)

    meta = {SUBSCRIPTION_ID: 7}
    assert ended == {
        "jsonrpc": "2.0",
        "id": 7,
        "result": {"resultType": "complete", "_meta": meta},
    }
    assert failed == {"jsonrpc": "2.0", "id": 7, "error": {"code": -32000, "message": "over"}}


PARAMS = st.fixed_dictionaries(
    {},
    optional={
        "_meta": st.none() | st.dictionaries(st.sampled_from(["a", SESSION_META]), st.text()),
        "uri": st.text(),
        "data": st.just({"_meta": {SESSION_META: {"sessionId": "of another message"}}}),
    },
)


@given(IDS, PARAMS, st.text(st.characters(min_codepoint=33, max_codepoint=126), min_size=1))
def test_an_event_of_a_session_is_stamped_whatever_its_sender_put_into_it(
    request_id: int | str, params: dict[str, Any], session_id: str
) -> None:
    """The stamp is put into the bytes, before the session's own `_meta`, which comes last."""
    before, between, after = EventTemplate("notifications/message", params, None).parts
    payload = before + encode(session_id)[1:-1] + between + b"1" + after

    stamp = json.loads(stamped(payload, request_id))

    expected = json.loads(payload)
    expected["params"]["_meta"][SUBSCRIPTION_ID] = request_id
    assert stamp == expected


@pytest.mark.parametrize("params", [{}, {"params": {"_meta": None}}, {"params": {"a": 1}}], ids=str)
def test_a_message_of_no_session_is_stamped_too(params: dict[str, Any]) -> None:
    message = {"jsonrpc": "2.0", "method": "notifications/message", **params}

    stamp = json.loads(stamped(encode(message), 7))

    assert stamp["params"]["_meta"] == {SUBSCRIPTION_ID: 7}
    assert stamp["params"].get("a") == params.get("params", {}).get("a")


def test_names_are_those_of_the_protocol() -> None:
    assert SUBSCRIPTION_ID == "io.modelcontextprotocol/subscriptionId"
    assert LEVELS == (
        "debug", "info", "notice", "warning", "error", "critical", "alert", "emergency",
    )  # fmt: skip
