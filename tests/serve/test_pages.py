"""The pages that the application's own CORS allows: the layer says the same of them."""

from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
from mcp.server.transport_security import TransportSecuritySettings
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.base import BaseHTTPMiddleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Mount
from starlette.types import ASGIApp
from websockets.exceptions import InvalidStatus

from mcp_sessions import SessionLayer
from tests.support.duplex import listening, websocket
from tests.support.modern import ModernClient
from tests.support.raw import RawClient, in_process
from tests.support.world import Toolbox

PAGE, OTHER = "https://app.example", "https://evil.example"


async def passing(request: Request, go_on: Callable[[Request], Awaitable[Response]]) -> Response:
    """A middleware that runs what is inside of it in another task."""
    return await go_on(request)


TASK = Middleware(BaseHTTPMiddleware, dispatch=passing)


def cors(**options: Any) -> Middleware:
    return Middleware(CORSMiddleware, **options)


def routes(layer: SessionLayer, allowed: Middleware, **options: Any) -> ASGIApp:
    return Starlette(routes=layer.routes(**options), middleware=[allowed])


def mounted(layer: SessionLayer, allowed: Middleware, **options: Any) -> ASGIApp:
    inner = Mount("/", app=layer.asgi_app(**options))
    return Starlette(routes=[inner], middleware=[allowed])


def in_a_task(layer: SessionLayer, allowed: Middleware, **options: Any) -> ASGIApp:
    return Starlette(routes=layer.routes(**options), middleware=[allowed, TASK])


def mounted_in_a_task(layer: SessionLayer, allowed: Middleware, **options: Any) -> ASGIApp:
    inner = Mount("/", app=layer.asgi_app(**options))
    return Starlette(routes=[inner], middleware=[allowed, TASK])


def wrapped(layer: SessionLayer, allowed: Middleware, **options: Any) -> ASGIApp:
    return allowed.cls(layer.asgi_app(**options), *allowed.args, **allowed.kwargs)


def named(layer: SessionLayer, allowed: Middleware, **options: Any) -> ASGIApp:
    """The application of a closure, which only its author can name."""
    found: list[ASGIApp] = []
    inner = layer.asgi_app(application=lambda: found[0], **options)
    found.append(allowed.cls(inner, *allowed.args, **allowed.kwargs))

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await found[0](scope, receive, send)

    return app


Way = Callable[..., ASGIApp]
WAYS = [routes, mounted, in_a_task, mounted_in_a_task, wrapped, named]


@asynccontextmanager
async def serving(
    way: Way, allowed: Middleware, **options: Any
) -> AsyncGenerator[tuple[ASGIApp, SessionLayer]]:
    layer = SessionLayer(Toolbox().server)
    app = way(layer, allowed, **options)
    async with layer.lifespan():
        yield app, layer


async def statuses(app: ASGIApp, origin: str, host: str = "127.0.0.1:8000") -> list[int | None]:
    """What a page of this origin is answered, in each era."""
    headers = {"Origin": origin, "Host": host}
    async with in_process(app) as carrier:
        newer = await ModernClient(carrier).send("server/discover", headers=headers).done()
        older = RawClient(carrier).send("session/start", headers=headers)
        return [newer.status, (await older.reply.done()).status]


async def opens(app: ASGIApp, origin: str) -> bool:
    async with listening(app) as port:
        try:
            async with websocket(f"ws://127.0.0.1:{port}/mcp", origin=origin):
                return True
        except InvalidStatus as refused:
            assert refused.response.status_code == 403
            return False


@pytest.mark.parametrize("way", WAYS)
async def test_a_page_that_the_applications_cors_allows_comes_in(way: Way) -> None:
    """SEC9. It was answered 403, in both eras and as a WebSocket."""
    async with serving(way, cors(allow_origins=[PAGE])) as (app, _):
        for _ in range(2):
            assert await statuses(app, PAGE) == [200, 200]
            assert await statuses(app, OTHER) == [403, 403]
            assert await statuses(app, "http://localhost:3000") == [200, 200]
        assert await statuses(app, PAGE, "evil.example") == [421, 421]
        assert await opens(app, PAGE)
        assert not await opens(app, OTHER)


@pytest.mark.parametrize(
    "allowed",
    [cors(allow_origins=["*"]), cors(allow_origin_regex=r"https://.*\.example", allow_methods=[])],
)
async def test_cors_decides_by_its_own_rule(allowed: Middleware) -> None:
    async with serving(routes, allowed) as (app, _):
        assert await statuses(app, PAGE) == [200, 200]
        assert await opens(app, OTHER)


@pytest.mark.parametrize("way", WAYS)
async def test_pages_that_the_operator_named_are_all_there_are(way: Way) -> None:
    """An endpoint may allow less than its application. A list of hosts names no page."""
    named = TransportSecuritySettings(allowed_hosts=["127.0.0.1"], allowed_origins=[OTHER])
    async with serving(way, cors(allow_origins=["*"]), security=named) as (app, _):
        assert await statuses(app, PAGE, "127.0.0.1") == [403, 403]
        assert await statuses(app, OTHER, "127.0.0.1") == [200, 200]
    hosts = TransportSecuritySettings(allowed_hosts=["127.0.0.1"])
    async with serving(way, cors(allow_origins=[PAGE]), security=hosts) as (app, _):
        assert await statuses(app, PAGE, "127.0.0.1") == [200, 200]
        assert await statuses(app, OTHER, "127.0.0.1") == [403, 403]


async def test_an_application_without_cors_allows_no_page() -> None:
    for way in (routes, mounted):
        async with serving(way, TASK) as (app, _):
            assert await statuses(app, PAGE) == [403, 403]
