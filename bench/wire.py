"""HTTP clients that are as cheap as a socket: thousands in one process, so that what is measured
is the server. They speak what the layer answers with, and no more of HTTP than that.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import re
import socket
import struct
import time
from collections.abc import Callable
from typing import Any, cast

from bench.bench_calls import HANDSHAKE, MODERN, SESSION

WITHIN = 60.0
"""Seconds that any answer may take."""

_HEAD = (
    "{method} /mcp HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\n"
    "Accept: application/json, text/event-stream\r\nContent-Type: application/json\r\n"
    "MCP-Protocol-Version: {era}\r\nContent-Length: {size}\r\n{more}\r\n"
)
_LENGTH = re.compile(rb"content-length: (\d+)", re.IGNORECASE)
_SESSION = re.compile(rb"mcp-session-id: (\S+)", re.IGNORECASE)
_FRAME = re.compile(rb"id: ([^\n]+)\n(?:event: message|retry: \d+)\ndata: ([^\n]*)\n\n")


class Refused(Exception):
    """The server answered with something else than a result."""


class Connection(asyncio.Protocol):
    """One connection: requests one after the other, and at last a stream.

    Args:
        port: The server's, on this machine.
    """

    def __init__(self, port: int) -> None:
        self.port = port
        self._ids = itertools.count(1)
        self._got = bytearray()
        self._answer: asyncio.Future[tuple[bytes, bytes]] | None = None
        self._on_bytes: Callable[[bytes], None] | None = None
        self.transport: asyncio.Transport | None = None
        self.session: str | None = None
        """``Mcp-Session-Id`` of a client of the 2025 era."""

        self.meta: dict[str, Any] = {}
        self.on_lost: Callable[[], None] | None = None

    @staticmethod
    async def to(port: int) -> Connection:
        loop = asyncio.get_running_loop()
        _, connection = await loop.create_connection(lambda: Connection(port), "127.0.0.1", port)
        return connection

    # --- the protocol --------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's is none by its class.
        self.transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        if self._on_bytes is not None:
            self._on_bytes(data)
            return
        self._got += data
        end = self._got.find(b"\r\n\r\n")
        if end < 0 or self._answer is None:
            return
        head = bytes(self._got[:end])
        length = _LENGTH.search(head)
        if length is None:
            # An answer that did not come at once is a stream, in chunks, of which the last is
            # empty; an answer without a body has neither.
            if b"chunked" in head and not self._got.endswith(b"\r\n0\r\n\r\n"):
                return
            size = len(self._got) - end - 4
        else:
            size = int(length[1])
        if len(self._got) >= end + 4 + size:
            answer, self._answer = self._answer, None
            body = bytes(self._got[end + 4 : end + 4 + size])
            self._got.clear()
            if not answer.done():
                answer.set_result((head, body))

    def connection_lost(self, exc: Exception | None) -> None:
        if self._answer is not None and not self._answer.done():
            self._answer.set_exception(ConnectionError("the server closed the connection"))
        if self.on_lost is not None:
            self.on_lost()

    # --- requests ------------------------------------------------------------------------

    async def send(self, request: bytes) -> tuple[bytes, bytes]:
        assert self.transport is not None and self._answer is None
        answer = self._answer = asyncio.get_running_loop().create_future()
        self.transport.write(request)
        async with asyncio.timeout(WITHIN):
            return await answer

    def request(self, method: str, params: dict[str, Any] | None, *, asks: bool = True) -> bytes:
        era = MODERN if self.meta else HANDSHAKE
        message: dict[str, Any] = {"jsonrpc": "2.0", "method": method}
        if asks:
            message["id"] = next(self._ids)
        if params is not None:
            message["params"] = {**params, "_meta": self.meta} if self.meta else params
        more = ""
        if self.meta:
            more = f"Mcp-Method: {method}\r\n"
            more += f"Mcp-Name: {params['name']}\r\n" if params and "name" in params else ""
        body = json.dumps(message).encode()
        return self._head("POST", era, len(body), more) + body

    async def ask(self, method: str, params: dict[str, Any]) -> dict[str, Any]:
        return self.result(*await self.send(self.request(method, params)))

    @staticmethod
    def result(head: bytes, body: bytes) -> dict[str, Any]:
        if not body.startswith(b"{"):
            found = [line for line in body.splitlines() if line.startswith(b"data: {")]
            body = found[-1][6:] if found else b"{}"
        answer = json.loads(body)
        if "result" not in answer:
            raise Refused(f"{head.splitlines()[0].decode()} {body[:200].decode()}")
        return answer["result"]

    async def initialize(self) -> None:
        info = {"name": "bench", "version": "1"}
        params = {"protocolVersion": HANDSHAKE, "capabilities": {}, "clientInfo": info}
        head, body = await self.send(self.request("initialize", params))
        self.result(head, body)
        found = _SESSION.search(head)
        assert found is not None, head
        self.session = found[1].decode()
        await self.send(self.request("notifications/initialized", None, asks=False))

    def be_modern(self, session: Any = None) -> None:
        """Speak the 2026 era from now on.

        Args:
            session: The result of ``sessions/create``; None: without a session.
        """
        self.meta = {
            "io.modelcontextprotocol/protocolVersion": MODERN,
            "io.modelcontextprotocol/clientCapabilities": {},
        }
        if session is not None:
            self.meta[SESSION] = session

    # --- streams -------------------------------------------------------------------------

    def listen(self, receive: Callable[[bytes], None], last: str | None = None) -> None:
        """Open the GET stream on this connection, which has no other use then.

        Args:
            receive: Called with what comes, as it comes; `frames` reads it.
            last: ``Last-Event-ID``.
        """
        assert self.transport is not None
        self._on_bytes = receive
        more = f"Last-Event-ID: {last}\r\n" if last is not None else ""
        self.transport.write(self._head("GET", HANDSHAKE, 0, more))

    def reset(self) -> None:
        """Reset the connection: the server sees it lost, with all messages on their way."""
        assert self.transport is not None
        sock = self.transport.get_extra_info("socket")
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.transport.abort()

    def close(self) -> None:
        if self.transport is not None:
            self.transport.close()

    def _head(self, method: str, era: str, size: int, more: str) -> bytes:
        if self.session is not None:
            more += f"Mcp-Session-Id: {self.session}\r\n"
        head = _HEAD.format(method=method, port=self.port, era=era, size=size, more=more)
        return head.encode()


def frames(got: bytearray) -> list[tuple[str, bytes]]:
    """Take the complete events out of the bytes: the id of each, and its data."""
    found = list(_FRAME.finditer(got))
    events = [(match[1].decode(), match[2]) for match in found]
    if found:
        del got[: found[-1].end()]
    return events


class Stream:
    """The GET stream of one client, over the connections that it needs.

    Args:
        receive: Called with each event that is one, not only a position.
        lost: Called when its connection is gone, by whomever it was cut.
    """

    __slots__ = ("_got", "_receive", "_lost", "connection", "is_open", "last", "session")

    def __init__(
        self,
        session: str,
        receive: Callable[[bytes], None],
        lost: Callable[[Stream], None] | None = None,
    ) -> None:
        self._receive = receive
        self._lost = lost
        self._got = bytearray()
        self.session = session
        self.last: str | None = None
        self.connection: Connection | None = None
        self.is_open = False
        """The server has answered on this connection."""

    async def open(self, port: int) -> None:
        connection = await Connection.to(port)
        self.open_on(connection)

    def open_on(self, connection: Connection) -> None:
        connection.session = self.session
        self._got.clear()
        self.is_open = False
        self.connection = connection
        connection.on_lost = self._is_lost
        connection.listen(self._take, self.last)

    def _is_lost(self) -> None:
        self.is_open = False
        if self._lost is not None:
            self._lost(self)

    def cut(self) -> None:
        assert self.connection is not None
        self.connection.reset()

    def _take(self, data: bytes) -> None:
        if not self.is_open:
            if not data.startswith(b"HTTP/1.1 200"):
                raise Refused(data[:200].decode())
            self.is_open = True
        self._got += data
        for last, event in frames(self._got):
            self.last = last
            if event:
                self._receive(event)


async def until(condition: Callable[[], bool], what: str, within: float = WITHIN) -> None:
    end = time.monotonic() + within
    while not condition():
        if time.monotonic() > end:
            raise Refused(f"{what}: not within {within:g} s")
        await asyncio.sleep(0.005)
