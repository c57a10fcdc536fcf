"""Run child processes: started without a shell, read line by line within bounds, ended as a
group.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import re
import signal
import sys
from asyncio.subprocess import DEVNULL, Process, SubprocessStreamProtocol
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import cast

from mcp_sessions.background import Background
from mcp_sessions.external_server import StdioServer
from mcp_sessions.server.upstream.external.output import Output

logger = logging.getLogger(__name__)

_HERE = Path(__file__).parent
_CHUNK = 65_536
_INPUT, _OUTPUT = 0, 1
_UNTAKEN = 65_536
"""Bytes that a process has not read. Above it, a sender that can wait sends no more."""

_CLOSING = 1.0
"""Seconds that a process has to exit by itself after its input ended."""

_TERMINATING = 2.0
"""Seconds that it has after SIGTERM. Then it is killed."""

_DRAINING = 1.0
"""Seconds for reading the last output of a process that has ended."""


class _Protocol(SubprocessStreamProtocol):
    """Take the output of a process, and its exit, even while other processes hold its pipes."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(limit=_CHUNK, loop=loop)
        self.exited = asyncio.Event()
        self.of_no_use = asyncio.Event()
        """Set once it has ended, or takes no input: it never answers input that it did not read."""

        self.output = Output()
        self.written = asyncio.Event()
        """Set once it writes nothing more."""

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
        # `takes_input` shows that it takes no more. Some releases of asyncio would log the
        # exception as one that was never retrieved.
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
    def __init__(self, of: Callable[[], str] | None = None) -> None:
        self._of = of

    def __call__(self) -> str:
        return self._of() if self._of is not None else "a server that waits"

    def given_to(self, of: Callable[[], str]) -> None:
        self._of = of


class Processes:
    """Start processes. None outlives the layer: the guard (``guard.py``) kills those that it
    leaves.
    """

    def __init__(self) -> None:
        self._living: set[int] = set()
        self._guard: Process | None = None
        self._pipe: int | None = None
        self._starting = asyncio.Lock()

    async def start(
        self,
        server: StdioServer,
        label: Label,
        env: dict[str, str],
        cwd: str | None,
        command: Sequence[str] = (),
    ) -> ChildProcess:
        """Start one process.

        Args:
            label: Returns its name for the log.
            env: All of its environment.
            cwd: Its working directory.
            command: Its program, its name and its arguments. Empty: those of the server.

        Raises:
            OSError: There are too many processes or files, or its directory does not exist.
        """
        loop = asyncio.get_running_loop()
        async with self._starting:
            guard = await self._guarded()
        trampoline = str(_HERE / "trampoline.py")
        command = command or (server.program, server.command, *server.args)
        arguments = (str(os.getpid()), str(guard), *command)
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
        given = {name: env[name] for name in server.given if name in env}
        return ChildProcess(process, transport, protocol, processes=self, label=label, given=given)

    def group_ended(self, group: int) -> None:
        self._living.discard(group)
        self._write_guard(b"-%d\n" % group)

    async def close(self) -> None:
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
            logger.warning("the guard of the child processes was killed; it is restarted")
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
            self._write_guard(b"+%d\n" % group)
        return write

    def _write_guard(self, line: bytes) -> None:
        if self._pipe is not None:
            # A guard that was killed is started again with the next process.
            with contextlib.suppress(BrokenPipeError):
                os.write(self._pipe, line)


class ChildProcess:
    def __init__(
        self,
        process: Process,
        transport: asyncio.SubprocessTransport,
        protocol: _Protocol,
        *,
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
        self.is_direct = False
        """Whether it runs without its launcher."""

        self._is_swept = False
        self._is_stopping = False
        self._background = Background()
        self._background.run("watching a child process", self._watch())
        self._errors = self._background.run("reading a child's stderr", self._stderr.read())

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def has_ended(self) -> bool:
        return self._exited.is_set()

    async def ended(self) -> None:
        await self._exited.wait()

    async def exits(self) -> bool:
        """Whether it exits by itself, now that it takes no input any more."""
        return await self._ends_within(_DRAINING)

    async def last_words(self) -> str:
        if await self._ends_within(_DRAINING):
            await asyncio.wait({self._errors}, timeout=_DRAINING)
        code = self._process.returncode
        ended = "it did not end" if code is None else f"it ended with status {code}"
        said = self._stderr.last_words
        if code == 0 and not said:
            said = "an MCP server runs until its input ends"
        return f"{ended}: {said}" if said else ended

    @property
    def untaken(self) -> int:
        return self._stdin.transport.get_write_buffer_size()

    @property
    def is_full(self) -> bool:
        return not self._protocol.takes_input or self.untaken > _UNTAKEN

    def write(self, line: bytes) -> None:
        """Send one line, without its end. Never waits. If the process takes no input, the line is
        dropped.
        """
        # Some event loops report a closed pipe only in a later turn.
        if self._protocol.takes_input and not self._stdin.is_closing():
            self._stdin.write(line + b"\n")

    async def room(self) -> None:
        """Wait until it has read most of its input.

        Raises:
            OSError: It takes no input any more.
        """
        while self.is_full:
            if not self._protocol.takes_input:
                raise BrokenPipeError
            await self._stdin.drain()
            # A task that is woken before this one may fill it again.
            await asyncio.sleep(0)

    async def stop(self) -> None:
        """End it and all of its group: its input ends, then it gets SIGTERM, then it is killed."""
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
        if not self._is_swept:
            self._signal(signal.SIGKILL)

    async def _watch(self) -> None:
        await self._protocol.of_no_use.wait()
        if not await self.exits() and not self._is_stopping:
            logger.warning("a child process is killed: it closed its input and did not exit")
            self.kill()
        await self._exited.wait()
        # These are processes that it left behind. The number is still theirs: no other process gets
        # it while the group exists.
        self._signal(signal.SIGKILL)
        self._is_swept = True
        self._processes.group_ended(self.pid)
        # Its output is read. But a process that left its group may hold the pipes for ever.
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
        # macOS refuses if only a zombie is left.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, number)


_LINE = 1_000
"""Characters of a line that are logged, at most."""

_LINES = 100
"""Lines that are logged in each second, at most."""

_LONGEST_REASON = 300
"""Characters of a line that a client gets, at most."""

_KEPT = 30
"""Last lines that are searched for its last words."""

_LEAST_SECRET = 6
"""Characters, at least, of an environment value that is hidden. Shorter ones stand in any text."""

_NODE = re.compile(r"Node\.js v\d")
"""Last line of a crash of Node, which does not name the reason."""

_FRAME = "│║┃├╟┠╞ "
"""What some programs draw around a line."""

_RAISED = re.compile(r"(?:Uncaught )?[\w.]*(?:Error|Exception)\b.*:|\[?[\w.]+Error\b")
_NPM = re.compile(
    r"npm (?:error|ERR!)\s*"
    r"(?:\d{3}\s*|code \w+|A complete log .*|\S*\.log|\d{3} (?:Note that|tarball,) .*)?$"
)
"""Lines around the reason for which npm failed."""


class StandardError:
    """Read the standard error of one process.

    Args:
        label: Returns the name of the process for the log.
        given: Variables that its environment alone has, by name. In all output ``$NAME`` replaces
            each value.
    """

    def __init__(
        self, stream: asyncio.StreamReader, label: Callable[[], str], given: Mapping[str, str]
    ) -> None:
        self._stream = stream
        self._label = label
        self._secrets = _secrets(given)
        self._longest = max((len(value.encode()) for value, _ in self._secrets), default=0)
        self._lines = deque[str](maxlen=_KEPT)
        self._second, self._logged = 0.0, 0

    @property
    def last_words(self) -> str:
        return reason_of(self._lines)[:_LONGEST_REASON]

    async def read(self) -> None:
        rest, is_cut = b"", False
        while chunk := await self._stream.read(_CHUNK):
            *lines, rest = (rest + chunk).split(b"\n")
            if is_cut:
                # The rest may begin in the middle of a hidden value.
                is_cut, lines, rest = not lines, lines[1:], rest if lines else b""
            elif len(rest) > _CHUNK + self._longest:
                is_cut, lines, rest = True, [*lines, rest], b""
            self._take([line for line in lines if line.strip()])
        if rest.strip():
            self._take([rest])

    def _take(self, lines: Sequence[bytes]) -> None:
        now = asyncio.get_running_loop().time()
        last = len(lines) - _KEPT
        for number, line in enumerate(lines):
            if now - self._second >= 1:
                if self._logged > _LINES:
                    left_out = self._logged - _LINES
                    logger.warning("%s: %d lines were dropped", self._label(), left_out)
                self._second, self._logged = now, 0
            self._logged += 1
            if self._logged <= _LINES or number >= last:
                self._say(self._printable(line))

    def _say(self, text: str) -> None:
        self._lines.append(text)
        if self._logged <= _LINES:
            logger.info("%s: %s", self._label(), text.strip())

    def _printable(self, line: bytes) -> str:
        # A value that is cut would not be found. So the search covers more than is logged.
        text = line[: 4 * _LINE + self._longest].decode("utf-8", "replace").rstrip()
        for value, name in self._secrets:
            text = text.replace(value, f"${name}")
        return "".join(character if character.isprintable() else "?" for character in text[:_LINE])


def reason_of(lines: Iterable[str]) -> str:
    """Return the last of these lines, without the lines with which some programs end: Node its
    version, npm the path of its log.
    """
    said = [line for line in lines if any(character.isalnum() for character in line)]
    if said and _NODE.match(said[-1]):
        raised = [line for line in said if _RAISED.match(line)]
        said = raised or said[:-1] or said
    return next((line for line in reversed(said) if not _NPM.match(line)), "").strip(_FRAME)


def _secrets(given: Mapping[str, str]) -> list[tuple[str, str]]:
    lines = {
        line.strip(): name
        for name, value in given.items()
        for line in (value, *value.splitlines())
        if len(line.strip()) >= _LEAST_SECRET
    }
    return sorted(lines.items(), key=lambda each: -len(each[0]))
