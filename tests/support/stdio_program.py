"""A server for a process of its own: ``python -m tests.support.stdio_program MODE [PORT]``.

Modes: ``stdio``; ``both`` (stdio, and HTTP and WebSocket on PORT); ``http`` (on PORT).
"""

import subprocess
import sys
from typing import Any

import anyio
from mcp.server import MCPServer
from mcp.server.mcpserver import Context

from mcp_sessions import SessionLayer, SessionPolicy

server = MCPServer[Any]("program", version="1.0")


@server.tool()
async def noisy() -> str:
    """Prints, in every way there is."""
    print("printed by a tool")  # noqa: T201
    sys.stdout.write("written by a tool\n")
    sys.stdout.flush()
    subprocess.run(  # noqa: ASYNC221
        [sys.executable, "-c", "print('a child prints')"], check=True
    )
    child = subprocess.run(  # noqa: ASYNC221
        [sys.executable, "-c", "import sys; print(len(sys.stdin.read()), file=sys.stderr)"],
        check=True,
        stderr=subprocess.PIPE,
        timeout=10,
    )
    return f"a child reads {int(child.stderr)} bytes of the protocol"


@server.tool()
async def work(ctx: Context[Any, Any]) -> str:
    """Says that it has begun, and takes a moment."""
    await ctx.report_progress(1, 2)
    await anyio.sleep(0.2)
    return "worked"


def up() -> None:
    sys.stderr.write("up\n")
    sys.stderr.flush()


def main() -> None:
    mode, *rest = sys.argv[1:]
    layer = SessionLayer(server, policy=SessionPolicy(max_message=20_000, reconnect_spread=5))
    port = int(rest[0]) if rest else None
    if mode == "http":
        layer.run("http", port=port, on_started=up, grace=5)
    else:
        layer.run("stdio", port=port, grace=5)


if __name__ == "__main__":
    main()
