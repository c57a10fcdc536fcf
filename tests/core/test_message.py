"""A message is read once, and says what is wrong with it where that matters."""

from typing import Any

import pytest

from mcp_sessions.core.message import MALFORMED_KEY, read
from mcp_sessions.core.messages import (
    INSTANCE_META,
    MAX_INSTANCE,
    REQUEST_KEY_META,
    SESSION_META,
    Notification,
    NotNamed,
    Request,
)
from mcp_sessions.errors import InvalidParams

SESSION = {"sessionId": "s", "state": "sealed"}


def request(meta: Any, **members: Any) -> Any:
    return read(Request(1, "tools/call", {**members, "_meta": meta}))


def test_what_stands_in_the_metadata_is_read() -> None:
    """ASC1, KEY1, TKO12."""
    meta = {
        SESSION_META: SESSION,
        REQUEST_KEY_META: "k",
        INSTANCE_META: "laptop",
        "progressToken": 7,
        "own": 1,
    }
    message = request(meta, name="echo")

    assert (message.id, message.method, message.is_notification) == (1, "tools/call", False)
    assert (message.session, message.named(), message.names_session) == ("s", "s", True)
    assert (message.key, message.keyed(), message.token) == ("k", "k", 7)
    assert (message.state, message.instance) == ("sealed", "laptop")
    assert message.meta == meta
    kept = {INSTANCE_META: "laptop", "progressToken": 7, "own": 1}
    assert message.forwarded == {"name": "echo", "_meta": kept}
    assert message.only_meta == {"_meta": kept}


@pytest.mark.parametrize("given", [7, "", "a\nb", "é", "x" * (MAX_INSTANCE + 1)])
def test_an_instance_that_nobody_repeats_is_none(given: Any) -> None:
    """TKO12: others are told it, so it is a short and plain text."""
    assert request({INSTANCE_META: given}).instance is None
    assert request({INSTANCE_META: "x" * MAX_INSTANCE}).instance == "x" * MAX_INSTANCE


@pytest.mark.parametrize("params", [None, {}, {"name": "echo"}, {"_meta": {}}, {"_meta": [1]}])
def test_without_metadata_it_says_nothing(params: dict[str, Any] | None) -> None:
    message = read(Request("", "ping", params))

    assert message.session is message.named() is NotNamed.ABSENT
    assert message.key is message.keyed() is message.token is message.state is None
    assert message.meta == {}
    assert message.forwarded is params
    assert not message.names_session


def test_it_may_say_that_it_belongs_to_no_session() -> None:
    """SES3."""
    message = request({SESSION_META: None})

    assert message.session is message.named() is NotNamed.NULL
    assert not message.names_session


@pytest.mark.parametrize("named", [1, [], {}, {"sessionId": 1}])
def test_a_malformed_session_names_none_and_is_refused_where_it_is_asked_for(named: Any) -> None:
    message = request({SESSION_META: named, REQUEST_KEY_META: "k"})

    assert (message.session, message.key) == (NotNamed.MALFORMED, "k")
    assert message.names_session
    for _ in range(2):
        with pytest.raises(InvalidParams):
            message.named()


@pytest.mark.parametrize("key", [1, "", "k" * 257, None])
def test_a_malformed_key_is_none_and_is_refused_where_it_is_asked_for(key: Any) -> None:
    """ASC20."""
    message = request({SESSION_META: SESSION, REQUEST_KEY_META: key})

    assert (message.session, message.key) == ("s", MALFORMED_KEY)
    with pytest.raises(InvalidParams):
        message.keyed()


def test_a_notification_has_no_id_and_nothing_of_it_changes() -> None:
    message = read(Notification("notifications/cancelled", {"requestId": 1}))

    assert message.is_notification
    assert message.id == ""
    with pytest.raises(AttributeError):
        message.key = "k"  # pyright: ignore[reportAttributeAccessIssue]


@pytest.mark.parametrize(
    ("method", "requested", "cancelled"),
    [
        ("notifications/cancelled", 1, 1),
        ("notifications/cancelled", "", ""),
        ("notifications/cancelled", True, None),
        ("notifications/cancelled", [1], None),
        ("notifications/progress", 1, None),
    ],
)
def test_the_request_that_it_cancels(method: str, requested: Any, cancelled: Any) -> None:
    assert read(Notification(method, {"requestId": requested})).cancels == cancelled


@pytest.mark.parametrize(
    ("method", "params", "about"),
    [
        ("session/end", {"sessionId": "a", "_meta": {SESSION_META: SESSION}}, "a"),
        ("session/end", {"sessionId": 1, "_meta": {SESSION_META: SESSION}}, "s"),
        ("tools/call", {"sessionId": "a", "_meta": {SESSION_META: SESSION}}, "s"),
        ("tools/call", {"sessionId": "a", "_meta": {SESSION_META: None}}, None),
        ("session/unknown", {"sessionId": "a"}, "a"),
        ("sessions/delete", None, None),
        ("sessions/delete", {"sessionId": "a", "_meta": {SESSION_META: SESSION}}, "s"),
    ],
)
def test_the_session_that_a_log_names(method: str, params: Any, about: str | None) -> None:
    assert read(Request(1, method, params)).about == about
