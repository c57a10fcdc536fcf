"""Server-sent events, read: wherever the bytes are split, and only up to the limit."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mcp_sessions.http_client.sse_reader import MOST, EventTooLarge, ReadEvent, SseReader

STREAM = (
    "\ufeff: a comment\r\n"
    "event: message\r\n"
    'id: 7\r\ndata: {"text":"a\u2028b"}\r\n\r\n'
    "id: 8\ndata:\n\n"
    "retry: 1500\rdata: one\rdata: two\r\r"
    "data: last\n\n"
).encode()

EVENTS = [
    ReadEvent("7", '{"text":"a\u2028b"}'.encode(), "message", None),
    ReadEvent("8", b"", "message", None),
    ReadEvent(None, b"one\ntwo", "message", 1500),
    ReadEvent(None, b"last", "message", None),
]


@given(st.lists(st.integers(0, len(STREAM))))
def test_events_are_the_same_wherever_the_bytes_are_split(cuts: list[int]) -> None:
    reader = SseReader(max_bytes=1_000)
    positions = sorted({0, len(STREAM), *cuts})
    found: list[ReadEvent] = []

    for start, end in zip(positions, positions[1:], strict=False):
        found += reader.feed(STREAM[start:end])

    assert found == EVENTS


def test_an_event_that_is_far_too_large_is_refused_before_it_is_complete() -> None:
    reader = SseReader(max_bytes=100)

    with pytest.raises(EventTooLarge):
        reader.feed(b"data: " + b"x" * MOST * 100)


@pytest.mark.parametrize("step", [1, 7, 100, 10_000])
def test_an_event_that_is_too_large_is_passed_over_and_its_id_is_known(step: int) -> None:
    reader = SseReader(max_bytes=100)
    large = b'data: {"id":4,"result":\ndata: {"x":"' + b"y" * 300 + b'"}}\nid: 2\n\n'
    stream = b"id: 1\ndata: {}\n\n" + large + b"id: 3\ndata: {}\n\n"
    found: list[ReadEvent] = []

    for start in range(0, len(stream), step):
        found += reader.feed(stream[start : start + step])

    assert [(event.id, event.data) for event in found] == [("1", b"{}"), ("2", b""), ("3", b"{}")]
    dropped = found[1].dropped
    assert dropped is not None
    assert (dropped.id, dropped.has_method) == (4, False)
    assert dropped.size > 300


def test_an_event_without_end_is_not_waited_for() -> None:
    reader = SseReader(max_bytes=100)
    with pytest.raises(EventTooLarge):
        for _ in range(1_000):
            reader.feed(b"data: " + b"x" * 90 + b"\n")


def test_comments_cost_nothing() -> None:
    """A stream that only shows signs of life is no event that grows."""
    reader = SseReader(max_bytes=100)

    for _ in range(1_000):
        assert reader.feed(b": still here\n\n") == []


@given(st.lists(st.binary(max_size=40), max_size=10))
def test_whatever_comes_is_read_or_refused(chunks: list[bytes]) -> None:
    """Passes if nothing is raised but what is documented."""
    reader = SseReader(max_bytes=64)
    try:
        for chunk in chunks:
            reader.feed(chunk)
    except EventTooLarge:
        pass
