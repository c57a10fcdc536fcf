from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
from typing import Any

from mcp_sessions.background import stopped
from mcp_sessions.serve.draining import Draining
from mcp_sessions.serve.lifespan import Lifespan
from mcp_sessions.serve.uvicorn_server import DrainingServer
from mcp_sessions_transports.served import Served
from mcp_sessions_transports.stdio.stdio_server import StdioBinding, standard_streams


async def serve_stdio(
    served: Served,
    lifespan: Lifespan,
    draining: Draining,
    grace: float,
    http_server: tuple[DrainingServer, socket.socket] | None = None,
) -> None:
    """Serve until the input ends, then drain.

    Args:
        served: What is served, and lives and drains by the next two.
        grace: Seconds that running calls get at the end.
        http_server: A server, and the socket it listens on, that serves the same.

    Raises:
        Exception: A defect ended it.
    """
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    if http_server is None:
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, stop.set)
    with standard_streams() as (wire_in, wire_out):
        async with contextlib.AsyncExitStack() as stack:
            serving: asyncio.Task[None] | None = None
            if http_server is None:
                await stack.enter_async_context(lifespan.run())
            else:
                await lifespan.open_store()
                server, listener = http_server
                serving = asyncio.create_task(server.serve(sockets=[listener]))
                await server.ready.wait()
            binding = StdioBinding(served)
            piped = asyncio.create_task(binding.serve(wire_in, wire_out))
            signalled = asyncio.create_task(stop.wait())
            waiting: set[asyncio.Task[Any]] = {piped, signalled}
            if serving is not None:
                waiting.add(serving)
            await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            signalled.cancel()
            await draining.drain(grace)
            await asyncio.wait({piped}, timeout=2)
            failures = await stopped(piped)
            if serving is not None and http_server is not None:
                http_server[0].should_exit = True
                await serving
            for failed in failures:
                raise failed
