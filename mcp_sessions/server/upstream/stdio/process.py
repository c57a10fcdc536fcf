"""Child processes: started without a shell, read line by line within bounds, ended as a group."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import sys
from asyncio.subprocess import DEVNULL, Process, SubprocessStreamProtocol
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import cast

from mcp_sessions.background import Background
from mcp_sessions.server.upstream.stdio.output import Output
from mcp_sessions.server.upstream.stdio.stderr import StandardError
from mcp_sessions.stdio_server import StdioServer

logger = logging.getLogger(__name__)

_HERE = Path(__file__).parent
_CHUNK = 65_536
_INPUT, _OUTPUT = 0, 1
_UNTAKEN = 65_536
"""Bytes that a process did not take, above which nothing more is handed to it by who can wait."""

_CLOSING = 1.0
"""Seconds that a process has to end by itself when its input ended."""

_TERMINATING = 2.0
"""Seconds that it has after SIGTERM; then it is killed."""

_DRAINING = 1.0
"""Seconds in which the last words of a process that is over are read."""


class _Protocol(SubprocessStreamProtocol):
    """Hears that the process is over, also while others hold its pipes; and what it writes."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(limit=_CHUNK, loop=loop)
        self.exited = asyncio.Event()
        self.of_no_use = asyncio.Event()
        """It is over, or takes no input: what it did not read it never answers."""

        self.output = Output()
        self.written = asyncio.Event()
        """It writes nothing any more."""

        self.takes_input = True

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        pipe = cast(asyncio.SubprocessTransport, transport).get_pipe_transport(_OUTPUT)
        self.output.opened(cast(asyncio.ReadTransport, pipe))

    def pipe_data_received(self, fd: int, data: bytes | str) -> None:
        if fd == _OUTPUT and isinstance(data, bytes):
            self.output.feed(data)
        else:
            super().pipe_data_received(fd, data)

    def pipe_connection_lost(self, fd: int, exc: Exception | None) -> None:
        # That it takes no more is seen in `takes_input`. Some releases of asyncio would log the
        # exception as one that nobody asked for.
        super().pipe_connection_lost(fd, None if fd == _INPUT else exc)
        if fd == _OUTPUT:
            self.written.set()
            self.output.end()
        elif fd == _INPUT:
            self.takes_input = False
            self.of_no_use.set()

    def process_exited(self) -> None:
        super().process_exited()
        self.exited.set()
        self.of_no_use.set()


class Label:
    """Whose a process is, for the log.

    Args:
        of: Says it; None: it is nobody's yet.
    """

    def __init__(self, of: Callable[[], str] | None = None) -> None:
        self._of = of

    def __call__(self) -> str:
        return self._of() if self._of is not None else "a server that waits"

    def given_to(self, of: Callable[[], str]) -> None:
        """It is another one's from now on."""
        self._of = of


class Processes:
    """Starts them. None outlives the layer: the guard (``guard.py``) kills what it leaves."""

    def __init__(self) -> None:
        self._living: set[int] = set()
        self._guard: Process | None = None
        self._pipe: int | None = None
        self._starting = asyncio.Lock()

    async def start(
        self, server: StdioServer, label: Label, env: dict[str, str], cwd: str | None
    ) -> ChildProcess:
        """Start one process.

        Args:
            label: Says whose it is, for the log.
            env: All of its environment.
            cwd: Where it runs.

        Raises:
            OSError: There are too many processes or files, or its directory is gone.
        """
        loop = asyncio.get_running_loop()
        async with self._starting:
            guard = await self._guarded()
        trampoline = str(_HERE / "trampoline.py")
        arguments = (str(os.getpid()), str(guard), server.program, server.command, *server.args)
        transport, protocol = await loop.subprocess_exec(
            lambda: _Protocol(loop),
            *(sys.executable, "-I", "-S", trampoline, *arguments),
            env=env,
            cwd=cwd,
            start_new_session=True,
            pass_fds=(guard,),
        )
        self._living.add(transport.get_pid())
        process = Process(transport, protocol, loop)
        given = {name: env[name] for name in server.given}
        return ChildProcess(process, transport, protocol, self, label, given)

    def over(self, group: int) -> None:
        """Nothing of a process group is left."""
        self._living.discard(group)
        self._tell(b"-%d\n" % group)

    async def close(self) -> None:
        """All of them are over: the guard ends."""
        async with self._starting:
            if self._pipe is not None:
                os.close(self._pipe)
                self._pipe = None
            if self._guard is not None:
                await self._guard.wait()

    async def _guarded(self) -> int:
        if self._pipe is not None and self._guard is not None and self._guard.returncode is None:
            return self._pipe
        if self._pipe is not None:
            logger.warning("the guard of the child processes was killed; it is started again")
            os.close(self._pipe)
            self._pipe = None
        read, write = os.pipe()
        try:
            self._guard = await asyncio.create_subprocess_exec(
                *(sys.executable, "-I", "-S", str(_HERE / "guard.py")),
                stdin=read,
                stdout=DEVNULL,
                start_new_session=True,
            )
        except BaseException:
            os.close(write)
            raise
        finally:
            os.close(read)
        self._pipe = write
        for group in self._living:
            self._tell(b"+%d\n" % group)
        return write

    def _tell(self, line: bytes) -> None:
        if self._pipe is not None:
            # One that was killed is started again with the next process.
            with contextlib.suppress(BrokenPipeError):
                os.write(self._pipe, line)


class ChildProcess:
    """One process, and the group that it leads."""

    def __init__(
        self,
        process: Process,
        transport: asyncio.SubprocessTransport,
        protocol: _Protocol,
        processes: Processes,
        label: Label,
        given: Mapping[str, str],
    ) -> None:
        if process.stdin is None or process.stderr is None:
            raise AssertionError("it was started with three pipes")
        self.output = protocol.output
        self._process = process
        self._stdin = process.stdin
        self._stderr = StandardError(process.stderr, label, given)
        self._transport = transport
        self._protocol = protocol
        self._exited = protocol.exited
        self._processes = processes
        self.label = label
        self._is_swept = False
        self._is_stopping = False
        self._background = Background()
        self._background.run("watching a child process", self._watch())
        self._errors = self._background.run("reading a child's stderr", self._stderr.read())

    @property
    def pid(self) -> int:
        """Its id, and its group's."""
        return self._process.pid

    @property
    def is_over(self) -> bool:
        """Whether it ended."""
        return self._exited.is_set()

    async def ended(self) -> None:
        """Return when it ended."""
        await self._exited.wait()

    async def last_words(self) -> str:
        """How it ended, if it did, and what it last wrote on stderr: one line for a client."""
        if await self._ends_within(_DRAINING):
            await asyncio.wait({self._errors}, timeout=_DRAINING)
        code = self._process.returncode
        ended = "it did not end" if code is None else f"it ended with status {code}"
        said = self._stderr.last_words
        return f"{ended}: {said}" if said else ended

    @property
    def untaken(self) -> int:
        """Bytes that it was handed and did not take yet."""
        return self._stdin.transport.get_write_buffer_size()

    @property
    def is_full(self) -> bool:
        """Whether :meth:`room` has something to wait for, or to say."""
        return not self._protocol.takes_input or self.untaken > _UNTAKEN

    def write(self, line: bytes) -> None:
        """Hand over one line, without its end. Never waits; what it cannot take is dropped."""
        # Of one that is closed not every event loop says so in the same turn.
        if self._protocol.takes_input and not self._stdin.is_closing():
            self._stdin.write(line + b"\n")

    async def room(self) -> None:
        """Wait until it took most of what it was handed.

        Raises:
            OSError: It takes nothing any more.
        """
        while self.is_full:
            if not self._protocol.takes_input:
                raise BrokenPipeError
            await self._stdin.drain()
            # Who is woken before may fill it again.
            await asyncio.sleep(0)

    async def stop(self) -> None:
        """End it and all of its group: its input ends, then it is told, then it is killed."""
        self._is_stopping = True
        try:
            self._stdin.close()
            if not await self._ends_within(_CLOSING):
                self._signal(signal.SIGTERM)
                await self._ends_within(_TERMINATING)
        finally:
            self.kill()
        await self._ends_within(_TERMINATING)
        await asyncio.wait({self._errors}, timeout=_DRAINING)
        await self._background.close()
        self._transport.close()

    def kill(self) -> None:
        """Kill it and all of its group, now."""
        if not self._is_swept:
            self._signal(signal.SIGKILL)

    async def _watch(self) -> None:
        await self._protocol.of_no_use.wait()
        if not await self._ends_within(_DRAINING) and not self._is_stopping:
            logger.warning("a child process is ended: it takes no more input")
            self.kill()
        await self._exited.wait()
        # What it left behind. Nobody else has that number: the group has it, if there is one.
        self._signal(signal.SIGKILL)
        self._is_swept = True
        self._processes.over(self.pid)
        # What it wrote is read; but one that left its group may hold the pipes for ever.
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_DRAINING):
                await self._protocol.written.wait()
                await asyncio.wait({self._errors})
        self._transport.close()

    async def _ends_within(self, seconds: float) -> bool:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._exited.wait()
        return self._exited.is_set()

    def _signal(self, number: signal.Signals) -> None:
        # macOS refuses where nobody but a zombie is left.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, number)
