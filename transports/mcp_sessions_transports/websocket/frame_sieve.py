"""Takes from a server's WebSocket stream the messages that are too large, as they go by.

Without it one such message costs the connection (1009), and who asked for it would get it
again after each reconnect. RFC 6455, 5.2: only what is needed of it to find frames' ends; what
is wrong in any other way passes, for the real parser to refuse.
"""

from __future__ import annotations

import secrets
import struct
from collections import deque

from mcp_sessions.core.outline import Outline

MOST = 64
"""A message of more than this many limits in length passes, and costs the connection."""

_HEADERS = 65_536
"""Bytes of the answer to the handshake."""

_CONTINUATION, _BINARY, _CONTROL = 0, 2, 8
_FIN, _MASKED = 0x80, 0x80


class FrameSieve:
    """The bytes of one connection, after the answer to the handshake.

    Args:
        limit: Bytes of one message.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._in = bytearray()
        self._is_open = self._is_off = False
        self._passing = self._holding = self._dropping = 0
        self._is_last = False
        self._opcode = 0
        self._held: bytearray | None = None
        self._outline: Outline | None = None
        self._mark = secrets.token_bytes(16)
        self._dropped: deque[Outline] = deque()

    def dropped(self, frame: str | bytes) -> Outline | None:
        return self._dropped.popleft() if frame == self._mark and self._dropped else None

    def feed(self, data: bytes) -> bytes:
        """The bytes to hand on; in place of a message that is too large, a small frame."""
        if self._is_off:
            return data
        self._in += data
        out = bytearray()
        while not self._is_off and self._step(out):
            pass
        if self._is_off:
            out += self._in
            self._in.clear()
        return bytes(out)

    def _step(self, out: bytearray) -> bool:
        if not self._is_open:
            return self._handshake(out)
        if self._passing:
            piece = self._cut(self._passing)
            self._passing -= len(piece)
            out += piece
            return bool(piece)
        if self._holding and self._held is not None:
            piece = self._cut(self._holding)
            self._holding -= len(piece)
            self._held += piece
            return self._ended(out) if not self._holding else bool(piece)
        if self._dropping and self._outline is not None:
            piece = self._cut(self._dropping)
            self._dropping -= len(piece)
            self._outline.feed(piece)
            return self._ended(out) if not self._dropping else bool(piece)
        return self._header(out)

    def _cut(self, most: int) -> bytes:
        piece = bytes(self._in[:most])
        del self._in[:most]
        return piece

    def _handshake(self, out: bytearray) -> bool:
        end = self._in.find(b"\r\n\r\n")
        if end < 0:
            self._is_off = len(self._in) > _HEADERS
            return False
        if not self._in.startswith(b"HTTP/1.1 101"):
            self._is_off = True
            return False
        self._is_open = True
        out += self._cut(end + 4)
        return True

    def _header(self, out: bytearray) -> bool:
        if len(self._in) < 2:
            return False
        first, second = self._in[0], self._in[1]
        size, length = 2, second & 0x7F
        if length >= 126:
            size = 4 if length == 126 else 10
            if len(self._in) < size:
                return False
            length = int.from_bytes(self._in[2:size], "big")
        opcode, is_last = first & 0x0F, bool(first & _FIN)
        if second & _MASKED or length > self._limit * MOST:
            self._is_off = True
            return False
        is_whole = is_last and opcode != _CONTINUATION and length <= self._limit
        is_within = self._held is not None or self._outline is not None
        if opcode >= _CONTROL or is_whole or (opcode == _CONTINUATION and not is_within):
            out += self._cut(size)
            self._passing = length
            return True
        self._cut(size)
        self._is_last = is_last
        if opcode != _CONTINUATION:
            self._opcode = opcode
            self._held, self._outline = bytearray(), None
        if self._held is not None and len(self._held) + length > self._limit:
            self._outline = Outline()
            self._outline.feed(bytes(self._held))
            self._held = None
        if self._held is not None:
            self._holding = length
        else:
            self._dropping = length
        return self._ended(out) if not length else True

    def _ended(self, out: bytearray) -> bool:
        outline = self._outline
        if outline is not None and outline.size > self._limit * MOST:
            self._is_off = True
            return False
        if not self._is_last:
            return True
        if outline is not None:
            self._dropped.append(outline)
            out += _frame(_BINARY, self._mark)
        elif self._held is not None:
            out += _frame(self._opcode, bytes(self._held))
        self._held = self._outline = None
        return True


def _frame(opcode: int, payload: bytes) -> bytes:
    length = len(payload)
    if length < 126:
        head = struct.pack("!BB", _FIN | opcode, length)
    elif length < 65_536:
        head = struct.pack("!BBH", _FIN | opcode, 126, length)
    else:
        head = struct.pack("!BBQ", _FIN | opcode, 127, length)
    return head + payload
