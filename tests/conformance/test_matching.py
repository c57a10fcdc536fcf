"""Shapes, templates and event streams: what the runner reads with."""

from typing import Any

import pytest

from mcp_sessions_conformance import sse
from mcp_sessions_conformance.matching import MISSING, mismatch
from mcp_sessions_conformance.values import UnknownName, filled, issued_after, pointed, spoilt

HOLDS: list[tuple[Any, Any]] = [
    ({}, {"more": 1}),
    ({"a": 1}, {"a": 1, "b": 2}),
    ([1, {"a": 1}], [1, {"a": 1, "b": 2}]),
    ({"a": {"$absent": True}}, {}),
    ({"a": {"$absent": False}}, {"a": None}),
    ({"$type": "integer"}, 0),
    ({"$type": "null"}, None),
    ({"$type": "timestamp"}, "2026-11-21T10:00:00.5Z"),
    ({"$type": "event-id"}, 7),
    ({"$pattern": "^a+$"}, "aaa"),
    ({"$not": "x"}, "y"),
    ({"$not": "x"}, MISSING),
    ({"$any": [1, {"$type": "string"}]}, "s"),
    ({"a": {"$any": [{"$absent": True}, 1]}}, {}),
    ({"$exact": {"a": [1]}}, {"a": [1]}),
    ({"$keys": ["a", "b"], "a": 1}, {"a": 1, "b": 2}),
    ({"$contains": {"a": 1}}, [{"a": 2}, {"a": 1}]),
    ({"$every": {"$type": "string"}}, ["a", "b"]),
    ({"$length": {"$atLeast": 2}}, "ab"),
    ({"$atMost": 3, "$atLeast": 3}, 3),
    ({"$after": "0-9"}, "1-0"),
]

HOLDS_NOT: list[tuple[Any, Any]] = [
    ({"a": 1}, {}),
    ({"a": 1}, []),
    ({}, MISSING),
    (1, True),
    (True, 1),
    (0, False),
    ([1], [1, 2]),
    ([1, 2], [1]),
    ([], {}),
    ({"a": {"$absent": True}}, {"a": None}),
    ({"a": {"$absent": False}}, {}),
    ({"$type": "integer"}, True),
    ({"$type": "number"}, "1"),
    ({"$type": "string"}, MISSING),
    ({"$type": "timestamp"}, "2026-11-21T10:00:00+01:00"),
    ({"$type": "timestamp"}, "2026-13-21T10:00:00Z"),
    ({"$type": "event-id"}, None),
    ({"$pattern": "a"}, 5),
    ({"$not": {"$type": "string"}}, "s"),
    ({"$any": [1, 2]}, 3),
    ({"$exact": {"a": 1}}, {"a": 1, "b": 2}),
    ({"$keys": ["a"]}, {"a": 1, "b": 2}),
    ({"$keys": ["a"], "a": 1}, {"a": 2}),
    ({"$contains": 1}, [2]),
    ({"$every": 1}, [1, 2]),
    ({"$length": 3}, "ab"),
    ({"$atLeast": 2}, 1),
    ({"$atMost": 2}, "1"),
    ({"$after": "b"}, "b"),
    ({"$after": 9}, "10"),
]


@pytest.mark.parametrize(("shape", "value"), HOLDS, ids=repr)
def test_a_shape_holds(shape: Any, value: Any) -> None:
    assert mismatch(shape, value) is None


@pytest.mark.parametrize(("shape", "value"), HOLDS_NOT, ids=repr)
def test_a_shape_does_not_hold_and_says_where(shape: Any, value: Any) -> None:
    assert mismatch(shape, value)
    assert "/x/y" in str(
        mismatch({"x": {"y": shape}}, {"x": {} if value is MISSING else {"y": value}})
    )


def test_a_reference_alone_keeps_its_type_and_within_text_it_is_text() -> None:
    names = {"n": 5, "s": "x"}
    assert filled({"${s}": ["${n}", "a-${n}-${s}", 1]}, names) == {"x": [5, "a-5-x", 1]}
    with pytest.raises(UnknownName, match="never"):
        filled("${never}", names)


def test_a_pointer_finds_or_says_that_nothing_is_there() -> None:
    document = {"a/b": [{"~": 1}]}
    assert pointed(document, "/a~1b/0/~0") == 1
    assert pointed(document, "") == document
    for nowhere in ("/x", "/a~1b/1", "/a~1b/x", "/a~1b/0/~0/deeper"):
        with pytest.raises(UnknownName):
            pointed(document, nowhere)


def test_event_ids_are_ordered_as_the_documents_say() -> None:
    """Rule: "a monotonically increasing string or integer"."""
    assert issued_after(9, 10)
    assert issued_after("9", "10"), "strings of digits go by value"
    assert issued_after("a-09", "a-10")
    assert not issued_after("a", "a")
    assert not issued_after(1, "2")
    assert not issued_after(False, True)


@pytest.mark.parametrize("how", ["flip", "truncate", "extend", "oversize", "ahead"])
def test_a_spoilt_token_is_another_one(how: str) -> None:
    for token in ("AAAA-0001", "v1.abcAAdef8"):
        assert spoilt(token, how) != token


def events(*chunks: bytes) -> list[tuple[str, str | None]]:
    reader = sse.Reader()
    return [(e.data, e.id) for chunk in chunks for e in reader.feed(chunk)]


def test_an_event_stream_is_read_wherever_it_is_cut() -> None:
    stream = '\ufeffid: 1\ndata: {"a":\ndata: 2}\n\n: comment\r\nid: 2\r\n\r\ndata:é\r\r'.encode()
    expected = [('{"a":\n2}', "1"), ("", "2"), ("é", None)]
    assert events(stream) == expected
    assert events(*(stream[i : i + 1] for i in range(len(stream)))) == expected
    for cut in range(len(stream)):
        assert events(stream[:cut], stream[cut:]) == expected


def test_a_line_without_end_is_refused() -> None:
    reader = sse.Reader()
    with pytest.raises(sse.TooLong):
        for _ in range(20):
            reader.feed(b"x" * 1_000_000)
