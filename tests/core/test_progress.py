"""Progress rises, whoever reports it."""

import math
from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mcp_sessions.core.progress import Progress

rising = st.lists(
    st.one_of(
        st.integers(-(2**60), 2**60),
        st.floats(allow_nan=False, allow_infinity=False, min_value=-1e300, max_value=1e300),
    ),
    unique=True,
    max_size=6,
).map(sorted)


@given(rising, st.lists(st.integers(0, 3), min_size=7, max_size=7))
def test_values_rise_between_the_handlers_own_as_well(own: list[float], ours: list[int]) -> None:
    """However close they are, and whatever they count from."""
    progress = Progress()
    received: list[float] = []
    for number, value in enumerate([*own, None]):
        received += [progress.still()["progress"] for _ in range(ours[number])]
        if value is not None:
            received.append(progress.reported({"progress": value})["progress"])
    assert all(before < after for before, after in zip(received, received[1:], strict=False)), (
        received
    )
    assert all(math.isfinite(value) for value in received)


@pytest.mark.parametrize(
    "reports",
    [
        [{"progress": 1, "total": 3}, {"progress": 2, "total": 3, "message": "m"}],
        [{"progress": 5}, {"progress": 3}, {"progress": 3}],
        [{"progress": True}, {"progress": "x"}, {}],
    ],
)
def test_what_a_handler_reports_is_not_changed_without_need(
    reports: list[Mapping[str, Any]],
) -> None:
    """Also if it does not rise: that is the handler's."""
    progress = Progress()
    assert [progress.reported(each) for each in reports] == reports


def test_a_first_report_of_nothing_rises() -> None:
    """Many handlers begin with 0."""
    progress = Progress()
    ours = progress.still()["progress"]
    assert 0 < ours < progress.reported({"progress": 0, "total": 9})["progress"] < 1
    assert progress.reported({"progress": 1, "total": 9}) == {"progress": 1, "total": 9}


def test_what_the_handler_said_last_is_said_again() -> None:
    """A client that shows text and total shows them on."""
    progress = Progress()
    progress.reported({"progress": 1, "total": 3, "message": "half"})
    notified = progress.still()
    assert 1 < notified["progress"] < 2
    assert (notified["total"], notified["message"]) == (3, "half")


def test_a_report_that_repeats_the_layers_own_value_rises() -> None:
    progress = Progress()
    progress.reported({"progress": 1})
    ours = progress.still()["progress"]
    assert progress.reported({"progress": ours})["progress"] > ours
