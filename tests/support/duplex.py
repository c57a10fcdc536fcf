"""Peers at the other end of a WebSocket or a pipe, and a wrapped server for them.

A `DuplexPeer` speaks JSON-RPC over either: it numbers its requests from 0, keeps every
message that came, in order, and does nothing by itself. `duplex_world` is `world` with
uvicorn before it, in the test's own event loop, so that a test may look at both ends.
"""

import asyncio
import contextlib
import itertools
import json
import os
import socket
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Generator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from typing import Any, cast

import uvicorn
from starlette.types import ASGIApp
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed
from websockets.typing import Subprotocol

from mcp_sessions import SessionLayer
from mcp_sessions.assembly import Assembly
from mcp_sessions.testing.memory_client import inside
from mcp_sessions_transports.stdio.stdio_server import StdioBinding
from tests.support.board import Board
from tests.support.modern import envelope
from tests.support.raw import (
    EXTENSION,
    Json,
    at_most,
    call_params,
    error_of,
    initialize_params,
    result_of,
    text_of,
)
from tests.support.world import World, world

DECLARED: Json = {"extensions": {EXTENSION: {}}}
"""Client capabilities: knows our extension."""

ELICITS: Json = {"elicitation": {}}
"""Client capabilities: can be asked."""

WITHIN = 30.0
"""Seconds that anything may take."""


class DuplexPeer(ABC):
    """One client. Its requests are numbered from 0."""

    def __init__(self, *, capabilities: Json | None = None, modern: bool = False) -> None:
        """Take who it is.

        Args:
            modern: Every request carries its envelope, and there is no handshake.
        """
        self.capabilities: Json = capabilities or {}
        self.modern = modern
        self.numbers = itertools.count()
        self.messages: list[Json] = []
        """Every message that came, in order."""
        self.ended = False
        """Nothing more comes."""
        self.board = Board()

    @abstractmethod
    async def put(self, text: str) -> None: ...

    @abstractmethod
    async def leave(self) -> None:
        """The peer goes away; return when that is done at this end."""

    def took(self, raw: str | bytes) -> None:
        self.messages.append(json.loads(raw))
        self.board.announce()

    # --- sending -------------------------------------------------------------------------

    async def post(self, message: Any) -> None:
        await self.put(json.dumps(message))

    async def send(
        self,
        method: str,
        params: Json | None = None,
        *,
        meta: Json | None = None,
        request_id: str | int | None = None,
    ) -> str | int:
        """Send a request and return its id; do not wait for the answer.

        Args:
            meta: More members of ``_meta``.
        """
        if request_id is None:
            request_id = next(self.numbers)
        message: Json = {"jsonrpc": "2.0", "id": request_id, "method": method}
        members = dict(params or {})
        given = {**members.pop("_meta", {}), **(meta or {})}
        if self.modern:
            given = envelope(given, capabilities=self.capabilities)
        if given:
            members["_meta"] = given
        if members or params is not None:
            message["params"] = members
        await self.post(message)
        return request_id

    async def notify(self, method: str, params: Json | None = None) -> None:
        message: Json = {"jsonrpc": "2.0", "method": method}
        if params is not None:
            message["params"] = params
        await self.post(message)

    async def respond(self, request: Json, result: Json) -> None:
        await self.post({"jsonrpc": "2.0", "id": request["id"], "result": result})

    # --- what came -----------------------------------------------------------------------

    async def until(self, look: Any, what: str = "it", *, within: float = WITHIN) -> Any:
        """What ``look()`` finds, once it finds something."""
        return await self.board.until(
            lambda: look() or None,
            what=lambda: f"{what}; there is {self.messages[-20:]!s:.3000}, ended={self.ended}",
            within=within,
        )

    @property
    def notifications(self) -> list[Json]:
        return [m for m in self.messages if "method" in m and "id" not in m]

    @property
    def events(self) -> list[Json]:
        return [m for m in self.notifications if "sessionEventId" in (m.get("params") or {})]

    @property
    def asked(self) -> list[Json]:
        return [m for m in self.messages if "method" in m and "id" in m]

    async def has_events(self, count: int) -> list[Json]:
        """The session events, once there are at least ``count``."""
        await self.until(lambda: len(self.events) >= count, f"{count} events")
        return self.events

    async def notified(self, method: str) -> Json:
        """The first notification of that method, once it is here."""
        found = await self.until(
            lambda: next((m for m in self.notifications if m["method"] == method), None), method
        )
        return cast("Json", found)

    async def question(self, number: int = 0) -> Json:
        """The server's request at that place, once it is here."""
        await self.until(lambda: len(self.asked) > number, f"question {number}")
        return self.asked[number]

    async def answer(self, request_id: str | int | None) -> Json:
        """The whole response to a request, once it is here."""

        def look() -> Json | None:
            for message in self.messages:
                if "method" not in message and message.get("id") == request_id:
                    return message
            assert not self.ended, f"ended without an answer to {request_id!r}: {self.messages}"
            return None

        return cast("Json", await self.until(look, f"the answer to {request_id!r}"))

    async def result(
        self, method: str, params: Json | None = None, *, meta: Json | None = None
    ) -> Json:
        return result_of(await self.answer(await self.send(method, params, meta=meta)))

    async def error(
        self, method: str, params: Json | None = None, *, meta: Json | None = None
    ) -> Json:
        return error_of(await self.answer(await self.send(method, params, meta=meta)))

    # --- MCP -----------------------------------------------------------------------------

    async def initialize(self) -> Json:
        """Shake hands; the result. In the modern era: nothing to do."""
        if self.modern:
            return {}
        result = await self.result(
            "initialize",
            initialize_params(capabilities=self.capabilities),
        )
        await self.notify("notifications/initialized")
        return result

    async def call(self, tool: str, *, meta: Json | None = None, **arguments: Any) -> str | int:
        return await self.send("tools/call", call_params(tool, arguments), meta=meta)

    async def text(self, tool: str, *, meta: Json | None = None, **arguments: Any) -> str:
        return text_of(await self.result("tools/call", call_params(tool, arguments), meta=meta))

    async def start(self) -> Json:
        return await self.result("session/start", {})

    async def resume(self, session_id: str, position: str | None = None) -> Json:
        params: Json = {"sessionId": session_id}
        if position is not None:
            params["lastSessionEventId"] = position
        return await self.result("session/resume", params)


class WebSocketPeer(DuplexPeer):
    def __init__(self, connection: ClientConnection, **options: Any) -> None:
        super().__init__(**options)
        self.connection = connection
        self._reader = asyncio.create_task(self._read())

    async def _read(self) -> None:
        try:
            while True:
                message = await self.connection.recv()
                assert isinstance(message, str), "the server sends text frames"
                self.took(message)
        except ConnectionClosed:
            pass
        finally:
            self.ended = self.connection.close_code is not None
            self.board.announce()

    async def put(self, text: str) -> None:
        await self.connection.send(text)

    async def stall(self) -> None:
        """Take nothing more."""
        self._reader.cancel()
        await asyncio.gather(self._reader, return_exceptions=True)

    def unstall(self) -> None:
        """Take what comes again."""
        self._reader = asyncio.create_task(self._read())

    async def closed(self) -> tuple[int | None, str | None]:
        """How the server closed, once it did."""
        await self.until(lambda: self.ended, "the close")
        return self.connection.close_code, self.connection.close_reason

    async def leave(self) -> None:
        """See :class:`DuplexPeer`: the network breaks, nobody says good-bye."""
        self.connection.transport.abort()
        await at_most(WITHIN, self.connection.wait_closed())
        await asyncio.gather(self._reader, return_exceptions=True)


@asynccontextmanager
async def websocket(
    url: str,
    *,
    subprotocols: tuple[str, ...] = ("mcp",),
    headers: dict[str, str] | None = None,
    origin: str | None = None,
    receive_buffer: int | None = None,
    **options: Any,
) -> AsyncGenerator[WebSocketPeer]:
    """A client on a WebSocket that has not said a word yet."""
    sock = None
    if receive_buffer is not None:
        host, port = url.split("/")[2].split(":")
        sock = socket.socket()
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        sock.setblocking(False)
        await asyncio.get_running_loop().sock_connect(sock, (host, int(port)))
    connection = await connect(
        url,
        subprotocols=[Subprotocol(name) for name in subprotocols] or None,
        additional_headers=headers,
        origin=cast(Any, origin),
        compression=None,
        max_size=None,
        max_queue=1 if receive_buffer is not None else 16,
        ping_interval=None,
        open_timeout=WITHIN,
        close_timeout=1,
        sock=sock,
        proxy=None,
    )
    peer = WebSocketPeer(connection, **options)
    try:
        yield peer
    finally:
        await peer.leave()


class PipePeer(DuplexPeer):
    """A client on a pair of pipes to a `StdioBinding` in this process."""

    def __init__(self, layer: SessionLayer, **options: Any) -> None:
        super().__init__(**options)
        self._layer = layer
        self._serving: asyncio.Task[None] | None = None
        self._out = -1

    async def open(self) -> None:
        theirs_in, self._out = os.pipe()
        ours_in, theirs_out = os.pipe()
        served = inside(self._layer)  # pyright: ignore[reportPrivateUsage]
        wire_in = os.fdopen(theirs_in, "rb", buffering=0)
        wire_out = os.fdopen(theirs_out, "wb", buffering=0)
        reader = asyncio.StreamReader(limit=2**24)
        loop = asyncio.get_running_loop()
        transport, _ = await loop.connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(ours_in, "rb", buffering=0)
        )

        async def serve() -> None:
            try:
                await StdioBinding(served).serve(wire_in, wire_out)
            finally:
                wire_out.close()

        async def read() -> None:
            while line := await reader.readline():
                self.took(line)
            transport.close()
            self.ended = True
            self.board.announce()

        async def both() -> None:
            await asyncio.gather(serve(), read())
            wire_in.close()

        self._serving = asyncio.create_task(both())

    async def put(self, text: str) -> None:
        os.write(self._out, text.encode() + b"\n")

    async def leave(self) -> None:
        """See :class:`DuplexPeer`: the input ends; return when all has ended."""
        if self._out != -1:
            os.close(self._out)
            self._out = -1
            assert self._serving is not None
            await at_most(WITHIN, self._serving)


@asynccontextmanager
async def pipe(layer: SessionLayer, **options: Any) -> AsyncGenerator[PipePeer]:
    """A client on a pipe that has not said a word yet."""
    peer = PipePeer(layer, **options)
    await peer.open()
    try:
        yield peer
    finally:
        await peer.leave()


class ServerInLoop(uvicorn.Server):
    """uvicorn inside an event loop that is not its own: the signals are not its either."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.stop = asyncio.Event()
        self.is_up = asyncio.Event()

    @contextmanager
    def capture_signals(self) -> Generator[None]:
        yield

    async def main_loop(self) -> None:
        """Return when it is asked to stop."""
        self.is_up.set()
        await self.stop.wait()


@asynccontextmanager
async def listening(
    app: ASGIApp, *, send_buffer: int | None = None, port: int = 0
) -> AsyncGenerator[int]:
    """``app`` on a port, in this event loop; its lifespan is somebody else's.

    Args:
        port: 0: a free one.
        send_buffer: Bytes that the kernel may keep for a peer that does not read.
    """
    listener = socket.create_server(("127.0.0.1", port))
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    if send_buffer is not None:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, send_buffer)
    config = uvicorn.Config(
        app,
        ws="websockets-sansio",
        lifespan="off",
        log_config=None,
        access_log=False,
        timeout_graceful_shutdown=2,
    )
    server = ServerInLoop(config)
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    try:
        await at_most(WITHIN, server.is_up.wait())
        yield int(listener.getsockname()[1])
    finally:
        server.stop.set()
        with contextlib.closing(listener):
            await at_most(WITHIN, serving)


@dataclass
class DuplexWorld:
    """A wrapped server that runs and can be reached in every way."""

    inner: World
    port: int
    stack: AsyncExitStack = field(repr=False)

    @property
    def url(self) -> str:
        """Of its WebSocket endpoint."""
        return f"ws://127.0.0.1:{self.port}/mcp"

    @property
    def layer(self) -> SessionLayer:
        return self.inner.layer

    @property
    def inside(self) -> Assembly:
        return self.inner.inside

    async def websocket(self, **options: Any) -> WebSocketPeer:
        """A client on a WebSocket that has not said a word yet; gone with the world."""
        return await self.stack.enter_async_context(websocket(self.url, **options))

    async def pipe(self, **options: Any) -> PipePeer:
        """A client on a pipe that has not said a word yet; gone with the world."""
        return await self.stack.enter_async_context(pipe(self.layer, **options))

    async def connected(self, kind: str = "websocket", **options: Any) -> DuplexPeer:
        opened = self.websocket if kind == "websocket" else self.pipe
        peer = await opened(**options)
        await peer.initialize()
        return peer

    async def publish(self, session_id: str, *uris: str, wait: bool = False) -> None:
        """One ``resources/updated`` of that session per URI."""
        publisher = self.inside.publisher
        for uri in uris:
            params = {"uri": uri}
            await publisher.publish(
                cast(Any, session_id), "notifications/resources/updated", params, wait=wait
            )


@asynccontextmanager
async def duplex_world(
    *, send_buffer_of_kernel: int | None = None, **options: Any
) -> AsyncGenerator[DuplexWorld]:
    """A wrapped server, running; options as of `world`."""
    async with world(**options) as inner:
        port_of = listening(inner.layer_app, send_buffer=send_buffer_of_kernel)
        async with port_of as port, AsyncExitStack() as stack:
            yield DuplexWorld(inner, port, stack)
