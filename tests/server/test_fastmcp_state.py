"""FastMCP's session state is FastMCP's: where it would be lost, that is said at the start."""

from collections.abc import Generator
from pathlib import Path
from typing import cast

import pytest
from fastmcp import FastMCP
from key_value.aio.protocols import AsyncKeyValue
from key_value.aio.stores.memory import MemoryStore
from mcp.server import MCPServer

from mcp_sessions import SessionLayer
from mcp_sessions.security import mint_key

pytestmark = pytest.mark.anyio


class Shared(MemoryStore):
    """Stands for a store that all replicas share."""


@pytest.fixture(autouse=True)
def keys(monkeypatch: pytest.MonkeyPatch) -> Generator[None]:
    """Of which another warning is."""
    monkeypatch.setenv("MCP_SESSIONS_KEYS", mint_key())
    yield


async def warned(server: object, store: str, caplog: pytest.LogCaptureFixture) -> list[str]:
    """What is warned of at the start."""
    caplog.clear()
    layer = SessionLayer(server, store=store)
    async with layer.lifespan():
        pass
    return [each.getMessage() for each in caplog.records if each.levelname == "WARNING"]


async def test_state_in_memory_beside_sessions_that_last_is_warned_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Once, with what to write; else it splits between replicas, and is gone, in silence."""
    lasting = f"sqlite:///{tmp_path}/sessions.db"

    [said] = await warned(FastMCP("notes"), lasting, caplog)
    assert "session_state_store=" in said and "ctx.set_state" in said
    own = FastMCP("notes", session_state_store=cast("AsyncKeyValue", MemoryStore()))
    assert await warned(own, lasting, caplog) == [said]


async def test_where_nothing_is_lost_nothing_is_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    lasting = f"sqlite:///{tmp_path}/sessions.db"
    shared = FastMCP("notes", session_state_store=cast("AsyncKeyValue", Shared()))

    assert await warned(FastMCP("notes"), "memory://", caplog) == []
    assert await warned(shared, lasting, caplog) == []
    assert await warned(MCPServer("notes"), lasting, caplog) == []
