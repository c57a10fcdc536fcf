"""The header for proxies that shard by session: the same on every connection (RTE)."""

from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

import anyio
import pytest
from mcp import Client
from starlette.types import ASGIApp, Receive, Scope, Send

from mcp_sessions.client.jar import FileJar
from mcp_sessions.client_transport import resumable
from mcp_sessions.ids import digest
from tests.support.modern import ModernClient
from tests.support.proxy import TcpProxy
from tests.support.raw import RawClient, call_params, in_session
from tests.support.resuming import MODES, QUICK, app_of
from tests.support.scripted import EXTENSION, OURS, ScriptedServer
from tests.support.servers import serve
from tests.support.world import world

HEADER = "mcp-session-route"


class Recording:
    """An application, and what each request to it was routed by."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self.seen: list[tuple[str, str | None]] = []

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] in ("http", "websocket"):
            headers = {name.decode(): value.decode() for name, value in scope["headers"]}
            self.seen.append((scope["type"], headers.get(HEADER)))
        await self._app(scope, receive, send)


@contextmanager
def recorded() -> Generator[tuple[Recording, int]]:
    _, layer = app_of()
    made: list[Recording] = []
    made.append(Recording(layer.asgi_app(application=lambda: made[0])))
    with serve(made[0]) as server:
        yield made[0], server.port


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("scheme", ["http", "ws"])
async def test_from_its_session_on_every_request_names_it_also_the_first_on_a_new_connection(
    mode: str, scheme: str
) -> None:
    """RTE2: by a digest, not by the id, which is a credential and which proxies would log."""
    with recorded() as (app, port):
        async with TcpProxy("127.0.0.1", port) as proxy:
            transport = resumable(proxy.url(scheme=scheme), policy=QUICK)
            async with Client(transport, mode=mode) as client:
                await client.call_tool("echo", {"text": "one"})
                assert transport.session is not None
                session = transport.session.session_id
                before = len(app.seen)
                assert app.seen[0][1] is None, "nothing is known yet"
                proxy.cut_all()
                await client.call_tool("echo", {"text": "two"})
    assert app.seen[before:], "it connected anew"
    assert {name for _, name in app.seen[before:]} == {digest(session)}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("scheme", ["http", "ws"])
async def test_a_run_that_takes_up_a_session_names_it_from_its_first_request_on(
    mode: str, scheme: str, tmp_path: Path
) -> None:
    """RTE2: with what the jar remembers of the server, before that says anything."""
    jar = FileJar(tmp_path / "jar")
    with recorded() as (app, port):
        url = f"{scheme}://127.0.0.1:{port}/mcp"
        transport = resumable(url, jar=jar, policy=QUICK)
        async with Client(transport, mode=mode) as client:
            await client.call_tool("echo", {"text": "one"})
            assert transport.session is not None
            session = transport.session.session_id
        before = len(app.seen)
        async with Client(resumable(url, jar=jar, policy=QUICK), mode=mode) as client:
            await client.call_tool("echo", {"text": "two"})
    assert app.seen[0][1] is None
    assert {name for _, name in app.seen[before:]} == {digest(session)}


async def test_a_server_that_does_not_ask_for_it_is_sent_none() -> None:
    """RTE1. One that names another header is another protocol's, and sent none either."""
    for routing in ({}, {"routing": {"header": "Authorization"}}, {"routing": "Mcp-Session-Route"}):
        extensions = {EXTENSION: {**OURS[EXTENSION], **routing}}
        capabilities = {"tools": {}, "sessions": {}, "extensions": extensions}
        async with ScriptedServer(capabilities=capabilities) as server:
            transport = resumable(server.url(), policy=QUICK)
            with anyio.fail_after(20):
                async with Client(transport, mode="legacy") as client:
                    await client.list_tools()
                    assert transport.session is not None
                    name = digest(transport.session.session_id)
            assert len(server.requests) > 3
            assert not [e for e in server.requests if name in e.headers.values()]


async def test_a_header_is_asked_for_and_decides_nothing() -> None:
    """RTE1: in both eras; another value, or none, is served all the same."""
    async with world() as w:
        client = RawClient(w.carrier)
        asked = [(await client.initialize())["capabilities"]["extensions"]]
        discovered = await ModernClient(w.carrier).send("server/discover").result()
        asked.append(discovered["capabilities"]["extensions"])
        assert [each[EXTENSION]["routing"] for each in asked] == [
            {"header": "Mcp-Session-Route"}
        ] * 2
        session_id = (await client.start())["sessionId"]
        for route in (digest(session_id), "another", None):
            headers = {HEADER: route} if route is not None else {}
            params = call_params("echo", {"text": "x"}, in_session(session_id))
            assert await client.send("tools/call", params, headers=headers).result()
