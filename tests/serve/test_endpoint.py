"""Both spellings of the endpoint's path, and the pages in browsers that may call it."""

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from fastmcp import FastMCP, settings
from mcp.server.transport_security import TransportSecuritySettings
from starlette.applications import Starlette
from starlette.routing import Mount
from starlette.types import ASGIApp
from websockets.exceptions import InvalidStatus

from mcp_sessions import SessionLayer
from tests.support import apps
from tests.support.duplex import listening, websocket
from tests.support.modern import ModernClient
from tests.support.raw import AsgiCarrier, RawClient, Reply, in_process
from tests.support.world import Toolbox

pytestmark = pytest.mark.filterwarnings(apps.DEPRECATED)

APP = "https://app.example"
SETTINGS = TransportSecuritySettings(
    allowed_hosts=["127.0.0.1:*"], allowed_origins=[APP, "http://localhost:*"]
)

WAYS = ("alone", "mounted", "with middleware", "fastmcp")


def served(way: str, path: str = "/mcp", **options: Any) -> tuple[SessionLayer, ASGIApp]:
    if way in ("fastmcp", "with middleware"):
        layer = SessionLayer(fastmcp())
    else:
        layer = SessionLayer(Toolbox().server)
    if way == "mounted":
        return layer, Starlette(routes=layer.routes(path, **options))
    if way == "with middleware":
        return layer, Starlette(routes=[Mount("/", app=layer.asgi_app(path, **options))])
    return layer, layer.asgi_app(path, **options)


def fastmcp() -> FastMCP[Any]:
    """A server with a route next to the endpoint."""
    server = FastMCP[Any]("notes")

    @server.tool
    def echo(text: str) -> str:
        return text

    assert echo is not None
    return server


@asynccontextmanager
async def calling(way: str, path: str = "/mcp", **options: Any) -> AsyncGenerator[AsgiCarrier]:
    layer, app = served(way, path, **options)
    async with layer.lifespan(), in_process(app) as carrier:
        yield carrier


# --- the path -------------------------------------------------------------------------------


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("given", ["/mcp", "/mcp/"])
@pytest.mark.parametrize("asked", ["/mcp", "/mcp/"])
async def test_a_slash_at_the_end_is_served_and_not_redirected(
    way: str, given: str, asked: str
) -> None:
    """A redirect may name ``http://`` behind a proxy that ends TLS: a credential goes in clear."""
    async with calling(way, given) as carrier:
        client = RawClient(carrier, path=asked)
        await client.initialize()
        assert await client.text("echo", text="x") == "x"
        assert (await client.get().started()).status == 200
        assert (await client.delete().done()).status == 200
        modern = ModernClient(carrier, path=asked)
        assert (await modern.send("server/discover").result())["supportedVersions"]


@pytest.mark.parametrize("way", ["alone", "mounted"])
async def test_a_websocket_may_have_the_slash_too(way: str) -> None:
    """The same two spellings."""
    layer, app = served(way)
    async with layer.lifespan(), listening(app) as port:
        for path in ("/mcp", "/mcp/"):
            async with websocket(f"ws://127.0.0.1:{port}{path}") as peer:
                await peer.initialize()
                assert await peer.text("echo", text="x") == "x"


# --- pages in browsers ----------------------------------------------------------------------


def preflight(carrier: AsgiCarrier, origin: str, method: str = "POST") -> Reply:
    """What a browser asks before it lets a page send a request."""
    headers = {
        "Host": "127.0.0.1:8000",
        "Origin": origin,
        "Access-Control-Request-Method": method,
        "Access-Control-Request-Headers": "content-type,mcp-protocol-version,mcp-param-region",
    }
    return carrier.send("OPTIONS", "/mcp", list(headers.items()), b"")


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("origin", [APP, "http://localhost:3000"])
@pytest.mark.parametrize("method", ["POST", "GET", "DELETE"])
async def test_a_preflight_of_an_allowed_page_is_answered(
    way: str, origin: str, method: str
) -> None:
    """Its request headers are allowed, also those that a tool names (``Mcp-Param-…``)."""
    async with calling(way, security=SETTINGS) as carrier:
        reply = await preflight(carrier, origin, method).done()
    assert reply.status == 200
    assert reply.header("access-control-allow-origin") == origin
    assert method in str(reply.header("access-control-allow-methods"))
    assert "mcp-param-region" in str(reply.header("access-control-allow-headers"))
    assert "Origin" in str(reply.header("vary"))


@pytest.mark.parametrize("way", WAYS)
async def test_an_allowed_page_reads_the_answer_and_its_headers(way: str) -> None:
    """The session's id is in a header, which a page reads only if it is exposed."""
    async with calling(way, security=SETTINGS) as carrier:
        client = RawClient(carrier)
        sent = client.send(
            "initialize",
            {
                "protocolVersion": "2025-11-25",
                "capabilities": {},
                "clientInfo": {"name": "page", "version": "1"},
            },
            headers={"Origin": APP},
        )
        reply = await sent.reply.done()
    assert reply.status == 200 and reply.header("mcp-session-id")
    assert reply.header("access-control-allow-origin") == APP
    exposed = str(reply.header("access-control-expose-headers")).lower().split(", ")
    assert {"mcp-session-id", "www-authenticate", "retry-after"} <= set(exposed)
    assert reply.header("access-control-allow-credentials") is None


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("origin", ["https://evil.example", "https://localhost", "null"])
async def test_any_other_page_is_refused(way: str, origin: str) -> None:
    """Neither a preflight nor a request names it as allowed."""
    async with calling(way, security=SETTINGS) as carrier:
        asked = await preflight(carrier, origin).done()
        sent = await RawClient(carrier).send("ping", headers={"Origin": origin}).reply.done()
    assert (asked.status, sent.status) == (400, 403)
    assert asked.header("access-control-allow-origin") is None
    assert sent.header("access-control-allow-origin") is None


async def test_without_the_setting_no_page_can_read_an_answer() -> None:
    """The origins of this machine may call a loopback server, and read nothing."""
    origin = "http://localhost:3000"
    async with calling("alone") as carrier:
        assert (await preflight(carrier, origin).done()).status == 405
        sent = RawClient(carrier).send("session/start", headers={"Origin": origin})
        reply = await sent.reply.done()
    assert reply.status == 200
    assert reply.header("access-control-allow-origin") is None


@pytest.mark.parametrize(
    ("way", "other_host", "other_origin"), [("alone", 421, 403), ("fastmcp", 200, 200)]
)
async def test_without_settings_a_page_of_another_machine_does_not_reach_loopback(
    way: str, other_host: int, other_origin: int
) -> None:
    """SEC9. FastMCP allows all over HTTP by default, and has no WebSocket."""
    layer, app = served(way)
    async with layer.lifespan(), listening(app) as port, in_process(app) as carrier:
        for headers, status in (
            ({"Host": "other.example"}, other_host),
            ({"Origin": "https://evil.example"}, other_origin),
            ({"Origin": "http://localhost:3000"}, 200),
        ):
            sent = ModernClient(carrier).send("server/discover", headers=headers)
            assert (await sent.done()).status == status
        with pytest.raises(InvalidStatus):
            async with websocket(f"ws://127.0.0.1:{port}/mcp", origin="https://evil.example"):
                pass


async def test_a_name_that_fastmcp_allows_is_allowed_on_loopback(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its own guard decides, if it was asked for."""
    monkeypatch.setattr(settings, "http_host_origin_protection", True)
    monkeypatch.setattr(settings, "http_allowed_hosts", ["mcp.example"])
    async with calling("fastmcp") as carrier:
        for host, status in (("mcp.example", 200), ("evil.example", 421)):
            sent = ModernClient(carrier).send("server/discover", headers={"Host": host})
            assert (await sent.done()).status == status


@pytest.mark.parametrize("way", ["alone", "fastmcp"])
async def test_another_path_is_answered_with_that_of_the_endpoint(way: str) -> None:
    async with calling(way, "/api/mcp") as carrier:
        for path in ("/", "/mcp", "/api"):
            reply = await carrier.send("GET", path, [], b"").done()
            assert reply.status == 404
            assert reply.body == b"Not Found. This server speaks MCP at /api/mcp\n"
