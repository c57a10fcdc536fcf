"""What waits for the store costs others nothing."""

import asyncio
import sys
from functools import partial
from itertools import count

import pytest

from mcp_sessions.errors import StoreUnavailable
from mcp_sessions.server.delivery import pending_writes
from mcp_sessions.server.delivery.pending_writes import PendingWrites, nothing


async def fails() -> None:
    raise StoreUnavailable("away")


async def test_a_write_that_the_store_refuses_delays_no_other_when_the_server_stops(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Rule 4: also the last time."""
    pending = PendingWrites()
    written: list[int] = []
    is_away = True

    async def write(number: int) -> None:
        if is_away:
            raise StoreUnavailable("away")
        written.append(number)

    await pending.settle({"refused": fails})
    for number in range(3):
        await pending.settle({number: partial(write, number)})
    is_away = False
    await pending.close()
    assert written == [0, 1, 2]
    assert "1 writes were lost" in caplog.text


async def test_what_waits_is_tried_again_within_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    """However long the store was away: clients wait for what is written then."""
    pending, delays, written = PendingWrites(), list[float](), asyncio.Event()

    async def sleep(seconds: float) -> None:
        delays.append(seconds)

    async def write() -> None:
        if len(delays) < 20:
            raise StoreUnavailable("away")
        written.set()

    monkeypatch.setattr(pending_writes.asyncio, "sleep", sleep)
    monkeypatch.setattr(pending_writes.random, "random", lambda: 1.0)
    await pending.settle({"late": write})
    async with asyncio.timeout(30):
        await written.wait()
    await pending.close()
    assert len(delays) == 20 and max(delays) <= 1


def _keep(pending: PendingWrites, log: object) -> None:
    pending.keep(log, fails, owner=log, holds=b"message", lost=lambda: nothing)


def _calls(pending: PendingWrites) -> int:
    """The function calls with which one more message waits."""
    calls = count()

    def called(*_: object) -> None:
        next(calls)

    sys.setprofile(called)
    try:
        _keep(pending, "one more")
    finally:
        sys.setprofile(None)
    return next(calls)


async def test_what_waits_makes_no_other_message_slower() -> None:
    """An outage with many sessions must not keep the process busy with counting."""
    costs: list[int] = []
    for many in (10, 1_000):
        pending = PendingWrites()
        for number in range(many):
            _keep(pending, number)
        costs.append(_calls(pending))
        await pending.close()
    assert costs[0] == costs[1]


async def test_what_waited_before_does_not_count() -> None:
    """The bound is about what waits now."""
    pending = PendingWrites()
    is_away = True
    lost: list[object] = []

    async def write() -> None:
        if is_away:
            raise StoreUnavailable("away")

    def lose() -> object:
        lost.append(None)
        return nothing

    for _ in range(3):
        is_away = True
        holds = bytes(8_000_000)
        await pending.in_order("log", write, owner="session", holds=holds, lost=lose)  # pyright: ignore[reportArgumentType]
        is_away = False
        async with asyncio.timeout(10):
            await pending.flush("log")
    assert not lost
    await pending.close()
