"""Serves the SDK's everything-server, bare or in our layer: ``launcher.py FOLDER KIND STACK``.

Other than that it is a command on a pipe (``launcher.py FOLDER stdio``), or what stands before one.
It writes the port it listens on to stdout, once it serves, and runs until SIGTERM.
"""

import importlib
import os
import socket
import sys
from pathlib import Path
from typing import Any

import uvicorn
from starlette.types import ASGIApp

RETRY_MILLISECONDS = 100
"""What the everything-server's own ``main`` gives its SSE streams."""


def bare(module: Any) -> ASGIApp:
    """Its own application, as its ``main`` serves it: with its event store."""
    return module.mcp.streamable_http_app(
        event_store=module.event_store, retry_interval=RETRY_MILLISECONDS
    )


def wrapped(module: Any) -> ASGIApp:
    """Ours around the same server. Its event store is not taken: we have our own."""
    # Here, not above: the bare server runs without anything of ours.
    from mcp_sessions import SessionLayer

    return SessionLayer(module.mcp).asgi_app()


def bound(module: Any) -> ASGIApp:
    """The same, with the conversations of hosts that start no session bound."""
    from mcp_sessions import Conversations, SessionLayer

    return SessionLayer(module.mcp, conversations=Conversations()).asgi_app()


def command(module: Any, eras: Any = "both") -> ASGIApp:
    """Ours around a process of it, for each session."""
    from mcp_sessions import SessionLayer, StdioServer

    folder = str(Path(module.__file__).parents[1])
    env = {"PYTHONPATH": os.environ["PYTHONPATH"]}
    server = StdioServer(sys.executable, __file__, folder, "stdio", env=env, warm=2)
    return SessionLayer(server, eras=eras).asgi_app()


def url(_: Any, eras: Any = "both") -> ASGIApp:
    """Ours before the one that is served somewhere else."""
    from mcp_sessions import HTTPServer, SessionLayer

    return SessionLayer(HTTPServer(os.environ["EVERYTHING_URL"]), eras=eras).asgi_app()


class _Server(uvicorn.Server):
    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets=sockets)
        if not self.should_exit:
            assert sockets is not None
            sys.stdout.write(f"{sockets[0].getsockname()[1]}\n")
            sys.stdout.flush()


def main(folder: str, kind: str, stack: str = "") -> None:
    """Serve.

    Args:
        folder: The one with the package ``mcp_everything_server``.
        kind: ``bare``, ``wrapped`` or ``bound``; ``command`` or ``url``, or one of them in one era,
            as ``url-2026``; ``stdio``: on a pipe.
        stack: ``h11``: what uvicorn is without extras, and what the SDK alone installs.
            ``httptools``: with uvloop, what our dependencies bring along.
    """
    sys.path.insert(0, folder)
    sys.dont_write_bytecode = True
    module = importlib.import_module("mcp_everything_server.server")
    if kind == "stdio":
        module.mcp.run(transport="stdio")
        return
    kinds: dict[str, Any] = {
        "bare": bare,
        "wrapped": wrapped,
        "bound": bound,
        "command": command,
        "url": url,
    }
    name, _, eras = kind.partition("-")
    serve(kinds[name](module, eras) if eras else kinds[name](module), stack)


def serve(app: ASGIApp, stack: str) -> None:
    """Serve on a free port of loopback, and write it to stdout."""
    loop, http = {"h11": ("asyncio", "h11"), "httptools": ("uvloop", "httptools")}[stack]
    config = uvicorn.Config(
        app,
        loop=loop,
        http=http,
        log_level="warning",
        access_log=False,
        timeout_graceful_shutdown=2,
    )
    with socket.create_server(("127.0.0.1", 0)) as listener:
        _Server(config).run(sockets=[listener])


if __name__ == "__main__":
    main(*sys.argv[1:])
