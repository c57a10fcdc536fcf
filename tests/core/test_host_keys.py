"""``mcp_sessions.core.conversation_keys``: a key that a host sends under a name of its own."""

from typing import Any

import pytest

from mcp_sessions.core.conversation_keys import among, home_of, host_key, place_of
from mcp_sessions.errors import InvalidParams
from mcp_sessions.ids import RequestKey

PLACES = [place_of("header:Idempotency-Key"), place_of("meta:host/use")]


def in_header(text: str, params: dict[str, Any] | None = None) -> RequestKey | None:
    return host_key(PLACES, params, {}, {"idempotency-key": text})


def test_the_same_text_in_two_places_is_two_keys() -> None:
    in_meta = host_key(PLACES, None, {"host/use": "k"}, {})
    assert None not in (in_header("k"), in_meta)
    assert in_header("k") != in_meta
    assert host_key(PLACES, None, {}, {}) is None


@pytest.mark.parametrize("member", ["requestState", "inputResponses"])
def test_a_further_round_is_another_request(member: str) -> None:
    rounds = [in_header("k", params) for params in ({}, {member: {"a": 1}}, {member: {"a": 2}})]
    assert len({*rounds}) == 3
    assert in_header("k", {"arguments": 1}) == rounds[0]


@pytest.mark.parametrize("text", ["", "k" * 257])
def test_a_key_that_cannot_count_is_refused(text: str) -> None:
    """Its sender expects protection."""
    with pytest.raises(InvalidParams):
        in_header(text)
    assert in_header("k" * 256) is not None


def test_a_key_of_one_conversation_is_none_of_another() -> None:
    key = RequestKey("k")
    assert among(key, "one") == among(key, "one")
    assert len({among(key, "one"), among(key, "two"), key}) == 3


def test_each_owner_has_a_home_of_its_own() -> None:
    assert len({home_of("a", None), home_of(None, "a"), home_of("a"), home_of()}) == 4
