"""`mcp_sessions.testing.connect`: a client in memory goes the way that every client goes."""

import asyncio
from typing import Any, cast

import pytest
from mcp import Client, MCPError
from mcp.server import MCPServer
from mcp.server.mcpserver import Context
from mcp_types import ElicitResult
from pydantic import BaseModel

from mcp_sessions import ConfigurationError, SessionLayer, current_session
from mcp_sessions.testing import connect
from tests.support.apps import DEPRECATED

pytestmark = pytest.mark.filterwarnings(DEPRECATED)

ERAS = ["auto", "legacy"]


class Name(BaseModel):
    name: str


def server(started: asyncio.Event | None = None) -> MCPServer[Any]:
    """One whose tools use their session.

    Args:
        started: Set when ``wait`` begins.
    """
    mcp: MCPServer[Any] = MCPServer("basket", log_level="ERROR")

    @mcp.tool()
    async def put(item: str) -> int:  # pyright: ignore[reportUnusedFunction]
        session = current_session()
        async with session.data.edit() as data:
            data.setdefault("items", []).append(item)
        session.state["count"] = session.state.get("count", 0) + 1
        return session.state["count"]

    @mcp.tool()
    async def has_session() -> bool:  # pyright: ignore[reportUnusedFunction]
        return current_session(default=None) is not None

    @mcp.tool()
    async def greet(ctx: Context[Any, Any]) -> str:  # pyright: ignore[reportUnusedFunction]
        answer = await ctx.elicit("Who are you?", Name)
        return f"hello {answer.data.name}" if answer.action == "accept" else "hello"

    @mcp.tool()
    async def wait() -> None:  # pyright: ignore[reportUnusedFunction]
        if started is not None:
            started.set()
        await asyncio.Event().wait()

    @mcp.resource("note://{name}")
    def note(name: str) -> str:  # pyright: ignore[reportUnusedFunction]
        return name

    return mcp


async def result(client: Client, tool: str, **arguments: Any) -> Any:
    answer = await client.call_tool(tool, arguments)
    assert not answer.is_error, answer.content
    assert answer.structured_content is not None
    return answer.structured_content["result"]


@pytest.mark.parametrize("mode", ERAS)
async def test_a_client_has_a_session_from_its_first_call_to_its_end(mode: str) -> None:
    async with connect(server(), mode=mode) as client:
        assert [await result(client, "put", item=item) for item in ("tea", "milk")] == [1, 2]


@pytest.mark.parametrize("mode", ERAS)
async def test_clients_of_one_layer_have_a_session_each_and_both_end_with_them(mode: str) -> None:
    layer = SessionLayer(server())
    async with layer.lifespan():
        async with connect(layer, mode=mode) as one, connect(layer, mode=mode) as another:
            assert await result(one, "put", item="tea") == 1
            assert await result(another, "put", item="tea") == 1
            assert await result(one, "put", item="tea") == 2
            assert len(await layer.sessions.list()) == 2
        assert await layer.sessions.list() == []


@pytest.mark.parametrize("session", [True, False])
async def test_a_gate_opens_for_a_client_with_a_session_alone(session: bool) -> None:
    layer = SessionLayer(server())
    layer.require_session(tools={"has_session"})
    async with connect(layer, session=session) as client:
        if session:
            assert await result(client, "has_session")
        else:
            with pytest.raises(MCPError) as refused:
                await client.call_tool("has_session", {})
            assert refused.value.code == -31044


async def test_a_client_of_the_modern_era_that_asks_for_none_has_its_connections() -> None:
    async with connect(server(), session=False, mode="2026-07-28") as client:
        assert await result(client, "has_session")


@pytest.mark.parametrize("session", [True, False])
async def test_a_tool_asks_the_client(session: bool) -> None:
    """With a session and without: the callbacks are the SDK's."""

    async def answers(_: Any, __: Any) -> ElicitResult:
        return ElicitResult(action="accept", content={"name": "Ada"})

    async with connect(
        server(), session=session, mode="legacy", elicitation_callback=answers
    ) as client:
        assert await result(client, "greet") == "hello Ada"


async def test_a_change_reaches_who_subscribed() -> None:
    received: asyncio.Queue[Any] = asyncio.Queue()

    async def handler(message: Any) -> None:
        received.put_nowait(message)

    layer = SessionLayer(server())
    async with connect(layer, mode="legacy", message_handler=handler) as client:
        await client.session.subscribe_resource("note://tea")  # pyright: ignore[reportDeprecated]
        await layer.notify_resource_updated("note://tea")
        async with asyncio.timeout(10):
            message = await received.get()
        assert str(message.params.uri) == "note://tea"


@pytest.mark.parametrize("session", [True, False])
async def test_a_call_that_runs_when_the_server_goes_is_answered_with_an_error(
    session: bool,
) -> None:
    started = asyncio.Event()
    layer = SessionLayer(server(started))
    async with connect(layer, session=session) as client:
        calling = asyncio.create_task(client.call_tool("wait", {}))
        async with asyncio.timeout(10):
            await started.wait()
            await layer.drain(grace=0)
            with pytest.raises(MCPError) as lost:
                await calling
        assert lost.value.code in (-31012, -32000)


async def test_what_a_test_raises_comes_out_as_it_is() -> None:
    """Not within a group, which an assertion's message would be lost in."""
    with pytest.raises(AssertionError, match="^what the test says$"):
        async with connect(server()):
            raise AssertionError("what the test says")


async def test_a_layer_that_ran_is_refused() -> None:
    layer = SessionLayer(server())
    async with connect(layer) as client:
        assert await result(client, "has_session")
    with pytest.raises(ConfigurationError, match="once|again|already"):
        async with connect(layer):
            pass


async def test_what_is_no_server_is_refused() -> None:
    with pytest.raises(ConfigurationError):
        async with connect(cast("Any", object())):
            pass
