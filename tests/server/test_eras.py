"""A layer speaks the eras that its operator names, on every transport."""

import json
import subprocess
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from mcp import Client
from mcp.shared.exceptions import MCPError
from mcp_types.version import LATEST_HANDSHAKE_VERSION, MODERN_PROTOCOL_VERSIONS

from mcp_sessions import ConfigurationError, SessionLayer
from mcp_sessions.cli.serve_options import parsed
from mcp_sessions.cli.servers_file import servers_of
from mcp_sessions.cli.settings_from_options import options_over
from mcp_sessions.external_server import ExternalServer
from mcp_sessions.layer_settings import LayerSettings
from mcp_sessions.protocol_versions import (
    HANDSHAKE_ERA,
    MODERN_ERA,
    NEWEST_HANDSHAKE,
    NEWEST_MODERN,
    Eras,
)
from mcp_sessions.server.upstream.external.children import can_follow
from mcp_sessions.server.upstream.sdk.kernel import HANDSHAKE_VERSIONS
from tests.support.duplex import DuplexPeer, listening, pipe, websocket
from tests.support.modern import ModernClient, envelope
from tests.support.raw import SESSION, Json
from tests.support.redis_server import namespace, shared_redis
from tests.support.serving import read_lines, serving
from tests.support.world import Toolbox, world

MODERN = "2026-07-28"
HANDSHAKE = "2025-11-25"
NOT_FOUND = -32601
UNSUPPORTED = -32022


@pytest.fixture
def anyio_backend() -> str:
    """Asyncio's own loop: threads of a pipe know no other time."""
    return "asyncio"


def test_the_versions_are_those_of_the_sdk() -> None:
    assert set(HANDSHAKE_ERA) < HANDSHAKE_VERSIONS
    assert NEWEST_HANDSHAKE == LATEST_HANDSHAKE_VERSION == max(HANDSHAKE_ERA)
    assert MODERN_ERA == MODERN_PROTOCOL_VERSIONS and NEWEST_MODERN == max(MODERN_ERA)


FIRST_LINES = {
    "2025": "handshake (2025-03-26, 2025-06-18, 2025-11-25)",
    "2026": "modern (2026-07-28)",
}
APP = """
from mcp.server import MCPServer
from mcp_sessions import SessionLayer

layer = SessionLayer(MCPServer("notes"), eras="2025")
"""


def first_lines(process: "subprocess.Popen[str]") -> str:
    said = ""
    while "  store  " not in said and (line := read_lines(process, 1)):
        said += line
    return said


@pytest.mark.parametrize(("given", "eras"), [((), "2025"), (("--eras", "2026"), "2026")])
def test_the_first_lines_name_the_eras_that_are_spoken(
    given: tuple[str, ...], eras: str, tmp_path: Path
) -> None:
    """Those of a file's layer, if no option replaces them."""
    (tmp_path / "app.py").write_text(APP)
    with serving(tmp_path, "app.py", *given) as process:
        lines = first_lines(process)

    assert f"  eras        {FIRST_LINES[eras]}\n" in lines


@pytest.mark.redis
def test_the_first_lines_of_workers_name_the_eras_of_the_file(tmp_path: Path) -> None:
    """The process that prints them does not load the file."""
    (tmp_path / "app.py").write_text(APP)
    store = f"{shared_redis().url}?namespace={namespace()}"
    with serving(tmp_path, "app.py", "--workers", "2", "--store", store) as process:
        lines = first_lines(process)

    assert f"  eras        {FIRST_LINES['2025']}\n" in lines


def test_the_first_lines_name_the_eras_of_all_servers_of_a_file(tmp_path: Path) -> None:
    entry: Json = {"url": "http://127.0.0.1:1/mcp"}
    for second, named in (("2025", FIRST_LINES["2025"]), ("2026", ", ".join(FIRST_LINES.values()))):
        servers = {"a": {**entry, "eras": "2025"}, "b": {**entry, "eras": second}}
        (tmp_path / "mcp.json").write_text(json.dumps({"mcpServers": servers}))
        with serving(tmp_path, "--config", "mcp.json", "--lazy") as process:
            assert f"  eras        {named}\n" in first_lines(process)


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


def test_a_file_names_the_eras_of_each_server_and_the_option_those_of_the_others(
    tmp_path: Path,
) -> None:
    """A server whose eras changed is served anew."""
    file = tmp_path / "mcp.json"

    def served(**eras: Any) -> list[ExternalServer]:
        entries = {name: {"url": "https://host/mcp", "eras": it} for name, it in eras.items()}
        file.write_text(json.dumps({"mcpServers": entries}))
        return list(servers_of(str(file), {}, eras="2025").values())

    one, other = served(one="2026", other=None)
    assert (one.eras, other.eras) == ("2026", "2025")
    assert can_follow(one, *served(one="2026")) and not can_follow(one, *served(one="both"))
    with pytest.raises(ConfigurationError, match="one: eras must be '2025', '2026' or 'both'"):
        served(one=2026)


@pytest.mark.parametrize(
    ("places", "expected"),
    [
        (["meta:a/b:c", "header:X-Chat", "env:CHAT"], [("a/b", "c"), ("x-chat", "")]),
        (["cookie:a"], None),
        (["meta:"], None),
    ],
)
def test_the_place_of_a_conversations_key_is_an_option(
    places: list[str], expected: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    given = [part for place in places for part in ("--conversation-key", place)]
    arguments = ["server.py", "--conversations", "--eras", "2025", *given]
    if expected is None:
        with pytest.raises(SystemExit):
            parsed(arguments, {})
        said = capsys.readouterr().err
        assert f"must be meta:NAME, header:NAME or env:NAME, not '{places[0]}'" in said
        return
    options = parsed(arguments, {})
    settings = options_over(options, LayerSettings()).conversations
    assert settings is not None and options.eras == "2025"
    assert [(rule.name, rule.member) for rule in settings.rules][:2] == expected
    assert list(settings.env) == ["CHAT"]
