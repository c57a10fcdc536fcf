"""A tool of FastMCP asks clients of both eras."""

import asyncio
from dataclasses import dataclass
from typing import Any, cast

import mcp_types as types
import pytest
from fastmcp import Context, FastMCP
from mcp.client import Client

from mcp_sessions import SessionLayer
from mcp_sessions.fastmcp import elicit
from tests.server.upstream.test_rounds import answers, text_by
from tests.support.duplex import listening
from tests.support.modern import ModernClient
from tests.support.world import world

pytestmark = [
    pytest.mark.anyio,
    pytest.mark.filterwarnings("ignore::mcp.shared.exceptions.MCPDeprecationWarning"),
]


@dataclass
class Answer:
    """The answer to a question."""

    answer: str


def asking_server() -> FastMCP[Any]:
    """Serve one tool for each way to ask."""
    mcp = FastMCP[Any]("asking")

    @mcp.tool
    async def ask(ctx: Context) -> str:
        result = await elicit(ctx, "how many?", Answer)
        return f"{result.action} {getattr(result, 'data', None)}"

    @mcp.tool
    async def sample(ctx: Context) -> str:
        said = types.SamplingMessage(role="user", content=types.TextContent(text="hello"))
        result = await ctx.session.create_message([said], max_tokens=5)  # pyright: ignore[reportDeprecated]
        return cast(types.TextContent, result.content).text

    @mcp.tool
    async def roots(ctx: Context) -> str:
        result = await ctx.session.list_roots()  # pyright: ignore[reportDeprecated]
        return str(result.roots[0].uri)

    _ = ask, sample, roots
    return mcp


@pytest.mark.parametrize("mode", ["2026-07-28", "legacy"])
async def test_a_stock_client_of_each_era_answers_what_a_tool_asks(mode: str) -> None:
    layer = SessionLayer(asking_server())
    app = layer.asgi_app()
    async with layer.lifespan(), listening(app) as port, asyncio.timeout(20):
        url = f"http://127.0.0.1:{port}/mcp"
        async with Client(url, mode=cast(Any, mode), **answers()) as client:
            said = [await text_by(client, tool) for tool in ("ask", "sample", "roots")]
    assert said == ["accept Answer(answer='how many?')", "you said hello", "file:///here"]


@pytest.mark.parametrize("limit", [0, 900])
async def test_a_client_that_cannot_be_asked_gets_fastmcps_error(limit: float) -> None:
    declared: Any = {"elicitation": {}} if limit == 0 else {}
    async with world(server=asking_server(), question_timeout=limit) as w:
        client = ModernClient(w.carrier, capabilities=declared)
        result = await client.call("ask").result()
    assert result["isError"] and "unavailable on 2026-07-28" in result["content"][0]["text"]
