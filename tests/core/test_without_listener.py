"""The calls that end when too many run without a listener."""

import random

from mcp_sessions.core.without_listener import WithoutListener


def held(most: int, most_of_one: int) -> WithoutListener[str]:
    return WithoutListener[str](most=most, most_of_one=most_of_one)


def test_a_session_over_its_bound_loses_its_own_oldest() -> None:
    """Rule 1; another session of the same principal keeps what it has."""
    without_listener = held(100, 2)
    assert without_listener.add("b1", "alice", "B") is None
    assert [without_listener.add(f"a{n}", "alice", "A") for n in range(4)] == [
        None,
        None,
        "a0",
        "a1",
    ]
    assert "b1" in without_listener and len(without_listener) == 3


def test_who_has_most_loses_for_one_more_of_anybody() -> None:
    """Rule 2: alice's one call is the oldest of all, and stays."""
    without_listener = held(4, 4)
    assert without_listener.add("a", "alice", "A") is None
    assert [without_listener.add(f"m{n}", "mallory", "M") for n in range(3)] == [None] * 3
    assert without_listener.add("b", "bob", "B") == "m0"
    assert without_listener.add("m3", "mallory", "M") == "m1"
    assert "a" in without_listener and "b" in without_listener


def test_many_sessions_of_one_principal_count_together() -> None:
    """Rule 2: who spreads over sessions does not have less for it."""
    without_listener = held(6, 3)
    for name in ("a1", "a2"):
        assert without_listener.add(name, "alice", "A") is None
    assert [without_listener.add(f"m{n}", "mallory", n) for n in range(4)] == [None] * 4
    assert without_listener.add("a3", "alice", "A") == "m0"


def test_without_authentication_the_session_that_has_most_loses() -> None:
    """Rule 2: everyone is one principal then."""
    without_listener = held(4, 4)
    assert without_listener.add("a", None, "A") is None
    assert [without_listener.add(f"m{n}", None, "M") for n in range(3)] == [None] * 3
    assert without_listener.add("b", None, "B") == "m0"


def test_no_bound_is_exceeded_and_nothing_is_left_behind() -> None:
    """For any order of calls."""
    chance = random.Random(7)
    without_listener, alive = held(20, 5), set[str]()
    for n in range(2_000):
        if alive and chance.random() < 0.4:
            one = chance.choice(sorted(alive))
            alive.remove(one)
            assert without_listener.remove(one) and not without_listener.remove(one)
            continue
        principal = chance.randrange(6)
        gone = without_listener.add(f"{n}", principal, (principal, chance.randrange(3)))
        alive.add(f"{n}")
        alive.discard(gone or "")
        assert len(without_listener) == len(alive) <= 20
        assert all(one in without_listener for one in alive)
    for one in alive:
        without_listener.remove(one)
    assert not vars(without_listener)["_kept"] and not vars(without_listener)["_counts"]
