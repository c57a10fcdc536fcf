"""``mcp_sessions.core.client_description``: of what a client says of itself, what is kept."""

import sys
from typing import Any

import pytest

from mcp_sessions.core.client_description import described, outlined, size_of


def test_of_a_handshake_what_a_connection_is_made_from_is_kept() -> None:
    kept: dict[str, Any] = {"protocolVersion": "2025-11-25", "capabilities": {"roots": {}}}

    assert described({**kept, "_meta": {"x": 1}}) == kept
    assert described(None) == described({}) == {}


def test_of_a_sessions_maker_what_it_can_be_asked_and_its_name_are_kept() -> None:
    """Its settings are its own: whoever uses the session later has others."""
    params: dict[str, Any] = {
        "capabilities": {"sampling": {"tools": {}}, "roots": {"listChanged": True}, "tasks": {}},
        "clientInfo": {"name": "a" * 300, "version": "1", "websiteUrl": "https://example.com"},
    }

    outline = outlined(params)

    assert outline == {
        "capabilities": {"sampling": {}, "roots": {}},
        "clientInfo": {"name": "a" * 256, "version": "1"},
    }


@pytest.mark.parametrize(
    "params",
    [{}, {"capabilities": None}, {"capabilities": [], "clientInfo": "me"}, {"clientInfo": {}}],
    ids=str,
)
def test_what_is_malformed_is_not_there(params: dict[str, Any]) -> None:
    assert outlined(params) == {"capabilities": {}}


def test_a_name_that_is_no_text_is_left_out() -> None:
    outline = outlined({"clientInfo": {"name": 5, "version": "2"}})

    assert outline == {"capabilities": {}, "clientInfo": {"version": "2"}}


def test_a_client_that_said_nothing_has_no_outline() -> None:
    assert outlined(None) is None


def test_a_size_is_in_bytes_and_what_nobody_can_write_is_larger_than_any_bound() -> None:
    deep: dict[str, Any] = {}
    for _ in range(100_000):
        deep = {"a": deep}

    assert size_of({"a": "é"}) == len('{"a":"é"}'.encode())
    assert size_of(None) == size_of({}) == 0
    assert size_of(deep) == sys.maxsize
    # Level by level: Python frees what is this deep in as many calls of its own.
    while deep:
        deep = deep["a"]
