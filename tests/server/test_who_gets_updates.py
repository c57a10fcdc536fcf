"""Who learns that a resource changed: each way in which a handler can say so (docs/server.md)."""

from typing import Any

import pytest
from fastmcp import Context as FastContext
from fastmcp import FastMCP
from mcp.server import MCPServer
from mcp.server.mcpserver import Context
from mcp.types import ResourceUpdatedNotification, ResourceUpdatedNotificationParams

from tests.support.modern import ModernClient
from tests.support.world import World, world

URI = "info://hours"


def sdk() -> Any:
    mcp = MCPServer("updates")

    @mcp.tool()
    async def standalone(ctx: Context) -> str:
        await ctx.session.send_resource_updated(URI)
        return "told"

    @mcp.tool()
    async def everybody(ctx: Context) -> str:
        await ctx.notify_resource_updated(URI)
        return "told"

    return mcp


def fastmcp() -> Any:
    mcp = FastMCP("updates")

    @mcp.tool()
    async def standalone(ctx: FastContext) -> str:
        params = ResourceUpdatedNotificationParams(uri=URI)
        await ctx.send_notification(ResourceUpdatedNotification(params=params))
        return "told"

    return mcp


async def subscribed(w: World, era: str) -> tuple[Any, Any]:
    """A client whose session subscribed, and that session."""
    if era == "modern":
        client = ModernClient(w.carrier)
        session = (await client.start())["sessionId"]
        await client.listening(session, URI)
        return client, session
    plain = await w.connected()
    session = (await plain.start())["sessionId"]
    await plain.result("resources/subscribe", {"uri": URI})
    return plain, session


@pytest.mark.parametrize("era", ["handshake", "modern"])
@pytest.mark.parametrize(
    ("make", "way", "other_receives"),
    [(sdk, "standalone", 0), (sdk, "everybody", 1), (fastmcp, "standalone", 0)],
)
async def test_what_a_handler_sends_its_own_client_reaches_no_other_subscriber(
    make: Any, way: str, other_receives: int, era: str
) -> None:
    """And ``layer.notify_resource_updated`` reaches all of them, whatever the server is."""
    async with world(server=make()) as w:
        caller, _ = await subscribed(w, era)
        _, session = await subscribed(w, era)
        before = await w.layer.store.head(session)
        assert before is not None
        sent = caller.call(way, {}) if era == "modern" else caller.call(way)
        assert (await sent.result())["content"][0]["text"] == "told"
        await w.layer.notify_resource_updated("info://other")
        after = await w.layer.store.head(session)
        assert after is not None and after.number - before.number == other_receives
        await w.layer.notify_resource_updated(URI)
        last = await w.layer.store.head(session)
        # A second update replaces the first: the head moves all the same.
        assert last is not None and last.number - after.number == 1
