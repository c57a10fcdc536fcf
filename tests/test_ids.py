"""``mcp_sessions.ids``: what ids look like, and how they sort."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mcp_sessions.ids import (
    LogEpoch,
    Position,
    SessionId,
    digest,
    parse_position,
    parse_session_id,
)
from tests.support.log_epochs import log_epoch

# 13 digits of milliseconds: September 2001 to the year 2286.
MILLISECONDS = st.integers(10**12, 10**13 - 1)
RANDOM_PARTS = st.integers(0, 999_999)
NUMBERS = st.integers(0, 10**12 - 1)
EPOCHS = st.builds(log_epoch, MILLISECONDS, RANDOM_PARTS)
POSITIONS = st.builds(Position, EPOCHS, NUMBERS)


@given(POSITIONS)
def test_a_position_survives_the_wire(position: Position) -> None:
    """CUP8: epoch and number travel as one value."""
    assert parse_position(position.event_id()) == position


@given(POSITIONS)
def test_an_event_id_fits_a_header_and_an_sse_line(position: Position) -> None:
    """EVT8: digits and one hyphen, of fixed width."""
    event_id = position.event_id()

    assert len(event_id) == 13 + 6 + 1 + 12
    assert set(event_id) <= set("0123456789-")


@given(POSITIONS, POSITIONS)
def test_event_ids_sort_as_bytes_like_their_epochs_and_numbers(a: Position, b: Position) -> None:
    """EVT8: byte order, numeric order and order of issue agree."""
    by_bytes = a.event_id().encode() < b.event_id().encode()

    assert by_bytes == ((a.log_epoch, a.number) < (b.log_epoch, b.number))


@given(MILLISECONDS, RANDOM_PARTS, RANDOM_PARTS, NUMBERS, NUMBERS, st.integers(1, 10**9))
def test_ids_of_a_log_made_anew_sort_after_every_id_of_the_old_one(
    made: int, old_random: int, new_random: int, old: int, new: int, later: int
) -> None:
    """EVT7: also across a log that was lost and made anew, a millisecond later."""
    anew = min(made + later, 10**13 - 1)
    before = Position(log_epoch(made, old_random), old).event_id()
    after = Position(log_epoch(anew, new_random), new).event_id()

    assert before < after or made == anew


@given(st.text() | st.from_regex(r"[0-9]{19}-[0-9]{12}"))
def test_what_parses_as_a_position_is_spelled_as_we_spell_it(text: str) -> None:
    """EVT8: one spelling per position, so nothing else names one."""
    position = parse_position(text)

    assert position is None or position.event_id() == text


@pytest.mark.parametrize(
    "text",
    [
        "",
        "se_305",
        "0" * 19,
        f"{'1' * 19}-{'1' * 11}",
        f"{'1' * 19}-{'1' * 13}",
        f"{'1' * 18}-{'1' * 12}",
        f"{'1' * 19}_{'1' * 12}",
        f" {'1' * 19}-{'1' * 12}",
        f"{'1' * 19}-{'1' * 12}\n",
        f"{'1' * 19}--{'1' * 11}",
        f"{'1' * 19}-+{'1' * 11}",
        f"{'١' * 19}-{'١' * 12}",
        f"{'1' * 19}-{'1' * 12}-{'1' * 12}",
    ],
)
def test_what_is_not_spelled_like_ours_is_no_position(text: str) -> None:
    """EVT8: no separator tricks, no other digits, no white space."""
    assert parse_position(text) is None


@given(st.text(st.characters(min_codepoint=0x21, max_codepoint=0x7E), min_size=1, max_size=1024))
def test_visible_ascii_can_be_a_session_id(text: str) -> None:
    """SES4: 0x21 to 0x7E."""
    assert parse_session_id(text) == text


@pytest.mark.parametrize(
    "value",
    [None, 7, b"abc", ["abc"], "", "a b", "a\n", "a\x7f", "ä", "a\x00", "x" * 1025, "a\u2028"],
)
def test_what_is_no_visible_ascii_cannot_be_a_session_id(value: object) -> None:
    """SES4, EVT8: type, length and characters are checked before anything is looked up."""
    assert parse_session_id(value) is None


@given(st.text(max_size=100))
def test_a_digest_names_a_session_without_being_its_id(session_id: str) -> None:
    """SEC2: the loggable name is not the credential."""
    name = digest(session_id)

    assert name == digest(session_id)
    assert len(name) == 12 and set(name) <= set("0123456789abcdef")
    assert session_id not in name or len(session_id) < 4


def test_digests_of_different_sessions_differ() -> None:
    """SEC2: two sessions can be distinguished in a log."""
    assert len({digest(f"session-{number}") for number in range(10_000)}) == 10_000


def test_a_digest_takes_whatever_a_caller_sent() -> None:
    """SEC2: a refused id is logged too, and logging it must not fail."""
    assert digest("\ud800") != digest("")


def test_the_position_before_the_first_event_is_a_position() -> None:
    """STA3."""
    start = Position(LogEpoch("1" * 19), 0)

    assert parse_position(start.event_id()) == start


def test_ids_of_different_kinds_are_different_types_to_a_type_checker() -> None:
    """Style: a stream id cannot be passed as a session id. At run time they are strings."""
    assert SessionId("a") == "a"
