"""Pipes and WebSockets whose clients start no session."""

from typing import cast

import pytest

from mcp_sessions import Conversations, current_session
from mcp_sessions.stores.contract import SessionStore
from tests.support.duplex import duplex_world
from tests.support.modern import ModernClient, envelope
from tests.support.raw import SESSION, Json, call_params
from tests.support.replicas import Backplane
from tests.support.world import Ctx, count


@pytest.mark.parametrize("kind", ["websocket", "stdio"])
async def test_a_pipe_and_a_websocket_remember_as_long_as_they_are_there(kind: str) -> None:
    """And ask no store for it, so that one that is away is not in their way."""
    backplane = Backplane()
    async with duplex_world(store=cast("SessionStore", backplane.store())) as w:
        w.inner.box.tools["count"] = count
        client, other = await w.connected(kind), await w.connected(kind)
        backplane.is_away = True

        said = [await client.text("count"), await client.text("count"), await other.text("count")]
        assert said == ["connection 1 1", "connection 2 2", "connection 1 1"]
        await client.text("tell", method="notifications/x", params={"a": 1})
        assert client.notifications == [
            {"jsonrpc": "2.0", "method": "notifications/x", "params": {"a": 1}}
        ]
        backplane.is_away = False
        assert await w.layer.sessions.list() == []


async def test_a_conversation_is_the_same_on_every_transport() -> None:
    """A pipe's and a WebSocket's messages say it in ``_meta``; a WebSocket's handshake in a header,
    and then for all of them.
    """
    async with duplex_world(conversations=Conversations()) as w:
        w.inner.box.tools["count"] = count
        pipe, socket = await w.connected("stdio"), await w.connected()
        other = await w.connected(headers={"agent-session-id": "one"})
        lone = ModernClient(w.inner.carrier)
        meta = {"agent-session-id": "one"}

        said = [
            await pipe.text("count", meta=meta),
            await socket.text("count", meta=meta),
            await other.text("count"),
            await lone.text("count", meta=meta),
            await other.text("count", meta={"threadId": "two"}),
            await pipe.text("count"),
        ]
        one, first = "conversation", "1 1"
        assert said == [
            *(f"{one} {n} {n}" for n in (1, 2, 3, 4)),
            f"{one} {first}",
            f"connection {first}",
        ]


async def test_a_modern_client_on_a_pipe_or_a_websocket_has_its_conversations() -> None:
    async with duplex_world(conversations=Conversations()) as w:
        w.inner.box.tools["count"] = count
        meta = envelope({"openai/session": "one"})
        opened = [await w.pipe(modern=True), await w.websocket(modern=True)]
        said = [await peer.text("count", meta=meta) for peer in (*opened, *opened)]
        assert said == [f"conversation {n} {n}" for n in (1, 2, 3, 4)]


@pytest.mark.parametrize("modern", [False, True])
async def test_a_handle_is_the_same_on_every_transport(modern: bool) -> None:
    """Started on a pipe, passed on a WebSocket and over HTTP; it is no connection's."""
    async with duplex_world(conversations=Conversations(handle={"count"})) as w:
        w.inner.box.tools["count"] = count
        pipe, socket = await w.pipe(modern=True), await w.websocket(modern=True)
        if not modern:
            pipe, socket = await w.connected("stdio"), await w.connected()
        meta = envelope() if modern else None

        first = await pipe.result("tools/call", call_params("count", {}), meta=meta)
        handle = first["structuredContent"]["session"]
        said = [
            await peer.text("count", session=handle, meta=meta) for peer in (pipe, socket, pipe)
        ]
        said.append(await ModernClient(w.inner.carrier).text("count", {"session": handle}))
        assert said == [f"conversation {n} {n}" for n in (2, 3, 4, 5)]


@pytest.mark.parametrize("kind", ["websocket", "stdio"])
async def test_a_connection_that_started_no_session_sees_what_was_revealed_to_it(
    kind: str,
) -> None:
    """It learns that its lists changed, and no more of what it was subscribed to and is hidden now;
    the one next to it sees and receives what it did before.
    """

    async def sight(ctx: Ctx, arguments: Json) -> str:
        await current_session().reveal(tools=["echo"])
        await current_session().hide(resources=["info://*"])
        return current_session().source

    async with duplex_world(hidden={"echo"}) as w:
        w.inner.box.tools["sight"] = sight
        peer, other = await w.connected(kind), await w.connected(kind)
        for each in (peer, other):
            await each.result("resources/subscribe", {"uri": "info://hours"})
        assert await peer.text("sight") == "connection"
        assert await peer.text("echo", text="shown") == "shown"
        await other.error("tools/call", call_params("echo", {"text": "a"}))
        await w.layer.notify_resource_updated("info://hours")
        await w.layer.notify_prompts_changed()
        received: list[list[str]] = []
        for each in (peer, other):
            await each.until(
                lambda each=each: "prompts" in str(each.notifications[-1:]), "all that is told"
            )
            methods = [notified["method"] for notified in each.notifications]
            received.append([method.removeprefix("notifications/") for method in methods])
        assert received == [
            ["tools/list_changed", "resources/list_changed", "prompts/list_changed"],
            ["resources/updated", "prompts/list_changed"],
        ]


@pytest.mark.parametrize("kind", ["websocket", "stdio"])
async def test_a_modern_client_that_names_no_session_has_its_connections(kind: str) -> None:
    """As with a handshake. Nothing is sent to it that it did not ask for."""
    async with duplex_world() as w:
        w.inner.box.tools["count"] = count
        one, other = await w.connected(kind, modern=True), await w.connected(kind, modern=True)
        said = [await one.text("count"), await one.text("count"), await other.text("count")]
        assert said == ["connection 1 1", "connection 2 2", "connection 1 1"]
        await one.text("tell", method="notifications/x", params={"a": 1})
        assert one.notifications == []
        session = (await one.start())["sessionId"]
        meta: Json = {SESSION: {"sessionId": session}}
        assert await one.text("count", meta=meta) == "session 1 1"
        asked = await one.send("tools/call", call_params("count", {}), meta={SESSION: None})
        assert "error" in await one.answer(asked)
        assert await one.text("count") == "connection 3 3"


@pytest.mark.parametrize("modern", [False, True])
async def test_the_environment_names_the_conversation_of_the_client_at_standard_input_alone(
    modern: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The host that started the process wrote it there. A name in a message says more."""
    monkeypatch.setenv("HOSTS_SESSION_ID", "one")
    settings = Conversations(env=("NOT_SET", "HOSTS_SESSION_ID"))
    async with duplex_world(conversations=settings) as w:
        w.inner.box.tools["count"] = count
        said: list[str] = []
        for kind in ("stdio", "websocket", "stdio"):
            peer = await w.connected(kind, modern=modern)
            said.append(await peer.text("count"))
        said.append(await peer.text("count", meta={"threadId": "two"}))
        assert said == [
            "conversation 1 1",
            "connection 1 1",
            "conversation 2 2",
            "conversation 1 1",
        ]
