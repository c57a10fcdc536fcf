"""One server that asks its client in each way, as an ``MCPServer``, with FastMCP, and as a command.

``python -m tests.support.asking`` is the command; ``mcp-sessions serve tests/support/asking.py``
serves the ``MCPServer``. With ``RUNS`` in its environment each call that
begins stands in that file, a line each.

=========  =======================================================
``rounds`` is written for several rounds (``MCPServer`` only)
``either`` asks by a result, in the middle of the call, or not at all (``MCPServer`` only)
``ask``    elicits ``{"answer": string}`` by a form
``sample`` asks the client's model
``roots``  asks for the client's roots
``visit``  elicits by a URL
``both``   asks two questions at once
=========  =======================================================
"""

import asyncio
import os
from typing import Any, cast

import mcp_types as types
from mcp.server.mcpserver import Context, MCPServer
from mcp.server.session import ServerSession
from pydantic import BaseModel

TOOLS = ("ask", "sample", "roots", "visit", "both")

SCHEMA: Any = {"type": "object", "properties": {"answer": {"type": "string"}}}


class Answer(BaseModel):
    """The answer to a question."""

    answer: str


def ran(call: str) -> None:
    """Written and there, whatever happens to this process next."""
    path = os.environ.get("RUNS")
    if path is not None:
        with open(path, "a") as runs:
            runs.write(call + "\n")


def said(result: Any) -> str:
    """What the user did, and the answer."""
    data = getattr(result, "data", None)
    return f"{result.action}: {data.answer}" if data is not None else str(result.action)


async def sampled(session: ServerSession) -> str:
    asked = types.SamplingMessage(role="user", content=types.TextContent(text="hello"))
    result = await session.create_message([asked], max_tokens=5)  # pyright: ignore[reportDeprecated]
    return cast(types.TextContent, result.content).text


async def first_root(session: ServerSession) -> str:
    result = await session.list_roots()  # pyright: ignore[reportDeprecated]
    return str(result.roots[0].uri)


def mcp_server() -> MCPServer[Any]:
    mcp = MCPServer[Any]("asking")

    @mcp.tool()
    async def ask(ctx: Context[Any], question: str = "how many?") -> str:
        ran(question)
        return said(await ctx.elicit(question, Answer))

    @mcp.tool()
    async def sample(ctx: Context[Any]) -> str:
        return await sampled(ctx.session)

    @mcp.tool()
    async def roots(ctx: Context[Any]) -> str:
        return await first_root(ctx.session)

    @mcp.tool()
    async def visit(ctx: Context[Any]) -> str:
        return said(await ctx.elicit_url("sign in", "https://example.com/", "one"))

    @mcp.tool()
    async def both(ctx: Context[Any]) -> str:
        asked = [ctx.elicit(question, Answer) for question in ("one?", "two?")]
        return " and ".join(map(said, await asyncio.gather(*asked)))

    @mcp.tool()
    async def rounds(ctx: Context[Any]) -> str | types.InputRequiredResult:
        ran("rounds")
        if ctx.request_state is None:
            form = types.ElicitRequestFormParams(message="?", requested_schema=SCHEMA)
            asked: Any = {"mine": types.ElicitRequest(params=form)}
            return types.InputRequiredResult(input_requests=asked, request_state="own")
        return f"{ctx.request_state}: {[*(ctx.input_responses or {})]}"

    @mcp.tool()
    async def either(ctx: Context[Any], how: str) -> str | types.InputRequiredResult:
        ran(f"either {how}")
        if how == "by its result":
            form = types.ElicitRequestFormParams(message="?", requested_schema=SCHEMA)
            asked: Any = {"mine": types.ElicitRequest(params=form)}
            return types.InputRequiredResult(input_requests=asked, request_state="own")
        return said(await ctx.elicit("?", Answer)) if how == "in the call" else "nothing asked"

    _ = ask, sample, roots, visit, both, rounds, either
    return mcp


def fastmcp_server() -> Any:
    # Here: the command starts sooner without it.
    from fastmcp import Context as FastMCPContext
    from fastmcp import FastMCP

    from mcp_sessions.fastmcp import elicit

    mcp = FastMCP[Any]("asking")

    @mcp.tool
    async def ask(ctx: FastMCPContext, question: str = "how many?") -> str:
        ran(question)
        return said(await elicit(ctx, question, Answer))

    @mcp.tool
    async def sample(ctx: FastMCPContext) -> str:
        return await sampled(ctx.session)

    @mcp.tool
    async def roots(ctx: FastMCPContext) -> str:
        return await first_root(ctx.session)

    @mcp.tool
    async def visit(ctx: FastMCPContext) -> str:
        return said(await ctx.session.elicit_url("sign in", "https://example.com/", "one"))

    @mcp.tool
    async def both(ctx: FastMCPContext) -> str:
        asked = [elicit(ctx, question, Answer) for question in ("one?", "two?")]
        return " and ".join(map(said, await asyncio.gather(*asked)))

    _ = ask, sample, roots, visit, both
    return mcp


mcp = mcp_server()

if __name__ == "__main__":
    mcp.run("stdio")
