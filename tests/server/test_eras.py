"""A layer speaks the eras that its operator names, on every transport."""

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

import pytest
from mcp import Client
from mcp.shared.exceptions import MCPError

from mcp_sessions import SessionLayer
from mcp_sessions.eras import Eras
from tests.support.duplex import DuplexPeer, listening, pipe, websocket
from tests.support.modern import ModernClient, envelope
from tests.support.raw import SESSION, Json
from tests.support.world import Toolbox, world

pytestmark = pytest.mark.anyio

MODERN = "2026-07-28"
HANDSHAKE = "2025-11-25"
NOT_FOUND = -32601
UNSUPPORTED = -32022


@pytest.fixture
def anyio_backend() -> str:
    """Asyncio's own loop: threads of a pipe know no other time."""
    return "asyncio"


DUPLEX = pytest.mark.parametrize("kind", ["websocket", "stdio"])


def layer_of(eras: Eras) -> SessionLayer:
    return SessionLayer(Toolbox().server, eras=eras)


@asynccontextmanager
async def url_of(eras: Eras) -> AsyncGenerator[str]:
    layer = layer_of(eras)
    app = layer.asgi_app()
    async with layer.lifespan(), listening(app) as port:
        yield f"http://127.0.0.1:{port}/mcp"


@asynccontextmanager
async def peer_of(kind: str, eras: Eras, *, modern: bool = False) -> AsyncGenerator[DuplexPeer]:
    layer = layer_of(eras)
    async with layer.lifespan():
        if kind == "stdio":
            async with pipe(layer, modern=modern) as peer:
                yield peer
            return
        async with listening(layer.asgi_app()) as port:
            async with websocket(f"ws://127.0.0.1:{port}/mcp", modern=modern) as peer:
                yield peer


@pytest.mark.parametrize(
    ("eras", "version"), [("2025", HANDSHAKE), ("2026", MODERN), ("both", MODERN)]
)
async def test_a_stock_host_of_both_eras_speaks_that_of_the_layer(eras: Eras, version: str) -> None:
    async with url_of(eras) as url, Client(url) as client:
        assert client.protocol_version == version
        assert (await client.list_tools()).tools


async def test_a_stock_client_of_the_handshake_era_is_refused_with_the_versions() -> None:
    async with url_of("2026") as url:
        with pytest.RaisesGroup(MCPError, flatten_subgroups=True) as refused:
            async with Client(url, mode="legacy"):
                pass
        (error,) = refused.value.exceptions
        while isinstance(error, BaseExceptionGroup):
            (error,) = error.exceptions
        assert isinstance(error, MCPError) and error.error.code == UNSUPPORTED
        assert error.error.data == {"supported": [MODERN], "requested": HANDSHAKE}


async def test_over_http_the_error_is_one_after_which_every_host_begins_with_a_handshake() -> None:
    """Some fall back after "Method not found" only, and some only if the status is 400."""
    async with world(eras="2025") as w:
        client = ModernClient(w.carrier)
        for method in ("server/discover", "tools/list", "session/start"):
            sent = client.send(method)
            assert (await sent.error())["code"] == NOT_FOUND
            assert sent.status == 400
        reply = await client.notify("notifications/cancelled", {"requestId": 1})
        assert reply.status == 400


@DUPLEX
async def test_a_connection_that_was_refused_goes_on_with_a_handshake(kind: str) -> None:
    async with peer_of(kind, "2025") as peer:
        for method in ("server/discover", "tools/list"):
            error = await peer.error(method, {"_meta": envelope()})
            assert error["code"] == NOT_FOUND
        assert (await peer.initialize())["protocolVersion"] == HANDSHAKE
        assert (await peer.result("tools/list"))["tools"]


@DUPLEX
async def test_a_connection_of_the_handshake_era_is_refused_and_may_go_on_without(
    kind: str,
) -> None:
    async with peer_of(kind, "2026") as peer:
        params: Json = {"protocolVersion": HANDSHAKE, "capabilities": {}, "clientInfo": {}}
        error = await peer.error("initialize", params)
        assert error["code"] == UNSUPPORTED and error["data"]["supported"] == [MODERN]
        for method in ("tools/list", "ping"):
            assert "error" in await peer.answer(await peer.send(method)), "it has no envelope"
        session = (await peer.start())["sessionId"]
        named = {SESSION: {"sessionId": session}}
        assert "error" in await peer.answer(await peer.send("tools/list", {"_meta": named}))
        result = await peer.result("tools/list", {"_meta": envelope()})
        assert result["resultType"] == "complete"
