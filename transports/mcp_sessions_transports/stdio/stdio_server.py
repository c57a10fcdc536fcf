"""stdio: one JSON-RPC message per line, and nothing else on standard output.

While it serves, file descriptor 1 leads to standard error, so that whatever a handler or a
child process prints cannot come between the messages; descriptor 0 leads nowhere.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import logging
import os
import select
import sys
import threading
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator
from contextlib import asynccontextmanager, contextmanager
from typing import Any, BinaryIO

from mcp_sessions.background import stopped
from mcp_sessions.principal import ANONYMOUS
from mcp_sessions.seldom import Seldom
from mcp_sessions_transports.duplex import DuplexConnection
from mcp_sessions_transports.served import Served

logger = logging.getLogger(__name__)
logger.addFilter(Seldom())

_LAST_WORDS = 2.0
"""Seconds that the peer has, at the end, to take what waits for it."""


@contextmanager
def standard_streams() -> Generator[tuple[BinaryIO, BinaryIO]]:
    """Standard input and output for the protocol alone, until the block ends."""
    sys.stdout.flush()
    wire_in, wire_out = os.dup(0), os.dup(1)
    nowhere = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nowhere, 0)
    os.close(nowhere)
    os.dup2(2, 1)
    try:
        # The descriptors are not closed here: a thread may still wait in a read.
        yield (
            os.fdopen(wire_in, "rb", buffering=0, closefd=False),
            os.fdopen(wire_out, "wb", buffering=0, closefd=False),
        )
    finally:
        sys.stdout.flush()
        os.dup2(wire_in, 0)
        os.dup2(wire_out, 1)


class StdioBinding:
    def __init__(self, served: Served) -> None:
        self._served = served

    async def serve(self, wire_in: BinaryIO, wire_out: BinaryIO) -> None:
        """Serve until the input ends; then its sessions wait, detached.

        A peer that closed its end, or takes nothing for too long, ends it as well.
        """
        connection = DuplexConnection("stdio", ANONYMOUS, self._served)
        self._served.connections.add(connection.client)
        writer = asyncio.ensure_future(self._write(connection, wire_out))
        reader = asyncio.ensure_future(self._read(connection, wire_in))
        # A writer whose peer takes nothing learns of no cut: it waits for the pipe.
        cut = asyncio.ensure_future(connection.transport.outbox.until_cut())
        try:
            await asyncio.wait({reader, writer, cut}, return_when=asyncio.FIRST_COMPLETED)
            if not writer.done() and not cut.done():
                # The input ended. Open requests are still answered, for a while.
                await connection.quiet(_LAST_WORDS)
                connection.transport.close()
                await asyncio.wait({writer}, timeout=_LAST_WORDS)
        finally:
            await connection.gone()
            failures = await stopped(reader, writer, cut)
        for failure in failures:
            if not isinstance(failure, OSError):
                raise failure

    async def _read(self, connection: DuplexConnection, wire_in: BinaryIO) -> None:
        limit = self._served.policy.max_message
        async with lines(wire_in, limit) as received:
            while (line := await received.get()) is not None:
                if len(line.rstrip(b"\r\n")) > limit:
                    logger.warning(
                        "a message of more than %d bytes (max_message) was dropped", limit
                    )
                    connection.refuse_too_big()
                elif line.strip():
                    await connection.take(line)

    async def _write(self, connection: DuplexConnection, wire_out: BinaryIO) -> None:
        with writing(wire_out) as write:

            async def write_lines(chunks: list[bytes]) -> None:
                await write(b"".join([chunk + b"\n" for chunk in chunks]))

            await connection.transport.outbox.empty_into(write_lines, idle=None, interval=0)


@contextmanager
def writing(wire_out: BinaryIO) -> Generator[Callable[[bytes], Awaitable[None]]]:
    """A function that writes all of its bytes, without a thread; one call at a time.

    It raises OSError if the other end is closed.
    """
    loop = asyncio.get_running_loop()
    # A pipe takes 64 KiB at once; what is small enough and finds room needs no thread.
    os.set_blocking(wire_out.fileno(), False)

    async def write(content: bytes) -> None:
        data = memoryview(content)
        while data:
            try:
                written = os.write(wire_out.fileno(), data)
            except BlockingIOError:
                await _writable(loop, wire_out.fileno())
                continue
            data = data[written:]

    try:
        yield write
    finally:
        with contextlib.suppress(OSError):
            os.set_blocking(wire_out.fileno(), True)


class _Waiting(io.RawIOBase):
    """Reads a descriptor that may not block: a terminal or a socket that is standard input
    and output at once does not, since the writer's end must not.
    """

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any, /) -> int:
        while True:
            try:
                return os.readv(self._descriptor, [buffer])
            except BlockingIOError:
                waiting = select.poll()
                waiting.register(self._descriptor, select.POLLIN)
                waiting.poll()


async def _writable(loop: asyncio.AbstractEventLoop, descriptor: int) -> None:
    ready = loop.create_future()
    loop.add_writer(descriptor, lambda: ready.done() or ready.set_result(None))
    try:
        await ready
    finally:
        loop.remove_writer(descriptor)


@asynccontextmanager
async def lines(wire_in: BinaryIO, limit: int) -> AsyncGenerator[asyncio.Queue[bytes | None]]:
    """The lines of a stream; None: it ended.

    A thread reads them: a file or a terminal cannot be waited for otherwise. It reads no
    further than a few lines ahead of who takes them.
    """
    loop = asyncio.get_running_loop()
    queue: asyncio.Queue[bytes | None] = asyncio.Queue()
    room = threading.Semaphore(64)
    stopped = threading.Event()

    def put(line: bytes | None) -> None:
        with contextlib.suppress(RuntimeError):
            loop.call_soon_threadsafe(queue.put_nowait, line)

    def read() -> None:
        buffered = io.BufferedReader(_Waiting(wire_in.fileno()))
        while not stopped.is_set():
            room.acquire()
            line = buffered.readline(limit + 2)
            whole = line.endswith(b"\n")
            while line and not whole:
                # Too long: the rest of it is read and thrown away.
                rest = buffered.readline(65_536)
                if not rest:
                    break
                whole = rest.endswith(b"\n")
            if not line:
                return
            put(line)

    def read_to_the_end() -> None:
        try:
            read()
        except OSError as failed:
            # A socket was reset, or a terminal is gone: nothing more comes.
            logger.debug("the input ended: %s", failed)
        finally:
            put(None)

    # A daemon: a read that waits for a client that never speaks must not keep the process.
    threading.Thread(target=read_to_the_end, daemon=True, name="mcp-sessions stdin").start()

    class Lines(asyncio.Queue[bytes | None]):
        async def get(self) -> bytes | None:
            line = await queue.get()
            room.release()
            return line

    try:
        yield Lines()
    finally:
        stopped.set()
        room.release()
