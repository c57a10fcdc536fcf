"""Plain HTTP: reading a body within a limit, and what a client accepts."""

import asyncio
import itertools
from collections.abc import Awaitable, Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st
from mcp.server.streamable_http import check_accept_headers
from starlette.requests import Request
from starlette.types import Message

from mcp_sessions_transports.http.io import (
    BodyTooLarge,
    Disconnected,
    accepts,
    is_json,
    read_body,
    send_json,
)

Receive = Callable[[], Awaitable[Message]]


def pieces(*chunks: bytes, ends: bool = True) -> Receive:
    """A body in pieces; or a client that leaves before its end."""
    messages: list[Message] = [
        {"type": "http.request", "body": chunk, "more_body": not ends or number < len(chunks) - 1}
        for number, chunk in enumerate(chunks)
    ]

    async def receive() -> Message:
        return messages.pop(0) if messages else {"type": "http.disconnect"}

    return receive


@pytest.mark.parametrize(
    "chunks",
    [
        (b"",),
        (b"abcdefghij",),
        (b"abcde", b"fghij"),
        (b"", b"", b"x"),
        tuple(b"x" for _ in range(10)),
    ],
    ids=len,
)
async def test_a_body_within_the_limit_is_read_whole(chunks: tuple[bytes, ...]) -> None:
    """However it is cut."""
    assert await read_body(pieces(*chunks), {}, 10) == b"".join(chunks)


@pytest.mark.parametrize(
    "chunks", [(b"abcdefghijk",), (b"abcdefghij", b"k"), (b"abcde", b"fghijk", b"")], ids=len
)
async def test_a_body_over_the_limit_is_refused(chunks: tuple[bytes, ...]) -> None:
    """413: whatever its headers say."""
    for headers in ({}, {b"content-length": b"1"}, {b"content-length": b"x"}):
        with pytest.raises(BodyTooLarge):
            await read_body(pieces(*chunks), headers, 10)


async def test_a_body_that_declares_to_be_too_large_is_not_read() -> None:
    """The rest of it is not waited for."""

    async def never() -> Message:
        raise AssertionError("read")

    with pytest.raises(BodyTooLarge):
        await read_body(never, {b"content-length": b"11"}, 10)


async def test_a_body_without_end_is_refused_at_the_limit() -> None:
    """One slow client does not fill the memory."""
    read = 0

    async def endless() -> Message:
        nonlocal read
        read += 1
        return {"type": "http.request", "body": b"x", "more_body": True}

    with pytest.raises(BodyTooLarge):
        await read_body(endless, {}, 10)
    assert read <= 12


@pytest.mark.parametrize("chunks", [(), (b"abc",), (b"abc", b"def")], ids=len)
async def test_a_client_that_leaves_early_is_noticed(chunks: tuple[bytes, ...]) -> None:
    """Half a message is no message."""
    with pytest.raises(Disconnected):
        await read_body(pieces(*chunks, ends=False), {}, 10)


TYPES = st.sampled_from(
    [
        "application/json",
        "text/event-stream",
        "*/*",
        "application/*",
        "text/*",
        "text/html",
        "",
        "json",
    ]
)
DRESSED = st.tuples(
    TYPES, st.sampled_from(["", ";q=0.5", " ; q=1", ";charset=utf-8"]), st.sampled_from(["", " "])
).map(lambda parts: f"{parts[2]}{parts[0]}{parts[1]}{parts[2]}")


@given(st.lists(DRESSED, max_size=4), st.booleans())
def test_what_a_client_accepts_is_read_as_the_sdk_reads_it(types: list[str], upper: bool) -> None:
    """RFC 9110 wildcards, parameters, white space, capitals."""
    value = ",".join(types)
    if upper:
        value = value.upper()
    request = Request({"type": "http", "headers": [(b"accept", value.encode())]})
    assert accepts({b"accept": value.encode()}) == check_accept_headers(request)


def test_a_client_that_says_nothing_accepts_nothing() -> None:
    """As the SDK has it: 406."""
    assert accepts({}) == (False, False)


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (b"application/json", True),
        (b"application/json; charset=utf-8", True),
        (b" Application/JSON ", True),
        (b"application/json-seq", False),
        (b"text/plain", False),
        (b"", False),
    ],
)
def test_a_body_declares_to_be_json(value: bytes, expected: bool) -> None:
    """415 for the rest."""
    assert is_json({b"content-type": value}) is expected
    assert not is_json({})


@pytest.mark.parametrize("size", [0, 1, 65_535, 65_536, 65_537, 131_072, 300_000])
async def test_a_large_answer_is_sent_in_pieces_and_others_run_in_between(size: int) -> None:
    """What one client reads is no other's wait; together it is what was to be sent."""
    body = bytes(at % 251 for at in range(size))
    sent: list[Message] = []
    turns_before: list[int] = []
    turns = 0

    async def others() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    async def send(message: Message) -> None:
        sent.append(message)
        turns_before.append(turns)

    running = asyncio.create_task(others())
    try:
        await send_json(send, body)
    finally:
        running.cancel()
    head, *parts = sent
    assert (b"content-length", str(size).encode()) in head["headers"]
    assert b"".join(part["body"] for part in parts) == body
    assert max(len(part["body"]) for part in parts) <= 65_536
    assert [part.get("more_body", False) for part in parts] == [*[True] * (len(parts) - 1), False]
    pauses = [after - before for before, after in itertools.pairwise(turns_before[1:])]
    assert all(pauses)
