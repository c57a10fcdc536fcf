"""Bad credentials wait while there are too many of them, in virtual time."""

import asyncio
import logging

import pytest

from mcp_sessions.authentication.pace import LONGEST_WAIT, RATE, Pace


async def answered(pace: Pace, count: int) -> list[float]:
    """Seconds after which each of so many refusals is answered."""
    loop = asyncio.get_running_loop()
    begun = loop.time()

    async def one() -> float:
        await pace.wait()
        return loop.time() - begun

    return await asyncio.gather(*(one() for _ in range(count)))


async def test_as_many_as_come_in_a_second_wait_for_nothing() -> None:
    pace = Pace()
    for _ in range(3):
        assert await answered(pace, RATE) == [0] * RATE
        await asyncio.sleep(1)


async def test_ten_thousand_at_once_are_answered_at_the_rate_and_none_waits_for_long() -> None:
    """O: 10,000 different bad tokens a second."""
    times = await answered(Pace(), 10_000)
    for second in range(int(LONGEST_WAIT)):
        assert sum(time <= second for time in times) == pytest.approx(RATE * (second + 1), abs=2)
    assert max(times) == pytest.approx(LONGEST_WAIT)


async def test_after_a_flood_the_next_one_waits_for_nothing() -> None:
    pace = Pace()
    await answered(pace, 10_000)
    await asyncio.sleep(2)
    assert await answered(pace, RATE) == [0] * RATE


async def test_a_flood_of_one_address_delays_no_refusal_of_another() -> None:
    """A client without a token asks so where to get one. It waited for five seconds."""
    pace, loop = Pace(), asyncio.get_running_loop()
    flood = [asyncio.create_task(pace.wait(None, "flood")) for _ in range(5_000)]
    await asyncio.sleep(0.5)
    begun = loop.time()
    for number in range(RATE // 2):
        await pace.wait(None, f"quiet{number}")
    assert loop.time() == begun
    await pace.wait(None, "quiet0")
    assert LONGEST_WAIT - 1 < loop.time() - begun <= LONGEST_WAIT
    await asyncio.gather(*flood)


async def test_a_flood_of_many_addresses_is_delayed_as_well() -> None:
    pace, loop = Pace(), asyncio.get_running_loop()
    begun = loop.time()

    async def one(number: int) -> float:
        await pace.wait(None, number)
        return loop.time() - begun

    times = await asyncio.gather(*(one(number) for number in range(5_000)))
    assert sum(time == 0 for time in times) <= 2 * RATE + 2


async def test_it_is_one_line_a_minute(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    pace = Pace()
    await answered(pace, 1_000)
    await asyncio.sleep(60)
    await answered(pace, 1_000)
    said = [record.getMessage() for record in caplog.records]
    begin = f"more than {RATE} credentials were refused in a second: refusals are delayed"
    waiting = 1_000 - RATE - 1
    assert said == [f"{begin}, 1 so far", f"{begin}, {waiting} so far"]
