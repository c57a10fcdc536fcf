"""What goes when one process holds too much for its clients."""

import random

from mcp_sessions.core.fair_bound import FairBound


def held(most: int, most_of_one: int) -> FairBound[str]:
    return FairBound[str](most=most, most_of_one=most_of_one)


def test_a_session_over_its_bound_loses_its_own_oldest() -> None:
    """Rule 4; another session of the same client keeps what it has."""
    bound = held(100, 2)
    assert bound.add("b1", "alice", "B") == []
    assert [bound.add(f"a{n}", "alice", "A") for n in range(4)] == [[], [], ["a0"], ["a1"]]
    assert "b1" in bound and len(bound) == 3


def test_who_has_most_loses_for_one_more_of_anybody() -> None:
    """Rule 2: alice's one is the oldest of all, and stays."""
    bound = held(4, 4)
    assert bound.add("a", "alice", "A") == []
    assert [bound.add(f"m{n}", "mallory", "M") for n in range(3)] == [[]] * 3
    assert bound.add("b", "bob", "B") == ["m0"]
    assert bound.add("m3", "mallory", "M") == ["m1"]
    assert "a" in bound and "b" in bound


def test_many_sessions_of_one_client_count_together() -> None:
    """Rule 2: who spreads over sessions does not have less for it."""
    bound = held(6, 3)
    for name in ("a1", "a2"):
        assert bound.add(name, "alice", "A") == []
    assert [bound.add(f"m{n}", "mallory", n) for n in range(4)] == [[]] * 4
    assert bound.add("a3", "alice", "A") == ["m0"]


def test_of_equal_ones_the_newcomer_is_refused() -> None:
    """Rule 3: many addresses with one each end nothing of anybody."""
    bound = held(4, 4)
    assert [bound.add(f"{n}", f"address {n}", None) for n in range(4)] == [[]] * 4
    assert bound.add("new", "address 5", None) == ["new"]
    assert bound.add("more", "address 0", None) == ["0"], "its own"
    assert len(bound) == 4


def test_behind_one_address_the_session_that_has_most_loses() -> None:
    """Rule 2: a proxy that is not named makes all clients one."""
    bound = held(4, 4)
    assert bound.add("a", "proxy", "A") == []
    assert [bound.add(f"m{n}", "proxy", "M") for n in range(3)] == [[]] * 3
    assert bound.add("b", "proxy", "B") == ["m0"]


def test_bytes_are_shared_as_numbers_are() -> None:
    """Rules 2 to 4."""
    bound = FairBound[str](most=99, most_bytes=100, most_bytes_of_one=60)
    assert bound.add("a", "alice", None, 30) == []
    assert bound.add("m0", "mallory", "N", 40) == []
    assert bound.add("m1", "mallory", "N", 30) == ["m0"], "more than one session may have"
    assert bound.add("m2", "mallory", "M", 40) == []
    assert bound.add("b", "bob", None, 20) == ["m2"], "of the session with most"
    assert bound.add("m3", "mallory", "M", 25) == ["m1"]
    assert bound.add("c", "carol", "C", 61) == ["c"]
    assert all(each in bound for each in ("a", "m3", "b"))


def test_no_bound_is_exceeded_and_nothing_is_left_behind() -> None:
    """For any order. And nobody loses anything for a client that has as much."""
    chance = random.Random(7)
    bound, alive = FairBound[str](most=20, most_of_one=5, most_bytes=150), dict[str, int]()
    shares: dict[str, int] = {}
    for n in range(3_000):
        if alive and chance.random() < 0.4:
            one = chance.choice(sorted(alive))
            del alive[one]
            assert bound.remove(one) and not bound.remove(one)
            continue
        share, name = chance.randrange(6), f"{n}"
        shares[name] = share
        before = [bound.count(each) for each in range(6)]
        gone = bound.add(name, share, (share, chance.randrange(3)), size := chance.randrange(15))
        alive[name] = size
        for loser in gone:
            del alive[loser]
        if sum(before) == 20 and gone and shares[gone[0]] != share:
            assert before[shares[gone[0]]] > before[share]
        assert len(bound) == len(alive) <= 20 and sum(alive.values()) <= 150
        assert all(one in bound for one in alive)
    for one in alive:
        bound.remove(one)
    assert not vars(bound)["_held"] and not vars(bound)["_bytes"]
