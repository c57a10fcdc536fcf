"""Servers that are URLs: a stock one of the SDK, and whatever a test writes, on a real socket."""

from collections import Counter
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any

from starlette.types import ASGIApp

from mcp_sessions import HTTPServer
from tests.support.duplex import listening
from tests.support.unwrapped import ListEventStore
from tests.support.world import Ctx, Toolbox


@asynccontextmanager
async def url_of(app: ASGIApp, port: int = 0) -> AsyncGenerator[str]:
    """Where an application is served, in this event loop; it has no lifespan."""
    async with listening(app, port=port) as port:
        yield f"http://127.0.0.1:{port}/mcp"


@asynccontextmanager
async def stock_url(
    box: Toolbox | None = None, *, resumable: bool = False, **options: Any
) -> AsyncGenerator[str]:
    """The box's server on the SDK's own Streamable HTTP.

    Args:
        resumable: Its events have ids, by which they can be fetched again.
        options: As of ``streamable_http_app``.
    """
    box = box or Toolbox()
    counts: Counter[str] = Counter()

    async def count(ctx: Ctx, arguments: dict[str, Any]) -> str:
        session: str = ctx.request.headers["mcp-session-id"] if ctx.request is not None else ""
        counts[session] += 1
        return str(counts[session])

    box.tools["count"] = count
    store = ListEventStore() if resumable else None
    app = box.server.streamable_http_app(event_store=store, retry_interval=10, **options)
    async with app.router.lifespan_context(app), url_of(app) as url:
        yield url


@asynccontextmanager
async def stock_server(box: Toolbox | None = None, **options: Any) -> AsyncGenerator[HTTPServer]:
    async with stock_url(box) as url:
        yield HTTPServer(url, **options)
