"""The conversation of a request, by the names that its host sends."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mcp_sessions.core.conversation_keys import (
    KNOWN_HOSTS,
    MAX_KEY,
    ConversationKey,
    Rule,
    checked_key,
    conversation_key,
)


@pytest.mark.parametrize("rule", KNOWN_HOSTS, ids=lambda rule: f"{rule.source}:{rule.name}")
def test_a_known_host_is_found_where_it_says_it(rule: Rule) -> None:
    """And nowhere else: a header's name in ``_meta``, or the other way round, is another thing."""
    said, nothing = {rule.name: "one"}, dict[str, Any]()
    at = (said, nothing) if rule.source == "meta" else (nothing, said)

    assert conversation_key([rule], *at) == ConversationKey(rule.name, "one")
    assert conversation_key([rule], *reversed(at)) is None
    assert conversation_key(KNOWN_HOSTS, *at) == ConversationKey(rule.name, "one")


def test_a_key_may_be_a_member_of_a_member() -> None:
    context = "com.zcode/request-context"
    said = {context: {"session_id": "one", "turn_id": "2"}}
    assert conversation_key(KNOWN_HOSTS, said, {}) == (context, "one")
    without = {context: {"turn_id": "2"}}
    assert conversation_key(KNOWN_HOSTS, without, {}) is None
    assert conversation_key(KNOWN_HOSTS, without, {"x-conversation-id": "two"}) == (
        "x-conversation-id",
        "two",
    )


def test_the_same_text_under_two_names_is_two_keys() -> None:
    one = conversation_key(KNOWN_HOSTS, {"threadId": "x"}, {})
    other = conversation_key(KNOWN_HOSTS, {"sessionID": "x"}, {})
    assert one is not None and other is not None and one != other


def test_the_first_rule_whose_source_holds_something_counts() -> None:
    rules = [Rule("meta", "a"), Rule("header", "b")]
    assert conversation_key(rules, {"a": "1"}, {"b": "2"}) == ("a", "1")
    assert conversation_key(rules, {}, {"b": "2"}) == ("b", "2")
    with pytest.raises(ValueError, match="^a$"):
        conversation_key(rules, {"a": None}, {"b": "2"})


@pytest.mark.parametrize(
    "value",
    ["", "x" * (MAX_KEY + 1), "x" * 10_000, "a\x00", "a\nb", "\x7f", "\x85", "\ud800", "a\u2028"],
)
def test_a_text_that_is_no_key_is_refused(value: str) -> None:
    with pytest.raises(ValueError, match="^host$") as refused:
        checked_key("host", value)
    assert str(refused.value) == "host"


@pytest.mark.parametrize("value", [None, 1, True, 1.5, ["x"], {"id": "x"}, b"x"])
def test_what_is_no_text_is_no_key(value: object) -> None:
    with pytest.raises(ValueError, match="^host$"):
        checked_key("host", value)


@given(st.text(max_size=MAX_KEY + 10))
def test_a_key_is_taken_as_it_is_or_not_at_all(text: str) -> None:
    try:
        key = checked_key("host", text)
    except ValueError:
        assert not text or len(text) > MAX_KEY or not text.isprintable()
    else:
        assert key == ("host", text)
