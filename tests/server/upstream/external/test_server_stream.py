"""A server decides when its stream is opened again, and not that it is opened in a loop."""

import asyncio

import pytest

from mcp_sessions.background import Background
from mcp_sessions.http_client.exchange import LEAST, Reopening
from mcp_sessions.server.upstream.external.server_stream import (
    ReadStream,
    ServerStream,
)
from mcp_sessions.server.upstream.port import UpstreamError
from tests.support.virtual_time import VIRTUAL, Backend

TEN_MINUTES = 600.0


@pytest.fixture
def anyio_backend() -> Backend:
    """Nothing here is another process."""
    return VIRTUAL


async def missed() -> None: ...


def somebody() -> str:
    return "the server"


async def opened_in_ten_minutes(read_stream: ReadStream, *, answers: bool = False) -> int:
    """How often such a stream is opened.

    Args:
        answers: Whatever else its server is asked, ten times a second, is answered.
    """
    times = 0

    async def counted(receiver: ServerStream) -> float | None:
        nonlocal times
        times += 1
        await receiver.begun(continues=True)
        return await read_stream(receiver)

    background = Background()
    listening = ServerStream(counted, missed, somebody)
    await listening.begin(background)
    for _ in range(round(TEN_MINUTES * 10)):
        await asyncio.sleep(0.1)
        if answers:
            listening.answered()
    await background.close()
    return times


@pytest.mark.parametrize("answers", [False, True])
@pytest.mark.parametrize("retry", [None, 0.0])
async def test_one_that_ends_at_once_is_opened_later_and_later(
    retry: float | None, answers: bool
) -> None:
    """Also by a server that answers whatever else it is asked."""

    async def read_stream(receiver: ServerStream) -> float | None:
        return retry

    # 15 seconds between two of them, in the mean.
    assert 10 <= await opened_in_ten_minutes(read_stream, answers=answers) <= 120


async def test_one_that_could_not_be_opened_is_as_soon_as_its_server_answers_something() -> None:
    """However long it was away: nobody would receive for half a minute what is sent again."""
    is_there, times, opened = True, 0, asyncio.Event()

    async def read_stream(receiver: ServerStream) -> float | None:
        nonlocal times
        times += is_there
        if is_there:
            await receiver.begun(continues=False)
        if times > 1:
            opened.set()
            await asyncio.Event().wait()
        raise UpstreamError({"code": -32603, "message": "away"})

    background = Background()
    listening = ServerStream(read_stream, missed, somebody)
    await listening.begin(background)
    is_there = False
    await asyncio.sleep(TEN_MINUTES)
    is_there = True
    listening.answered()
    async with asyncio.timeout(2):
        await opened.wait()
    assert opened.is_set()
    await background.close()


async def test_one_that_brings_something_is_opened_as_soon_as_its_server_says() -> None:
    async def read_stream(receiver: ServerStream) -> float | None:
        receiver.progressed()
        return 2.0

    assert await opened_in_ten_minutes(read_stream) in (300, 301)


@pytest.mark.parametrize("answers", [False, True])
async def test_one_that_was_open_is_not_opened_before_its_server_says(answers: bool) -> None:
    """Whatever else that answers."""

    async def read_stream(receiver: ServerStream) -> float | None:
        receiver.progressed()
        return 20.0

    assert await opened_in_ten_minutes(read_stream, answers=answers) in (30, 31)


async def test_one_that_lasts_is_opened_as_soon_as_its_server_says() -> None:
    async def read_stream(receiver: ServerStream) -> float | None:
        await asyncio.sleep(10)
        return 2.0

    assert await opened_in_ten_minutes(read_stream) in (50, 51)


async def test_what_a_server_says_is_taken_within_bounds() -> None:
    reopening = Reopening(1.0)
    for said, taken in ((0.0, LEAST), (2.5, 2.5), (3600.0, 30.0)):
        reopening.opened()
        reopening.progressed()
        assert reopening.delay(said) == taken
