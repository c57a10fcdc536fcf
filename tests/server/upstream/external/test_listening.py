"""A server decides when its stream is opened again, and not that it is opened in a loop."""

import asyncio

import pytest

from mcp_sessions.background import Background
from mcp_sessions.server.upstream.external.listening import Hear, Heard, Listening
from mcp_sessions.server.upstream.external.reopening import LEAST, Reopening
from tests.support.virtual_time import VIRTUAL, Backend

pytestmark = pytest.mark.anyio

TEN_MINUTES = 600.0


@pytest.fixture
def anyio_backend() -> Backend:
    """Nothing here is another process."""
    return VIRTUAL


async def missed() -> None:
    """What was missed is of no interest."""


async def opened_in_ten_minutes(hear: Hear) -> int:
    """How often such a stream is opened."""
    times = 0

    async def counted(heard: Heard) -> float | None:
        nonlocal times
        times += 1
        await heard.begun(goes_on=True)
        return await hear(heard)

    background = Background()
    await Listening(background, 1.0, missed).begin_anew(counted)
    await asyncio.sleep(TEN_MINUTES)
    await background.close()
    return times


@pytest.mark.parametrize("retry", [None, 0.0])
async def test_one_that_ends_at_once_is_opened_later_and_later(retry: float | None) -> None:
    async def hear(heard: Heard) -> float | None:
        return retry

    # 15 seconds between two of them, in the mean.
    assert 10 <= await opened_in_ten_minutes(hear) <= 120


async def test_one_that_brings_something_is_opened_as_soon_as_its_server_says() -> None:
    async def hear(heard: Heard) -> float | None:
        heard.progressed()
        return 2.0

    assert await opened_in_ten_minutes(hear) in (300, 301)


async def test_one_that_lasts_is_opened_as_soon_as_its_server_says() -> None:
    async def hear(heard: Heard) -> float | None:
        await asyncio.sleep(10)
        return 2.0

    assert await opened_in_ten_minutes(hear) in (50, 51)


async def test_what_a_server_says_is_taken_within_bounds() -> None:
    reopening = Reopening(1.0)
    for said, taken in ((0.0, LEAST), (2.5, 2.5), (3600.0, 30.0)):
        reopening.opened()
        reopening.progressed()
        assert reopening.delay(said) == taken
