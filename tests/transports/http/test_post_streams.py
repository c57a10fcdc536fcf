"""The names of response streams, and the SSE ids that say them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mcp_sessions.ids import StreamName, process_of
from mcp_sessions_transports.http.post_streams import (
    MAX_EVENT_ID,
    PostPosition,
    may_read,
    post_event_id,
    post_position_of,
    post_stream_name,
)

PROCESS = "process-abc_DEF-1"
AT = "1800000000000000000-000000000007"

few = st.frozensets(st.sampled_from(["read", "write", "admin", "ünï", "a~b/c.d@e", ""]))


@given(few, few)
def test_it_takes_every_scope_of_the_request(needed: frozenset[str], had: frozenset[str]) -> None:
    """SEC3."""
    name = post_stream_name(PROCESS, needed)
    assert may_read(name, had) is (had >= needed)


def test_of_very_many_scopes_it_takes_the_very_same() -> None:
    """A name is short, whoever sends the request."""
    many = frozenset(f"scope-{number}" for number in range(500))
    name = post_stream_name(PROCESS, many)
    assert len(name) < 256
    assert may_read(name, many)
    assert not may_read(name, many - {"scope-7"})
    assert not may_read(name, frozenset())


@given(few, st.one_of(st.integers(), st.text(max_size=200)))
def test_an_id_says_what_it_was_made_of(scopes: frozenset[str], request_id: int | str) -> None:
    name = post_stream_name(PROCESS, scopes)
    assert process_of(name) == PROCESS
    event_id = post_event_id(name, AT, request_id)
    assert post_position_of(event_id) == PostPosition(name, AT, request_id)


def test_names_without_scopes_are_those_of_before() -> None:
    """A client may come back to a process that runs another version."""
    name = StreamName(f"post-{'r' * 22}@{PROCESS}")
    assert may_read(name, frozenset())
    assert post_position_of(post_event_id(name, AT, 5)) == PostPosition(name, AT, 5)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "nonsense",
        AT,
        f"get/{AT}.NQ",
        f"events/{AT}.NQ",
        f"post-a/{AT}.",
        f"post-a/{AT}.dHJ1ZQ",
        f"post-a/{AT[:-1]}.NQ",
        f"post-\xe9/{AT}.NQ",
        f"post-{'a' * 300}/{AT}.NQ",
        f"post~{'a' * 700}~-a/{AT}.NQ",
        f"post-a/{AT}.{'A' * MAX_EVENT_ID}",
    ],
)
def test_what_is_no_id_of_a_response_stream_is_none(text: str) -> None:
    assert post_position_of(text) is None
