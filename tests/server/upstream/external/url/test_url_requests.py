"""However much a server says at once: others have their turns meanwhile."""

import asyncio
import gzip
import logging
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any

import httpx2
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp

from mcp_sessions import HTTPServer, background
from mcp_sessions.http_client.exchange import events_of, pieces_of
from tests.support.descriptors import no_descriptors
from tests.support.modern import ModernClient
from tests.support.modern_server import ModernServer
from tests.support.serving import INITIALIZE
from tests.support.url_server import UrlServer
from tests.support.urls import url_of
from tests.support.world import connected_world, world


@asynccontextmanager
async def server(kind: str) -> AsyncGenerator[ASGIApp]:
    """One without sessions, one with them, or one of the modern era only, whose refusals are, or
    are not, messages.
    """
    if not kind.startswith("modern"):
        yield UrlServer(kind)
        return
    modern = ModernServer()
    app = modern.server.streamable_http_app()
    async with app.router.lifespan_context(app):
        yield modern.only(app, UrlServer("old") if kind == "modern, and terse" else None)


@pytest.mark.parametrize("after", ["stateless", "sessions", "modern"])
@pytest.mark.parametrize("before", ["stateless", "sessions", "modern"])
async def test_where_another_server_is_deployed_it_is_begun_with_anew(
    before: str, after: str
) -> None:
    """It refuses what the one before it took; nobody waits until that is idle. A 400 without a code
    of the protocol proves nothing: such a request is not sent again (KEY17).
    """
    is_unproven = after == "sessions" != before
    async with server(before) as old, server(after) as new:
        now = old

        async def deployed(scope: Any, receive: Any, send: Any) -> None:
            await now(scope, receive, send)

        async with url_of(deployed) as url, world(server=HTTPServer(url)) as w:
            client, modern = await w.connected(), ModernClient(w.carrier)
            for each in (client, modern):
                assert await each.text("count")
            now = new
            for each in (client, modern):
                if is_unproven:
                    assert (await each.call("count").error())["code"] == -32600
                assert await each.text("count")


async def test_a_server_of_the_modern_era_may_refuse_a_handshake_in_any_words() -> None:
    async with server("modern, and terse") as app, url_of(app) as url:
        async with connected_world(server=HTTPServer(url)) as (_, client):
            assert await client.text("echo") == "echo"


async def test_a_refusal_that_speaks_of_a_session_of_its_own_is_about_that_request() -> None:
    """Where the server has none of this protocol: who shares it loses nothing."""
    begun, ends = asyncio.Event(), asyncio.Event()

    async def mcp(request: Request) -> Response:
        if request.method != "POST":
            return Response(status_code=405)
        message = await request.json()
        if "id" not in message:
            return Response(status_code=202)
        result: dict[str, Any] = {"content": []}
        if message["method"] == "initialize":
            info = {"name": "bank", "version": "1"}
            result = {"protocolVersion": "2025-11-25", "capabilities": {}, "serverInfo": info}
        elif message["params"]["name"] == "refused":
            return Response('{"error": "your login session expired"}', 400)
        else:
            begun.set()
            await ends.wait()
        return JSONResponse({"jsonrpc": "2.0", "id": message["id"], "result": result})

    methods = ["GET", "POST", "DELETE"]
    app = Starlette(routes=[Route("/mcp", mcp, methods=methods)])
    async with url_of(app) as url, world(server=HTTPServer(url, per="shared")) as w:
        one, other = await w.connected(), await w.connected()
        slow = one.call("slow")
        await begun.wait()
        refused = await other.call("refused").error()
        assert "HTTP status 400" in refused["message"]
        ends.set()
        assert await slow.result()


def response(*chunks: bytes, **headers: str) -> httpx2.Response:
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
    assert not time_slice.has_ended() and not time_slice.has_ended()
    await asyncio.sleep(2 * background._SLICE)  # pyright: ignore[reportPrivateUsage]
    assert not time_slice.has_ended()


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
async def test_a_process_without_descriptors_is_no_failure_of_a_url(
    host: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Whoever asks next is not refused. A resolver that can open no file says something else."""
    async with url_of(UrlServer()) as url:
        wrapped = HTTPServer(url.replace("127.0.0.1", host), try_at_start=False)
        async with world(server=wrapped) as w:
            # It stays, so that nothing is closed meanwhile.
            await w.connected()
            for _ in range(3):
                with no_descriptors():
                    error = await w.client().error("initialize", INITIALIZE["params"])
                assert "too many open files" in error["message"]
                await w.connected()
    said = [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]
    assert len([text for text in said if "too many open files" in text]) == 1, said
