"""``mcp_sessions.stores.sqlite.commit_budget``: commits leave the event loop its time."""

import asyncio
from collections.abc import Callable
from typing import Any, cast

import pytest

from mcp_sessions.stores.sqlite import commit_budget as sqlite_turns
from mcp_sessions.stores.sqlite.commit_budget import AT_ONCE, PAUSE, SHARE, CommitBudget


class Loop:
    """An event loop whose next turn comes when the test says so."""

    def __init__(self) -> None:
        self.soon: list[Callable[[], None]] = []

    def call_soon(self, call: Callable[[], None]) -> None:
        self.soon.append(call)

    def turn(self) -> None:
        soon, self.soon = self.soon, []
        for call in soon:
            call()


class Clock:
    now = 1_000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(sqlite_turns, "monotonic", clock)
    return clock


def made() -> tuple[CommitBudget, Loop]:
    loop = Loop()
    return CommitBudget(cast("asyncio.AbstractEventLoop", cast(Any, loop))), loop


def commits(turns: CommitBudget, clock: Clock, took: float) -> int:
    """How many there is time for, if each takes that long."""
    count = 0
    while turns.begin():
        count += 1
        clock.now += took
        turns.end()
    return count


def test_there_are_so_many_until_the_loop_turns(clock: Clock) -> None:
    turns, loop = made()
    for _ in range(3):
        assert commits(turns, clock, 0.0) == AT_ONCE
        assert len(loop.soon) == 1
        loop.turn()


def test_there_is_so_much_time_for_them_however_much_passes_between(clock: Clock) -> None:
    turns, loop = made()
    for _ in range(3):
        assert commits(turns, clock, SHARE / 4) == 4
        clock.now += 60
        assert not turns.begin()
        assert len(loop.soon) == 1
        loop.turn()


def test_who_comes_alone_is_served_each_time_and_seldom_asks_for_a_turn(clock: Clock) -> None:
    turns, loop = made()
    asked = 0
    for _ in range(10 * AT_ONCE):
        assert turns.begin()
        clock.now += 0.0001
        turns.end()
        asked += len(loop.soon)
        loop.turn()
    assert asked <= 20


def test_after_one_that_took_long_there_is_none_for_a_while(clock: Clock) -> None:
    turns, loop = made()
    assert commits(turns, clock, 2 * SHARE) == 1
    loop.turn()
    clock.now += PAUSE - 0.01
    assert not turns.begin()
    clock.now += 0.02
    assert turns.begin()
