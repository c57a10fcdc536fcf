"""The few lines with which ``examples/plain_client.py`` reads an event stream."""

from collections.abc import AsyncIterator

import pytest
from plain_client import Refused, result_of, sse_data

STREAM = (
    ": a comment\r\n\r\n"
    'id: 1\r\nretry: 500\r\ndata: {"a": 1}\r\n\r\n'
    "id: 2\ndata:\n\n"
    "event: message\ndata:two\ndata: lines\n\n"
    "data: Zürich\u2028東京\n\n"
    "data: never finished\n"
).encode()


@pytest.mark.parametrize("size", [1, 2, 3, 7, 1000])
async def test_events_are_read_alike_however_the_bytes_are_split(size: int) -> None:
    """Comments, ids and events without data are skipped; an unfinished event is not given."""

    async def chunks() -> AsyncIterator[bytes]:
        for start in range(0, len(STREAM), size):
            yield STREAM[start : start + size]

    assert [data async for data in sse_data(chunks())] == [
        '{"a": 1}',
        "two\nlines",
        "Zürich\u2028東京",
    ]


async def test_an_error_is_raised_with_its_code() -> None:
    """And its data."""
    error = {"code": -32043, "message": "Session not found", "data": {"sessionId": "x"}}

    with pytest.raises(Refused, match="Session not found") as refused:
        result_of({"jsonrpc": "2.0", "id": 0, "error": error})

    assert (refused.value.code, refused.value.data) == (-32043, {"sessionId": "x"})
