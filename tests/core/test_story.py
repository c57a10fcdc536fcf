"""The story of a session as text: bounded, and read by whoever meets it, older or newer."""

import pytest

from mcp_sessions.core.story import (
    MOST,
    Entry,
    Why,
    detaches,
    last_method,
    outcome,
    read,
    told,
    troubles,
    why_it_lives,
)
from mcp_sessions.ids import LogEpoch, Position

STREAM = "attached http here opened free - 0 - - -"
CLOSED = "detached closed here"
NOBODY = "it lives, and no connection has it"


def test_the_oldest_entries_fold_away_and_are_counted() -> None:
    story = ""
    for number in range(200):
        story = told(story, float(number), f"detached closed replica{number}")
        folded, entries = read(story)
        assert len(story.encode()) <= MOST and folded + len(entries) == number + 1
        assert entries[-1].at == number and entries[0].at == folded
    # As many as there is room for.
    assert len(story) > MOST - 100


@pytest.mark.parametrize(
    ("facts", "text"),
    [
        (
            outcome(False, Position(LogEpoch("1"), 4), head=9, replayed=3, evicted=0, refusal=None),
            "resumed by http at replica here from event 4: 3 replayed, 2 coalesced",
        ),
        (
            outcome(True, None, head=9, replayed=0, evicted=0, refusal="no_position"),
            "resumed by http at replica here without a position; taken over from another "
            "connection",
        ),
        (
            outcome(
                False, Position(LogEpoch("1"), 4), head=9, replayed=0, evicted=6, refusal="evicted"
            ),
            "resumed by http at replica here from event 4: nothing replayed (evicted); events up "
            "to 6 were evicted",
        ),
    ],
)
def test_a_resume_says_from_where_and_with_what(facts: str, text: str) -> None:
    _, (entry,) = read(told("", 1.0, f"attached http here {Why.RESUMED}{facts}"))
    assert entry.text == text


@pytest.mark.parametrize(
    "line",
    [
        "",
        "no time",
        "+many",
        "1",
        "1 danced wildly",
        "1 attached http",
        "1 long tools/call soon",
        "1 attached http here resumed free 1 nine 3 0 -",
        "99999999999999999999 detached closed here",
    ],
)
def test_a_line_of_another_release_is_left_out(line: str) -> None:
    story = f"1 detached closed here\n{line}\n2 detached slow here - and more\n"
    folded, entries = read(story)
    assert folded == 0
    assert [entry.text for entry in entries] == [
        "detached at replica here: closed",
        "detached at replica here: slow",
    ]


def test_a_session_that_was_detached_has_its_last_request() -> None:
    """Also in a story of an older release, which has none."""
    story = told("", 1.0, "detached closed here tools/call")
    assert read(story)[1][0].text == "detached at replica here: closed, after tools/call"
    assert last_method(story) == "tools/call"
    assert last_method(told(story, *detaches(2.0, Why.SLOW, "here"))) is None
    assert detaches(2.0, Why.SLOW, "here", "ping").text == "detached slow here ping"
    assert last_method("") is None


@pytest.mark.parametrize(
    ("moves", "is_attached", "why"),
    [
        ([], None, "it lives"),
        ([], False, "it lives, and no connection has it"),
        ([STREAM], None, "it lives: stream opened by http at replica here"),
        ([STREAM], True, "it lives: stream opened by http at replica here"),
        ([STREAM, CLOSED], None, f"{NOBODY}: detached at replica here: closed"),
        ([STREAM, CLOSED], False, f"{NOBODY}: detached at replica here: closed"),
        # The store knows better than a story that is late.
        ([STREAM, CLOSED], True, "it lives"),
        ([STREAM], False, NOBODY),
    ],
)
def test_a_session_that_lives_says_who_has_it(
    moves: list[str], is_attached: bool | None, why: str
) -> None:
    story = ""
    for number, text in enumerate(moves):
        story = told(story, float(number), text)
    assert why_it_lives(story, is_attached=is_attached)[0] == why


def test_what_went_wrong_is_counted_since_a_time() -> None:
    story = ""
    for at, text in (
        (1, "detached slow here"),
        (5, "attached http here started free - 0 0 0 -"),
        (6, "detached slow here tools/call"),
        (7, "detached closed here"),
        (8, "attached http here resumed free 3 40 0 30 evicted"),
        (9, "attached http here resumed free - 40 0 30 no_position"),
        (10, "refused max_running_requests tools/call 40"),
        (11, "refused max_running_requests tools/list 2"),
        (12, "asked elicitation/create 45"),
        (13, "a-word-of-a-newer-release"),
    ):
        story = told(story, float(at), text)

    assert troubles(story, 5.0) == {"slow": 1, "not-replayed": 1, "refused": 42}
    assert troubles(story, 99.0) == {} and troubles("+12\n", 0.0) == {}


def test_a_replica_that_has_no_name_is_left_out() -> None:
    entry = detaches(1.0, Why.CLOSED, "-")
    assert entry == Entry(1.0, "detached closed -")
    _, (shown,) = read(told("", *entry))
    assert shown.text == "detached: closed" and "replica" not in shown.facts
