"""The client half of the core: positions, and what may be done after a loss."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mcp_sessions.core.messages import EXTENSION, SESSION_META
from mcp_sessions.core.resume import (
    AWAY,
    LATE_ATTEMPT,
    Abilities,
    Attempts,
    FailureCause,
    Follower,
    Lives,
    SessionView,
    Step,
    abilities,
    after_status,
    event_id_of,
    is_away,
    is_session_id,
    may_send_again,
)

# --- what may be sent again ------------------------------------------------------------------


def again(**changed: Any) -> bool:
    """A keyed request, sent ten seconds ago in the session that is still there."""
    given: dict[str, Any] = {
        "is_keyed": True,
        "first_sent": 0.0,
        "same_session": True,
        "now": 10.0,
        "key_lifetime": 100.0,
    }
    return may_send_again(**{**given, **changed})


def test_a_keyed_request_may_be_sent_again_in_its_session() -> None:
    assert again()


def test_what_has_no_key_is_never_sent_again() -> None:
    """KEY3."""
    assert not again(is_keyed=False)


def test_a_key_means_nothing_in_another_session() -> None:
    """KEY3."""
    assert not again(same_session=False)


def test_a_key_older_than_the_server_remembers_is_never_sent_again() -> None:
    """KEY3, and some time before: the way there takes time as well."""
    assert again(now=89.9)
    assert not again(now=90.0)


def test_what_certainly_never_ran_may_always_be_sent() -> None:
    assert again(first_sent=None, is_keyed=False, same_session=False)


# --- statuses -------------------------------------------------------------------------------


@pytest.mark.parametrize("status", [404, 410])
def test_an_unknown_session_is_taken_up_on_a_new_connection(status: int) -> None:
    """CLI5."""
    step = after_status(status, failures=0, is_answer=False)
    assert step is Step.RECONNECT


def test_an_unknown_method_is_not_an_unknown_session() -> None:
    """2026-07-28 answers it with 404 and a proper error."""
    assert after_status(404, failures=0, is_answer=True) is Step.REPORT


def test_a_busy_server_is_asked_again_before_it_is_given_up() -> None:
    steps = [after_status(429, failures=n, is_answer=False) for n in range(3)]
    assert steps == [Step.RETRY, Step.RETRY, Step.RECONNECT]


@pytest.mark.parametrize("status", AWAY)
def test_a_proxy_that_does_not_reach_the_server_is_a_lost_connection(status: int) -> None:
    step = after_status(status, failures=0, is_answer=False)
    assert step is Step.RECONNECT


@pytest.mark.parametrize("cause", FailureCause)
@pytest.mark.parametrize("status", [None, 401, 404, 429, 500, *AWAY])
def test_a_server_is_away_unless_something_of_it_came(
    cause: FailureCause, status: int | None
) -> None:
    expected = status in AWAY if status is not None else cause is not FailureCause.STATUS
    assert is_away(cause, status) is expected


@pytest.mark.parametrize("status", [400, 401, 403, 413, 500])
def test_any_other_status_is_the_answer(status: int) -> None:
    assert after_status(status, failures=0, is_answer=False) is Step.REPORT


# --- positions ------------------------------------------------------------------------------


def test_an_event_that_was_seen_goes_nowhere() -> None:
    follower = Follower()

    assert [follower.admits(n) for n in ("1", "2", "1", "3", "3")] == [
        True,
        True,
        False,
        True,
        False,
    ]
    assert follower.position == "3"


@given(st.lists(st.integers(0, 50)))
def test_the_position_moves_with_each_new_event(ids: list[int]) -> None:
    """CUP2: replayed or live makes no difference."""
    follower = Follower()

    admitted = [event_id for event_id in ids if follower.admits(event_id)]

    assert admitted == list(dict.fromkeys(ids))
    assert follower.position == (admitted[-1] if admitted else None)


def test_position_and_memory_are_reset_together() -> None:
    """CLI4: the ids of a log that was made anew may be those of the old one."""
    follower = Follower()
    follower.admits(1)
    follower.admits(2)

    follower.restart(0)

    assert follower.position == 0
    assert follower.admits(1)


def test_the_memory_is_bounded() -> None:
    follower = Follower(remembered=2)
    for event_id in (1, 2, 3):
        follower.admits(event_id)

    assert not follower.admits(3)
    assert follower.admits(1)


# --- lives ----------------------------------------------------------------------------------


def test_a_session_is_started_over_once_unless_it_was_of_use() -> None:
    """CLI5: exactly once."""
    lives = Lives()

    assert lives.restart(now=0, rest=30)
    assert not lives.restart(now=1, rest=30)
    lives.used()
    assert lives.restart(now=2, rest=30)
    assert lives.generation == 2


def test_a_session_that_nobody_used_may_be_replaced_after_a_rest() -> None:
    """A server that restarts twice while its client is idle."""
    lives = Lives()
    lives.restart(now=0, rest=30)

    assert not lives.restart(now=29, rest=30)
    assert lives.restart(now=30, rest=30)


# --- attempts ---------------------------------------------------------------------------------


def test_a_takeover_in_ones_own_name_is_ones_own() -> None:
    """TKO13: however often, and whether or not anything was given up."""
    attempts = Attempts("me")
    assert [attempts.is_own("me", now=at) for at in (0.0, 1.0, 9e9)] == [True] * 3


def test_a_takeover_in_another_name_never_is() -> None:
    """TKO7."""
    attempts = Attempts("me")
    attempts.gave_up(now=0.0)
    assert not attempts.is_own("you", now=0.0)


@pytest.mark.parametrize("unsaid", [None, 7, ["me"]])
def test_a_takeover_in_no_name_is_ones_own_once_for_each_attempt_that_was_given_up(
    unsaid: object,
) -> None:
    """TKO13."""
    attempts = Attempts("me")
    assert not attempts.is_own(unsaid, now=0.0)
    attempts.gave_up(now=0.0)
    attempts.gave_up(now=1.0)
    assert [attempts.is_own(unsaid, now=2.0) for _ in range(3)] == [True, True, False]


def test_what_was_given_up_long_ago_explains_nothing() -> None:
    """TKO13: "a short time ago (ours: 300 seconds)"."""
    attempts = Attempts("me")
    attempts.gave_up(now=0.0)
    assert not attempts.is_own(None, now=LATE_ATTEMPT)


def test_what_was_given_up_is_bounded() -> None:
    attempts = Attempts("me")
    for _ in range(100):
        attempts.gave_up(now=0.0)
    assert sum(attempts.is_own(None, now=1.0) for _ in range(100)) == 16


# --- what servers say -------------------------------------------------------------------------


def test_the_capabilities_of_this_projects_server() -> None:
    said = abilities(
        {
            "sessions": {},
            "tools": {},
            "extensions": {
                EXTENSION: {"features": ["start", "requestKey"], "requestKeys": {"lifetime": 60}}
            },
        }
    )

    assert said == Abilities(True, True, frozenset({"start", "requestKey"}), 60.0, ("tools",))
    assert said.may("start")
    assert not said.may("resume")


def test_a_server_that_lists_no_features_may_be_asked_for_each() -> None:
    said = abilities({"sessions": {}})

    assert said.may("start")
    assert said.key_lifetime == 0


@pytest.mark.parametrize(
    "said", [None, [], {}, {"sessions": True}, {"experimental": {"sessions": {}}}]
)
def test_a_server_without_sessions(said: object) -> None:
    assert not abilities(said).has_sessions


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text() | st.just("requestKeys"), inner),
    max_leaves=10,
)


@given(JSON, JSON)
def test_malformed_capabilities_are_not_there(extension: object, sessions: object) -> None:
    read = abilities({"sessions": sessions, "extensions": {EXTENSION: extension}})
    assert read.has_sessions is isinstance(sessions, dict)
    assert read.is_ours is isinstance(extension, dict)
    assert not abilities({"extensions": extension}).has_sessions


def test_the_state_is_kept_as_it_came_and_a_missing_one_stays() -> None:
    view = SessionView("s", "grün\u2028\N{SNOWMAN}")

    view.merge({"_meta": {SESSION_META: {"sessionId": "s", "expiresAt": "later"}}})

    assert view.metadata() == {"sessionId": "s", "state": "grün\u2028\N{SNOWMAN}"}
    assert view.expires_at == "later"


def test_another_sessions_metadata_is_ignored() -> None:
    view = SessionView("s", "mine")

    assert not view.merge({"_meta": {SESSION_META: {"sessionId": "t", "state": "theirs"}}})
    assert view.state == "mine"


@pytest.mark.parametrize(
    ("params", "found"),
    [
        ({"sessionEventId": "7"}, "7"),
        ({"sessionEventId": 7}, 7),
        ({"sessionEventId": True}, None),
        ({"sessionEventId": "7", "_meta": {SESSION_META: {"sessionId": "s"}}}, "7"),
        ({"sessionEventId": "7", "_meta": {SESSION_META: {"sessionId": "t"}}}, None),
        ({}, None),
        (None, None),
    ],
)
def test_the_id_of_an_event_of_this_session(params: Any, found: object) -> None:
    """The elevation document: a string or an integer."""
    assert event_id_of(params, "s") == found


@pytest.mark.parametrize(
    ("value", "is_one"),
    [
        ("s", True),
        ("s" * 1_024, True),
        ("", False),
        ("s" * 1_025, False),
        ("\ud800", False),
        (7, False),
    ],
)
def test_an_id_of_a_session_is_a_text_with_a_bound(value: object, is_one: bool) -> None:
    assert is_session_id(value) is is_one
