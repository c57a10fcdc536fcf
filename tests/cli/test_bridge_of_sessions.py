"""``mcp-sessions bridge`` in front of a host that holds sessions itself.

Its connection is the pipe, which does not break. So nothing that it receives may tell of the
network behind the bridge (ATT6, RES4), and each request is of the session that the pipe gives
it (ASC1, ASC2, ASC4), whatever connections there were.
"""

import itertools
import os
import signal
import subprocess
import sys
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path

import anyio
import pytest

from mcp_sessions import SessionLayer, SessionPolicy
from tests.support.apps import App, make_app
from tests.support.duplex import DECLARED, websocket
from tests.support.host import Host, host, named, session_of
from tests.support.modern import SUBSCRIPTION_ID
from tests.support.processes import free_port, wait_until_it_listens
from tests.support.proxy import TcpProxy
from tests.support.raw import Json
from tests.support.resuming import serving
from tests.support.scripted import OURS, Exchange, ScriptedServer, never
from tests.support.servers import RunningServer

NOTES = ("note://1", "note://2", "note://3")
WAYS = [
    pytest.param("http", False, id="http-handshake", marks=pytest.mark.full),
    pytest.param("http", True, id="http-modern"),
    pytest.param("ws", False, id="ws-handshake"),
    pytest.param("ws", True, id="ws-modern", marks=pytest.mark.full),
]
SCHEMES = ["http", pytest.param("ws", marks=pytest.mark.full)]
DETACHED = "notifications/sessions/detached"


class World:
    """A server, a network that can be cut, and a host behind its bridge."""

    def __init__(
        self, app: App, layer: SessionLayer, server: RunningServer, proxy: TcpProxy, peer: Host
    ) -> None:
        self.app, self.layer, self.server = app, layer, server
        self.proxy, self.host = proxy, peer

    async def change(self, *uris: str) -> None:
        """The server announces that resources changed."""
        for uri in uris:
            await self.server.call(self.layer.notify_resource_updated, uri)


@asynccontextmanager
async def bridged(
    scheme: str,
    *,
    modern: bool = False,
    capabilities: Json | None = None,
    policy: SessionPolicy | None = None,
) -> AsyncGenerator[World]:
    made = None
    if policy is not None:
        app = make_app("mcpserver")
        made = app, SessionLayer(app.server, policy=policy)
        app.publish = made[1].notify_resource_updated
    with serving(made) as (app, layer, server), anyio.fail_after(55):
        async with TcpProxy(server.host, server.port) as proxy:
            url = proxy.url(scheme=scheme)
            async with host(url, modern=modern, capabilities=capabilities) as peer:
                yield World(app, layer, server, proxy, peer)


@pytest.mark.parametrize(("scheme", "modern"), WAYS)
async def test_events_of_an_outage_come_once_and_in_order(scheme: str, modern: bool) -> None:
    async with bridged(scheme, modern=modern) as it:
        sessions = [await it.host.subscribed(*NOTES) for _ in range(3)]
        await it.change(NOTES[0])
        await it.host.has_events(3)
        with it.proxy.offline():
            await it.change(*NOTES)
        await it.host.has_events(12)
        await it.change(NOTES[1])
        await it.host.has_events(15)

        for session_id in sessions:
            assert it.host.received(session_id) == [NOTES[0], *NOTES, NOTES[1]]
            assert it.host.ids(session_id) == sorted(set(it.host.ids(session_id)))
        streams = [e["params"]["_meta"].get(SUBSCRIPTION_ID) for e in it.host.events]
        assert set(streams) == (set(it.host.acknowledged) if modern else {None})
        assert len(it.host.acknowledged) == (3 if modern else 0)
        assert [n for n in it.host.notifications if n["method"] == DETACHED] == []


@pytest.mark.parametrize("scheme", SCHEMES)
async def test_a_request_is_of_the_session_that_the_pipe_gives_it(scheme: str) -> None:
    """Before a cut and after it: current, named, none; and the current one after its end."""
    async with bridged(scheme) as it:
        first, second = [(await it.host.start())["sessionId"] for _ in range(2)]
        for _ in range(2):
            assert await it.host.current() == second
            assert await it.host.text("session_id", meta=named(first)) == first
            nothing: Json = {"io.modelcontextprotocol/session": None}
            assert await it.host.text("session_id", meta=nothing) == "none"
            it.proxy.cut_all()
        await it.host.resume(first)
        assert await it.host.current() == first
        await it.host.result("session/end", {"sessionId": first})
        it.proxy.cut_all()
        # First what has a key: the other might be lost with the connection (KEY17).
        assert await it.host.text("session_id", meta=named(second)) == second
        assert await it.host.current() == "none"


@pytest.mark.parametrize(("scheme", "modern"), WAYS)
async def test_a_call_in_its_session_survives_a_cut_and_runs_once(
    scheme: str, modern: bool
) -> None:
    async with bridged(scheme, modern=modern) as it:
        session_id = (await it.host.start())["sessionId"]
        meta = named(session_id) if modern else None
        call = await it.host.call("slow", meta=meta, steps=1, gate="g")
        await it.app.stage.reached("g:started", within=30)
        it.proxy.cut_all()
        it.app.stage.mark("g:go")

        answer = await it.host.answer(call)
        assert answer["result"]["content"][0]["text"] == "1 steps"
        assert it.app.stage.count("g:started") == 1
        is_named = "io.modelcontextprotocol/session" in (answer["result"].get("_meta") or {})
        assert is_named == modern


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("is_declared", [True, pytest.param(False, marks=pytest.mark.full)])
async def test_a_session_that_ended_during_an_outage_is_gone(
    scheme: str, is_declared: bool
) -> None:
    """ASC17; and who knows the extension is asked to ask for it again."""
    async with bridged(scheme, capabilities=DECLARED if is_declared else None) as it:
        gone = await it.host.subscribed(*NOTES)
        left = await it.host.subscribed(*NOTES)
        await it.host.resume(gone)
        with it.proxy.offline():
            await it.server.call(it.layer.sessions.end, gone)
        await it.change(NOTES[0])
        await it.host.until(lambda: it.host.received(left))
        if is_declared and scheme == "ws":
            # Over HTTP the connection goes on where it was, and nobody says it there.
            notified = await it.host.notified(DETACHED)
            assert notified["params"] == {"sessionId": gone, "reason": "evicted"}

        assert (await it.host.error("tools/list"))["code"] == -32043
        assert (await it.host.error("session/resume", {"sessionId": gone}))["code"] == -32043
        await it.host.result("ping")
        assert await it.host.text("session_id", meta=named(left)) == left


FEW = SessionPolicy(max_events=2)


@pytest.mark.parametrize("scheme", SCHEMES)
async def test_no_event_passes_behind_a_hole(scheme: str) -> None:
    """ATT10: the session leaves the pipe, and comes back when its host asks for it."""
    async with bridged(scheme, capabilities=DECLARED, policy=FEW) as it:
        session_id = await it.host.subscribed(*NOTES, "note://4")
        await it.change(NOTES[0])
        [first] = await it.host.has_events(1)
        with it.proxy.offline():
            await it.change(*NOTES, "note://4")
        notified = await it.host.notified(DETACHED)
        assert notified["params"] == {"sessionId": session_id, "reason": "evicted"}
        await it.change(NOTES[0])
        assert (await it.host.error("tools/list"))["code"] == -31010
        assert it.host.events == [first]

        answer = await it.host.resume(session_id, first["params"]["sessionEventId"])
        assert (answer["catchup"], answer["reason"]) == (False, "evicted")
        await it.change(NOTES[1])
        assert [e["params"]["uri"] for e in await it.host.has_events(2)] == [NOTES[0], NOTES[1]]
        assert await it.host.current() == session_id


async def test_a_stream_that_cannot_continue_is_opened_again_after_another_resume() -> None:
    """HTL7: the sessions of a modern host, on a connection of their own. The bridge is busy with
    another session when that connection's stream breaks.
    """
    asked: list[Exchange] = []
    is_held = False

    def serve(exchange: Exchange) -> None:
        if exchange.method == "server/discover":
            if is_held:
                asked.append(exchange)
                never(exchange)
            else:
                exchange.result(discovered(OURS))
        elif exchange.method == "subscriptions/listen":
            exchange.event(acknowledged(exchange.message["id"]))
        elif exchange.verb == "GET":
            server.stream = exchange
            exchange.event({"jsonrpc": "2.0", "method": "notifications/x"})  # without an id

    server = ScriptedServer({"*": serve})
    with anyio.fail_after(55):
        async with server, host(server.url(), modern=True, capabilities=DECLARED) as peer:
            await peer.result("tools/list")
            one, two = [(await peer.start())["sessionId"] for _ in range(2)]
            await server.has(lambda: server.stream, "the notification stream")
            listen = await peer.send("subscriptions/listen", {"notifications": {}}, meta=named(two))
            await peer.until(lambda: listen in peer.acknowledged, "the listen")
            is_held = True
            await peer.notify("notifications/cancelled", {"requestId": listen})
            await server.has(lambda: asked, "a resume of the other session")
            assert server.stream is not None
            before = server.stream.headers["mcp-session-id"]
            server.stream.end()
            await server.has(lambda: len(server.asked("GET")) == 2, "the next stream")
            is_held = False
            for exchange in asked:
                exchange.result(discovered(OURS))
            await server.has(
                lambda: server.stream and server.stream.headers["mcp-session-id"] != before,
                "the stream of another connection",
            )
            server.push_message(update_of(one))
            await peer.has_events(1)
            assert peer.received(one) == [NOTES[0]]


def discovered(extensions: Json) -> Json:
    capabilities = {"tools": {}, "resources": {}, "sessions": {}, "extensions": extensions}
    return {
        "supportedVersions": ["2026-07-28"],
        "resultType": "complete",
        "capabilities": capabilities,
    }


def acknowledged(request_id: object) -> Json:
    params = {"notifications": {}, "_meta": {SUBSCRIPTION_ID: request_id}}
    method = "notifications/subscriptions/acknowledged"
    return {"jsonrpc": "2.0", "method": method, "params": params}


def update_of(session_id: str) -> Json:
    params = {"uri": NOTES[0], "sessionEventId": "1", "_meta": named(session_id)}
    return {"jsonrpc": "2.0", "method": "notifications/resources/updated", "params": params}


async def test_a_host_that_cannot_be_notified_of_a_hole_has_its_connection_ended() -> None:
    """ATT10, TKO3: in silence it would take what it got for all there was."""
    async with bridged("ws", policy=FEW) as it:
        session_id = await it.host.subscribed(*NOTES, "note://4")
        await it.change(NOTES[0])
        await it.host.has_events(1)
        with it.proxy.offline():
            await it.change(*NOTES, "note://4")
        assert await it.host.exit() == 1
        assert it.host.received(session_id) == [NOTES[0]]
        assert "start the bridge again" in it.host.said.splitlines()[-1]
        assert session_id not in it.host.said


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("is_declared", [True, pytest.param(False, marks=pytest.mark.full)])
async def test_who_took_a_session_over_keeps_it(scheme: str, is_declared: bool) -> None:
    """TKO3, TKO5, TKO7: also after the bridge's own connection was cut."""
    async with bridged(scheme, capabilities=DECLARED if is_declared else None) as it:
        session_id = await it.host.subscribed(*NOTES)
        url = f"ws://{it.server.host}:{it.server.port}/mcp"
        async with websocket(url) as other:
            await other.initialize()
            await other.resume(session_id)
            for _ in range(2):
                assert (await it.host.error("tools/list"))["code"] == -31010
                it.proxy.cut_all()
            await it.change(NOTES[0])
            assert session_of((await other.has_events(1))[0]) == session_id
            assert await it.host.text("session_id", meta=named(session_id)) == session_id
            assert it.host.events == []
        notices = [n["params"] for n in it.host.notifications if n["method"] == DETACHED]
        assert [n["reason"] for n in notices] == ["taken_over"] * is_declared


async def test_what_was_subscribed_outside_of_sessions_is_subscribed_again() -> None:
    """It went with the connection, and nobody kept what was missed."""
    async with bridged("ws", capabilities=DECLARED) as it:
        await it.host.result("resources/subscribe", {"uri": NOTES[0]})
        it.proxy.cut_all()
        updated = "notifications/resources/updated"
        await it.host.notified(updated)
        await it.change(NOTES[0])
        await it.host.until(
            lambda: len([n for n in it.host.notifications if n["method"] == updated]) == 2
        )
        assert it.host.events == []


PROGRAM = '''
from mcp.server import MCPServer
from mcp_sessions import SessionLayer, current_session

mcp = MCPServer("notes")
layer = SessionLayer(mcp, store={store!r})


@mcp.tool()
async def tell(uri: str) -> str:
    """Sends an event of its session."""
    await current_session().notify("notifications/resources/updated", {{"uri": uri}})
    return "told"
'''


@pytest.mark.full
@pytest.mark.timeout(180)
@pytest.mark.parametrize(("scheme", "modern"), WAYS)
async def test_a_server_that_is_killed_and_away_for_four_seconds(
    scheme: str, modern: bool, tmp_path: Path
) -> None:
    """SIGKILL, then the same store: nothing that the host's sessions missed is lost."""
    program = tmp_path / "notes.py"
    program.write_text(PROGRAM.format(store=f"sqlite:///{tmp_path / 'notes.db'}"))
    port = free_port()
    command = [sys.executable, "-m", "mcp_sessions.cli", "serve", "--port", str(port)]

    def start() -> "subprocess.Popen[bytes]":
        process = subprocess.Popen(
            [*command, str(program)], stdin=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        wait_until_it_listens(process, port)
        return process

    server = start()
    try:
        url = f"{scheme}://127.0.0.1:{port}/mcp"
        async with host(url, modern=modern) as peer:
            sessions = [(await peer.start())["sessionId"] for _ in range(3)]
            for session_id in sessions:
                await peer.text("tell", meta=named(session_id), uri="note://before")
            os.kill(server.pid, signal.SIGKILL)
            server.wait(timeout=20)
            with anyio.move_on_after(4):
                # That long it is away, and nothing says so on the pipe.
                await peer.until(lambda: peer.ended, "the end of the pipe", within=60)
            assert not peer.ended
            server = start()
            # From another connection, perhaps before the bridge is back.
            async with websocket(f"ws://127.0.0.1:{port}/mcp", modern=modern) as other:
                await other.initialize()
                for number, session_id in itertools.product(range(3), sessions):
                    uri = f"note://{number}"
                    await peer.text("tell", meta=named(session_id), uri=uri)
            expected = ["note://before", "note://0", "note://1", "note://2"]
            for session_id in sessions:
                await peer.until(lambda s=session_id: len(peer.received(s)) >= 4, "the events")
                assert peer.received(session_id) == expected
                assert peer.ids(session_id) == sorted(set(peer.ids(session_id)))
    finally:
        server.kill()
        server.wait(timeout=20)
