"""``mcp_sessions.stores.redis.record_codec``: what is written is read again, what is kept has a
bound.
"""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mcp_sessions.ids import ConnectionId, LogEpoch, SessionId
from mcp_sessions.stores.redis.commands import tag_of
from mcp_sessions.stores.redis.record_codec import (
    NOTHING,
    KnownFacts,
    KnownSessions,
    decoded,
    encoded,
    packed,
    published_event,
    unpacked,
)

ANY_TEXT = st.text(st.characters(exclude_categories=()))
JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.integers(2**64, 2**100)
    | st.floats(allow_nan=False, allow_infinity=False)
    | ANY_TEXT,
    lambda parts: st.lists(parts) | st.dictionaries(ANY_TEXT, parts),
    max_leaves=10,
)
ONE, TWO, THREE = SessionId("one"), SessionId("two"), SessionId("three")


@given(JSON)
def test_what_is_packed_is_unpacked_as_it_was(value: object) -> None:
    # Not by `==`: 2**64 is equal to the float that it may have become.
    assert repr(unpacked(packed(value))) == repr(value)


@pytest.mark.parametrize("number", [2**70 + 1, -(2**65) - 1, [2**64], {"n": 10**30 + 7}])
def test_an_integer_beyond_64_bits_keeps_its_last_digit(number: object) -> None:
    """The regression: it came back as a float, which is another number: a handler that had put
    it into its session's state or data read 1.18e21.
    """
    assert repr(unpacked(packed(number))) == repr(number)


@given(ANY_TEXT)
def test_any_text_of_a_peer_is_decoded_as_it_was(text: str) -> None:
    """Lone surrogates are text to a peer."""
    assert decoded(encoded(text)) == text


@given(ANY_TEXT, ANY_TEXT)
def test_a_key_tells_names_apart(one: str, other: str) -> None:
    """SEC2: keys turn up in monitors and slow logs."""
    assert (tag_of(one) == tag_of(other)) is (one == other)
    assert len(tag_of(one)) == 40


def facts(uris: int = 0, peer_bytes: int = 0) -> KnownFacts:
    return KnownFacts(b"1", frozenset(f"a:{each}" for each in range(uris)), (None,), peer_bytes)


def test_of_what_is_known_of_sessions_the_one_used_longest_ago_is_forgotten() -> None:
    """A process that serves for months meets many sessions."""
    known = KnownSessions(most=2 * (KnownSessions.COST + 100))
    for session_id in (ONE, TWO):
        known.learn(session_id, facts(peer_bytes=100))
    assert known.of(ONE) != NOTHING

    known.learn(THREE, facts(uris=1))

    assert known.of(TWO) == NOTHING
    assert known.of(ONE) == facts(peer_bytes=100) and known.of(THREE) == facts(uris=1)


def test_nothing_is_known_that_alone_is_more_than_the_bound() -> None:
    known = KnownSessions(most=KnownSessions.COST)

    known.learn(ONE, facts(uris=1))
    assert known.of(ONE) == NOTHING

    known.learn(ONE, facts())
    known.learn(ONE, facts())
    assert known.of(ONE) == facts()


def test_a_change_is_applied_only_to_the_subscriptions_that_it_changed() -> None:
    """Another process may have changed them in between: then they are read again."""
    known = KnownSessions()
    known.learn(ONE, facts(uris=2))

    known.changed(ONE, b"1", b"2", with_one="a:3", without="a:1")
    assert known.of(ONE)[:3] == (b"2", {"a:0", "a:3"}, (None,))
    known.changed(ONE, b"another", b"4", with_one="a:4")
    assert known.of(ONE).change == b"2"

    # They were lost, and this is the first one again.
    known.changed(ONE, None, b"5", with_one="a:5")
    assert known.of(ONE)[:3] == (b"5", {"a:5"}, (None,))


@pytest.mark.parametrize("payload", [b"{}", b'{"a":"line\\n"}', b"\n \n"])
def test_a_published_event_is_read_whatever_its_payload_holds(payload: bytes) -> None:
    head = b"%s 7 1.5 3 2 -1 6\n" % (b"1" * 19)

    event, attachment = published_event(head + b"c1" + b"origin" + payload)

    assert (event.number, event.at, event.payload) == (7, 1.5, payload)
    assert (event.key, event.origin) == (None, "origin")
    assert event.event_id.startswith(LogEpoch("1" * 19))
    assert attachment is not None
    assert (attachment.connection_id, attachment.fencing_epoch) == (ConnectionId("c1"), 3)
