"""Tools for the stock clients of tasks. They know nothing of tasks.

``tasks_tools.py`` serves them on standard input and output.
"""

import asyncio
from typing import Any

from mcp.server.mcpserver import Context, MCPServer
from pydantic import BaseModel

mcp = MCPServer[Any]("tasks")


class Answer(BaseModel):
    answer: str


@mcp.tool()
async def quick() -> str:
    return "at once"


@mcp.tool()
async def slow() -> str:
    await asyncio.sleep(1.5)
    return "in the end"


@mcp.tool()
async def ask_two(ctx: Context[Any, Any]) -> str:
    # Until its call is a task.
    await asyncio.sleep(1.5)
    given = await asyncio.gather(*(ctx.elicit(text, Answer) for text in ("one", "two")))
    said = [each.data.answer if each.action == "accept" else each.action for each in given]
    return ", ".join(said)


@mcp.tool()
async def endless() -> str:
    await asyncio.Event().wait()
    return "never"


if __name__ == "__main__":
    mcp.run("stdio")
