"""A server that does what the test says, on a real socket: also what no server should do.

It speaks HTTP/1.1 and a handshake-era MCP server's part of it; each method of it can be
replaced by the test::

    async with ScriptedServer({"session/resume": status(503)}) as server:
        transport = resumable(server.url())

An entry is called with the `Exchange` and answers it, or does not. What the server was asked
is on `server.requests`; what it says on the GET stream goes through `server.push`.
"""

from __future__ import annotations

import asyncio
import json
import socket
import struct
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self

from tests.support.board import Board

Json = dict[str, Any]
SESSION = "io.modelcontextprotocol/session"
EXTENSION = "io.github.mcp-sessions/sessions"

OURS: Json = {
    EXTENSION: {
        "features": ["start", "resume", "end", "create", "delete", "state", "requestKey"],
        "requestKeys": {"lifetime": 3600},
    }
}


@dataclass
class Exchange:
    verb: str
    headers: dict[str, str]
    message: Json
    writer: asyncio.StreamWriter
    answered: bool = False
    _chunked: bool = False

    @property
    def method(self) -> str:
        """The JSON-RPC method; empty for a GET, a DELETE or an answer."""
        method: str = self.message.get("method", "")
        return method

    @property
    def params(self) -> Json:
        params: Json = self.message.get("params") or {}
        return params

    @property
    def meta(self) -> Json:
        meta: Json = self.params.get("_meta") or {}
        return meta

    def respond(
        self, status: int, body: bytes = b"", headers: Mapping[str, str] | None = None
    ) -> None:
        self.answered = True
        fields = {"Content-Length": str(len(body)), **(headers or {})}
        head = "".join(f"{name}: {value}\r\n" for name, value in fields.items())
        self.writer.write(f"HTTP/1.1 {status} Scripted\r\n{head}\r\n".encode() + body)

    def json(self, body: Json, status: int = 200, headers: Mapping[str, str] | None = None) -> None:
        fields = {"Content-Type": "application/json", **(headers or {})}
        self.respond(status, json.dumps(body).encode(), fields)

    def result(self, result: Json, headers: Mapping[str, str] | None = None) -> None:
        body = {"jsonrpc": "2.0", "id": self.message["id"], "result": result}
        self.json(body, headers=headers)

    def error(self, code: int, text: str, status: int = 200, data: Any = None) -> None:
        error = {"code": code, "message": text, "data": data}
        self.json({"jsonrpc": "2.0", "id": self.message["id"], "error": error}, status)

    def event(self, message: Json | None, event_id: str | None = None) -> None:
        """Send one server-sent event; the first one begins the stream."""
        if not self._chunked:
            self._chunked = self.answered = True
            self.writer.write(
                b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n"
                b"Transfer-Encoding: chunked\r\n\r\n"
            )
        text = f"id: {event_id}\n" if event_id is not None else ""
        text += f"data: {json.dumps(message) if message is not None else ''}\n\n"
        block = text.encode()
        self.writer.write(f"{len(block):x}\r\n".encode() + block + b"\r\n")

    def end(self) -> None:
        self.writer.write(b"0\r\n\r\n")

    def reset(self) -> None:
        self.answered = True
        sock: socket.socket = self.writer.get_extra_info("socket")
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.writer.transport.abort()


Entry = Callable[[Exchange], Awaitable[None] | None]


def status(code: int, body: bytes = b"", **headers: str) -> Entry:
    return lambda exchange: exchange.respond(code, body, headers)


def never(exchange: Exchange) -> None:
    exchange.answered = True


@dataclass
class ScriptedServer:
    script: dict[str, Entry] = field(default_factory=dict[str, Entry])
    """Method, or ``GET``, ``DELETE`` or ``*`` (asked first, may leave it) → what to do."""

    capabilities: Json = field(
        default_factory=lambda: {"tools": {}, "sessions": {}, "extensions": OURS}
    )
    requests: list[Exchange] = field(default_factory=list[Exchange])
    board: Board = field(default_factory=Board)
    sessions: int = 0
    """How many were started."""
    transports: int = 0
    """How often it was initialized."""
    stream: Exchange | None = None
    """The newest GET."""
    _server: asyncio.Server | None = None
    _writers: set[asyncio.StreamWriter] = field(default_factory=set[asyncio.StreamWriter])

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        assert self._server is not None
        self._server.close()
        for writer in list(self._writers):
            writer.transport.abort()
        await asyncio.sleep(0)
        await asyncio.sleep(0)

    def url(self) -> str:
        assert self._server is not None
        port: int = self._server.sockets[0].getsockname()[1]
        return f"http://127.0.0.1:{port}/mcp"

    def asked(self, method: str) -> list[Exchange]:
        return [
            exchange for exchange in self.requests if method in (exchange.method, exchange.verb)
        ]

    async def has(self, look: Callable[[], object], what: str) -> None:
        """Return once ``look()`` holds."""
        asked = lambda: [e.method or e.verb for e in self.requests]  # noqa: E731
        await self.board.until(lambda: bool(look()), what=lambda: f"{what}: {asked()}")

    def push(self, method: str, event_id: object = None, **params: Any) -> None:
        if event_id is not None:
            params["sessionEventId"] = event_id
        self.push_message({"jsonrpc": "2.0", "method": method, "params": params})

    def push_message(self, message: Json) -> None:
        assert self.stream is not None, "the client opened no stream"
        self.stream.event(message)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.add(writer)
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
                line, *lines = head.rstrip("\r\n").split("\r\n")
                pairs = (entry.partition(":") for entry in lines)
                headers = {name.lower(): value.strip() for name, _, value in pairs}
                body = await reader.readexactly(int(headers.get("content-length", 0)))
                message: Json = json.loads(body) if body else {}
                exchange = Exchange(line.split()[0], headers, message, writer)
                self.requests.append(exchange)
                await self._answer(exchange)
                self.board.announce()
        except (asyncio.IncompleteReadError, OSError):
            pass  # The client is done with this connection.
        finally:
            self._writers.discard(writer)
            writer.close()

    async def _answer(self, exchange: Exchange) -> None:
        for name in ("*", exchange.method or exchange.verb):
            entry = self.script.get(name)
            if entry is not None:
                done = entry(exchange)
                if done is not None:
                    await done
            if exchange.answered:
                return
        self._as_it_should(exchange)

    def _as_it_should(self, exchange: Exchange) -> None:
        match exchange.method or exchange.verb:
            case "GET":
                self.stream = exchange
                exchange.event(None, "0")
            case "initialize":
                self.transports += 1
                result = {
                    "protocolVersion": exchange.params["protocolVersion"],
                    "capabilities": self.capabilities,
                    "serverInfo": {"name": "scripted", "version": "1"},
                }
                exchange.result(result, {"Mcp-Session-Id": f"transport-{self.transports}"})
            case "session/start":
                self.sessions += 1
                exchange.result({"sessionId": f"s-{self.sessions}", "sessionEventId": "0"})
            case "sessions/create":
                self.sessions += 1
                exchange.result({"session": {"sessionId": f"s-{self.sessions}", "state": "one"}})
            case "session/resume":
                exchange.result({"resumed": True, "catchup": True})
            case "tools/list":
                schema = {"type": "object"}
                exchange.result({"tools": [{"name": "echo", "inputSchema": schema}]})
            case "tools/call":
                exchange.result(tool_result(named(exchange) or "none"))
            case "DELETE":
                exchange.respond(200)
            case method if method.startswith("notifications/") or method == "POST":
                exchange.respond(202)
            case _:
                exchange.result({})


def named(exchange: Exchange) -> str:
    """The session that a request names; empty: none."""
    session: Json = exchange.meta.get(SESSION) or {}
    session_id: str = session.get("sessionId", "")
    return session_id


def tool_result(text: str, *, is_error: bool = False, meta: Json | None = None) -> Json:
    result: Json = {"content": [{"type": "text", "text": text}], "isError": is_error}
    if meta is not None:
        result["_meta"] = meta
    return result
