"""FastMCP's client of tasks: ``driver.py COMMAND…`` calls tools of the server that the command
serves, and prints what became of each as one line of JSON. ``driver.py URL`` does so over HTTP.
"""

import asyncio
import json
import os
import sys
from typing import Any

import fastmcp_tasks  # pyright: ignore[reportMissingImports]
from fastmcp import Client
from fastmcp.client.transports import StdioTransport
from mcp import MCPError

# Importing it is what gives tasks to the client.
call_tool_task: Any = fastmcp_tasks.call_tool_task  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]


async def answered(message: str, response_type: Any, params: Any, context: Any) -> dict[str, str]:
    return {"answer": f"answer to {message}"}


def say(tool: str, status: str, text: object) -> None:
    said = {"tool": tool, "kind": "", "status": status, "text": text}
    sys.stdout.write(json.dumps(said) + "\n")
    sys.stdout.flush()


async def main(target: list[str]) -> None:
    transport: Any = target[0]
    if not transport.startswith("http"):
        transport = StdioTransport(target[0], target[1:], env=dict(os.environ))
    async with Client(transport, elicitation_handler=answered, mode="2026-07-28") as client:
        for tool in ("quick", "slow", "ask_two"):
            try:
                result: Any = await client.call_tool(tool, {})
            except MCPError as refused:
                say(tool, "refused", refused.error.code)
                return
            say(tool, "completed", result.content[0].text)
        task = await call_tool_task(client, "endless", {})
        await task.cancel()
        shown = await task.wait()
        say("endless", shown.status, None)


asyncio.run(main(sys.argv[1:]))
