"""``mcp_sessions.core.coalescing_key``: only listed notifications, and only by their key."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mcp_sessions.core.coalescing_key import coalescing_key
from mcp_sessions.policy import COALESCED_BY_DEFAULT as RULES

UPDATED = "notifications/resources/updated"
LIST_CHANGES = [method for method in RULES if method.endswith("list_changed")]


@pytest.mark.parametrize(
    "method",
    [
        "notifications/cancelled",
        "notifications/progress",
        "notifications/message",
        "notifications/sessions/detached",
        "notifications/resources",
        "notifications/resources/updated/",
        "elicitation/create",
        "sampling/createMessage",
        "roots/list",
        "ping",
        "tools/call",
        "",
    ],
)
def test_what_is_not_listed_is_never_coalesced(method: str) -> None:
    """COA4: never a request, a response, an error, a cancellation, nor progress."""
    assert coalescing_key(method, {"uri": "note://1", "requestId": 1}, RULES) is None


@given(st.text(), st.text())
def test_updates_of_one_resource_have_one_key_and_of_two_have_two(a: str, b: str) -> None:
    """COA2: ``notifications/resources/updated`` by ``uri``."""
    key_a, key_b = (coalescing_key(UPDATED, {"uri": uri}, RULES) for uri in (a, b))

    assert key_a is not None
    assert (key_a == key_b) == (a == b)


def test_what_else_stands_in_an_update_is_not_part_of_its_key() -> None:
    """The newer update of a resource says all there is to know."""
    plain = coalescing_key(UPDATED, {"uri": "note://1"}, RULES)

    assert coalescing_key(UPDATED, {"uri": "note://1", "title": "t", "_meta": {}}, RULES) == plain


@pytest.mark.parametrize("params", [None, {}, {"uri": None}, {"uri": 7}, {"uri": ["note://1"]}])
def test_an_update_without_its_member_hides_no_other(params: dict[str, Any] | None) -> None:
    """COA4: it is kept as it is."""
    assert coalescing_key(UPDATED, params, RULES) is None


def test_list_changes_have_a_key_each_whatever_their_params() -> None:
    """COA3: ``list_changed`` by method."""
    keys = [coalescing_key(method, {"x": 1}, RULES) for method in LIST_CHANGES]

    assert len(LIST_CHANGES) == 3
    assert keys == [coalescing_key(method, None, RULES) for method in LIST_CHANGES]
    assert None not in keys and len(set(keys)) == 3


@given(st.text() | st.sampled_from(LIST_CHANGES))
def test_no_uri_makes_an_update_look_like_a_list_change(uri: str) -> None:
    """COA4: a resource's name is the application's, perhaps a stranger's."""
    assert coalescing_key(UPDATED, {"uri": uri}, RULES) not in {
        coalescing_key(method, None, RULES) for method in LIST_CHANGES
    }


def test_without_rules_nothing_is_coalesced() -> None:
    """COA4: by default; a policy says otherwise."""
    assert coalescing_key(UPDATED, {"uri": "note://1"}, {}) is None
    assert coalescing_key("notifications/mine", {"id": "1"}, {"notifications/mine": "id"})
