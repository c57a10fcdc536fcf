import asyncio
import contextlib
import json
import os
import signal
from collections.abc import Mapping, Sequence
from typing import Any

from mcp_sessions_conformance.peer import Era, Failure, Limits, Peer, Sent, Transport
from mcp_sessions_conformance.transcript import Transcript

_MAX_LINE = 16 * 1024 * 1024
_KEPT_STDERR = 4000


class Program:
    def __init__(self, command: Sequence[str], *, ends_within: float) -> None:
        """Describe a program that does not run yet.

        Args:
            ends_within: Seconds after the end of its input, before it is killed.
        """
        self.command = command
        self.ends_within = ends_within
        self.process: asyncio.subprocess.Process | None = None
        self.stderr = ""
        """The end of what it wrote to standard error."""

        self._stderr_reader: asyncio.Task[None] | None = None

    @property
    def runs(self) -> bool:
        return self.process is not None and self.process.returncode is None

    async def start(self) -> asyncio.subprocess.Process:
        try:
            self.process = await asyncio.create_subprocess_exec(
                *self.command,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
                # Its child processes are stopped with it.
                start_new_session=os.name == "posix",
            )
        except (OSError, ValueError) as error:
            raise Failure(f"{self.command[0]} cannot be started: {error}") from None
        self._stderr_reader = asyncio.create_task(self._keep_stderr(self.process))
        return self.process

    async def _keep_stderr(self, process: asyncio.subprocess.Process) -> None:
        if process.stderr is None:
            raise AssertionError("stderr is a pipe")
        while chunk := await process.stderr.read(65_536):
            self.stderr = (self.stderr + chunk.decode(errors="replace"))[-_KEPT_STDERR:]

    async def stop(self) -> None:
        process = self.process
        if process is None:
            return
        if process.stdin is not None:
            process.stdin.close()
        try:
            async with asyncio.timeout(self.ends_within):
                await process.wait()
        except TimeoutError:
            with contextlib.suppress(ProcessLookupError):
                if os.name == "posix":
                    os.killpg(process.pid, signal.SIGKILL)
                else:
                    process.kill()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(3):
                    await process.wait()
        if self._stderr_reader is not None:
            await asyncio.wait([self._stderr_reader], timeout=1)
            self._stderr_reader.cancel()


class StdioPeer(Peer):
    """A pipe that several vectors share, one after the other: see :meth:`lend`."""

    transport: Transport = "stdio"

    def __init__(self, program: Program, era: Era, limits: Limits) -> None:
        super().__init__("pipe", era, transcript=Transcript(), limits=limits)
        self.program = program
        self.is_initialized = False
        self._reader: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Start the program.

        Raises:
            Failure: It cannot be started.
        """
        process = await self.program.start()
        self._reader = asyncio.create_task(self._read(process))

    def lend(self, name: str, transcript: Transcript) -> None:
        """Lend the pipe to the next vector. Messages for the one before are dropped."""
        self.name, self.transcript = name, transcript
        self.arrivals = []
        self.sent = []
        self.problems = []
        self.listens = {}
        self.first_id = self.next_id
        self._bytes = 0

    async def _read(self, process: asyncio.subprocess.Process) -> None:
        if process.stdout is None:
            raise AssertionError("stdout is a pipe")
        rest = b""
        how = "the program closed its output"
        try:
            while chunk := await process.stdout.read(65_536):
                *lines, rest = (rest + chunk).split(b"\n")
                for line in lines:
                    self.took(line, "socket")
                if len(rest) > _MAX_LINE:
                    raise Failure("a line without end came")
        except Failure as flood:
            self.problem(str(flood))
            how = str(flood)
            self.ended_by(how)
            # To its end, unseen: a pipe that nobody reads cannot be closed.
            while await process.stdout.read(65_536):
                pass
        except OSError as error:
            how = f"{type(error).__name__}: {error}"
        except Exception as error:
            # The boundary to a program that may write anything.
            how = f"{type(error).__name__}: {error}"
            self.problem(f"the pipe cannot be read: {how}")
        last = " ".join(self.program.stderr.split())[-300:]
        self.ended_by(f"{how}; on stderr: {last!r}" if last else how)

    async def post(self, message: Any, sent: Sent | None, headers: Mapping[str, str]) -> None:
        await self.frame(json.dumps(message))

    async def frame(self, data: str | bytes) -> None:
        process = self.program.process
        if process is None or process.stdin is None or self.ended:
            raise Failure(f"the pipe is closed: {self.ended}")
        line = data.encode() if isinstance(data, str) else data
        try:
            process.stdin.write(line + b"\n")
            async with asyncio.timeout(self.limits.wait):
                await process.stdin.drain()
        except TimeoutError:
            raise Failure(f"the program read nothing for {self.limits.wait:g} s") from None
        except OSError as error:
            raise Failure(f"the pipe broke: {type(error).__name__}") from None

    async def fence(self) -> None:
        """Await the answer of a ping: messages arrive in order."""
        if self.ended:
            return
        sent = await self.request("ping")
        await self.answer(sent)
        await asyncio.sleep(0.02)

    async def cut(self, what: str) -> None:
        await self.close()

    async def close(self) -> None:
        await self.program.stop()
        if self._reader is not None:
            await asyncio.wait([self._reader], timeout=1)
            self._reader.cancel()
            await asyncio.wait([self._reader], timeout=1)
