"""A pipe, or a WebSocket, whose client started no session."""

from typing import cast

import pytest

from mcp_sessions import current_session
from mcp_sessions.stores.contract import SessionStore
from tests.support.duplex import duplex_world
from tests.support.raw import Json
from tests.support.replicas import Backplane
from tests.support.world import Ctx

pytestmark = pytest.mark.anyio


async def count(ctx: Ctx, arguments: Json) -> str:
    """A tool that counts in ``state`` and in ``data``."""
    session = current_session()
    session.state["n"] = session.state.get("n", 0) + 1
    async with session.data.edit() as data:
        data["n"] = data.get("n", 0) + 1
    return f"{session.source} {session.state['n']} {data['n']}"


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
