"""Requests a second of each sender: what may be sent at once, and later."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mcp_sessions.core.buckets import BURST, MOST, Buckets


def test_a_sender_may_send_the_requests_of_ten_seconds_at_once_and_then_waits() -> None:
    buckets = Buckets(2)
    assert [buckets.take("a", 100.0) for _ in range(int(2 * BURST))] == [0.0] * 20
    assert buckets.take("a", 100.0) == pytest.approx(0.5)
    assert buckets.take("a", 100.25) == pytest.approx(0.25), "a refused request took nothing"
    assert buckets.take("a", 100.5) == 0
    assert buckets.take("a", 100.5) > 0


def test_senders_do_not_share() -> None:
    buckets = Buckets(0.1)
    assert buckets.take("a", 0) == 0
    assert buckets.take("a", 0) == pytest.approx(10)
    assert buckets.take("b", 0) == 0


@given(
    rate=st.floats(0.01, 1_000),
    waits=st.lists(st.floats(0, 3), min_size=1, max_size=200),
)
def test_nobody_sends_more_than_the_rate_and_who_waits_is_served(
    rate: float, waits: list[float]
) -> None:
    buckets, now, served = Buckets(rate), 1_000.0, 0
    for wait in waits:
        now += wait
        after = buckets.take("a", now)
        if after:
            assert after <= 1 / rate + 1e-6
            now += after
            assert buckets.take("a", now) == 0
        served += 1
        assert served <= max(1.0, rate * BURST) + rate * (now - 1_000) + 1e-3


def test_the_number_of_buckets_is_bounded_and_full_ones_go_first() -> None:
    buckets = Buckets(1)
    for number in range(MOST):
        assert buckets.take(f"old {number}", 0) == 0
    for number in range(2 * MOST):
        assert buckets.take(f"new {number}", 1_000) == 0
        assert len(buckets) <= MOST
    # The newest senders are known still.
    for _ in range(9):
        assert buckets.take(f"new {2 * MOST - 1}", 1_000) == 0
    assert buckets.take(f"new {2 * MOST - 1}", 1_000) > 0


def test_a_bucket_that_is_full_just_now_is_forgotten() -> None:
    buckets = Buckets(1)
    for number in range(MOST):
        assert buckets.take(f"old {number}", 0) == 0
    # Each of them was full again after one second.
    assert buckets.take("new", 1) == 0
    assert len(buckets) == 1


def test_a_tenth_is_forgotten_at_once_if_no_bucket_is_full() -> None:
    buckets = Buckets(1)
    for number in range(MOST + 1):
        assert buckets.take(f"sender {number}", 0) == 0
    assert len(buckets) == MOST - MOST // 10
