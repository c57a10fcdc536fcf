"""A pytest plugin for the SDK's ``tests/interaction``: their connections go through the layer.

``MCP_SESSIONS_LEG`` says which:

=================== =====================================================================
``sdk``             the SDK's own client; the layer serves every HTTP application that a
                    test makes, and stands on stdio where a test connects in memory
``resumable-http``  `resumable`, where a test takes its ``connect`` over HTTP
``resumable-ws``    the same over WebSocket on a real socket, where it does in memory
``resumable-stdio`` the same to a child process
=================== =====================================================================

Nothing of the tests is changed: what they call is replaced before they import it.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import importlib
import inspect
import os
import socket
import sys
import tempfile
from collections.abc import AsyncGenerator, Callable, Generator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, cast

import anyio
import httpx2
import pytest
import uvicorn
from mcp import Client, StdioServerParameters
from mcp.client.stdio import stdio_client
from mcp.server import MCPServer, Server
from mcp_types.version import LATEST_HANDSHAKE_VERSION, MODERN_PROTOCOL_VERSIONS
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from mcp_sessions.client_transport import resumable
from mcp_sessions.layer import SessionLayer
from mcp_sessions.testing.memory_client import inside
from mcp_sessions_transports.stdio.stdio_server import StdioBinding

LEG = os.environ["MCP_SESSIONS_LEG"]

RELAY = Path(__file__).with_name("relay.py")

TEST_SECONDS = 15.0
"""For one test. The tests' own limits are 5 and 10."""

connections: Any = importlib.import_module("tests.interaction._connect")
bridge: Any = importlib.import_module("tests.interaction.transports._bridge")


# --- over HTTP: the layer in place of the SDK's own application --------------------------------

_asked_for: list[dict[str, Any]] = []
"""The options of the application that is being made, while the layer asks the server for what
it has around its endpoint."""


def served_by_the_layer(original: Callable[..., Any]) -> Callable[..., Any]:
    """``streamable_http_app``, with the layer's endpoint in it."""

    def streamable_http_app(server: Any, **options: Any) -> Any:
        if _asked_for:
            return original(server, **{**_asked_for[-1], **options})
        _asked_for.append(options)
        try:
            # What the SDK calls stateless is what the layer is without a store.
            layer = SessionLayer(
                server, store=None if options.get("stateless_http") else "memory://"
            )
            app = layer.asgi_app(
                options.get("streamable_http_path", "/mcp"),
                host=options.get("host", "127.0.0.1"),
                security=options.get("transport_security"),
                max_body=options.get("max_request_body_size"),
            )
        finally:
            _asked_for.pop()
        # What the tests enter to have their server run.
        server.session_manager.run = layer.lifespan
        return app if options.get("json_response") else _AsEventStream(app)

    return streamable_http_app


class _AsEventStream:
    """The layer's answer in JSON as the event stream of one event, which is as right: most tests
    that speak HTTP themselves read nothing else, and would end at their first answer.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        head: Message | None = None
        fields: dict[bytes, bytes] = dict(scope.get("headers", ()))
        accepted = fields.get(b"accept", b"")

        async def passed_on(message: Message) -> None:
            nonlocal head
            if message["type"] == "http.response.start" and message["status"] == 200:
                given = {bytes(name).lower(): value for name, value in message["headers"]}
                if given.get(b"content-type", b"").startswith(b"application/json"):
                    head = message
                    return
            if head is not None and not message.get("more_body", False):
                others = [
                    (name, value)
                    for name, value in head["headers"]
                    if bytes(name).lower() not in (b"content-type", b"content-length")
                ]
                await send({**head, "headers": [*others, (b"content-type", b"text/event-stream")]})
                body = b"event: message\r\ndata: " + message["body"] + b"\r\n\r\n"
                message, head = {**message, "body": body}, None
            await send(message)

        is_post = scope["type"] == "http" and scope["method"] == "POST"
        # The modern era answers in JSON from the SDK as well.
        is_modern = fields.get(b"mcp-protocol-version", b"").decode() in MODERN_PROTOCOL_VERSIONS
        reads_events = is_post and not is_modern and b"text/event-stream" in accepted
        await self._app(scope, receive, passed_on if reads_events else send)


# --- over WebSocket and stdio ------------------------------------------------------------------


class _Uvicorn(uvicorn.Server):
    """In the test's own event loop, whose signals are not its business."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.is_up = asyncio.Event()

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets=sockets)
        self.is_up.set()


@asynccontextmanager
async def on_a_socket(server: Any) -> AsyncGenerator[str]:
    """A server behind the layer; its WebSocket URL."""
    app = server.streamable_http_app()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        config = uvicorn.Config(
            app,
            ws="websockets-sansio",
            lifespan="off",
            log_config=None,
            log_level="warning",
            access_log=False,
            timeout_graceful_shutdown=2,
        )
        serving = _Uvicorn(config)
        async with server.session_manager.run():
            task = asyncio.create_task(serving.serve(sockets=[listener]))
            await serving.is_up.wait()
            try:
                yield f"ws://127.0.0.1:{listener.getsockname()[1]}/mcp"
            finally:
                serving.should_exit = True
                await task


def _as_file(connection: socket.socket) -> BinaryIO:
    return open(connection.fileno(), "r+b", buffering=0, closefd=False)


@asynccontextmanager
async def on_stdio(server: Any) -> AsyncGenerator[StdioServerParameters]:
    """A server behind the layer; the child to start for it, which relays."""
    layer = SessionLayer(server)
    served = inside(layer)
    loop = asyncio.get_running_loop()

    async def serve(connection: socket.socket) -> None:
        with connection, _as_file(connection) as wire:
            await StdioBinding(served).serve(wire, wire)

    async def accept(listener: socket.socket) -> None:
        async with asyncio.TaskGroup() as tasks:
            while True:
                connection, _ = await loop.sock_accept(listener)
                tasks.create_task(serve(connection))

    with (
        tempfile.TemporaryDirectory() as folder,
        socket.socket(socket.AF_UNIX) as listener,
    ):
        path = str(Path(folder) / "server")
        listener.bind(path)
        listener.listen()
        listener.setblocking(False)
        async with layer.lifespan():
            accepting = asyncio.create_task(accept(listener))
            try:
                # -S, -E: it imports next to nothing, and is up at once.
                yield StdioServerParameters(
                    command=sys.executable, args=["-S", "-E", str(RELAY), path]
                )
            finally:
                accepting.cancel()
                await asyncio.gather(accepting, return_exceptions=True)


# --- the tests' factories of connections -------------------------------------------------------


@asynccontextmanager
async def client_of(
    transport: Any, *, spec_version: str = LATEST_HANDSHAKE_VERSION, **options: Any
) -> AsyncGenerator[Client]:
    mode: Any = spec_version if spec_version in MODERN_PROTOCOL_VERSIONS else "legacy"
    async with Client(transport, mode=mode, **options) as client:
        yield client


@asynccontextmanager
async def sdk_over_stdio(server: Any, **options: Any) -> AsyncGenerator[Client]:
    async with on_stdio(server) as child, client_of(stdio_client(child), **options) as client:
        yield client


@asynccontextmanager
async def resumable_over_http(server: Any, **options: Any) -> AsyncGenerator[Client]:
    """In process, over the tests' own bridge."""
    app = server.streamable_http_app(transport_security=connections.NO_DNS_REBINDING_PROTECTION)
    async with (
        server.session_manager.run(),
        httpx2.AsyncClient(
            transport=bridge.StreamingASGITransport(app), base_url=connections.BASE_URL
        ) as http_client,
        client_of(
            resumable(f"{connections.BASE_URL}/mcp", http_client=http_client), **options
        ) as client,
    ):
        yield client


@asynccontextmanager
async def resumable_over_websocket(server: Any, **options: Any) -> AsyncGenerator[Client]:
    async with on_a_socket(server) as url, client_of(resumable(url), **options) as client:
        yield client


@asynccontextmanager
async def resumable_over_stdio(server: Any, **options: Any) -> AsyncGenerator[Client]:
    async with on_stdio(server) as child, client_of(resumable(child), **options) as client:
        yield client


for kind in (Server, MCPServer):
    setattr(kind, "streamable_http_app", served_by_the_layer(kind.streamable_http_app))  # noqa: B010

match LEG:
    case "sdk":
        connections.connect_in_memory = sdk_over_stdio
    case "resumable-http":
        connections.connect_over_streamable_http = resumable_over_http
    case "resumable-ws":
        connections.connect_in_memory = resumable_over_websocket
    case "resumable-stdio":
        connections.connect_in_memory = resumable_over_stdio
    case _:
        raise ValueError(f"no leg {LEG!r}")

# The stateless one was made of the original before it was replaced.
connections.connect_over_streamable_http_stateless = partial(
    connections.connect_over_streamable_http, stateless_http=True
)


def _takes_part(item: pytest.Item) -> bool:
    """Whether something of this project takes part in a test as it is connected here."""
    callspec: Any = getattr(item, "callspec", None)
    cell = callspec.params.get("connect") if callspec is not None else None
    if LEG != "sdk":
        instead_of = "streamable-http" if LEG == "resumable-http" else "in-memory"
        return cell is not None and cell[0] == instead_of
    # The layer has no transport of before 2025-03-26.
    return cell is None or cell[0] != "sse"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what a leg does not touch; how many run is in the manifest."""
    chosen = [item for item in items if _takes_part(item)]
    config.hook.pytest_deselected(items=[item for item in items if not _takes_part(item)])
    items[:] = chosen
    for item in chosen:
        if isinstance(item, pytest.Function) and inspect.iscoroutinefunction(item.obj):
            item.obj = _failing_as_others_do(item.obj)


def _failing_as_others_do(test: Callable[..., Any]) -> Callable[..., Any]:
    """A test whose ``pytest.raises`` that sees nothing raised ends the test, and not with it the
    event loop that the other tests of its module share: what it raises is no ``Exception``.
    """

    @functools.wraps(test)
    async def run(*args: Any, **kwargs: Any) -> None:
        try:
            # trio's clock is a mock in these tests; none of those reaches the layer.
            with anyio.fail_after(TEST_SECONDS if _is_on_asyncio() else None):
                await test(*args, **kwargs)
        except BaseException as raised:
            failures = _failures_of(raised)
            if not failures:
                raise
            raise AssertionError("; ".join(failures)) from raised

    return run


def _is_on_asyncio() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


def _failures_of(raised: BaseException) -> list[str]:
    """What ``pytest.fail`` said, wherever in a group."""
    if isinstance(raised, pytest.fail.Exception):
        return [str(raised)]
    if isinstance(raised, BaseExceptionGroup):
        group = cast("BaseExceptionGroup[BaseException]", raised)
        return [text for inner in group.exceptions for text in _failures_of(inner)]
    return []
