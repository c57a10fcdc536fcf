"""What one principal uses of a process: requests a second, and open calls."""

import logging
from typing import Any

import pytest
from websockets.exceptions import InvalidStatus

from mcp_sessions import metrics
from mcp_sessions.errors import LimitReached
from mcp_sessions.policy import SessionPolicy
from mcp_sessions.principal import ANONYMOUS, Principal
from mcp_sessions.seldom import QUIET
from mcp_sessions.server.calls.shares import Shares, share_of, shares_of
from mcp_sessions.server.reporting.reached_limits import ReachedLimits
from tests.support.duplex import duplex_world
from tests.support.modern import ModernClient
from tests.support.raw import RawClient
from tests.support.world import world

ALICE = Principal("app", "https://issuer", "alice")
BOB = Principal("app", "https://issuer", "bob")
SELDOM = 0.001
"""Requests a second: one, and no other in a test."""


def came_from(address: str) -> dict[str, Any]:
    return {"client": (address, 4711)}


def shares(now: list[float], **limits: Any) -> Shares:
    """Shares whose clock is the last of these numbers."""
    made = shares_of(SessionPolicy(**limits), lambda: now[-1])
    assert made is not None
    return made


def test_without_limits_there_is_nothing_to_look_at() -> None:
    assert shares_of(SessionPolicy(), lambda: 0.0) is None


def test_a_refusal_names_the_limit_its_size_and_when_to_come_back() -> None:
    now = [0.0]
    seldom = shares(now, max_requests_per_principal=0.5)
    for _ in range(5):
        seldom.take(ALICE, None)
    with pytest.raises(LimitReached) as refused:
        seldom.take(ALICE, None)
    named = {"limit": "max_requests_per_principal", "max": 0.5, "retryAfter": 2}
    assert refused.value.data == named
    seldom.take(BOB, None)
    now.append(2.0)
    seldom.take(ALICE, None)


def test_open_calls_are_counted_until_they_are_answered() -> None:
    few = shares([0.0], max_calls_per_principal=2)
    first, _ = few.opened(ALICE, None), few.opened(ALICE, None)
    with pytest.raises(LimitReached) as refused:
        few.opened(ALICE, None)
    named = {"limit": "max_calls_per_principal", "max": 2, "retryAfter": 1}
    assert refused.value.data == named
    few.opened(BOB, None)
    few.closed(first)
    few.opened(ALICE, None)


def test_a_call_that_is_refused_for_its_number_counts_as_no_request() -> None:
    both = shares([0.0], max_calls_per_principal=1, max_requests_per_principal=0.2)
    opened = both.opened(ALICE, None)
    for _ in range(9):
        with pytest.raises(LimitReached, match="Limit"):
            both.opened(ALICE, None)
    both.closed(opened)
    both.opened(ALICE, None)


def test_without_authentication_the_address_is_the_principal() -> None:
    """One client has a whole network of IPv6, and IPv4 may be written as IPv6."""

    def same(one: str, other: str) -> bool:
        found = [share_of(ANONYMOUS, came_from(each)) for each in (one, other)]
        assert None not in found
        return found[0] == found[1]

    assert same("192.0.2.7", "192.0.2.7") and same("192.0.2.7", "::ffff:192.0.2.7")
    assert not same("192.0.2.7", "192.0.2.8")
    assert same("2001:db8::1", "2001:db8::ffff:1") and not same("2001:db8::1", "2001:db8:0:1::1")
    assert same("proxy", "proxy") and not same("proxy", "192.0.2.7")
    assert share_of(ANONYMOUS, None) is None and share_of(ANONYMOUS, {"client": None}) is None
    assert share_of(ALICE, came_from("192.0.2.7")) == share_of(ALICE, came_from("192.0.2.8"))


def test_a_user_has_one_share_whatever_client_acts() -> None:
    """A client may register itself as often as it likes."""
    other = Principal("another app", ALICE.issuer, ALICE.subject)
    few = shares([0.0], max_calls_per_principal=1)
    few.opened(ALICE, None)
    with pytest.raises(LimitReached):
        few.opened(other, None)
    for apart in (
        BOB,
        Principal("app", "https://other", "alice"),
        Principal("alice", ALICE.issuer),
        Principal("app", ALICE.issuer),
        Principal("app", None, None),
    ):
        few.opened(apart, None)


async def test_over_http_of_2026_the_status_says_when_to_come_back() -> None:
    """ERR6."""
    async with world(max_requests_per_principal=SELDOM) as w:
        client = ModernClient(w.carrier)
        first, second = client.send("tools/list"), client.send("tools/list")
        await first.result()
        error = await second.error()
        assert second.status == 429
        assert second.reply.header("retry-after") == str(error["data"]["retryAfter"])
        assert (error["code"], error["data"]["limit"], error["data"]["max"]) == (
            -31011,
            "max_requests_per_principal",
            SELDOM,
        )


async def test_over_http_of_2025_the_error_is_the_answer() -> None:
    """ERR6. Clients of that era end their connection at a status that they do not know."""
    async with world(max_requests_per_principal=0.2) as w:
        client = RawClient(w.carrier)
        await client.initialize()
        assert await client.text("echo", text="two of two") == "two of two"
        refused = await client.error("tools/call", {"name": "echo", "arguments": {"text": "x"}})
        assert refused["data"]["limit"] == "max_requests_per_principal"
        with pytest.raises(AssertionError, match="max_requests_per_principal"):
            await RawClient(w.carrier).initialize()


async def test_on_a_websocket_requests_are_refused_and_answers_arrive() -> None:
    """ERR6. The client that is at its limit still answers what it was asked."""
    async with duplex_world(max_calls_per_principal=1) as w:
        peer = await w.connected(capabilities={"elicitation": {}})
        call = await peer.call("ask", question="why?")
        question = await peer.question()
        error = await peer.error("tools/call", {"name": "echo", "arguments": {"text": "x"}})
        assert error["data"] == {"limit": "max_calls_per_principal", "max": 1, "retryAfter": 1}
        await peer.respond(question, {"action": "accept", "content": {"answer": "so"}})
        assert "error" not in await peer.answer(call)
        assert await peer.text("echo", text="free again") == "free again"


async def test_websockets_are_counted_by_address_without_authentication() -> None:
    async with duplex_world(max_connections_per_principal=1) as w:
        await w.websocket()
        with pytest.raises(InvalidStatus) as refused:
            await w.websocket()
        assert refused.value.response.status_code == 429
        assert refused.value.response.headers["retry-after"] == "5"
        said = b"max_connections_per_principal is 1; come back in 5 s"
        assert refused.value.response.body == said


def test_the_log_names_a_limit_once_a_minute_and_how_to_raise_it(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    counted: list[str] = []
    monkeypatch.setattr(metrics, "limited", counted.append)
    now = [0.0]
    limits = ReachedLimits(lambda: now[-1])
    for _ in range(3):
        limits.reached(LimitReached("max_calls_per_principal", 5, 1.0))
    limits.reached(LimitReached("max_running_requests", 1000))
    now.append(QUIET)
    limits.reached(LimitReached("max_calls_per_principal", 5, 1.0))
    assert [(each.levelno, each.getMessage()) for each in caplog.records] == [
        (logging.WARNING, f"refused requests: {text}")
        for text in (
            "1. The limit max_calls_per_principal (5) is reached. To raise it, set "
            "max_calls_per_principal in SessionPolicy, or --max-calls-per-principal",
            "1. The limit max_running_requests (1000) is reached. To raise it, set "
            "max_running_requests in SessionPolicy, or --max-running-requests",
            "3. The limit max_calls_per_principal (5) is reached. To raise it, set "
            "max_calls_per_principal in SessionPolicy, or --max-calls-per-principal",
        )
    ]
    assert counted == ["max_calls_per_principal"] * 3 + [
        "max_running_requests",
        "max_calls_per_principal",
    ]
