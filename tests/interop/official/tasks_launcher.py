"""The fixture of the tasks scenarios: ``tasks_launcher.py FOLDER KIND STACK``, as ``launcher.py``.

Its tools are those that the scenarios name. They know nothing of tasks.
"""

import asyncio
import os
import sys

# The folder of this program is the first of the path.
import launcher  # pyright: ignore[reportMissingImports]
from mcp.server.mcpserver import Context, MCPServer
from mcp.shared.exceptions import MCPError
from pydantic import BaseModel

mcp = MCPServer("tasks")


class Confirmation(BaseModel):
    confirm: bool


class Name(BaseModel):
    name: str


@mcp.tool()
async def greet(name: str) -> str:
    return f"Hello, {name}!"


@mcp.tool()
async def slow_compute(seconds: float, label: str = "") -> str:
    await asyncio.sleep(seconds)
    return f"done {label}"


@mcp.tool()
async def failing_job() -> str:
    raise RuntimeError("the job failed")


@mcp.tool()
async def protocol_error_job() -> str:
    raise MCPError(-32603, "the job broke")


@mcp.tool()
async def confirm_delete(filename: str, ctx: Context) -> str:
    answer = await ctx.elicit(f"Delete {filename}?", Confirmation)
    return f"{answer.action} {filename}"


@mcp.tool()
async def multi_input(ctx: Context) -> str:
    first, second = await asyncio.gather(ctx.elicit("first?", Name), ctx.elicit("second?", Name))
    return f"{first.action} {second.action}"


@mcp.tool()
async def test_tool_with_task(ctx: Context) -> str:
    answer = await ctx.elicit("your name?", Name)
    await asyncio.sleep(1)
    return f"Hello {answer.data.name}" if answer.action == "accept" else answer.action


def main(folder: str, kind: str, stack: str = "") -> None:
    if kind == "stdio":
        mcp.run(transport="stdio")
        return
    if kind == "bare":
        launcher.serve(mcp.streamable_http_app(), stack)
        return
    from mcp_sessions import HTTPServer, SessionLayer, StdioServer, TaskPolicy

    always = {"slow_compute", "protocol_error_job", "confirm_delete", "multi_input"}
    # The first call of a server outside waits for its start, which may take longer.
    never = {"greet"}
    tasks = TaskPolicy(after=0.4, always=always, never=never, required={"failing_job"})
    server: object = mcp
    if kind == "command":
        env = {"PYTHONPATH": os.environ["PYTHONPATH"]}
        server = StdioServer(sys.executable, __file__, folder, "stdio", env=env, warm=2)
    elif kind == "url":
        server = HTTPServer(os.environ["EVERYTHING_URL"])
    launcher.serve(SessionLayer(server, tasks=tasks).asgi_app(), stack)


if __name__ == "__main__":
    main(*sys.argv[1:])
