"""``mcp_sessions.stores.limits``: what a session may hold, at its bound and one beyond."""

from collections.abc import Callable

import pytest

from mcp_sessions.errors import LimitReached
from mcp_sessions.policy import SessionPolicy
from mcp_sessions.stores.limits import (
    check_data,
    check_peer,
    check_sessions,
    check_state,
    check_subscriptions,
    text_size,
)
from mcp_sessions.stores.records import Peer

POLICY = SessionPolicy(
    max_sessions=5,
    max_sessions_per_principal=2,
    max_subscriptions=3,
    max_uri_bytes=10,
    max_subscription_bytes=20,
    max_data_bytes=100,
    max_state_bytes=50,
    max_client_bytes=30,
)


def peer(size: int) -> Peer:
    return Peer("2025-11-25", {"a": "x" * (size - len('{"a":""}'))}, modern=False)


BOUNDS: list[tuple[str, Callable[[int], None]]] = [
    ("max_sessions", lambda more: check_sessions(4 + more, 0, POLICY)),
    ("max_sessions_per_principal", lambda more: check_sessions(2, 1 + more, POLICY)),
    ("max_subscriptions", lambda more: check_subscriptions(["a"] * (3 + more), POLICY)),
    ("max_uri_bytes", lambda more: check_subscriptions(["é" * (5 + more)], POLICY)),
    (
        "max_subscription_bytes",
        lambda more: check_subscriptions(["a" * 10, "b" * 9, "c" * (1 + more)], POLICY),
    ),
    ("max_data_bytes", lambda more: check_data(100 + more, POLICY)),
    ("max_state_bytes", lambda more: check_state(50 + more, POLICY)),
    ("max_client_bytes", lambda more: check_peer(peer(30 + more), POLICY)),
]


@pytest.mark.parametrize(("limit", "check"), BOUNDS, ids=[limit for limit, _ in BOUNDS])
def test_a_bound_may_be_reached_and_not_passed(limit: str, check: Callable[[int], None]) -> None:
    """ERR6: the error names what was reached."""
    check(0)

    with pytest.raises(LimitReached) as refused:
        check(1)

    assert refused.value.limit == limit


def test_where_a_principal_has_no_bound_of_its_own_that_of_all_remains() -> None:
    policy = SessionPolicy(max_sessions=5, max_sessions_per_principal=None)

    check_sessions(4, 4, policy)

    with pytest.raises(LimitReached):
        check_sessions(5, 0, policy)


def test_a_client_that_said_nothing_is_small_enough() -> None:
    check_peer(None, POLICY)
    assert text_size("\ud800") == 3
