"""WebSocket and stdio without network and threads, for where time jumps.

All of the library's bindings is running but for what reads and writes a descriptor.
"""

import asyncio
import io
from typing import Any, BinaryIO, cast

from starlette.types import ASGIApp
from starlette.types import Message as AsgiMessage

from mcp_sessions import SessionLayer
from mcp_sessions.testing.memory_client import inside
from mcp_sessions_transports.duplex import DuplexConnection
from mcp_sessions_transports.stdio.stdio_server import StdioBinding
from tests.support.duplex import DuplexPeer


class MemorySocket(DuplexPeer):
    """A client on a WebSocket of the app's, as a server would hand it over."""

    def __init__(self, app: ASGIApp, **options: Any) -> None:
        super().__init__(**options)
        self.code: int | None = None
        """Why the server closed."""

        self.refused: int | None = None
        """The HTTP status that it was refused with."""

        self.raised: BaseException | None = None
        """What the app raised."""

        self._app = app
        self._incoming: asyncio.Queue[AsgiMessage] = asyncio.Queue()
        self._has_left = False
        self._serving: asyncio.Task[None] | None = None

    async def open(self) -> None:
        """Shake hands; return when the server has accepted or refused."""
        self._incoming.put_nowait({"type": "websocket.connect"})
        self._accepted = asyncio.Event()
        self._serving = asyncio.create_task(self._serve())
        await self._accepted.wait()

    async def _serve(self) -> None:
        try:
            # A server keeps the scope to itself: whoever has one is taken for an application.
            await self._app(_scope(), self._incoming.get, self._send)
        except Exception as error:
            # What a server would log is the test's to see.
            self.raised = error
        finally:
            self._end()

    async def _send(self, message: AsgiMessage) -> None:
        if self._has_left:
            # As uvicorn does.
            raise OSError("the client is gone")
        match message["type"]:
            case "websocket.accept":
                self._accepted.set()
            case "websocket.send":
                self.took(message["text"])
            case "websocket.close":
                self.code = message["code"]
                self._end()
            case "websocket.http.response.start":
                self.refused = message["status"]
            case _:
                pass

    def _end(self) -> None:
        self.ended = True
        self._accepted.set()
        self.board.announce()

    async def put(self, text: str) -> None:
        self._incoming.put_nowait({"type": "websocket.receive", "text": text})

    async def leave(self) -> None:
        """See :class:`DuplexPeer`: the network breaks."""
        self._has_left = True
        self._incoming.put_nowait({"type": "websocket.disconnect", "code": 1006})
        if self._serving is not None:
            await self._serving


def _scope() -> dict[str, Any]:
    return {
        "type": "websocket",
        "asgi": {"version": "3.0", "spec_version": "2.4"},
        "http_version": "1.1",
        "scheme": "ws",
        "path": "/mcp",
        "raw_path": b"/mcp",
        "query_string": b"",
        "root_path": "",
        "headers": [(b"host", b"127.0.0.1:8000"), (b"sec-websocket-protocol", b"mcp")],
        "subprotocols": ["mcp"],
        "client": ("127.0.0.1", 50_000),
        "server": ("127.0.0.1", 8_000),
        "extensions": {"websocket.http.response": {}},
    }


class _Lines(StdioBinding):
    """Reads and writes lines of this event loop."""

    def __init__(self, layer: SessionLayer, peer: "MemoryPipe") -> None:
        super().__init__(inside(layer))
        self._peer = peer

    async def _read(self, connection: DuplexConnection, wire_in: BinaryIO) -> None:
        while (line := await self._peer.incoming.get()) is not None:
            await connection.take(line)

    async def _write(self, connection: DuplexConnection, wire_out: BinaryIO) -> None:
        async def write(chunks: list[bytes]) -> None:
            for chunk in chunks:
                self._peer.took(chunk)

        await connection.transport.outbox.empty_into(write, idle=None, interval=0)


class MemoryPipe(DuplexPeer):
    """A client at the other end of standard input and output."""

    def __init__(self, layer: SessionLayer, **options: Any) -> None:
        super().__init__(**options)
        self.incoming: asyncio.Queue[bytes | None] = asyncio.Queue()
        self.raised: BaseException | None = None
        """What the binding raised."""

        self._layer = layer
        self._serving: asyncio.Task[None] | None = None

    async def open(self) -> None:
        self._serving = asyncio.create_task(self._serve())

    async def _serve(self) -> None:
        nothing = cast(BinaryIO, io.BytesIO())
        try:
            await _Lines(self._layer, self).serve(nothing, nothing)
        except Exception as error:
            self.raised = error
        finally:
            self.ended = True
            self.board.announce()

    async def put(self, text: str) -> None:
        self.incoming.put_nowait(text.encode())

    async def leave(self) -> None:
        """See :class:`DuplexPeer`: the input ends."""
        self.incoming.put_nowait(None)
        if self._serving is not None:
            await self._serving
