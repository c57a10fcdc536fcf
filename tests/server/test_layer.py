"""``SessionLayer`` as an application holds it: three kinds of server, mounted or alone."""

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from fastapi import FastAPI
from mcp.server import MCPServer
from mcp.server.transport_security import TransportSecuritySettings
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse
from starlette.routing import Mount, Route
from starlette.types import ASGIApp

from mcp_sessions import SessionLayer
from mcp_sessions.errors import ConfigurationError, StoreUnavailable
from tests.support.apps import DEPRECATED, KINDS, Kind, make_app
from tests.support.raw import (
    EXTENSION,
    RawClient,
    call_params,
    event_ids,
    in_process,
    in_session,
    text_of,
    uris,
)
from tests.support.virtual_time import Backend
from tests.support.world import Toolbox, world

pytestmark = pytest.mark.filterwarnings(DEPRECATED)


@pytest.fixture
def anyio_backend() -> Backend:
    """Some of these servers' functions run in threads: time must not jump."""
    return ("asyncio", {})


# --- the main job, for every kind of server -----------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
async def test_the_main_job(kind: Kind) -> None:
    """Promised: "A stock handshake-era client can call ``session/start``, subscribe, lose its
    connection, reconnect with a new ``initialize`` (ids from 0 again), call ``session/resume``
    and get the missed updates on its new GET stream, coalesced, once, in order".
    """
    app = make_app(kind)
    layer = SessionLayer(app.server)
    app.publish = layer.notify_resource_updated
    asgi = layer.asgi_app()
    async with layer.lifespan(), in_process(asgi) as carrier:
        client = RawClient(carrier)
        result = await client.initialize()
        assert result["capabilities"]["resources"]["subscribe"] is True
        assert result["capabilities"]["sessions"] == {}
        assert EXTENSION in result["capabilities"]["extensions"]
        stream = client.get()
        started = await client.start()
        for number in range(3):
            await client.result("resources/subscribe", {"uri": f"note://{number}"})
        await client.text("touch", uri="note://0")
        position = event_ids(await stream.has(1))[0]
        await stream.gone()

        other = RawClient(carrier)
        await other.initialize()
        for number in range(50):
            await other.text("touch", uri=f"note://{number * 7 % 4}")
        again = RawClient(carrier)
        await again.initialize()
        new_stream = await again.get().started()
        resumed = await again.resume(started["sessionId"], position)
        messages = await new_stream.has(3)

        assert (resumed["catchup"], resumed["replayed"]) == (True, 3)
        assert sorted(uris(messages)) == ["note://0", "note://1", "note://2"]
        assert event_ids(messages) == sorted(event_ids(messages))
        assert event_ids(messages)[-1] == resumed["sessionEventId"]
        assert await again.text("session_id") == started["sessionId"]
        # The subscriptions are the session's: they came along.
        await other.text("touch", uri="note://1")
        await other.text("touch", uri="note://3")
        assert uris(await new_stream.has(4))[3:] == ["note://1"]
        await again.result("resources/unsubscribe", {"uri": "note://1"})
        await other.text("touch", uri="note://1")
        await other.text("touch", uri="note://2")
        assert uris(await new_stream.has(5))[4:] == ["note://2"]
    assert app.lifespans == 1


@pytest.mark.parametrize("kind", KINDS)
async def test_handlers_see_a_normal_context(kind: Kind) -> None:
    """Promised: "progress, logging, elicitation, sampling, roots, cancellation … all work
    inside and outside sessions".
    """
    app = make_app(kind)
    layer = SessionLayer(app.server)
    asgi = layer.asgi_app()
    async with layer.lifespan(), in_process(asgi) as carrier:
        client = RawClient(carrier, capabilities={"elicitation": {}, "sampling": {}, "roots": {}})
        await client.initialize()
        for _ in range(2):
            slow = client.call("slow", steps=3, meta={"progressToken": 5})
            assert text_of(await slow.result()) == "3 steps"
            progress = [m["params"]["progress"] for m in slow.reply.messages[:-1]]
            assert progress == [1, 2, 3]
            logged = client.call("log", text="hello")
            await logged.result()
            assert logged.reply.messages[0]["params"]["level"] == "info"
            asked = client.call("ask", question="?")
            question = (await asked.reply.has(1))[0]
            await client.respond(question, {"action": "accept", "content": {"answer": "42"}})
            assert text_of(await asked.result()) == "accept: 42"
            read = await client.result("resources/read", {"uri": "note://welcome"})
            assert read["contents"][0]["text"].startswith("note://welcome")
            prompt = await client.result(
                "prompts/get", {"name": "greet", "arguments": {"name": "A"}}
            )
            assert prompt["messages"][0]["content"]["text"] == "Greet A."
            assert (await client.error("x/unknown"))["code"] == -32601
            await client.start()


@pytest.mark.parametrize("kind", KINDS)
async def test_a_cancelled_handler_is_interrupted(kind: Kind) -> None:
    """In each kind of server the handler itself sees the cancellation."""
    app = make_app(kind)
    layer = SessionLayer(app.server)
    asgi = layer.asgi_app()
    async with layer.lifespan(), in_process(asgi) as carrier:
        client = RawClient(carrier)
        await client.initialize()
        sent = client.call("slow", steps=2, gate="g")
        await app.stage.reached("g:started")

        await client.notify("notifications/cancelled", {"requestId": sent.id})

        assert (await sent.error())["code"] == -32800
        await app.stage.reached("g:cancelled")


# --- running ----------------------------------------------------------------------------------


async def test_nobody_but_a_test_gives_a_layer_another_clock() -> None:
    """One that is ahead would end everybody's sessions, also where the store has its own clock."""
    options: dict[str, Any] = {"clock": lambda: 2_000_000_000.0}
    with pytest.raises(TypeError, match="clock"):
        SessionLayer(MCPServer("notes"), **options)


async def test_a_layer_runs_once() -> None:
    """``layer.lifespan`` twice: at the same time, and one after the other."""
    layer = SessionLayer(Toolbox().server)
    async with layer.lifespan():
        with pytest.raises(ConfigurationError, match="runs once"):
            async with layer.lifespan():
                pass
    with pytest.raises(ConfigurationError, match="runs once"):
        async with layer.lifespan():
            pass


async def test_a_layer_that_does_not_run_says_so() -> None:
    """The usual mistake: mounted without ``lifespan``. Not 404, not a hang: a sentence."""
    layer = SessionLayer(Toolbox().server)
    app = Starlette(routes=layer.routes())
    carrier = _unchecked(app)
    reply = carrier.send("POST", "/mcp", [("host", "127.0.0.1:8000")], b"{}")
    await reply.done()

    assert isinstance(reply.error, ConfigurationError)
    assert "layer.lifespan" in str(reply.error)
    with pytest.raises(ConfigurationError, match="does not run"):
        await layer.notify_tools_changed()


def _unchecked(app: ASGIApp) -> Any:
    from tests.support.raw import AsgiCarrier

    return AsgiCarrier(app)


@pytest.mark.parametrize("server", [None, object(), "server", SessionLayer])
def test_what_is_no_server_is_refused(server: Any) -> None:
    """One sentence that says what is wanted."""
    with pytest.raises(ConfigurationError, match="an MCPServer, a lowlevel Server or a FastMCP"):
        SessionLayer(server)


# --- mounting ---------------------------------------------------------------------------------


async def hello(request: Request) -> PlainTextResponse:
    return PlainTextResponse("hello")


@asynccontextmanager
async def lifespan_of(app: Any) -> AsyncGenerator[None]:
    async with app.router.lifespan_context(app):
        yield


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("framework", ["starlette", "fastapi", "alone"])
async def test_the_layer_is_mounted(kind: Kind, framework: str) -> None:
    """Promised: "``layer.routes(path=…)`` and ``layer.lifespan`` for mounting in Starlette or
    FastAPI (tested under both, no redirect)"; the application's own routes stay.
    """
    layer = SessionLayer(make_app(kind).server)
    app: Any
    if framework == "starlette":
        routes = [Route("/hello", hello), *layer.routes(path="/api/mcp")]
        app = Starlette(routes=routes, lifespan=layer.lifespan)
    elif framework == "fastapi":
        app = FastAPI(lifespan=layer.lifespan)
        app.add_route("/hello", hello)
        app.router.routes.extend(layer.routes(path="/api/mcp"))
    else:
        app = layer.asgi_app("/api/mcp")
    running = lifespan_of(app) if framework != "alone" else layer.lifespan()
    async with running, in_process(app) as carrier:
        client = RawClient(carrier, path="/api/mcp")
        await client.initialize()
        stream = client.get()
        session = (await client.start())["sessionId"]
        assert await client.text("session_id") == session
        assert (await stream.started()).status == 200
        # The session works like any; a lone POST too.
        assert (
            await RawClient(carrier, path="/api/mcp").text(
                "echo", text="x", meta=in_session(session)
            )
            == "x"
        )
        if framework != "alone":
            page = await carrier.send("GET", "/hello", [], b"").done()
            assert bytes(page.body) == b"hello"
        missing = await carrier.send("GET", "/other", [], b"").done()
        assert missing.status == 404
        assert (await client.delete().done()).status == 200


async def test_a_mounted_path_is_not_redirected() -> None:
    """Under a Mount, with the prefix in ``root_path``: 200 and no 307, which loses the body of
    a POST with some clients.
    """
    layer = SessionLayer(Toolbox().server)
    inner = Starlette(routes=layer.routes(path="/mcp"))
    app = Starlette(routes=[Mount("/v1", app=inner)], lifespan=layer.lifespan)
    async with lifespan_of(app), in_process(app) as carrier:
        client = RawClient(carrier, path="/v1/mcp")
        await client.initialize()
        assert await client.text("echo", text="x") == "x"


async def test_an_application_of_the_layer_can_be_mounted() -> None:
    """``asgi_app()`` under a Mount serves its path below the prefix."""
    layer = SessionLayer(Toolbox().server)
    app = Starlette(routes=[Mount("/v1", app=layer.asgi_app())], lifespan=layer.lifespan)
    async with lifespan_of(app), in_process(app) as carrier:
        client = RawClient(carrier, path="/v1/mcp")
        await client.initialize()
        assert await client.text("echo", text="x") == "x"


async def test_two_endpoints_of_one_layer_share_its_sessions() -> None:
    """One store, one hub, whatever path a client comes by."""
    layer = SessionLayer(Toolbox().server)
    app = Starlette(
        routes=[*layer.routes(path="/a"), *layer.routes(path="/b")], lifespan=layer.lifespan
    )
    async with lifespan_of(app), in_process(app) as carrier:
        first, second = RawClient(carrier, path="/a"), RawClient(carrier, path="/b")
        await first.initialize()
        await second.initialize()
        stream = await second.get().started()
        session = (await first.start())["sessionId"]
        await second.resume(session)
        assert (await first.error("tools/list"))["code"] == -31010
        await second.text("update", uri="a:1")
        assert uris(await stream.has(1)) == ["a:1"]


async def test_the_security_settings_are_the_sdks() -> None:
    """Promised: "Host and Origin protection with the SDK's settings object"."""
    settings = TransportSecuritySettings(
        allowed_hosts=["api.example"], allowed_origins=["https://app.example"]
    )
    layer = SessionLayer(Toolbox().server)
    app = layer.asgi_app(security=settings)
    async with layer.lifespan(), in_process(app) as carrier:
        client = RawClient(carrier)
        for headers, status in [
            ({"Host": "127.0.0.1:8000"}, 421),
            ({"Host": "api.example"}, 200),
            ({"Host": "api.example", "Origin": "https://app.example"}, 200),
            ({"Host": "api.example", "Origin": "https://evil.example"}, 403),
        ]:
            sent = client.send("session/start", headers=headers)
            assert (await sent.reply.done()).status == status


@pytest.mark.parametrize("host", ["127.0.0.2", "LOCALHOST", "0:0:0:0:0:0:0:1"])
async def test_each_name_of_this_machine_has_the_guard_of_loopback(host: str) -> None:
    named = f"[{host}]:8000" if ":" in host else f"{host}:8000"
    layer = SessionLayer(Toolbox().server)
    app = layer.asgi_app(host=host)
    async with layer.lifespan(), in_process(app) as carrier:
        client = RawClient(carrier)
        for headers, status in [
            ({"Host": named}, 200),
            ({"Host": "evil.example"}, 421),
            ({"Host": named, "Origin": "https://evil.example"}, 403),
        ]:
            sent = client.send("session/start", headers=headers)
            assert (await sent.reply.done()).status == status


async def test_a_body_may_be_as_large_as_the_layer_says() -> None:
    """Promised: "body limit (default 4 MiB → 413)"; ``max_body`` changes it."""
    layer = SessionLayer(Toolbox().server)
    app = layer.asgi_app(max_body=2_000)
    async with layer.lifespan(), in_process(app) as carrier:
        client = RawClient(carrier)
        await client.initialize()
        assert await client.text("echo", text="x" * 1_000) == "x" * 1_000
        sent = client.send("tools/call", call_params("echo", {"text": "x" * 2_000}))
        reply = await sent.reply.done()
        assert reply.status == 413
        assert reply.body == b"Request body too large: the limit is 2000 bytes (max_message)"


async def test_the_layer_changes_nothing_of_a_server_it_wraps() -> None:
    """The same server object can still be served bare, and wrapped again."""
    box = Toolbox()
    async with world(box=box) as w:
        assert await (await w.connected()).text("echo", text="x") == "x"
    async with world(box=box) as w:
        assert await (await w.connected()).text("echo", text="y") == "y"


@pytest.mark.parametrize("kind", KINDS)
def test_outside_of_asyncio_a_layer_says_so_and_starts_nothing(kind: Kind) -> None:
    """As under trio, which the SDK's own servers run on as well."""
    app = make_app(kind)
    layer = SessionLayer(app.server)

    with pytest.raises(ConfigurationError, match="asyncio"):
        layer.lifespan().__aenter__().send(None)  # pyright: ignore[reportAttributeAccessIssue]

    assert app.lifespans == 0


@pytest.mark.parametrize(("port", "asked"), [(None, 8000), (0, 0), (9000, 9000)])
def test_port_0_is_any_free_one_and_none_is_the_default(
    monkeypatch: pytest.MonkeyPatch, port: int | None, asked: int
) -> None:
    ports: list[int] = []

    def listen_on(_: str, port: int) -> None:
        ports.append(port)
        raise OSError("enough")

    monkeypatch.setattr("mcp_sessions.layer.listen_on", listen_on)
    with pytest.raises(OSError, match="enough"):
        SessionLayer(MCPServer[Any]("any")).run("http", port=port)
    assert ports == [asked]


@pytest.mark.parametrize("transport", ["http", "stdio"])
def test_a_store_that_is_away_has_a_short_traceback(transport: Any) -> None:
    """It had thirty lines of other packages before the one that says what to do."""
    layer = SessionLayer(MCPServer[Any]("any"), store="redis://127.0.0.1:1")
    with pytest.raises(StoreUnavailable, match="start it, or correct the URL") as away:
        layer.run(transport, port=0)
    assert away.value.__cause__ is None and away.value.__suppress_context__
    assert [each.name for each in away.traceback][1:] == ["call", "run"]
