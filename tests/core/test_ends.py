"""How a session ended: what people read, and what stores keep."""

import pytest

from mcp_sessions import SessionPolicy
from mcp_sessions.core.ends import EndReason, SessionEnd, duration, times_of
from mcp_sessions.core.states import Mode, State


@pytest.mark.parametrize(
    ("end", "said"),
    [
        (
            SessionEnd("a" * 12, EndReason.IDLE, 0, Mode.PROTOCOL, 4000, 1800),
            "it expired after 30m without a request",
        ),
        (
            SessionEnd("a" * 12, EndReason.LIFETIME, 0, Mode.PROTOCOL, 86_400, None),
            "it expired after 1d, its longest lifetime",
        ),
        (
            SessionEnd("a" * 12, EndReason.LIMIT, 0, Mode.CONVERSATION, 9, 5, "max_sessions"),
            "it made room for another (max_sessions) after 5s without a request",
        ),
        (SessionEnd("a" * 12, EndReason.EMPTIED, 0), "the store was emptied or replaced"),
    ],
)
def test_an_end_says_why_in_a_sentence(end: SessionEnd, said: str) -> None:
    assert str(end) == said


@pytest.mark.parametrize("reason", EndReason)
def test_what_a_store_keeps_of_an_end_is_the_end(reason: EndReason) -> None:
    """Every reason has a sentence and a kind, and is read as it was written."""
    end = SessionEnd("a" * 12, reason, 1.5, Mode.CONVERSATION, 2.0, None, "max_sessions")
    assert SessionEnd.from_json(end.to_json()) == end
    assert str(end) and reason.kind


def test_the_count_of_ends_names_the_state_that_follows_and_else_what_went_wrong() -> None:
    """SES18."""
    assert {reason: reason.kind for reason in EndReason} == {
        EndReason.IDLE: State.EXPIRED.value,
        EndReason.LIFETIME: State.EXPIRED.value,
        EndReason.CLIENT: State.ENDED.value,
        EndReason.OPERATOR: State.ENDED.value,
        EndReason.LIMIT: "evicted",
        EndReason.EMPTIED: "lost",
        EndReason.LOST: "lost",
    }


@pytest.mark.parametrize("kept", [None, [], {}, {"session": "a", "reason": "new", "at": 1}])
def test_what_a_newer_version_kept_is_no_end(kept: object) -> None:
    assert SessionEnd.from_json(kept) is None


def test_idle_time_is_unknown_where_the_lifetime_ends_first() -> None:
    policy = SessionPolicy(idle_timeout=100, max_lifetime=150)
    mode = Mode.PROTOCOL
    at = {"created_at": 0.0, "policy": policy}
    assert times_of(mode, expires_at=100.0, now=130.0, **at) == (130.0, 130.0)  # type: ignore[arg-type]
    assert times_of(mode, expires_at=90.0, now=130.0, **at) == (130.0, None)  # type: ignore[arg-type]


def test_a_duration_has_two_units() -> None:
    assert [duration(each) for each in (0, 90, 7_500, 90_000)] == ["0s", "1m30s", "2h5m", "1d1h"]
