"""A server for processes that are killed: ``mcp-sessions serve tests/support/restart_app.py``.

What its tools did stands in the file that ``RUNS`` names, a line each.
"""

import os
from typing import Any

import anyio
from mcp.server import MCPServer
from mcp.server.mcpserver import Context

from mcp_sessions import current_session

mcp = MCPServer[Any]("restarted", version="1.0")


def ran(what: str) -> None:
    """Written and there, whatever happens to this process next."""
    with open(os.environ["RUNS"], "a") as runs:
        runs.write(what + "\n")


@mcp.tool()
async def touch(uri: str, ctx: Context[Any, Any]) -> str:
    """An event of this session or connection."""
    ran(f"touch {uri}")
    await ctx.session.send_resource_updated(uri)
    return f"touched {uri}"


@mcp.tool()
async def remember(word: str) -> str:
    """State and data of the session: all words so far."""
    ran(f"remember {word}")
    session = current_session()
    session.state["last"] = word
    async with session.data.edit() as data:
        data.setdefault("words", []).append(word)
        return " ".join(data["words"])


@mcp.tool()
async def last() -> str:
    """What the state says."""
    return str(current_session().state["last"])


@mcp.tool()
async def wait(gate: str) -> str:
    """Runs until a file of that name is there."""
    ran(f"wait {gate}")
    opened = anyio.Path(os.environ["RUNS"]).with_name(gate)
    while not await opened.exists():  # noqa: ASYNC110
        await anyio.sleep(0.01)
    return f"through {gate}"
