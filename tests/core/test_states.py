"""``mcp_sessions.core.states``: a session's life is the table, and the table is closed."""

import itertools

import pytest

from mcp_sessions.core.states import BEGINS, TRANSITIONS, Change, State, after

ENDED_STATES = frozenset({State.ENDED, State.EXPIRED})
LIVE = frozenset({State.DETACHED, State.ATTACHED})


@pytest.mark.parametrize(("state", "change"), list(itertools.product(State, Change)))
def test_every_change_in_every_state_is_in_the_table_or_cannot_happen(
    state: State, change: Change
) -> None:
    """Every state × every change."""
    follows = after(state, change)

    assert follows is TRANSITIONS.get((state, change))
    assert (follows is None) == (state in ENDED_STATES)


@pytest.mark.parametrize("state", [state for state in State if state in LIVE])
@pytest.mark.parametrize(
    ("change", "follows"),
    [
        (Change.ATTACH, State.ATTACHED),
        (Change.DISPLACE, State.DETACHED),
        (Change.DETACH, State.DETACHED),
        (Change.END, State.ENDED),
        (Change.EXPIRE, State.EXPIRED),
    ],
)
def test_what_follows_a_change_depends_on_the_change_alone_while_a_session_lives(
    state: State, change: Change, follows: State
) -> None:
    """HTL8: an attach works at once, whether or not somebody is attached."""
    assert after(state, change) is follows


def test_a_session_that_has_ended_has_no_way_out() -> None:
    """SES18, END1: ended and expired are two words, and both are for ever."""
    assert frozenset(State) - LIVE == ENDED_STATES
    assert not any(state in ENDED_STATES for state, _ in TRANSITIONS)


def test_every_state_is_reached_from_the_first() -> None:
    """No state of the table is decoration."""
    reached, unseen = {BEGINS}, [BEGINS]
    while unseen:
        state = unseen.pop()
        for change in Change:
            follows = after(state, change)
            if follows is not None and follows not in reached:
                reached.add(follows)
                unseen.append(follows)

    assert reached == set(State)


def test_a_session_begins_with_nobody_listening() -> None:
    """``sessions/create`` and a lone POST make sessions that are attached nowhere."""
    assert BEGINS is State.DETACHED and BEGINS in LIVE


@pytest.mark.parametrize("state", [State.DETACHED, State.ATTACHED])
@pytest.mark.parametrize("change", Change)
def test_only_an_end_and_time_are_the_last_change_of_a_session(
    state: State, change: Change
) -> None:
    """END2: after that no store keeps it."""
    assert (after(state, change) in ENDED_STATES) == (change in (Change.END, Change.EXPIRE))
