"""What guards the endpoint for HTTP guards it for WebSockets, wherever in an application it is.

Most middleware looks at HTTP requests only and lets a WebSocket through unasked. The handshake
is put through all of it as the GET that it is.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

import pytest
from fastapi import FastAPI
from mcp.server.auth.middleware.bearer_auth import AuthenticatedUser
from mcp.server.auth.provider import AccessToken
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.base import BaseHTTPMiddleware, RequestResponseEndpoint
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import BaseRoute, Mount
from starlette.testclient import TestClient
from starlette.types import ASGIApp, Receive, Scope, Send
from websockets.exceptions import InvalidStatus

from mcp_sessions import SessionLayer
from mcp_sessions_transports.outermost import Outermost, outermost
from tests.support.duplex import listening, websocket
from tests.support.raw import RawClient, SocketCarrier
from tests.support.world import Ctx, Toolbox

KEY = {"X-Api-Key": "secret"}


def _has_key(scope: Scope) -> bool:
    return dict(scope["headers"]).get(b"x-api-key") == b"secret"


class PureGuard:
    """Looks at HTTP only, as many do."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and not _has_key(scope):
            await PlainTextResponse("no key", 401)(scope, receive, send)
            return
        await self._app(scope, receive, send)


class BaseGuard(BaseHTTPMiddleware):
    """Reads the whole body, too, as one that checks a signature does."""

    async def dispatch(self, request: Request, call_next: RequestResponseEndpoint) -> Response:
        if not _has_key(request.scope):
            return PlainTextResponse("no key", 401)
        await request.body()
        return await call_next(request)


_inner: list[ASGIApp] = []


async def module_guard(scope: Scope, receive: Receive, send: Send) -> None:
    if scope["type"] == "http" and not _has_key(scope):
        await PlainTextResponse("no key", 401)(scope, receive, send)
        return
    await _inner[-1](scope, receive, send)


def closure_guard(app: ASGIApp) -> ASGIApp:
    """One that is a nested function: it cannot be found again."""

    async def guard(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and not _has_key(scope):
            await PlainTextResponse("no key", 401)(scope, receive, send)
            return
        await app(scope, receive, send)

    return guard


def _starlette(layer: SessionLayer, *middleware: type) -> ASGIApp:
    return Starlette(routes=layer.routes(), middleware=[Middleware(m) for m in middleware])


def _fastapi(layer: SessionLayer) -> ASGIApp:
    app = FastAPI(routes=layer.routes())

    async def guard(
        request: Request, call_next: Callable[[Request], Awaitable[Response]]
    ) -> Response:
        if not _has_key(request.scope):
            return JSONResponse({"detail": "no key"}, 401)
        return await call_next(request)

    app.middleware("http")(guard)
    return app


def _nested(layer: SessionLayer, *, at: int) -> ASGIApp:
    """A mount in a mount in an application; the guard is one of them."""
    guards = [[Middleware(PureGuard)] if number == at else [] for number in range(4)]
    inner = Starlette(routes=layer.routes(), middleware=guards[0])
    middle: list[BaseRoute] = [Mount("/b", app=inner, middleware=guards[1])]
    outer = Starlette(routes=middle, middleware=guards[2])
    return FastAPI(routes=[Mount("/a", app=outer)], middleware=guards[3])


def _module(layer: SessionLayer) -> ASGIApp:
    _inner.append(_starlette(layer))
    return module_guard


def _mounted_app(layer: SessionLayer) -> ASGIApp:
    mounted = [Mount("/a", app=layer.asgi_app())]
    return Starlette(routes=mounted, middleware=[Middleware(PureGuard)])


APPLICATIONS: dict[str, tuple[Callable[[SessionLayer], ASGIApp], str]] = {
    "pure middleware": (lambda layer: _starlette(layer, PureGuard), "/mcp"),
    "base middleware": (lambda layer: _starlette(layer, BaseGuard), "/mcp"),
    "both": (lambda layer: _starlette(layer, BaseGuard, PureGuard), "/mcp"),
    "fastapi": (_fastapi, "/mcp"),
    "nested 0": (lambda layer: _nested(layer, at=0), "/a/b/mcp"),
    "nested 1": (lambda layer: _nested(layer, at=1), "/a/b/mcp"),
    "nested 2": (lambda layer: _nested(layer, at=2), "/a/b/mcp"),
    "nested 3": (lambda layer: _nested(layer, at=3), "/a/b/mcp"),
    "around routes": (lambda layer: PureGuard(_starlette(layer)), "/mcp"),
    "around the app": (lambda layer: PureGuard(layer.asgi_app()), "/mcp"),
    "around twice": (lambda layer: PureGuard(PureGuard(layer.asgi_app())), "/mcp"),
    "a function": (_module, "/mcp"),
    "the app mounted": (_mounted_app, "/a/mcp"),
}


async def refused(url: str, **options: Any) -> Any:
    """The response to a handshake that was refused."""
    with pytest.raises(InvalidStatus) as refusal:
        async with websocket(url, **options):
            pass
    return refusal.value.response


@pytest.mark.parametrize("name", APPLICATIONS)
async def test_what_guards_http_guards_websockets(name: str) -> None:
    """WSS18: the refusal is the guard's own, and who may send a GET may connect."""
    make, path = APPLICATIONS[name]
    box = Toolbox()
    layer = SessionLayer(box.server)
    app = make(layer)
    async with layer.lifespan(), listening(app) as port:
        carrier = SocketCarrier("127.0.0.1", port)
        over_http = await RawClient(carrier, path=path).get().done()
        url = f"ws://127.0.0.1:{port}{path}"
        response = await refused(url)
        assert response.status_code == over_http.status == 401
        assert response.body == bytes(over_http.body)
        assert (await refused(url, headers={"X-Api-Key": "wrong"})).status_code == 401

        async with websocket(url, headers=KEY) as peer:
            await peer.initialize()
            assert await peer.text("echo", text=name) == name
        await carrier.aclose()
    assert box.calls == ["echo"]


Application = Callable[[], ASGIApp] | None


def _app_behind(layer: SessionLayer, application: Application) -> ASGIApp:
    return layer.asgi_app(application=application)


def _routes_behind(layer: SessionLayer, application: Application) -> ASGIApp:
    return Starlette(routes=layer.routes(application=application))


async def test_nobody_comes_in_by_an_application_that_is_not_the_outermost_one(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """WSS18: what cannot be asked may be the guard. The log says what to do, and doing it helps."""
    caplog.set_level(logging.WARNING)
    for make in (_app_behind, _routes_behind):
        unasked = SessionLayer(Toolbox().server)
        app = closure_guard(make(unasked, None))
        async with unasked.lifespan(), listening(app) as port:
            url = f"ws://127.0.0.1:{port}/mcp"
            caplog.clear()
            assert (await refused(url, headers=KEY)).status_code == 403
            assert "closure_guard" in caplog.text and "Pass application=" in caplog.text

        layer = SessionLayer(Toolbox().server)
        guarded: list[ASGIApp] = []
        guarded.append(closure_guard(make(layer, partial(guarded.__getitem__, 0))))
        async with layer.lifespan(), listening(guarded[0]) as port:
            url = f"ws://127.0.0.1:{port}/mcp"
            assert (await refused(url)).status_code == 401
            async with websocket(url, headers=KEY) as peer:
                await peer.initialize()
                assert await peer.text("echo", text="in") == "in"


async def test_what_an_application_answers_itself_is_no_leave_to_come_in() -> None:
    """WSS18: a GET that never came to the endpoint lets nobody in, whatever its status."""

    class Landing(BaseHTTPMiddleware):
        async def dispatch(self, request: Request, call_next: RequestResponseEndpoint) -> Response:
            if request.method == "GET":
                return PlainTextResponse("welcome")
            return await call_next(request)

    layer = SessionLayer(Toolbox().server)
    app = _starlette(layer, Landing)
    async with layer.lifespan(), listening(app) as port:
        assert (await refused(f"ws://127.0.0.1:{port}/mcp")).status_code == 403


async def test_what_an_application_makes_of_the_endpoints_answer_counts() -> None:
    """WSS18: also who refuses afterwards."""

    class Late(BaseHTTPMiddleware):
        async def dispatch(self, request: Request, call_next: RequestResponseEndpoint) -> Response:
            await call_next(request)
            return PlainTextResponse("too many", 429)

    layer = SessionLayer(Toolbox().server)
    app = _starlette(layer, Late)
    async with layer.lifespan(), listening(app) as port:
        response = await refused(f"ws://127.0.0.1:{port}/mcp")
        assert (response.status_code, response.body) == (429, b"too many")


async def test_who_a_guard_says_it_is_is_who_it_is() -> None:
    """A user that the application's own middleware finds owns what is made over WebSocket, and a
    handler sees the context variables of the way.
    """

    class Users(PureGuard):
        async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
            if scope["type"] == "http":
                name = dict(scope["headers"]).get(b"x-user", b"nobody").decode()
                token = AccessToken(token=name, client_id="app", scopes=[], subject=name)
                scope["user"] = AuthenticatedUser(token)
            await self._app(scope, receive, send)

    layer = SessionLayer(Toolbox().server)
    app = _starlette(layer, Users)
    async with layer.lifespan(), listening(app) as port:
        url = f"ws://127.0.0.1:{port}/mcp"
        async with websocket(url, headers={"X-User": "ann"}) as ann:
            await ann.initialize()
            session = (await ann.start())["sessionId"]
            async with websocket(url, headers={"X-User": "bob"}) as bob:
                await bob.initialize()
                error = await bob.error("session/resume", {"sessionId": session})
                assert error["code"] == -32043
            async with websocket(url, headers={"X-User": "ann"}) as again:
                await again.initialize()
                assert (await again.resume(session))["resumed"] is True


def test_starlettes_test_client_comes_in_too() -> None:
    """It is a server as any."""
    box = Toolbox()

    async def hello(ctx: Ctx, arguments: object) -> str:
        return "hello"

    box.tools["hello"] = hello
    layer = SessionLayer(box.server)
    app = Starlette(
        routes=layer.routes(), lifespan=layer.lifespan, middleware=[Middleware(PureGuard)]
    )
    with TestClient(app) as client:
        with client.websocket_connect(
            "ws://127.0.0.1:8000/mcp", subprotocols=["mcp"], headers=KEY
        ) as peer:
            peer.send_json({"jsonrpc": "2.0", "id": 1, "method": "ping"})
            assert peer.receive_json() == {"jsonrpc": "2.0", "id": 1, "result": {}}


class _Forms:
    """Ways in which an application can be called."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, *args: Any) -> None:
        await self.named(*args)

    async def named(self, scope: Scope, receive: Receive, send: Send) -> None:
        # What is in a scope is found wherever it is handed on.
        await self._app({**scope, "path": "/changed"}, receive, send)


@pytest.mark.parametrize("form", ["object", "method", "nested"])
async def test_the_outermost_application_is_found_with_the_scope_it_was_given(form: str) -> None:
    found: list[Outermost | None] = []

    async def endpoint(scope: Scope, receive: Receive, send: Send) -> None:
        found.append(outermost())

    around = _Forms(endpoint)
    app: ASGIApp = {"object": around, "method": around.named, "nested": endpoint}[form]

    async def no_client(*_: Any) -> Any:
        raise AssertionError("nothing is received or sent")

    async def server() -> None:
        scope: Scope = {"type": "websocket", "path": "/a"}
        await app(scope, no_client, no_client)

    # In a task of its own, as servers do.
    await asyncio.create_task(server())

    assert found[0] is not None
    assert found[0].app == (None if form == "nested" else app)
    assert found[0].scope["path"] == "/a"
