"""A client at the other end of a process's pipes."""

import asyncio
from asyncio.subprocess import Process
from typing import Any

from tests.support.duplex import WITHIN, DuplexPeer
from tests.support.raw import at_most


class ProcessPeer(DuplexPeer):
    def __init__(
        self,
        process: Process,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        **options: Any,
    ) -> None:
        super().__init__(**options)
        self.process = process
        self._writer = writer
        self._reading = asyncio.create_task(self._read(reader))

    async def _read(self, reader: asyncio.StreamReader) -> None:
        # What is no JSON is an error here, and the test's.
        while line := await reader.readline():
            self.took(line)
        self.ended = True
        self.board.announce()

    async def put(self, text: str) -> None:
        self._writer.write(text.encode() + b"\n")
        await self._writer.drain()

    async def leave(self) -> None:
        """See :class:`DuplexPeer`: the input ends."""
        if self._writer.can_write_eof():
            self._writer.write_eof()
        else:
            self._writer.close()

    async def exit(self) -> int:
        """Its exit code, once it has ended and everything was read."""
        code = await at_most(WITHIN, self.process.wait())
        await at_most(WITHIN, self._reading)
        self._writer.close()
        return code
