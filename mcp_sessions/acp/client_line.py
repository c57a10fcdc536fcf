"""One client's line: JSON-RPC messages, one per line, in and out.

`StreamsWire` is a pair of asyncio streams, `StdioWire` this process's standard streams.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Protocol

from mcp_sessions_transports.stdio.stdio_server import lines, standard_streams, writing


class MessageTooLong(Exception):
    """A line was too long. It was dropped, and the next one can be read."""


class Wire(Protocol):
    async def read(self) -> bytes | None:
        """The next line; None: the client will send no more.

        Raises:
            MessageTooLong: See there.
        """
        ...

    async def write(self, data: bytes) -> None:
        """Send whole lines; returns when there is room for more.

        Raises:
            OSError: The client takes nothing any more.
        """
        ...


@dataclass(slots=True, eq=False, repr=False)
class StreamsWire:
    _reader: asyncio.StreamReader
    _writer: asyncio.StreamWriter
    _max_message: int

    async def read(self) -> bytes | None:
        pieces: list[bytes] = []
        length = 0
        while True:
            try:
                piece = await self._reader.readuntil(b"\n")
                whole = True
            except asyncio.LimitOverrunError as overrun:
                # The stream's own buffer is smaller than a message may be.
                piece = await self._reader.readexactly(overrun.consumed)
                whole = False
            except asyncio.IncompleteReadError as ended:
                piece, whole = ended.partial, True
            except ConnectionError:
                return None
            length += len(piece)
            if length <= self._max_message:
                pieces.append(piece)
            if whole and length > self._max_message:
                raise MessageTooLong
            if whole:
                return b"".join(pieces) or None

    async def write(self, data: bytes) -> None:
        self._writer.write(data)
        await self._writer.drain()


@dataclass(slots=True, eq=False, repr=False)
class StdioWire:
    _received: asyncio.Queue[bytes | None]
    _write: Callable[[bytes], Awaitable[None]]
    _max_message: int

    async def read(self) -> bytes | None:
        line = await self._received.get()
        if line is not None and len(line.rstrip(b"\r\n")) > self._max_message:
            raise MessageTooLong
        return line

    async def write(self, data: bytes) -> None:
        await self._write(data)


@asynccontextmanager
async def stdio_wire(max_message: int) -> AsyncGenerator[StdioWire]:
    """Standard input and output, for the protocol alone: other output goes to stderr."""
    with standard_streams() as (wire_in, wire_out), writing(wire_out) as write:
        async with lines(wire_in, max_message) as received:
            yield StdioWire(received, write, max_message)
