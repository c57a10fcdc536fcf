"""``mcp_sessions.core.log``: the rules of the event log, by example and by property."""

import tracemalloc
from collections.abc import Sequence
from typing import Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mcp_sessions.core.log import UNBOUNDED, Draft, EventLog, LoggedEvent, Window
from mcp_sessions.errors import Refusal
from mcp_sessions.ids import LogEpoch, Position, SessionId, parse_position
from tests.property.model import LogModel
from tests.support.log_epochs import log_epoch

OLD = log_epoch(1_700_000_000_000, 999_999)
EPOCH = log_epoch(1_800_000_000_000, 0)
NEWER = log_epoch(1_900_000_000_000, 0)
ONE, TWO = SessionId("one"), SessionId("two")


def log_of(events: int, *, window: Window = UNBOUNDED, epoch: LogEpoch = EPOCH) -> EventLog:
    log = EventLog(epoch, window)
    for number in range(1, events + 1):
        log.append(Draft(b"event"), now=float(number))
    return log


def at(number: int, epoch: LogEpoch = EPOCH) -> Position:
    return Position(epoch, number)


def numbers(events: Sequence[LoggedEvent]) -> list[int]:
    return [event.number for event in events]


def refused(log: EventLog, position: Position, *, now: float = 0.0) -> Refusal:
    events, refusal = log.replay(position, now=now)
    assert refusal is not None and not events
    return refusal


def since(
    log: EventLog, position: Position, *, now: float, limit: int | None = None
) -> tuple[LoggedEvent, ...]:
    events, refusal = log.replay(position, now=now, limit=limit)
    assert refusal is None
    return events


# --- positions (rule 2) --------------------------------------------------------------------


def test_a_position_from_an_older_log_is_refused_even_when_its_number_is_in_range() -> None:
    """CUP8."""
    assert refused(log_of(100), at(50, OLD)) is Refusal.LOG_REPLACED
    assert refused(log_of(100), at(0, OLD)) is Refusal.LOG_REPLACED


def test_a_position_from_a_log_that_was_never_ours_is_unknown() -> None:
    """CUP8: a newer epoch than the log's own."""
    assert refused(log_of(100), at(50, NEWER)) is Refusal.UNKNOWN_POSITION


def test_the_epoch_is_compared_before_the_number() -> None:
    """CUP8, CUP5: a dead position is not ``ahead``, whatever its number."""
    assert refused(log_of(1), at(7, OLD)) is Refusal.LOG_REPLACED


def test_a_position_above_the_head_is_refused() -> None:
    """CUP8: never treated as caught up."""
    assert refused(log_of(3), at(4)) is Refusal.AHEAD
    assert refused(log_of(0), at(1)) is Refusal.AHEAD


def test_whoever_is_at_the_head_is_up_to_date() -> None:
    """CUP2: zero events is a success, not a refusal."""
    log = log_of(3)

    assert since(log, log.head, now=0.0) == ()


def test_resume_before_the_first_event_works() -> None:
    """STA3."""
    log = log_of(0)
    head = log.head

    assert since(log, head, now=0.0) == ()
    log.append(Draft(b"first"), now=1.0)
    assert numbers(since(log, head, now=1.0)) == [1]


@pytest.mark.parametrize(
    ("event_id", "reason"),
    [
        (None, Refusal.NO_POSITION),
        ("", Refusal.UNKNOWN_POSITION),
        ("se_305", Refusal.UNKNOWN_POSITION),
        (at(50, OLD).event_id(), Refusal.LOG_REPLACED),
        (at(2, NEWER).event_id(), Refusal.UNKNOWN_POSITION),
        (at(9).event_id(), Refusal.AHEAD),
        (at(0).event_id(), Refusal.EVICTED),
    ],
)
def test_each_bad_position_has_its_own_reason_and_replays_nothing(
    event_id: str | None, reason: Refusal
) -> None:
    """CUP5."""
    log = log_of(5, window=Window(3, None, None))

    assert log.since_id(event_id, now=5.0) == ((), reason)


def test_a_good_position_as_the_wire_spells_it_is_replayed() -> None:
    """CUP8: ``lastSessionEventId`` in, the events after it out."""
    events, refusal = log_of(5).since_id(at(3).event_id(), now=5.0)

    assert (numbers(events), refusal) == ([4, 5], None)


def test_what_time_took_is_expired_and_what_space_took_is_evicted() -> None:
    """CUP5, glossary: lost to time and lost to a limit are two words."""
    by_time = log_of(5, window=Window(None, None, 10.0))
    by_space = log_of(5, window=Window(3, None, 10.0))

    assert refused(by_time, at(2), now=13.5) is Refusal.EXPIRED
    assert numbers(since(by_time, at(3), now=13.5)) == [4, 5]
    assert refused(by_space, at(1), now=5.0) is Refusal.EVICTED
    assert refused(by_space, at(1), now=13.5) is Refusal.EVICTED
    assert refused(by_space, at(2), now=13.5) is Refusal.EXPIRED


# --- ids -----------------------------------------------------------------------------------


def test_an_events_id_is_its_position_and_stands_in_its_payload() -> None:
    """EVT8: one spelling, spliced where the template left room."""
    log = log_of(0)

    event = log.append(Draft(b'{"id":"', b'"}'), now=7.0)

    assert parse_position(event.event_id) == at(1) == log.head
    assert event.payload == b'{"id":"' + event.event_id.encode() + b'"}'
    assert (event.number, event.at) == (1, 7.0)


def test_a_draft_without_room_for_an_id_is_stored_as_it_is() -> None:
    """A bare connection's messages carry no id of ours."""
    assert log_of(0).append(Draft(b"{}"), now=0.0).payload == b"{}"


@given(st.lists(st.integers(0, 30), min_size=1, max_size=4), st.data())
def test_ids_sort_in_the_order_of_issue_also_across_logs_made_anew(
    lengths: list[int], data: st.DataObject
) -> None:
    """EVT8. Each log is made at least a millisecond after the one before."""
    issued: list[bytes] = []
    milliseconds = 1_700_000_000_000
    for length in lengths:
        milliseconds += data.draw(st.integers(1, 10**9))
        epoch = log_epoch(milliseconds, data.draw(st.integers(0, 999_999)))
        log = log_of(length, epoch=epoch)
        issued += [event.event_id.encode() for event in since(log, at(0, epoch), now=0.0)]

    assert issued == sorted(set(issued))


def test_a_log_never_issues_an_id_that_would_not_sort() -> None:
    """EVT8: the number has twelve digits, and there it ends."""
    log = log_of(0)
    log._head, log._oldest = 10**12 - 2, 10**12 - 2  # pyright: ignore[reportPrivateUsage]

    last = log.append(Draft(b"last"), now=0.0)

    assert parse_position(last.event_id) == at(10**12 - 1)
    with pytest.raises(OverflowError):
        log.append(Draft(b"one more"), now=0.0)
    assert log.head == at(10**12 - 1) and len(log) == 1


# --- coalescing (rule 3) -------------------------------------------------------------------


def test_the_survivor_keeps_its_newer_id_and_the_replaced_id_stays_a_position() -> None:
    """COA4."""
    log = log_of(0)
    for key in ("a", None, "a", "b"):
        log.append(Draft(b"x", key=key), now=0.0)

    assert numbers(since(log, at(0), now=0.0)) == [2, 3, 4]
    assert numbers(since(log, at(1), now=0.0)) == [2, 3, 4]
    assert log.floor == at(0)


def test_a_million_updates_of_ten_resources_are_ten_events() -> None:
    """CUP1: the window is bounded by what there is to know (here 20,000)."""
    log = EventLog(EPOCH, Window(10, None, None))
    for number in range(20_000):
        log.append(Draft(b"x", key=f"note://{number % 10}"), now=0.0)

    assert numbers(since(log, at(0), now=0.0)) == list(range(19_991, 20_001))
    assert log.size == 10


def test_sessions_that_share_a_stream_do_not_replace_each_others_events() -> None:
    """SEC7: the key of an event belongs to its session."""
    log = log_of(0)
    for origin in (ONE, TWO, None, ONE):
        log.append(Draft(b"x", key="note://1", origin=origin), now=0.0)

    assert numbers(since(log, at(0), now=0.0)) == [2, 3, 4]


def test_an_evicted_event_is_not_replaced_again() -> None:
    """CUP1: the index of keys is evicted with its events."""
    log = EventLog(EPOCH, Window(2, None, None))
    log.append(Draft(b"xxx", key="a"), now=0.0)
    log.append(Draft(b"x"), now=0.0)
    log.append(Draft(b"x"), now=0.0)
    log.append(Draft(b"xx", key="a"), now=0.0)

    assert numbers(since(log, at(2), now=0.0)) == [3, 4]
    assert log.size == 3


def test_the_memory_of_a_log_is_bounded_by_its_window_not_by_its_past() -> None:
    """CUP1, END2: neither events nor keys nor holes between them pile up."""
    log = EventLog(EPOCH, Window(10, None, None))
    for number in range(2_000):
        log.append(Draft(b"x", key=f"warm-up {number}"), now=0.0)
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        for number in range(10_000):
            log.append(Draft(b"x", key=f"note://{number}"), now=0.0)
            log.append(Draft(b"x", key="note://always"), now=0.0)
        after, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()

    assert len(log) == 10
    assert after - before < 64 * 1024


# --- one session's events on a connection's stream -------------------------------------------


def test_dropping_one_sessions_events_leaves_the_others_and_every_position() -> None:
    """TKO1: ``session/resume`` first removes that session's entries."""
    log = log_of(0)
    for origin in (ONE, TWO, None, ONE):
        log.append(Draft(b"xy", key="k" if origin == ONE else None, origin=origin), now=0.0)

    # The fourth replaced the first.
    assert log.drop_origin(ONE) == 1
    assert log.drop_origin(ONE) == 0
    assert numbers(since(log, at(0), now=0.0)) == [2, 3]
    assert (len(log), log.size, log.floor, log.head) == (2, 4, at(0), at(4))
    assert since(log, at(4), now=0.0) == ()
    assert log.append(Draft(b"x", key="k", origin=ONE), now=0.0).number == 5


# --- bounds (rule 4) -----------------------------------------------------------------------


def test_the_newest_event_is_kept_however_large() -> None:
    """ATT7, policy: bounded bytes, but for the newest one."""
    log = EventLog(EPOCH, Window(None, 10, None))
    log.append(Draft(b"small"), now=0.0)
    log.append(Draft(b"x" * 1_000), now=0.0)

    assert numbers(since(log, at(1), now=0.0)) == [2]
    log.append(Draft(b"small"), now=0.0)
    assert (len(log), log.size) == (1, 5)


def test_an_event_can_be_replayed_until_it_is_as_old_as_the_window_allows() -> None:
    """ATT7: age counts when reading too, not only when the next event comes."""
    log = EventLog(EPOCH, Window(None, None, 60.0))
    log.append(Draft(b"x"), now=100.0)

    assert numbers(since(log, at(0), now=160.0)) == [1]
    assert refused(log, at(0), now=160.5) is Refusal.EXPIRED
    assert (len(log), log.size) == (0, 0)
    assert since(log, log.head, now=160.5) == ()


def test_an_unbounded_log_keeps_everything() -> None:
    """A window may be unbounded."""
    log = log_of(3_000)

    assert numbers(since(log, at(0), now=1e12)) == list(range(1, 3_001))


# --- for every log: the properties -----------------------------------------------------------

BOUNDS = st.builds(
    Window,
    st.none() | st.integers(1, 8),
    st.none() | st.integers(1, 60),
    st.none() | st.integers(0, 30).map(float),
)
ORIGINS = st.sampled_from([None, ONE, TWO])
Step = tuple[Literal["append", "drop"], int, str | None, SessionId | None, int]
STEPS = st.lists(
    st.tuples(
        st.sampled_from(["append"] * 9 + ["drop"]),
        st.integers(0, 20),
        st.sampled_from([None, None, "a", "b", "c"]),
        ORIGINS,
        st.sampled_from([0, 0, 0, 1, 5, 40]),
    ),
    max_size=40,
)


def grown(window: Window, steps: Sequence[Step]) -> tuple[EventLog, LogModel, float]:
    """A log and its model after the same steps, compared after each; and the time."""
    log, model, now = EventLog(EPOCH, window), LogModel(window), 0.0
    for step, size, key, origin, seconds in steps:
        now += seconds
        if step == "drop" and origin is not None:
            before = len(model.kept)
            model.drop(origin)
            assert log.drop_origin(origin) == before - len(model.kept)
        else:
            draft = Draft(b"x" * size, key=key, origin=origin)
            log.append(draft, now=now)
            model.append(size, now, (origin, key) if key is not None else None, origin)
        assert (len(log), log.size) == (len(model.kept), sum(event.size for event in model.kept))
        assert (log.head.number, log.floor.number) == (model.head, model.floor)
        assert window.max_events is None or len(log) <= window.max_events
        assert window.max_bytes is None or log.size <= window.max_bytes or len(log) == 1
    return log, model, now


@given(BOUNDS, STEPS, st.integers(0, 45), st.sampled_from([0, 1, 29, 31]))
def test_a_replay_is_whole_or_refused(
    window: Window, steps: Sequence[Step], number: int, later: int
) -> None:
    """CUP8, CUP5, ATT7: for every size of log, window and position."""
    log, model, now = grown(window, steps)

    expected = model.replay(number, now + later)

    if isinstance(expected, Refusal):
        assert refused(log, at(number), now=now + later) is expected
    else:
        events = since(log, at(number), now=now + later)
        assert numbers(events) == expected
        assert window.max_age is None or all(
            event.at >= now + later - window.max_age for event in events
        )


@given(BOUNDS, STEPS, st.integers(0, 45), st.integers(1, 9))
def test_reads_in_pages_equal_the_whole(
    window: Window, steps: Sequence[Step], number: int, limit: int
) -> None:
    """ATT7: a backlog is read in pages, each from the last one's position."""
    log, _, now = grown(window, steps)
    position = at(min(max(number, log.floor.number), log.head.number))
    whole = since(log, position, now=now)

    pages: list[LoggedEvent] = []
    while page := since(log, position, now=now, limit=limit):
        assert len(page) <= limit
        pages += page
        position = at(page[-1].number)

    assert tuple(pages) == whole


def test_pages_of_a_log_that_is_mostly_holes_equal_the_whole() -> None:
    """ATT7: where stepping through the numbers would be dearer than through what is kept."""
    log = log_of(1)
    for number in range(100):
        log.append(Draft(b"x", key=f"note://{number % 2}"), now=2.0)

    pages = [since(log, at(number), now=2.0, limit=1) for number in (0, 1, 100, 101)]

    assert [numbers(page) for page in pages] == [[1], [100], [101], []]


@given(BOUNDS, STEPS, st.sampled_from([OLD, NEWER, LogEpoch("0" * 19)]), st.integers(0, 45))
def test_no_position_of_another_log_is_ever_replayed(
    window: Window, steps: Sequence[Step], epoch: LogEpoch, number: int
) -> None:
    """CUP8: for every number, inside today's range or not."""
    log, _, now = grown(window, steps)

    assert refused(log, at(number, epoch), now=now) in {
        Refusal.LOG_REPLACED,
        Refusal.UNKNOWN_POSITION,
    }


def test_what_the_log_has_already_replaces_nothing() -> None:
    """The answer of a call was lost, and the call is made again."""
    log = log_of(0)
    first = Draft(b"event", key="k", name="n", since=1.0)
    assert not log.would_replace(first)
    log.append(first, now=1.0)
    assert not log.would_replace(first)
    for another in (Draft(b"event", key="k"), Draft(b"event", key="k", name="m", since=2.0)):
        assert log.would_replace(another)
    assert not log.would_replace(Draft(b"event", key="l"))
