"""CLI2: full jitter, and a count that only progress resets."""

from hypothesis import given
from hypothesis import strategies as st

from mcp_sessions.core.backoff import Backoff, spread

FRACTIONS = st.floats(0, 1)


def test_the_bound_doubles_up_to_the_cap() -> None:
    backoff = Backoff(base=0.5, cap=3)

    assert [backoff.failed(1.0) for _ in range(5)] == [0.5, 1.0, 2.0, 3.0, 3.0]


@given(st.integers(0, 2_000), FRACTIONS)
def test_a_delay_is_anything_from_zero_to_its_bound(failures: int, fraction: float) -> None:
    """Full jitter: clients that were cut at once do not come back at once."""
    backoff = Backoff(base=0.5, cap=30)
    for _ in range(failures):
        backoff.failed(1.0)

    delay = backoff.failed(fraction)

    assert 0 <= delay <= 30
    assert backoff.failures == failures + 1


def test_only_progress_makes_the_next_failure_a_first_one() -> None:
    backoff = Backoff(base=1, cap=100)
    backoff.failed(1.0)
    backoff.failed(1.0)

    backoff.progressed()

    assert backoff.failures == 0
    assert backoff.failed(1.0) == 1


@given(FRACTIONS)
def test_a_server_that_drains_is_come_back_to_within_its_time(fraction: float) -> None:
    """WSS17: "reconnect, spread over N seconds"."""
    assert 0 <= spread(10, fraction) <= 10
    assert spread(-1, fraction) == 0
