"""FastMCP's session state: kept with the layer's sessions; where it would be lost, that is said at
the start.
"""

import asyncio
from collections.abc import Generator
from pathlib import Path
from typing import Any, cast

import pytest
from fastmcp import Context, FastMCP
from key_value.aio.protocols import AsyncKeyValue
from key_value.aio.stores.memory import MemoryStore
from mcp.server import MCPServer

from mcp_sessions import Conversations, SessionLayer, SessionSecurity
from mcp_sessions.fastmcp import session_state
from mcp_sessions.security import mint_key
from mcp_sessions.server.requests.handle import current_session
from tests.support.modern import ModernClient
from tests.support.raw import RawClient
from tests.support.replicas import cluster
from tests.support.world import Toolbox, world


class Shared(MemoryStore):
    """Stands for a store that all replicas share."""


@pytest.fixture(autouse=True)
def keys(monkeypatch: pytest.MonkeyPatch) -> Generator[None]:
    monkeypatch.setenv("MCP_SESSIONS_KEYS", mint_key())
    yield


async def warned(server: Any, store: str, caplog: pytest.LogCaptureFixture) -> list[str]:
    caplog.clear()
    layer = SessionLayer(server, store=store)
    async with layer.lifespan():
        pass
    return [each.getMessage() for each in caplog.records if each.levelname == "WARNING"]


async def test_state_in_memory_in_addition_to_sessions_that_last_is_warned_of(
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

    assert (
        await warned(FastMCP("notes", session_state_store=session_state()), lasting, caplog) == []
    )
    assert await warned(FastMCP("notes"), "memory://", caplog) == []
    assert await warned(shared, lasting, caplog) == []
    assert await warned(MCPServer("notes"), lasting, caplog) == []


# --- kept in the layer's sessions ---------------------------------------------------------

ONE, TWO = {"openai/session": "one"}, {"openai/session": "two"}


def counting(fallback: AsyncKeyValue | None = None) -> FastMCP[Any]:
    """A server that counts with ``ctx.set_state``, under the name that it is given."""
    server: FastMCP[Any] = FastMCP("notes", session_state_store=session_state(fallback))

    @server.tool
    async def count(ctx: Context, name: str = "n") -> str:
        counted = (await ctx.get_state(name) or 0) + 1
        await ctx.set_state(name, counted)
        return str(counted)

    @server.tool
    async def forget(ctx: Context) -> str:
        await ctx.delete_state("n")
        await ctx.delete_state("n")
        return str(await ctx.get_state("n"))

    @server.tool
    async def kept() -> str:
        session = current_session()
        return f"{session.source} {sorted((await session.data.read()).get('fastmcp', {}))}"

    @server.tool
    async def secret() -> str:
        return "seen"

    @server.tool
    async def hide(ctx: Context) -> str:
        await ctx.disable_components(names={"secret"})
        return "hidden"

    del count, forget, kept, secret, hide
    return server


async def test_a_conversation_has_fastmcps_state_on_every_connection_in_both_eras() -> None:
    async with world(server=counting(), conversations=Conversations()) as w:
        said: list[str] = []
        for _ in range(2):
            said.append(await ModernClient(w.carrier).text("count", meta=ONE))
            said.append(await (await w.connected()).text("count", meta=ONE))
        assert said == ["1", "2", "3", "4"]
        assert await ModernClient(w.carrier).text("count", meta=TWO) == "1"
        assert await ModernClient(w.carrier).text("kept", meta=ONE) == "conversation ['n']"
        assert await ModernClient(w.carrier).text("forget", meta=ONE) == "None"
        assert await ModernClient(w.carrier).text("count", meta=ONE) == "1"


async def test_a_connection_and_a_session_that_its_client_started_have_each_their_own() -> None:
    async with world(server=counting()) as w:
        client, other = await w.connected(), await w.connected()
        assert [await each.text("count") for each in (client, client, other)] == ["1", "2", "1"]
        started = (await client.start())["sessionId"]
        assert await client.text("count") == "1"
        modern = ModernClient(w.carrier)
        assert await modern.text("count", session=started) == "2"
        assert await modern.text("kept", session=started) == "session ['n']"


async def test_it_is_the_same_at_every_replica_and_no_change_at_once_is_lost() -> None:
    def server() -> tuple[Toolbox, object]:
        return Toolbox(), counting()

    security = SessionSecurity([mint_key()])
    names = [f"name {number}" for number in range(12)]
    async with cluster(3, server=server, security=security, conversations=Conversations()) as c:
        clients = [ModernClient(w.carrier) for w in c.worlds]
        said = [await client.text("count", meta=ONE) for client in clients]
        assert said == ["1", "2", "3"]
        await asyncio.gather(
            *(
                clients[number % 3].text("count", {"name": name}, meta=ONE)
                for number, name in enumerate(names)
            )
        )
        kept = await clients[0].text("kept", meta=ONE)
        assert kept == f"conversation {sorted(['n', *names])}"


async def test_what_a_session_is_shown_is_kept_with_it() -> None:
    """FastMCP's own visibility, of a connection; another one sees what there is."""
    async with world(server=counting()) as w:
        client, other = await w.connected(), await w.connected()
        assert await client.text("hide") == "hidden"
        assert "secret" not in await names_of(client)
        assert "secret" in await names_of(other)
        assert await client.text("kept") == "connection ['_visibility_rules']"


async def names_of(client: RawClient) -> list[str]:
    return [tool["name"] for tool in (await client.result("tools/list"))["tools"]]


async def test_what_is_of_no_session_is_kept_apart() -> None:
    """A request that has none; and what FastMCP keeps under an id of its own."""
    fallback = MemoryStore()
    server = counting(cast("AsyncKeyValue", fallback))
    async with world(server=server) as w:
        said = [await ModernClient(w.carrier).text("count") for _ in range(2)]
        assert said == ["1", "1"]
        keys = await fallback.keys(collection="fastmcp_state")
        assert len(keys) == 2 and all(key.endswith(":n") for key in keys)
        store = server._state_store  # pyright: ignore[reportPrivateUsage]
        from fastmcp.server.server import StateValue

        await store.put(key="user:ann", value=StateValue(value=1), ttl=60)
        found, left = await store.ttl(key="user:ann")
        assert found is not None and found.value == 1 and left is not None
        assert await store.delete(key="user:ann")


async def test_a_tool_that_some_sessions_see_takes_their_handle() -> None:
    """By FastMCP's own visibility, which it has for sessions of the 2025 era and keeps with them
    here: what is disabled when the layer starts, and in no list that goes by.
    """
    server: FastMCP[Any] = FastMCP("shop", session_state_store=session_state())

    @server.tool
    async def begin(ctx: Context) -> str:
        await ctx.enable_components(names={"pay"})
        return "begun"

    @server.tool
    async def pay() -> str:
        return current_session().source

    server.disable(names={"pay"})
    conversations = Conversations(handle={"begin", "pay"})
    async with world(server=server, conversations=conversations) as w:

        async def call(tool: str, **arguments: Any) -> Any:
            client = await w.connected()
            return await client.call(tool, **arguments).result()

        first, other = await call("begin"), await call("begin")
        handle = first["structuredContent"]["session"]
        assert handle != other["structuredContent"]["session"]
        listed = await (await w.connected()).result("tools/list")
        assert [tool["name"] for tool in listed["tools"]] == ["begin"]
        assert (await call("pay", session=handle))["content"][0]["text"] == "conversation"
