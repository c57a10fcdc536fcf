"""``mcp_sessions.core.load``: how much each has at work."""

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from mcp_sessions.core.load import Load


@given(st.lists(st.tuples(st.booleans(), st.sampled_from(["a", "b"]))))
def test_each_has_a_bound_of_its_own_and_who_has_nothing_costs_nothing(
    steps: list[tuple[bool, str]],
) -> None:
    load, counted = Load(2), Counter[str]()
    for adds, whose in steps:
        if adds and not load.is_full(whose):
            load.add(whose)
            counted[whose] += 1
        elif counted[whose]:
            load.remove(whose)
            counted[whose] -= 1

        assert load.is_full(whose) is (counted[whose] >= 2)
        assert len(load) == len(+counted)


def test_nobody_has_no_bound() -> None:
    load = Load(1)
    for _ in range(3):
        load.add(None)

    assert not load.is_full(None)
    load.remove(None)
    assert len(load) == 0
