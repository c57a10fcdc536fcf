"""WebSocket clients that are as cheap as a socket: many in one process, a thread for none."""

from __future__ import annotations

import itertools
import json
import socket
import struct
from typing import Any

from bench.bench_calls import HANDSHAKE

WITHIN = 30.0
"""Seconds that any answer may take."""

_OPENING = (
    "GET /mcp HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
    "Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\nSec-WebSocket-Version: 13\r\n"
    "Sec-WebSocket-Protocol: mcp\r\n\r\n"
)


class RawSocket:
    """A client of the 2025 era on one WebSocket. It counts the messages that are no answers."""

    def __init__(self, port: int) -> None:
        self.socket = socket.create_connection(("127.0.0.1", port), timeout=WITHIN)
        self._ids = itertools.count(1)
        self._rest = b""
        self.socket.sendall(_OPENING.format(port=port).encode())
        while b"\r\n\r\n" not in self._rest:
            self._receive()
        status, _, self._rest = self._rest.partition(b"\r\n\r\n")
        assert b" 101 " in status, status
        self.events: list[dict[str, Any]] = []
        info = {"name": "bench", "version": "1"}
        params = {"protocolVersion": HANDSHAKE, "capabilities": {}, "clientInfo": info}
        self.ask("initialize", params)
        self.put({"jsonrpc": "2.0", "method": "notifications/initialized"})

    def ask(self, method: str, params: dict[str, Any]) -> Any:
        number = next(self._ids)
        self.put({"jsonrpc": "2.0", "id": number, "method": method, "params": params})
        while (message := self.get()).get("id") != number or "method" in message:
            self.events.append(message)
        assert "result" in message, message
        return message["result"]

    def until(self, count: int) -> None:
        while len(self.events) < count:
            self.events.append(self.get())

    def put(self, message: dict[str, Any]) -> None:
        text = json.dumps(message).encode()
        size = (
            bytes([0x80 | len(text)]) if len(text) < 126 else b"\xfe" + struct.pack("!H", len(text))
        )
        self.socket.sendall(b"\x81" + size + bytes(4) + text)

    def get(self) -> dict[str, Any]:
        """The next message. A ping gets no pong."""
        while True:
            kind, text = self._frame()
            if kind == 0x81:
                return json.loads(text)
            assert kind == 0x89, f"the server sent a frame of kind {kind:#x}: {text!r}"

    def _frame(self) -> tuple[int, bytes]:
        kind, size = self._take(2)
        if size == 126:
            (size,) = struct.unpack("!H", self._take(2))
        elif size == 127:
            (size,) = struct.unpack("!Q", self._take(8))
        return kind, self._take(size)

    def _take(self, size: int) -> bytes:
        while len(self._rest) < size:
            self._receive()
        taken, self._rest = self._rest[:size], self._rest[size:]
        return taken

    def _receive(self) -> None:
        more = self.socket.recv(65_536)
        if not more:
            raise ConnectionError("the server closed the connection")
        self._rest += more

    def close(self) -> None:
        self.socket.close()
