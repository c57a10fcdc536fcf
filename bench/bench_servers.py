"""The servers that the other modules drive, a process each.

python -m bench.bench_servers KIND [PORT [STORE | COMMAND [ARG …]]]
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

import uvicorn
from mcp.server import MCPServer
from starlette.applications import Starlette
from starlette.routing import WebSocketRoute
from starlette.websockets import WebSocket, WebSocketDisconnect

from bench.eventful import Eventful
from bench.stalls import Stalls
from mcp_sessions import Conversations, SessionLayer, SessionPolicy, SessionSecurity, TaskPolicy
from mcp_sessions.core.states import Mode

KINDS = {
    "floor": "bare ASGI and orjson: no MCP at all",
    "kernel": "that, and the SDK's kernel for a modern request: no transport, no checks",
    "pipe": "that, and a command (in place of STORE and after): its line in, its line out",
    "comments": "bare ASGI: a comment on every stream, each so many seconds (in place of STORE)",
    "sdk": "the SDK's Streamable HTTP as it comes",
    "sdk-json": "the SDK answering JSON instead of SSE",
    "ours": "the same server in a SessionLayer",
    "conversations": "a SessionLayer that binds conversations",
    "tasks": "a SessionLayer whose tool `wait` is a task; STORE is the seconds that one is kept",
    "guarded": "the same, which wants tokens; the issuer's keys, as JSON, in place of STORE",
    "noisy": "a SessionLayer with tools that make work",
    "many": "the same, with room for many sessions, in memory; says how long its loop stood still",
    "watched": "a SessionLayer with room for many sessions, its page, and events all the time",
    "echo": "bare Starlette on a WebSocket: no MCP at all",
    "sdk-stdio": "the SDK's stdio as it comes; no PORT",
    "ours-stdio": "the same server in a SessionLayer; no PORT",
}

BARE = frozenset({"floor", "kernel", "pipe", "echo", "comments"})

STORE = "MCP_SESSIONS_BENCH_STORE"
"""The environment variable with the store of what is served from the command line."""


def mcp_server() -> MCPServer[Any]:
    server: MCPServer[Any] = MCPServer("bench", log_level="ERROR")

    @server.tool()
    async def echo(text: str) -> str:  # pyright: ignore[reportUnusedFunction]
        return text

    return server


def tasks_layer(ttl: float) -> SessionLayer:
    server, ends = mcp_server(), asyncio.Event()

    @server.tool()
    async def wait() -> str:  # pyright: ignore[reportUnusedFunction]
        await ends.wait()
        return "waited"

    @server.tool()
    async def end() -> str:  # pyright: ignore[reportUnusedFunction]
        ends.set()
        return ""

    @server.tool()
    async def left() -> str:  # pyright: ignore[reportUnusedFunction]
        stored = await layer.store.all_sessions()
        return str(sum(each.mode is Mode.TASK for each in stored))

    # Tasks are looked at ten times in an idle time.
    layer = SessionLayer(
        server,
        tasks=TaskPolicy(always={"wait"}, ttl=ttl),
        policy=SessionPolicy(idle_timeout=20),
    )
    return layer


def noisy_layer(
    store: str, *, policy: SessionPolicy | None = None, stalls: Stalls | None = None
) -> SessionLayer:
    """Make a server with tools that cause much work when they are called.

    Args:
        stalls: Reported at ``/stalls``.
    """
    server = mcp_server()
    layer = SessionLayer(server, store=store, policy=policy)
    if stalls is not None:
        server.custom_route("/stalls", methods=["POST"])(stalls.respond)

    @server.tool()
    async def big(size: int) -> str:  # pyright: ignore[reportUnusedFunction]
        return "x" * size

    @server.tool()
    async def touch(uri: str) -> str:  # pyright: ignore[reportUnusedFunction]
        await layer.notify_resource_updated(uri)
        return "touched"

    @server.tool()
    async def wait(seconds: float) -> str:  # pyright: ignore[reportUnusedFunction]
        await asyncio.sleep(seconds)
        return "waited"

    @server.tool()
    async def process() -> str:  # pyright: ignore[reportUnusedFunction]
        return str(os.getpid())

    return layer


def watched_layer(store: str) -> SessionLayer:
    server = mcp_server()
    room = SessionPolicy(max_sessions=1_000_000, max_sessions_per_principal=1_000_000)
    layer = SessionLayer(server, store=store, policy=room)
    eventful = Eventful(layer)
    server.custom_route("/fill", methods=["POST"])(eventful.fill)
    server.custom_route("/count", methods=["POST"])(eventful.count)
    return layer


def guarded_layer(keys: str) -> SessionLayer:
    from mcp_sessions.authentication.issuer import Issuer
    from mcp_sessions.authentication.tokens import Tokens
    from mcp_sessions.server.upstream.sdk.authentication import SdkVerifier, resource_server
    from tests.support.issuers import AUDIENCE, JWKS, URL

    async def fetched(url: str) -> dict[str, Any]:
        return json.loads(keys) if url == JWKS else {"issuer": URL, "jwks_uri": JWKS}

    tokens = Tokens(Issuer(URL, time.time, fetched), AUDIENCE, time.time)
    before = resource_server(SdkVerifier([tokens]), URL, AUDIENCE, ["use"])
    return SessionLayer(mcp_server(), auth=before)


Result = Callable[[dict[str, Any]], Awaitable[dict[str, Any]]]
"""Makes the result of a request."""


async def nothing(message: dict[str, Any]) -> dict[str, Any]:
    return {"content": [], "isError": False}


def kernel() -> Result:
    """The SDK's part of a modern request that its transport has let through."""
    from mcp.server._streamable_http_modern import (
        _SingleExchangeDispatchContext as Exchange,  # pyright: ignore[reportPrivateUsage]
    )
    from mcp.server.connection import Connection
    from mcp.server.runner import serve_one
    from mcp.shared.transport_context import TransportContext

    server = mcp_server()._lowlevel_server  # pyright: ignore[reportPrivateUsage]
    transport = TransportContext(kind="streamable-http", can_send_request=False)

    async def result(message: dict[str, Any]) -> dict[str, Any]:
        exchange = Exchange(transport, message["id"], None)
        connection = Connection.from_envelope("2026-07-28", None, {})
        method, params = message["method"], message["params"]
        return await serve_one(
            server, exchange, method, params, connection=connection, lifespan_state={}
        )

    return result


def piped(command: list[str]) -> Result:
    """The cost of any server in Python that lets a command answer: a connection with one call at a
    time, and without errors.
    """
    import orjson

    started: list[asyncio.subprocess.Process] = []

    async def result(message: dict[str, Any]) -> dict[str, Any]:
        if not started:
            pipe = asyncio.subprocess.PIPE
            program = await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe)
            started.append(program)
        child = started[0]
        assert child.stdin is not None
        assert child.stdout is not None
        child.stdin.write(orjson.dumps(message) + b"\n")
        if "id" not in message:
            return {}
        return orjson.loads(await child.stdout.readline())["result"]

    return result


async def floor(scope: Any, receive: Any, send: Any, result: Result = nothing) -> None:
    """The cost of any HTTP server in Python: read JSON, write JSON."""
    import orjson

    if scope["type"] != "http":
        return
    message = orjson.loads((await receive())["body"])
    body = orjson.dumps(
        {"jsonrpc": "2.0", "id": message.get("id"), "result": await result(message)}
    )
    headers = [
        (b"content-type", b"application/json"),
        (b"content-length", str(len(body)).encode()),
        (b"mcp-session-id", b"none"),
    ]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": body})


def comments(interval: float) -> Any:
    """The cost of any server in Python that keeps a stream alive."""

    async def application(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            return
        headers = [(b"content-type", b"text/event-stream")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        while True:
            comment = {"type": "http.response.body", "body": b": keep-alive\n\n", "more_body": True}
            await send(comment)
            await asyncio.sleep(interval)

    return application


async def echo(socket: WebSocket) -> None:
    """The cost of any WebSocket server in Python: take a text, send it back."""
    await socket.accept("mcp")
    try:
        while True:
            await socket.send_text(await socket.receive_text())
    except WebSocketDisconnect:
        pass


def app(kind: str) -> Any:
    match kind:
        case "floor":
            return floor
        case "kernel":
            return partial(floor, result=kernel())
        case "pipe":
            return partial(floor, result=piped(sys.argv[3:]))
        case "comments":
            return comments(float(sys.argv[3]))
        case "sdk":
            return mcp_server().streamable_http_app()
        case "sdk-json":
            return mcp_server().streamable_http_app(json_response=True)
        case "echo":
            return Starlette(routes=[WebSocketRoute("/mcp", echo)])
        case _:
            raise SystemExit(f"unknown kind {kind!r}: one of {', '.join(KINDS)}")


def main() -> None:
    kind = sys.argv[1]
    match kind:
        case "ours":
            store = sys.argv[3] if len(sys.argv) > 3 else "memory://"
            layer = SessionLayer(mcp_server(), store=store)
            layer.run("http", port=int(sys.argv[2]), log_level="error")
        case "conversations":
            layer = SessionLayer(
                mcp_server(),
                store=sys.argv[3],
                security=SessionSecurity(["k" * 32]),
                conversations=Conversations(),
            )
            layer.run("http", port=int(sys.argv[2]), log_level="error")
        case "tasks":
            tasks_layer(float(sys.argv[3])).run("http", port=int(sys.argv[2]), log_level="error")
        case "guarded":
            guarded_layer(sys.argv[3]).run("http", port=int(sys.argv[2]), log_level="error")
        case "noisy":
            noisy_layer(sys.argv[3]).run("http", port=int(sys.argv[2]), log_level="error")
        case "many":
            room = SessionPolicy(max_sessions=1_000_000)
            layer = noisy_layer("memory://", policy=room, stalls=Stalls())
            layer.run("http", port=int(sys.argv[2]), log_level="error")
        case "watched":
            watched_layer(sys.argv[3]).run(
                "http", port=int(sys.argv[2]), log_level="error", dashboard="/sessions"
            )
        case "sdk-stdio":
            mcp_server().run("stdio")
        case "ours-stdio":
            SessionLayer(mcp_server()).run("stdio")
        case _:
            uvicorn.run(
                app(kind),
                port=int(sys.argv[2]),
                log_level="error",
                interface="asgi3",
                # About connections that are open when it ends.
                timeout_graceful_shutdown=1,
                lifespan="off" if kind in BARE else "on",
                # As the layer's own, so that nothing but the application differs.
                ws="websockets-sansio",
                ws_per_message_deflate=False,
            )


if __name__ == "__main__":
    main()
