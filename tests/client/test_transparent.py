"""The application and the wrapped server see nothing of the session.

The credential, the sealed state, event ids and request keys stand on the wire and nowhere
else: an application's log or response cache, and a handler's, hold none of them.
"""

import json
import os
import sys
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import fastmcp
import pytest
from mcp import Client, StdioServerParameters
from mcp.server import MCPServer
from mcp.server.mcpserver import Context
from mcp_types import Request, Result

import mcp_sessions.fastmcp
from mcp_sessions.client.sdk import ResumableTransport
from mcp_sessions.client_transport import resumable
from mcp_sessions.ids import digest
from mcp_sessions.layer import SessionLayer
from mcp_sessions.server.requests.handle import current_session
from tests.support.apps import DEPRECATED
from tests.support.board import Board
from tests.support.resuming import MODES, QUICK, subscribe, text_of
from tests.support.scripted import Exchange, ScriptedServer, tool_result
from tests.support.servers import serve

pytestmark = pytest.mark.filterwarnings(DEPRECATED)

OURS = ("io.modelcontextprotocol/session", "io.github.mcp-sessions/requestKey", "sessionEventId")


def looking_server() -> MCPServer[Any]:
    """A server whose tools say what they see of the request they are called by."""
    server = MCPServer[Any]("looking")

    @server.tool()
    async def look(ctx: Context[Any, Any]) -> str:
        session = current_session()
        session.state["calls"] = session.state.get("calls", 0) + 1
        return json.dumps({"id": session.id, "meta": ctx.request_context.meta})

    @server.tool()
    async def change(ctx: Context[Any, Any]) -> str:
        await ctx.notify_resource_updated("note://1")
        await ctx.report_progress(1, 2)
        return "changed"

    @server.resource("note://{n}")
    def note(n: str) -> str:
        return n

    del look, change, note
    return server


class Created(Result):
    session: dict[str, Any]


class Overheard:
    """A transport, and each message that the application is given by it."""

    def __init__(self, transport: ResumableTransport) -> None:
        self.transport = transport
        self.messages: list[Any] = []
        self.board = Board()

    @asynccontextmanager
    async def streams(self) -> AsyncGenerator[Any]:
        """For the SDK's ``Client``."""
        to_app, read = anyio.create_memory_object_stream[Any](0)
        async with (
            self.transport as (given, write),
            to_app,
            read,
            anyio.create_task_group() as tasks,
        ):

            async def pass_on() -> None:
                async for item in given:
                    dumped = item.message.model_dump(by_alias=True, mode="json", exclude_unset=True)
                    self.messages.append(dumped)
                    self.board.announce()
                    try:
                        await to_app.send(item)
                    except anyio.BrokenResourceError:
                        # The application has ended. A message may still be on its way to it.
                        return

            tasks.start_soon(pass_on)
            yield read, write
            tasks.cancel_scope.cancel()

    def named(self, method: str) -> list[Any]:
        return [message for message in self.messages if message.get("method") == method]


@asynccontextmanager
async def transport_to(scheme: str, tmp_path: Path) -> AsyncGenerator[ResumableTransport]:
    """To a looking server, over each binding."""
    if scheme != "stdio":
        layer = SessionLayer(looking_server())
        with serve(layer.asgi_app()) as server:
            yield resumable(server.url(scheme=scheme), policy=QUICK)
        return
    path = tmp_path / "server.py"
    path.write_text(
        "from mcp_sessions import SessionLayer\n"
        "from tests.client.test_transparent import looking_server\n"
        "SessionLayer(looking_server()).run('stdio')\n"
    )
    here = str(Path(__file__).parents[2])
    environment = {"PYTHONPATH": os.pathsep.join(filter(None, [here, *sys.path]))}
    yield resumable(
        StdioServerParameters(command=sys.executable, args=[str(path)], env=environment),
        policy=QUICK,
    )


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("scheme", ["http", "ws", "stdio"])
async def test_neither_the_application_nor_the_handlers_see_the_session_on_the_wire(
    scheme: str, mode: str, tmp_path: Path
) -> None:
    with anyio.fail_after(50):
        async with transport_to(scheme, tmp_path) as transport:
            received = Overheard(transport)
            async with Client(received.streams(), mode=mode) as client:
                seen = [json.loads(text_of(await client.call_tool("look", {}))) for _ in range(2)]
                updates = "notifications/resources/updated"

                async def receive_a_change() -> None:
                    await client.call_tool("change", {}, progress_callback=on_progress)
                    await received.board.until(
                        lambda: bool(received.named(updates)), what="the update"
                    )

                progressed: list[float] = []

                async def on_progress(
                    progress: float, total: float | None, message: str | None
                ) -> None:
                    progressed.append(progress)

                if mode == "legacy":
                    await subscribe(client, "note://1")
                    await receive_a_change()
                else:
                    async with client.listen(resource_subscriptions=["note://1"]):
                        await receive_a_change()

    # It has a session, with a state that the client echoes.
    assert seen[0]["id"] == seen[1]["id"]
    for look in seen:
        assert not any(name in json.dumps(look["meta"]) for name in OURS), look["meta"]
    [update] = received.named(updates)
    # As the SDK's own server sends it.
    assert {name for name in update["params"]} == {"uri"} | ({"_meta"} if mode == "auto" else set())
    assert progressed == [1]
    for message in received.messages:
        message = {**message}
        if "result" in message:
            # What a tool of the test itself says of its session.
            message["result"] = {**message["result"], "content": None, "structuredContent": None}
        written = json.dumps(message)
        assert seen[0]["id"] not in written
        assert not any(name in written for name in OURS), written


async def test_what_the_application_may_want_to_know_is_asked_of_the_transport(
    tmp_path: Path,
) -> None:
    async with transport_to("http", tmp_path) as transport:
        assert transport.session is None
        async with Client(transport, mode="legacy") as client:
            seen = json.loads(text_of(await client.call_tool("look", {})))
            session = transport.session
            assert session is not None
            assert session.session_id == seen["id"]
            assert session.digest == digest(seen["id"])
            assert session.expires_at is not None
            assert session.is_resumable
            before = session.last_event_id
            assert before is not None
            # It may be logged: the credential is not in it.
            assert seen["id"] not in repr(session) and seen["id"] not in str(session)
            await subscribe(client, "note://1")
            await client.call_tool("change", {})
            with anyio.fail_after(10):
                while (at := transport.session) and at.last_event_id == before:
                    await anyio.lowlevel.checkpoint()
        assert transport.session is None


async def test_metadata_of_others_stays_and_what_only_we_made_goes_away() -> None:
    """On results and notifications, whatever else stands next to the session's."""

    def answer(meta: dict[str, Any]) -> Any:
        def entry(exchange: Exchange) -> None:
            exchange.result({**tool_result("fine"), "_meta": meta})

        return entry

    named = {OURS[0]: {"sessionId": "s-1", "expiresAt": "2031-01-01T00:00:00Z", "state": "sealed"}}
    both: list[Any] = []
    async with ScriptedServer() as server:
        transport = resumable(server.url(), policy=QUICK)
        with anyio.fail_after(30):
            async with Client(transport, mode="legacy") as client:
                for meta in (named, {**named, "theirs": {"a": 1}}, {"theirs": 2}):
                    server.script["tools/call"] = answer(meta)
                    both.append((await client.call_tool("echo", {})).meta)
                session = transport.session

    assert both == [None, {"theirs": {"a": 1}}, {"theirs": 2}]
    assert session is not None and session.expires_at == "2031-01-01T00:00:00Z"


async def test_an_application_that_names_a_session_of_its_own_sees_what_is_said_of_it() -> None:
    """It asked for that: nothing of it is ours."""
    layer = SessionLayer(looking_server())
    with serve(layer.asgi_app()) as server, anyio.fail_after(30):
        received = Overheard(resumable(server.url(), policy=QUICK))
        async with Client(received.streams(), mode="legacy") as client:
            await client.call_tool("look", {})
            created = await client.session.send_request(
                Request[Any, str](method="sessions/create", params=None), Created
            )
            named: Any = {OURS[0]: {"sessionId": created.session["sessionId"]}}
            looked = await client.call_tool("look", {}, meta=named)
            unnamed = await client.call_tool("look", {})

    assert json.loads(text_of(looked))["id"] == created.session["sessionId"]
    assert looked.meta is not None and looked.meta[OURS[0]]["state"]
    assert unnamed.meta is None


async def test_fastmcps_transport_says_the_same(tmp_path: Path) -> None:
    layer = SessionLayer(looking_server())
    with serve(layer.asgi_app()) as server, anyio.fail_after(30):
        transport = mcp_sessions.fastmcp.resumable(server.url(), policy=QUICK)
        async with fastmcp.Client(transport) as client:
            result = await client.call_tool("look")
            assert result.structured_content is not None
            assert transport.session is not None
            assert (
                transport.session.session_id
                == json.loads(result.structured_content["result"])["id"]
            )
            assert OURS[0] not in (result.meta or {})
