"""One request and its responses: when they are left, and fetched on."""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager

import httpx2
import pytest

from mcp_sessions.http_client.exchange import Exchange
from mcp_sessions.http_client.sse_reader import ReadEvent

SSE: Mapping[str, str] = {"content-type": "text/event-stream"}


class Refused(Exception): ...


async def nothing(_: object) -> None: ...


def exchange(
    *bodies: Callable[[], AsyncGenerator[bytes]],
    on_event: Callable[[ReadEvent], Awaitable[None]] = nothing,
    attempts: int = 2,
    after: float = 0.0,
) -> tuple[Exchange, list[str | None]]:
    """One whose responses have those bodies, and the events that each was opened after."""
    opened: list[str | None] = []

    @asynccontextmanager
    async def opens(last_event_id: str | None) -> AsyncGenerator[httpx2.Response]:
        opened.append(last_event_id)
        if len(opened) > len(bodies):
            raise Refused
        yield httpx2.Response(200, headers=SSE, content=bodies[len(opened) - 1]())

    made = Exchange(
        opens=opens,
        refusal=Refused,
        begun=nothing,
        on_event=on_event,
        take=nothing,
        longest=1_000,
        attempts=attempts,
        after=after,
    )
    return made, opened


async def test_what_a_server_said_after_its_answer_is_taken_however_long_that_takes() -> None:
    taken: list[bytes] = []

    async def body() -> AsyncGenerator[bytes]:
        yield b"data: answer\n\ndata: late\n\n"
        await asyncio.Event().wait()

    async def on_event(event: ReadEvent) -> None:
        if event.data == b"answer":
            made.answered()
        else:
            # Longer than it is waited for what it would say next.
            await asyncio.sleep(0.2)
        taken.append(event.data)

    made, _ = exchange(body, on_event=on_event, after=0.05)
    async with asyncio.timeout(10):
        await made.run()
    assert taken == [b"answer", b"late"]


async def test_who_waits_for_nothing_after_the_answer_leaves_with_it() -> None:
    taken: list[bytes] = []

    async def body() -> AsyncGenerator[bytes]:
        yield b"data: answer\n\ndata: late\n\n"
        await asyncio.Event().wait()

    async def on_event(event: ReadEvent) -> None:
        taken.append(event.data)
        made.answered()

    made, _ = exchange(body, on_event=on_event)
    async with asyncio.timeout(10):
        await made.run()
    assert taken == [b"answer"]


async def cut() -> AsyncGenerator[bytes]:
    yield b"id: 7\nretry: 1\ndata: x\n\n"
    raise httpx2.ReadError("cut")


async def ends() -> AsyncGenerator[bytes]:
    yield b": nothing new\n\n"


async def test_a_response_is_fetched_on_from_the_break_for_as_long_as_it_brings_something() -> None:
    """The last break is what the request failed of."""
    made, opened = exchange(cut, cut, ends, ends)
    async with asyncio.timeout(10):
        with pytest.raises(httpx2.ReadError):
            await made.run()
    assert opened == [None, "7", "7", "7"]


async def test_nothing_is_fetched_on_behind_a_refusal_or_where_there_is_no_event_with_an_id() -> (
    None
):
    made, opened = exchange(cut)
    async with asyncio.timeout(10):
        with pytest.raises(httpx2.ReadError):
            await made.run()
        assert opened == [None, "7"]
        made, opened = exchange(ends)
        await made.run()
        assert opened == [None] and not made.is_answered


async def test_who_sends_a_request_again_by_its_key_fetches_nothing_on() -> None:
    made, opened = exchange(cut, ends, attempts=0)
    async with asyncio.timeout(10):
        with pytest.raises(httpx2.ReadError):
            await made.run()
    assert opened == [None]


async def test_who_is_answered_as_its_response_ends_does_not_fetch_on() -> None:
    """Its server may send again what others of its responses had."""

    async def body() -> AsyncGenerator[bytes]:
        yield b"id: 7\nretry: 1\ndata: answer\n\n"

    async def on_event(_: ReadEvent) -> None:
        # With the next turn of the loop: the answer came on another stream.
        asyncio.get_running_loop().call_soon(made.answered)

    made, opened = exchange(body, on_event=on_event, after=5.0)
    async with asyncio.timeout(10):
        await made.run()
    assert opened == [None]
