"""Connections on which the refusal of a bad credential waits: they are closed before all others.

The rules are 3 and 4 of ``mcp_sessions.serve.open_connections``.
"""

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from typing import Any, cast

import pytest
from mcp.server import MCPServer
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.server import ServerState

from mcp_sessions import SessionLayer
from mcp_sessions.authentication import pace
from mcp_sessions.authentication.pace import DELAYS, Delays, Pace
from mcp_sessions.serve import open_connections
from mcp_sessions.serve.open_connections import ConnectionLimits
from mcp_sessions.serve.protocols import LimitedHttp
from mcp_sessions.serve.uvicorn_server import HttpSettings, http_config
from mcp_sessions.server.upstream.sdk.authentication import Authentication, SdkVerifier

WITHIN = 20
BAD = b"GET /bad HTTP/1.1\r\nHost: x\r\n\r\n"
GOOD = b"GET /good HTTP/1.1\r\nHost: x\r\n\r\n"
UPGRADE = (
    b"GET /bad HTTP/1.1\r\nHost: x\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
    b"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\nSec-WebSocket-Version: 13\r\n\r\n"
)

Stream = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class Setup:
    """A server on which each refusal waits until its connection is closed."""

    def __init__(self, most: int | None, app: ASGIApp | None) -> None:
        limits = ConnectionLimits(
            max_message=1_000,
            max_unfinished=1_000_000,
            receive_timeout=30,
            slow_timeout=30,
            max_connections=most,
        )
        self._config = http_config(app or self._app, HttpSettings(limits=limits, log_level="error"))
        self._config.load()
        self._state = ServerState()
        self._streams: list[Stream] = []
        self.waiting = self.ended = 0
        self._changed = asyncio.Condition()
        self.address: Any = None

    async def _app(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["path"] == "/bad":
            await self._count(1, 0)
            delays = cast("Delays", scope["state"][DELAYS])
            wait = asyncio.get_running_loop().create_future()
            delays(wait)
            try:
                await wait
            finally:
                delays(None)
                await self._count(-1, 1)
        if scope["type"] == "http":
            await send({"type": "http.response.start", "status": 204, "headers": []})
            await send({"type": "http.response.body", "body": b""})

    async def _count(self, waiting: int, ended: int) -> None:
        async with self._changed:
            self.waiting += waiting
            self.ended += ended
            self._changed.notify_all()

    async def until(self, is_so: Callable[[], bool]) -> None:
        """Wait for that."""
        async with asyncio.timeout(WITHIN), self._changed:
            await self._changed.wait_for(is_so)

    def protocol(self) -> asyncio.Protocol:
        """One for a new connection."""
        return LimitedHttp(config=self._config, server_state=self._state, app_state={})

    def delayed(self) -> int:
        """How many refusals wait."""
        open_ = self._config.open_connections
        return len(open_._delayed)  # pyright: ignore[reportPrivateUsage]

    async def send(self, request: bytes) -> Stream:
        """Send a request on a connection of its own."""
        reader, writer = await asyncio.open_connection(*self.address)
        self._streams.append((reader, writer))
        writer.write(request)
        return reader, writer

    async def bad(self, request: bytes = BAD) -> asyncio.StreamReader:
        """Send a bad credential, and return when its refusal waits."""
        before = self.waiting + self.ended
        reader, _ = await self.send(request)
        await self.until(lambda: self.waiting + self.ended > before)
        return reader

    def close(self) -> None:
        """Close all connections of the clients."""
        for _, writer in self._streams:
            writer.close()


@asynccontextmanager
async def served(most: int | None = None, app: ASGIApp | None = None) -> AsyncGenerator[Setup]:
    """A server until the block ends."""
    setup = Setup(most, app)
    server = await asyncio.get_running_loop().create_server(setup.protocol, "127.0.0.1", 0)
    setup.address = server.sockets[0].getsockname()
    async with asyncio.timeout(60):
        try:
            yield setup
        finally:
            setup.close()
            server.close()
            await setup.until(lambda: not setup.waiting)


async def expect_answered(stream: Stream, status: int = 204) -> None:
    """The good client is served."""
    reader, _ = stream
    assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 %d" % status)


async def expect_closed(reader: asyncio.StreamReader) -> None:
    """The server closes, and answers nothing."""
    try:
        assert await reader.read() == b""
    except ConnectionResetError:
        return


@pytest.mark.parametrize("request_", [BAD, UPGRADE], ids=["HTTP", "WebSocket"])
async def test_they_make_room_before_an_idle_connection(request_: bytes) -> None:
    """The idle one was silent for longer, and its client had a good credential."""
    async with served(most=3) as setup:
        idle = await setup.send(GOOD)
        await expect_answered(idle)
        first = await setup.bad(request_)
        second = await setup.bad(request_)
        third = await setup.bad(request_)
        await expect_closed(first)
        # Nothing of it is left: its task has ended, too.
        await setup.until(lambda: (setup.waiting, setup.ended) == (2, 1))
        new = await setup.send(GOOD)
        await expect_answered(new)
        await expect_closed(second)
        idle[1].write(GOOD)
        await expect_answered(idle)
        await expect_answered(await setup.send(GOOD))
        await expect_closed(third)


async def test_there_are_only_so_many(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where there may be any number of connections. The first ones get their answers."""
    monkeypatch.setattr(open_connections, "MOST_DELAYED", 2)
    async with served() as setup:
        readers = [await setup.bad() for _ in range(5)]
        for reader in readers[2:]:
            await expect_closed(reader)
        await setup.until(lambda: (setup.waiting, setup.ended) == (2, 3))


async def test_the_refusals_of_a_layer_are_such(monkeypatch: pytest.MonkeyPatch) -> None:
    """The way from the authentication to the connection, through all that is between."""
    monkeypatch.setattr(pace, "RATE", 0.01)
    before = Authentication(SdkVerifier([]))
    layer = SessionLayer(cast("Any", MCPServer[Any]("open")), auth=before)
    async with layer.lifespan(), served(most=2, app=layer.asgi_app()) as setup:
        request = (
            b"POST /mcp HTTP/1.1\r\nHost: 127.0.0.1\r\nAuthorization: Bearer bad\r\n"
            b"Content-Length: 2\r\n\r\n{}"
        )
        at_once, _ = await setup.send(request)
        assert (await at_once.readuntil(b"\r\n")).startswith(b"HTTP/1.1 401")
        late, _ = await setup.send(request)
        for _ in range(100_000):
            if setup.delayed():
                break
            await asyncio.sleep(0)
        for _ in range(2):
            await expect_answered(await setup.send(b"GET /none HTTP/1.1\r\nHost: x\r\n\r\n"), 404)
        await expect_closed(late)


async def test_a_client_that_leaves_ends_the_wait() -> None:
    async with served() as setup:
        await setup.bad()
        setup.close()
        await setup.until(lambda: setup.ended > 0)
        assert setup.waiting == 0


async def test_the_pace_ends_when_the_connection_is_lost() -> None:
    """It would else hold the request for seconds."""
    paced, waits = Pace(), list[asyncio.Future[None] | None]()

    def delays(wait: asyncio.Future[None] | None) -> None:
        waits.append(wait)
        if wait is not None:
            wait.set_result(None)

    async with asyncio.timeout(WITHIN):
        for _ in range(10_000):
            await paced.wait(delays)
    assert waits and waits[-1] is None and len(waits) % 2 == 0
