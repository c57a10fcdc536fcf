"""No background task dies unseen: see ``mcp_sessions.background``."""

import asyncio
import logging

import anyio
import pytest

from mcp_sessions.background import Background, give_way, stopped, watched
from mcp_sessions.errors import StoreUnavailable
from tests.support.virtual_time import cycles

SECRET = "s3cr3t-session-id"


class Loop:
    """A loop that fails as often as the test wants, and counts."""

    def __init__(self, failures: int, error: BaseException) -> None:
        self.begun: list[float] = []
        self._failures = failures
        self._error = error

    async def run(self) -> None:
        """Fail, or go on for ever."""
        self.begun.append(asyncio.get_running_loop().time())
        if len(self.begun) <= self._failures:
            raise self._error
        await asyncio.Event().wait()


@pytest.mark.fails_in_background("a loop")
async def test_a_loop_that_raised_is_begun_anew_ever_more_seldom() -> None:
    background, loop = Background(draw=lambda: 1.0), Loop(8, KeyError(SECRET))
    background.loop("a loop", loop.run)
    await asyncio.sleep(100)
    rests = [round(b - a, 6) for a, b in zip(loop.begun, loop.begun[1:], strict=False)]
    assert rests == [0.5, 1.0, 2.0, 4.0, 8.0, 15.0, 15.0, 15.0]
    await background.close()
    assert not background.tasks


@pytest.mark.fails_in_background("a loop")
async def test_a_loop_that_ran_for_long_is_begun_anew_at_once() -> None:
    begun: list[float] = []

    async def run() -> None:
        begun.append(asyncio.get_running_loop().time())
        await asyncio.sleep(60)
        raise OSError

    background = Background(draw=lambda: 1.0)
    background.loop("a loop", run)
    await asyncio.sleep(150)
    assert [round(b - a, 6) for a, b in zip(begun, begun[1:], strict=False)] == [60.5, 60.5]
    await background.close()


async def test_a_loop_that_returns_has_ended() -> None:
    background, done = Background(), asyncio.Event()

    async def run() -> None:
        done.set()

    background.loop("a loop", run)
    await cycles()
    assert done.is_set()
    assert not background.tasks


@pytest.mark.fails_in_background("a loop")
async def test_a_loop_outlives_what_it_waits_for_being_cancelled() -> None:
    """A CancelledError that is not the loop's own would end it without a word."""
    loop, background = Loop(1, asyncio.CancelledError()), Background(draw=lambda: 1.0)
    background.loop("a loop", loop.run)
    await asyncio.sleep(1)
    assert len(loop.begun) == 2
    await background.close()


@pytest.mark.fails_in_background("some work", "held elsewhere")
async def test_work_that_raises_is_reported_once_however_its_outcome_is_gathered(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The kind and the line are logged; the text, which may quote an id, is not."""

    async def work() -> None:
        raise KeyError(SECRET)

    background = Background()
    await asyncio.gather(background.run("some work", work()), return_exceptions=True)
    held = asyncio.create_task(work())
    watched("held elsewhere", held)
    await asyncio.gather(held, return_exceptions=True)
    await cycles()

    notified = [record for record in caplog.records if record.name == "mcp_sessions.background"]
    assert [record.getMessage() for record in notified] == [
        "some work failed",
        "held elsewhere failed",
    ]
    assert "KeyError" in caplog.text
    assert "test_background.py" in caplog.text
    assert SECRET not in caplog.text


async def test_a_store_that_is_away_is_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    async def work() -> None:
        raise StoreUnavailable("Redis is away: TimeoutError")

    await Background().run("some work", work())
    (record,) = [r for r in caplog.records if r.name == "mcp_sessions.background"]
    assert record.levelno == logging.WARNING
    assert record.exc_info is None


async def test_an_owner_that_closes_cancels_and_waits() -> None:
    ended: list[str] = []

    async def work(name: str) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(1)
            ended.append(name)

    background = Background()
    background.run("some work", work("work"))
    background.loop("a loop", lambda: work("loop"))
    await cycles()
    await background.close()
    assert sorted(ended) == ["loop", "work"]


async def test_work_that_never_began_is_closed_all_the_same() -> None:
    """It would be a coroutine that nobody awaits, and a warning somewhere else."""

    async def work() -> None:
        raise AssertionError("it is cancelled before")

    background, never_begun = Background(), work()
    background.run("work", never_begun).cancel()
    await background.close()
    with pytest.raises(RuntimeError, match="cannot reuse already awaited coroutine"):
        never_begun.send(None)


async def test_what_is_stopped_has_ended_and_reports_what_it_raised() -> None:
    ended: list[str] = []

    async def works(name: str, failure: Exception | None) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(1)
            ended.append(name)
            if failure is not None:
                raise failure

    failure = OSError("gone")
    tasks = [asyncio.create_task(works("one", None)), asyncio.create_task(works("two", failure))]
    await asyncio.sleep(0)
    assert await stopped(*tasks) == [failure]
    assert ended == ["one", "two"]
    assert await stopped() == []


async def test_who_is_cancelled_while_it_stops_others_learns_of_its_own_cancellation() -> None:
    """A cancel scope knows it again: nothing comes out of it."""
    other = asyncio.create_task(asyncio.Event().wait())
    await asyncio.sleep(0)
    with anyio.CancelScope() as scope:
        asyncio.get_running_loop().call_soon(scope.cancel)
        await stopped(other)
    assert scope.cancelled_caught
    assert other.cancelled()


async def test_between_two_pieces_of_a_long_work_a_small_request_is_served() -> None:
    """It is read, run, answered and written, a turn of the event loop each."""

    async def small() -> None:
        for _ in range(3):
            await asyncio.sleep(0)

    request = asyncio.create_task(small())
    await give_way()
    assert request.done()
