"""The demo's stage: a notes server in a process, a line to it that can be cut, and the screen."""

import asyncio
import os
import re
import socket
import struct
import sys
import time
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path

from rich.console import Console
from rich.markup import escape

LOG = "server.log"
NOTES = "notes"


class ServerFailed(Exception):
    """The server did not start."""


BARE = """
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
import sys

file = Path(sys.argv[1])
sys.path.insert(0, str(file.parent))
spec = spec_from_file_location(file.stem, file)
module = module_from_spec(spec)
spec.loader.exec_module(module)
module.mcp.run("streamable-http", host="127.0.0.1", port=0)
"""
"""Serves the ``MCPServer`` of a file with the SDK alone."""


@asynccontextmanager
async def notes_server(target: str, directory: Path) -> AsyncGenerator[int]:
    """Serve ``target``, its notes and its log in ``directory``; yields the port.

    Raises:
        ServerFailed: It ended, or does not say where it listens within 60 s.
    """
    serve = ("-m", "mcp_sessions.cli", "serve", target, "--host", "127.0.0.1", "--port", "0")
    async with process(serve, directory) as port:
        yield port


@asynccontextmanager
async def bare_server(target: str, directory: Path) -> AsyncGenerator[int]:
    """Serve the same without the layer.

    Raises:
        ServerFailed: See ``notes_server``.
    """
    async with process(("-c", BARE, target), directory) as port:
        yield port


@asynccontextmanager
async def process(arguments: tuple[str, ...], directory: Path) -> AsyncGenerator[int]:
    with open(directory / LOG, "wb") as log:  # noqa: ASYNC230  (a new, empty file)
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, *arguments),
            env={**os.environ, "NOTES_DIR": str(directory / NOTES)},
            stdout=log,
            stderr=log,
        )
    try:
        yield await port_of(process, directory)
    finally:
        if process.returncode is None:
            process.terminate()
            try:
                await asyncio.wait_for(process.wait(), 5)
            except TimeoutError:
                process.kill()
                await process.wait()


async def port_of(process: asyncio.subprocess.Process, directory: Path) -> int:
    deadline = time.monotonic() + 60
    while process.returncode is None and time.monotonic() < deadline:
        address = re.search(r"http://127\.0\.0\.1:(\d+)[/ ]", log_of(directory))
        if address is not None:
            return int(address[1])
        await asyncio.sleep(0.05)
    raise ServerFailed(f"the server does not listen (exit status: {process.returncode})")


def log_of(directory: Path) -> str:
    log = directory / LOG
    return log.read_text("utf-8", "replace") if log.exists() else ""


def texts_of(directory: Path) -> dict[str, str]:
    return {path.stem: path.read_text("utf-8") for path in (directory / NOTES).glob("*.md")}


class Relay:
    """A TCP line to a server, which can be cut: both ends then see a reset, as with a lost peer.

    It looks at no byte, so what breaks is the connection and nothing else.
    """

    def __init__(self, target_port: int) -> None:
        self._target_port = target_port
        self._open: set[asyncio.StreamWriter] = set()
        self._is_cut = False
        self.port = 0

    @property
    def open(self) -> int:
        return len(self._open) // 2

    @asynccontextmanager
    async def listening(self) -> AsyncGenerator["Relay"]:
        server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.port = server.sockets[0].getsockname()[1]
        try:
            yield self
        finally:
            server.close()
            self.cut()

    def cut(self) -> int:
        """Reset every open connection, and new ones until ``mend``. How many were open."""
        self._is_cut = True
        number = self.open
        for writer in self._open:
            reset(writer)
        return number

    def mend(self) -> None:
        self._is_cut = False

    async def _serve(self, near: asyncio.StreamReader, near_out: asyncio.StreamWriter) -> None:
        if self._is_cut:
            return reset(near_out)
        try:
            far, far_out = await asyncio.open_connection("127.0.0.1", self._target_port)
        except OSError:
            return reset(near_out)
        ends = {near_out, far_out}
        self._open |= ends
        if self._is_cut:  # while we connected
            for writer in ends:
                reset(writer)
        await asyncio.gather(pass_on(near, far_out), pass_on(far, near_out))
        self._open -= ends


async def pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        while data := await reader.read(65_536):
            writer.write(data)
            await writer.drain()
    except ConnectionError:
        pass
    writer.close()


def reset(writer: asyncio.StreamWriter) -> None:
    """Close with a reset (RST) and without a FIN: there is no time to linger."""
    end: socket.socket = writer.get_extra_info("socket")
    if end.fileno() != -1:  # else it is closed already
        end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()


def chapter(console: Console, title: str) -> None:
    console.print()
    console.print(title, style="bold cyan", highlight=False)


def line(console: Console, text: str) -> None:
    """Print a line as it is: text from the wire is never markup."""
    console.print(escape(text), highlight=False)
