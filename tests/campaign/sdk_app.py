"""The same tool with the SDK alone, whose sessions live in one process: ``sdk_app.py PORT``."""

import sys
from typing import Any

from mcp.server import MCPServer

mcp = MCPServer[Any]("sdk", version="1")


@mcp.tool()
def work(mark: str, script: list[str]) -> str:
    """Do nothing."""
    return mark


if __name__ == "__main__":
    mcp.run("streamable-http", port=int(sys.argv[1]))
