"""What code that may log it sees of a session's id."""

import hashlib
from typing import Any

import pytest
from fastmcp import Context as FastContext
from fastmcp import FastMCP
from mcp.server import MCPServer
from mcp.server.mcpserver import Context

from mcp_sessions.ids import digest
from tests.support.modern import ModernClient
from tests.support.raw import in_session
from tests.support.world import Ctx, World, world


def server(kind: str) -> Any:
    """One whose tool ``own`` says ``ctx.session_id``, with all else that its context says of it."""
    if kind == "fastmcp":
        fast = FastMCP("own")

        @fast.tool()
        async def own(ctx: FastContext) -> str:
            return ctx.session_id

        return fast
    mcp = MCPServer("own")

    @mcp.tool(name="own")
    async def own_of_sdk(ctx: Context) -> str:
        return str(ctx.request_context.session._connection.session_id)  # pyright: ignore[reportPrivateUsage]

    return mcp


@pytest.mark.parametrize("kind", ["mcp", "fastmcp"])
async def test_the_id_in_the_context_opens_nothing(kind: str) -> None:
    """Of a connection, and of a session that a client started, in each era: the SHA-256 of the
    credential, the same each time, as the session's name in the log begins.
    """
    async with world(server=server(kind)) as w:
        client = await w.connected()
        of_connection = await client.text("own")
        of_transport = [each.id for each in await w.layer.sessions.list()]
        assert of_connection in {sha256(each) for each in of_transport}
        assert await client.text("own") == of_connection

        started = (await client.start())["sessionId"]
        named = in_session(started)
        said = [await client.text("own"), await client.text("own", meta=named)]
        said.append(await (await w.connected()).text("own", meta=named))
        modern = ModernClient(w.carrier)
        said += [await modern.text("own", meta=named)]
        said += [await modern.text("own", meta=named, headers={"Mcp-Session-Id": started})]
        assert set(said) == {sha256(started)}
        assert said[0].startswith(digest(started))

        resumed = await client.call("own", meta=in_session(said[0])).error()
        assert resumed["code"] == -32043


def sha256(credential: str) -> str:
    return hashlib.sha256(credential.encode()).hexdigest()


async def test_a_lowlevel_servers_context_says_the_same(w: World) -> None:
    async def own(ctx: Ctx, arguments: Any) -> str:
        return str(ctx.session._connection.session_id)  # pyright: ignore[reportPrivateUsage]

    w.box.tools["own"] = own
    modern = ModernClient(w.carrier)
    started = (await modern.start())["sessionId"]
    assert await modern.text("own", meta=in_session(started)) == sha256(started)
    assert await modern.text("own") == "None"
