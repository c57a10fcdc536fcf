"""A server for replicas that are restarted: ``mcp-sessions serve tests/support/rolling_app.py``.

Each call that begins stands in the file that ``RUNS`` names, a line each.
"""

import os
from typing import Any

import anyio
from mcp.server import MCPServer

from mcp_sessions import SessionLayer

mcp = MCPServer[Any]("rolling", version="1.0")
layer = SessionLayer(mcp, store=os.environ["STORE"])


def ran(call: str) -> None:
    """Written and there, whatever happens to this process next."""
    with open(os.environ["RUNS"], "a") as runs:
        runs.write(call + "\n")


@mcp.resource("note://{name}")
def note(name: str) -> str:
    """Something to subscribe to."""
    return name


@mcp.tool()
async def work(call: str, seconds: float) -> str:
    """Take so long."""
    ran(call)
    await anyio.sleep(seconds)
    return call


@mcp.tool()
async def touch(call: str) -> str:
    """Tell whoever watches."""
    ran(call)
    await layer.notify_resource_updated("note://watched")
    return call
