"""``mcp_sessions.core.entitlement``: whose event a change of the server is."""

from collections.abc import Collection

import pytest

from mcp_sessions.core.entitlement import is_entitled
from mcp_sessions.core.states import Mode

MCP = (Mode.PROTOCOL, Mode.TRANSPORT)


def updated(mode: Mode, *, is_subscribed: bool) -> bool:
    return is_entitled(
        mode, uri="note://1", listed=None, is_subscribed=is_subscribed, lists=(), carries=True
    )


def listed(mode: Mode, *, lists: Collection[str] | None = None, carries: bool = False) -> bool:
    return is_entitled(
        mode, uri=None, listed="tools", is_subscribed=False, lists=lists, carries=carries
    )


@pytest.mark.parametrize("mode", MCP)
def test_a_resource_is_asked_to_who_subscribed(mode: Mode) -> None:
    """EVT1."""
    assert updated(mode, is_subscribed=True)
    assert not updated(mode, is_subscribed=False)


@pytest.mark.parametrize(
    ("lists", "expected"), [(None, True), ({"tools"}, True), ({"prompts"}, False), ((), False)]
)
def test_a_list_is_asked_to_who_did_not_filter_it_out(
    lists: Collection[str] | None, expected: bool
) -> None:
    """EVT1."""
    assert listed(Mode.PROTOCOL, lists=lists) is expected


def test_a_stream_that_carries_a_session_is_notified_of_lists_by_that() -> None:
    """EVT1, ATT6: each change once on one connection."""
    assert listed(Mode.TRANSPORT)
    assert not listed(Mode.TRANSPORT, carries=True)


@pytest.mark.parametrize("mode", [mode for mode in Mode if mode not in MCP])
def test_a_session_that_no_message_of_mcp_names_gets_no_change(mode: Mode) -> None:
    assert not updated(mode, is_subscribed=True)
    assert not listed(mode)
