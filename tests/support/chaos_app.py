"""A server for replicas that are killed: ``mcp-sessions serve tests/support/chaos_app.py``.

Its tool writes down that it ran, in the file that ``RUNS`` names, before it does anything.
"""

import os
from typing import Any

import anyio
from mcp.server import MCPServer
from mcp.server.mcpserver import Context

mcp = MCPServer[Any]("chaos", version="1.0")


def ran(name: str) -> None:
    """Written and there, whatever happens to this process next."""
    with open(os.environ["RUNS"], "a") as runs:
        runs.write(name + "\n")


@mcp.tool()
async def work(name: str, pause: float, ctx: Context[Any, Any]) -> str:
    """Takes ``pause`` seconds, and tells the session what it does."""
    ran(name)
    await ctx.session.send_resource_updated(f"begun://{name}")
    await anyio.sleep(pause)
    await ctx.session.send_resource_updated(f"done://{name}")
    await ctx.session.send_resource_updated(f"last://{name.partition('/')[0]}")
    return name
