"""One request to a URL: when its response is left."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any

import httpx2
import pytest

from mcp_sessions.core.messages import Answer
from mcp_sessions.http_client.sse_reader import ReadEvent
from mcp_sessions.server.upstream.external import url_exchange
from mcp_sessions.server.upstream.external.child_requests import Waiting
from mcp_sessions.server.upstream.external.url_exchange import UrlExchange, UrlSession

pytestmark = pytest.mark.anyio


async def test_what_a_server_said_after_its_answer_is_taken_however_long_that_takes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(url_exchange, "_AFTER", 0.05)
    waiting = Waiting(1, asyncio.get_running_loop().create_future(), None)
    taken: list[bytes] = []

    async def body() -> AsyncGenerator[bytes]:
        yield b"data: answer\n\ndata: late\n\n"
        await asyncio.Event().wait()

    @asynccontextmanager
    async def opens(*_: Any, **__: Any) -> AsyncGenerator[httpx2.Response]:
        yield httpx2.Response(200, headers={"content-type": "text/event-stream"}, content=body())

    async def on_event(event: ReadEvent, waiting: Waiting) -> None:
        if event.data == b"answer":
            waiting.future.set_result(Answer(1, {}, None))
        else:
            # Longer than it is waited for what it would say next.
            await asyncio.sleep(0.2)
        taken.append(event.data)

    async def nothing(*_: Any) -> None: ...

    session = UrlSession(
        opens=opens,
        check=nothing,
        begun=lambda _: None,
        on_event=on_event,
        take=nothing,
        longest=1_000,
    )
    async with asyncio.timeout(10):
        await UrlExchange(session, waiting).run(b"{}", None)
    assert taken == [b"answer", b"late"]
