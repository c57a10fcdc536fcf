"""Time that passes while the machine sleeps, and what it does to request keys."""

import itertools
import time
from collections.abc import Callable, Coroutine
from typing import Any

import anyio
import pytest
from hypothesis import given
from hypothesis import strategies as st
from mcp import Client, MCPError

from mcp_sessions.client.sdk import is_outcome_unknown
from mcp_sessions.client.state import Elapsed
from mcp_sessions.client_transport import resumable
from tests.support.resuming import QUICK, text_of
from tests.support.scripted import OURS, Exchange, ScriptedServer, never


class Hand:
    def __init__(self, at: float) -> None:
        self.at = at

    def __call__(self) -> float:
        return self.at


def test_the_longer_time_is_believed_whichever_clock_shows_it() -> None:
    steady, wall = Hand(10), Hand(1_000_000)
    elapsed = Elapsed([steady, wall])
    steady.at += 5
    assert elapsed() == 5
    wall.at += 3_600
    assert elapsed() == 3_605
    wall.at -= 7_200
    assert elapsed() == 3_605
    steady.at += 1
    assert elapsed() == 3_606


@given(st.lists(st.tuples(st.floats(0, 1e6), st.floats(-1e6, 1e6)), max_size=30))
def test_it_never_goes_back_and_never_falls_behind(steps: list[tuple[float, float]]) -> None:
    steady, wall = Hand(0), Hand(0)
    elapsed, before = Elapsed([steady, wall]), 0.0
    for forward, either in steps:
        steady.at += forward
        wall.at += either
        now = elapsed()
        assert now - before >= max(forward, either) - 1e-3
        before = now


def test_the_clocks_of_this_system_are_read() -> None:
    elapsed = Elapsed()
    first = elapsed()
    assert 0 <= first <= elapsed() < 60


def sleeps_by_wall(monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    """As a virtual machine that was paused sees it."""
    wall = time.time
    monkeypatch.setattr(time, "time", lambda: wall() + seconds)


def sleeps_by_boot_time(monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    """As a laptop sees it whose wall clock is set right later."""
    reading = time.clock_gettime

    def later(clock: int) -> float:
        return reading(clock) + seconds

    monkeypatch.setattr(time, "clock_gettime", later)


async def failing(client: Client, meanwhile: Callable[[], Coroutine[Any, Any, None]]) -> MCPError:
    """The error of a call during which something happens."""
    errors: list[MCPError] = []

    async def call() -> None:
        try:
            await client.call_tool("echo", {})
        except MCPError as error:
            errors.append(error)

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(call)
        tasks.start_soon(meanwhile)
    [error] = errors
    return error


@pytest.mark.parametrize("sleeps", [sleeps_by_wall, sleeps_by_boot_time])
async def test_a_call_is_not_run_twice_by_a_machine_that_slept(
    monkeypatch: pytest.MonkeyPatch, sleeps: Callable[[pytest.MonkeyPatch, float], None]
) -> None:
    """KEY16: the server forgot the key meanwhile, and would run the call again."""
    held: list[Exchange] = []

    def hold(exchange: Exchange) -> None:
        if not held:
            held.append(exchange)
            never(exchange)

    async with ScriptedServer({"tools/call": hold}) as server:
        with anyio.fail_after(20):
            async with Client(resumable(server.url(), policy=QUICK), mode="legacy") as client:

                async def wake_up() -> None:
                    await server.has(lambda: held, "the call")
                    sleeps(monkeypatch, 3_600)
                    held[0].reset()

                assert is_outcome_unknown(await failing(client, wake_up))
                assert len(server.asked("tools/call")) == 1
                assert text_of(await client.call_tool("echo", {})) == "s-1"


async def test_a_key_is_as_old_as_the_server_that_got_it_first_lets_it_become(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """KEY16: another replica promises more, which holds for the keys that it is sent."""
    # The client may connect once more, after its call was lost.
    lifetimes = itertools.chain([100], itertools.repeat(1_000_000))
    held: list[Exchange] = []

    def entry(exchange: Exchange) -> None:
        if exchange.method == "initialize":
            keys = {"lifetime": next(lifetimes), "maxBytes": 1}
            [(name, ours)] = OURS.items()
            server.capabilities = {
                "tools": {},
                "sessions": {},
                "extensions": {name: {**ours, "requestKeys": keys}},
            }
        is_first = exchange.headers.get("mcp-session-id") == "transport-1"
        if exchange.method == "tools/call" and len(held) < 2:
            held.append(exchange)
            never(exchange)
        elif exchange.method == "tools/list" and is_first:
            exchange.respond(404)

    server = ScriptedServer({"*": entry})
    async with server:
        with anyio.fail_after(20):
            async with Client(resumable(server.url(), policy=QUICK), mode="legacy") as client:

                async def move_and_lose() -> None:
                    await server.has(lambda: held, "the call")
                    await client.list_tools()
                    await server.has(lambda: len(held) == 2, "the call, again")
                    sleeps_by_wall(monkeypatch, 200)
                    held[1].reset()

                assert is_outcome_unknown(await failing(client, move_and_lose))
                assert len(server.asked("tools/call")) == 2
