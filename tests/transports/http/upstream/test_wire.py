"""However much a server says at once: others have their turns meanwhile."""

import asyncio
import gzip
from collections.abc import AsyncGenerator

import httpx2
import pytest

from mcp_sessions import background
from mcp_sessions_transports.http.upstream.wire import events_of, pieces_of

pytestmark = pytest.mark.anyio


def response(*chunks: bytes, **headers: str) -> httpx2.Response:
    """One whose chunks are all there at once."""

    async def stream() -> AsyncGenerator[bytes]:
        for chunk in chunks:
            yield chunk

    return httpx2.Response(200, headers=headers, content=stream())


@pytest.fixture
async def turns(monkeypatch: pytest.MonkeyPatch) -> AsyncGenerator[list[int]]:
    """Grows with each turn of the event loop; each slice of time is over at once."""
    monkeypatch.setattr(background, "_SLICE", 0.0)
    had: list[int] = []

    async def others() -> None:
        while True:
            had.append(1)
            await asyncio.sleep(0)

    task = asyncio.create_task(others())
    yield had
    task.cancel()


async def test_between_events_that_came_at_once(turns: list[int]) -> None:
    seen = 0
    async for _ in events_of(response(b"data:\n\n" * 1_000), 10_000):
        seen += 1
    assert seen == 1_000 and len(turns) >= 1_000


async def test_between_portions_of_lines_that_are_no_events(turns: list[int]) -> None:
    body = b":\n" * 100_000
    assert [event async for event in events_of(response(body), 10_000)] == []
    assert len(turns) >= 40


async def test_between_pieces_of_what_was_compressed_and_between_small_ones(
    turns: list[int],
) -> None:
    bomb = response(gzip.compress(bytes(10_000_000)), **{"content-encoding": "gzip"})
    assert sum([len(piece) async for piece in pieces_of(bomb)]) == 10_000_000
    assert len(turns) >= 100
    turns.clear()
    assert len([piece async for piece in pieces_of(response(*[b"x"] * 1_000))]) == 1_000
    assert len(turns) >= 1_000


async def test_what_is_little_or_waits_by_itself_costs_no_turn() -> None:
    time_slice = background.TimeSlice()
    assert not time_slice.is_over() and not time_slice.is_over()
    await asyncio.sleep(2 * background._SLICE)  # pyright: ignore[reportPrivateUsage]
    assert not time_slice.is_over()
