"""Server-sent events, read: wherever the bytes are split, and only up to the limit."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mcp_sessions_transports.sse_reader import EventTooLarge, ReadEvent, SseReader

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
    places = sorted({0, len(STREAM), *cuts})
    found: list[ReadEvent] = []

    for start, end in zip(places, places[1:], strict=False):
        found += reader.feed(STREAM[start:end])

    assert found == EVENTS


def test_an_event_that_is_too_large_is_refused_before_it_is_complete() -> None:
    reader = SseReader(max_bytes=100)

    with pytest.raises(EventTooLarge):
        reader.feed(b"data: " + b"x" * 200)


def test_comments_cost_nothing() -> None:
    """A stream that only shows signs of life is no event that grows."""
    reader = SseReader(max_bytes=100)

    for _ in range(1_000):
        assert reader.feed(b": still here\n\n") == []


@given(st.lists(st.binary(max_size=40), max_size=10))
def test_whatever_comes_is_read_or_refused(chunks: list[bytes]) -> None:
    reader = SseReader(max_bytes=64)
    try:
        for chunk in chunks:
            reader.feed(chunk)
    except EventTooLarge:
        pass
