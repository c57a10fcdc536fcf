"""``layer.asgi_app()`` inside a FastAPI application, as FastMCP's users mount theirs."""

from contextlib import AsyncExitStack

import httpx2
import pytest
from fastapi import FastAPI
from fastmcp import FastMCP
from starlette.requests import Request
from starlette.responses import PlainTextResponse
from starlette.routing import Route

from mcp_sessions import SessionLayer
from tests.support.apps import KINDS, Kind, make_app
from tests.support.raw import RawClient, in_process


@pytest.mark.parametrize("kind", KINDS)
async def test_an_application_that_mounts_it_runs_its_lifespan(kind: Kind) -> None:
    """``FastAPI(lifespan=app.lifespan)`` is the habit of FastMCP's users."""
    app = make_app(kind)
    mounted = SessionLayer(app.server).asgi_app("/mcp")
    application = FastAPI(lifespan=mounted.lifespan)
    application.mount("/api", mounted)

    async with AsyncExitStack() as stack:
        await stack.enter_async_context(application.router.lifespan_context(application))
        carrier = await stack.enter_async_context(in_process(application))
        client = RawClient(carrier, path="/api/mcp")
        await client.initialize()
        await client.start()
    assert app.lifespans == 1


async def test_it_has_what_fastmcps_own_application_has() -> None:
    """The server's routes are in it, and its handlers find the application's state."""
    server = FastMCP("notes")

    @server.custom_route("/about", methods=["GET"])
    async def about(request: Request) -> PlainTextResponse:
        return PlainTextResponse(request.app.state.said)

    app = SessionLayer(server).asgi_app()
    app.state.said = "notes"

    assert {route.path for route in app.routes if isinstance(route, Route)} >= {"/mcp", "/about"}
    async with app.lifespan(app):
        transport = httpx2.ASGITransport(app=app)
        async with httpx2.AsyncClient(transport=transport, base_url="http://localhost") as client:
            assert (await client.get("/about")).text == "notes"
