"""Speak with a child that is a process: one message on a line.

A malformed message fails only the request that it answers, even if it stands on several lines, as a
program writes JSON for people. A text that is no message is skipped, as noise. Too much noise
between two messages ends the process.

In the modern era everything comes on one pipe, too: a listen is a request that is answered at its
end.

`Directories` makes directories for sessions (``{session}`` in ``cwd``), and deletes them. Rules,
owned by ``tests/server/upstream/external/command/test_directories.py``:

1. A directory belongs to its session, whichever process runs there. It is deleted with its content
   once the session has ended, and no process runs there.
2. A directory for a process outside of any session is deleted with that process: no other process
   gets its name.
3. A session that may continue keeps its directory. Its process may have ended, another replica may
   have it now, or the layer stops and the store outlives it.
4. A directory that cannot be deleted is a line in the log.
"""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Mapping
from functools import partial
from secrets import token_hex
from typing import Any, Final

from mcp_sessions import method_names
from mcp_sessions.background import Background
from mcp_sessions.core.messages import encode
from mcp_sessions.core.outline import Outline
from mcp_sessions.core.recent import Recent
from mcp_sessions.errors import LimitReached
from mcp_sessions.external_server import ExternalServer, StdioServer
from mcp_sessions.ids import SessionId, name_for_handlers
from mcp_sessions.principal import Principal
from mcp_sessions.server.reporting.reached_limits import ReachedLimits
from mcp_sessions.server.upstream.external.child import Child, ChildWire
from mcp_sessions.server.upstream.external.child_requests import Client, Forgotten, Later, Waiting
from mcp_sessions.server.upstream.external.launcher import Launcher, memory_of
from mcp_sessions.server.upstream.external.output import Line, TooLong
from mcp_sessions.server.upstream.external.process import ChildProcess, Label, Processes
from mcp_sessions.server.upstream.external.reading import more_than, of_ends, outlined
from mcp_sessions.server.upstream.external.server_stream import ReadStream, ServerStream
from mcp_sessions.server.upstream.external.slot import Slot
from mcp_sessions.server.upstream.external.starts import Starter
from mcp_sessions.server.upstream.external.warm import WarmProcesses
from mcp_sessions.server.upstream.port import UpstreamError

logger = logging.getLogger(__name__)

_JUNK: Final = 1_048_576
"""Bytes that are no message, between two messages, at most."""

_UNREAD: Final = 4
"""Unread bytes at most, in longest messages, of a child that gets messages without waiting. Most of
them are answers to its pings.
"""

_DIGITS: Final = 32
"""Hexadecimal digits that name a principal or a session to its process."""


class StdioChildren(Starter):
    """Start processes.

    Args:
        longest: Bytes of one of their messages, at most.
        lasting: Whether sessions outlive this process.
    """

    def __init__(self, server: StdioServer, longest: int, *, lasting: bool) -> None:
        self._directories = Directories(lasting=lasting)
        self._server = server
        self._longest = longest
        self._limits = ReachedLimits(time.monotonic)
        self._processes = Processes()
        self._background = Background()
        self._launcher = Launcher(server, self._look, self._background)
        self._warm = WarmProcesses(
            server.warm, server.child_idle, self._start_waiting, self._ended_before
        )

    def run(self, room: Callable[[], int]) -> None:
        self._warm.run(room)

    def use(self, server: ExternalServer) -> None:
        if not isinstance(server, StdioServer):
            raise AssertionError("it is of another kind")
        self._server = server
        self._launcher = Launcher(server, self._look, self._background)
        self._warm.change(server.warm, server.child_idle)

    def start_first(self) -> bool:
        server = self._server
        if server.per == "shared" or server.has_template:
            return False
        self._warm.start_first(server.title)
        return True

    def retries(self) -> bool:
        return self._launcher.retries()

    async def start(self, slot: Slot, principal: Principal) -> Child:
        process = await self._warm.take(slot.label)
        if process is not None:
            return self._child(process, slot)
        return await self._start(slot, principal)

    def _child(
        self, process: ChildProcess, slot: Slot, ended: Callable[[], None] | None = None
    ) -> Child:
        began = partial(self._launcher.began, directly=process.is_direct)
        wire = StdioWire(process, self._longest, self._limits, began=began, ended=ended)
        return Child(wire, slot)

    async def _look(self, server: StdioServer) -> ChildProcess:
        label = Label(lambda: f"{server.title}, {os.path.basename(server.command)}")
        return await self._processes.start(server, label, *server.env_and_cwd("", ""))

    async def _run(self, label: Label, env: dict[str, str], cwd: str | None) -> ChildProcess:
        server = self._server
        found = await self._launcher.command()
        if found is None:
            return await self._processes.start(server, label, env, cwd)
        command = (found.program, *found.arguments)
        process = await self._processes.start(server, label, found.env, cwd, command)
        process.is_direct = True
        return process

    async def _start_waiting(self, label: Label) -> ChildProcess:
        return await self._run(label, *self._server.env_and_cwd("", ""))

    def _ended_before(self, process: ChildProcess) -> None:
        self._launcher.began(directly=process.is_direct, answered=False)
        self._launcher.retries()

    async def _start(self, slot: Slot, principal: Principal) -> Child:
        server = self._server
        # Paths and variables hold a digest: a name chosen by a client means nothing there.
        who = name_for_handlers(repr((principal.client_id, principal.issuer, principal.subject)))
        own = name_for_handlers(slot.key) if isinstance(slot.key, str) else None
        names = who[:_DIGITS], (own or token_hex(32))[:_DIGITS]
        env, cwd = server.env_and_cwd(*names)
        directory = server.directory_of(*names)
        if cwd is not None and directory is not None:
            await self._directories.enter(directory, cwd, own)
        elif cwd is not None and server.has_cwd_template:
            await asyncio.to_thread(os.makedirs, cwd, 0o700, True)
        leave = partial(self._directories.leave, directory) if directory is not None else None
        try:
            process = await self._run(Label(slot.label), env, cwd)
        except BaseException:
            if leave is not None:
                leave()
            raise
        return self._child(process, slot, leave)

    def session_ended(self, session_id: SessionId) -> None:
        own = name_for_handlers(session_id)
        # If the session did not run here since the layer started, its principal is unknown.
        by_name = None if self._server.names_principals else own[:_DIGITS]
        before = self._server.directory_of("", by_name) if by_name is not None else None
        self._directories.session_ended(own, before)

    async def close(self) -> None:
        await self._background.close()
        await self._warm.close()
        await self._processes.close()
        await self._directories.close()


class StdioWire(ChildWire):
    """The pipes of one process.

    Args:
        longest: Bytes of one of its messages, at most.
        limits: Told of each answer that is longer.
        began: Called once with ``answered``: whether it sent a message before it ended.
        ended: Called once nothing of the process is left.
    """

    _child: Child

    def __init__(
        self,
        process: ChildProcess,
        longest: int,
        limits: ReachedLimits,
        *,
        began: Callable[..., None] | None = None,
        ended: Callable[[], None] | None = None,
    ) -> None:
        self._process = process
        self._began = began
        self._ended = ended
        self._longest = longest
        self._limits = limits
        self._junk = 0
        self._spread: Outline | None = None
        """Message on several lines that is not complete."""

        self._is_stopping = False
        self._dying: asyncio.Task[None] | None = None

    def begin(self, child: Child) -> None:
        self._child = child
        self._process.output.read(
            self._longest, self._take_line, self._output_ended, child.background
        )

    def given_to(self, client: Client) -> None:
        self._process.label.given_to(client.label)

    async def stop(self) -> None:
        self._is_stopping = True
        try:
            await self._process.stop()
            if self._dying is not None:
                # Everything that it waits for has happened.
                await self._dying
        finally:
            await self._child.background.close()
            self._process.output.leave()
            ended, self._ended = self._ended, None
            if ended is not None:
                ended()

    def kill(self) -> None:
        self._process.kill()

    async def last_words(self) -> str:
        return await self._process.last_words()

    def room(self) -> Coroutine[Any, Any, None] | None:
        return self._until_it_takes() if self._process.is_full else None

    async def _until_it_takes(self) -> None:
        try:
            await self._process.room()
        except OSError:
            # What ends closes its input, too. How it ended says more.
            if not await self._process.exits():
                self._break("it closed its input")

    def write(self, message: bytes) -> None:
        self._process.write(message)
        if self._process.untaken > _UNREAD * self._longest:
            self._break("it does not read its input")

    async def hand_over(self, message: bytes) -> None:
        room = self.room()
        if room is not None:
            await room
        self.write(message)

    def submit(self, waiting: Waiting, message: Mapping[str, Any]) -> None:
        self._process.write(encode(message))

    def _break(self, failure: str) -> None:
        """Kill the process, which fails its open requests: it can no longer be used."""
        if not self._child.failure:
            self._child.failure = failure
            if self._child.result:
                # Otherwise its start fails, and that is logged.
                logger.warning("%s: the layer kills it: %s", self._process.label(), failure)
        self._process.kill()
        self._process.output.leave()

    def _begins(self, *, answered: bool) -> None:
        began, self._began = self._began, None
        if began is not None:
            began(answered=answered)

    @property
    def pid(self) -> int:
        return self._process.pid

    def memory(self) -> int | None:
        return memory_of(self._process.pid)

    def _output_ended(self) -> None:
        child = self._child
        if not self._is_stopping:
            self._begins(answered=False)
        child.give_up()
        if child.result and not self._is_stopping and not child.failure:
            self._dying = child.background.run("the last output of a child", self._died())

    async def _died(self) -> None:
        logger.warning("%s: %s", self._process.label(), await self.last_words())

    # --- its messages ------------------------------------------------------------------------

    def _take_line(self, line: Line) -> Later | None:
        if isinstance(line, TooLong):
            self._too_long(line)
            return None
        noise = self._junk
        later = self._child.take(line)
        if self._junk == noise:
            self._junk, self._spread = 0, None
            if self._began is not None:
                self._begins(answered=True)
        else:
            self._continue_spread(line)
        return later

    def _continue_spread(self, line: bytes) -> None:
        if self._spread is None:
            if not line.lstrip().startswith(b"{"):
                return
            self._spread = Outline()
        self._spread.feed(line + b"\n")
        if self._spread.is_whole:
            said, self._spread = outlined(self._spread, "is written on several lines"), None
            if said.is_answer or said.has_method:
                self._child.cannot_read(said, 0)
                self._junk = 0

    def noise(self, size: int, why: str) -> None:
        self._child.warn("noise", f"its output is not a message: it {why}")
        self._junk += size + 1
        if self._junk > _JUNK:
            self._break("its output is not a message")

    def _too_long(self, line: TooLong) -> None:
        said = of_ends(line.head, line.tail, f"has {more_than(self._longest)}")
        if said.is_answer:
            self._limits.reached(LimitReached("max_answer", self._longest))
        if not self._child.dropped(said, self._longest):
            # A request may wait for it.
            self._break(f"a message of {more_than(self._longest)}")

    # --- in the modern era -------------------------------------------------------------------

    def stream(self) -> ReadStream | None:
        return None

    async def listen(
        self,
        request_id: int,
        params: dict[str, Any],
        stream: ServerStream,
    ) -> float | None:
        try:
            await self._child.exchange(request_id, None, method_names.LISTEN, params)
        except UpstreamError:
            if self._child.has_ended:
                raise Forgotten from None
            if not stream.is_open:
                raise
        return None


_KNOWN: Final = 10_000
"""Sessions whose directories are known, at most. Those of older ones stay."""


class Directories:
    """Manage the directories of one command.

    Args:
        lasting: Whether sessions outlive this process.
    """

    def __init__(self, *, lasting: bool) -> None:
        self._is_lasting = lasting
        self._of = Recent[str, str](_KNOWN)
        """Session → its directory."""

        self._processes = Counter[str]()
        """Directory → number of processes that run there."""

        self._left: set[str] = set()
        """Directories that are deleted once no process runs there."""

        self._background = Background()

    async def enter(self, path: str, cwd: str, session: str | None) -> None:
        """Make a directory for a process that begins there.

        Args:
            path: The directory to delete in the end. It names the session or another owner.
            cwd: The working directory, there or below.
            session: The session of the process. None: it has none.

        Raises:
            OSError: It cannot be made.
        """
        self._processes[path] += 1
        if session is None:
            self._left.add(path)
        else:
            self._of.keep(session, path)
        try:
            await asyncio.to_thread(os.makedirs, cwd, 0o700, True)
        except BaseException:
            self.leave(path)
            raise

    def leave(self, path: str) -> None:
        self._processes[path] -= 1
        if self._processes[path] <= 0:
            del self._processes[path]
            if path in self._left:
                self._left.discard(path)
                self._background.run("the end of a directory", self._delete(path))

    def session_ended(self, session: str, before: str | None = None) -> None:
        """Delete the directory of a session that cannot resume.

        Args:
            before: Its directory, if it ran there before the layer was started. None: unknown.
        """
        path = self._of.pop(session, before)
        if path is not None:
            self._left.add(path)
            # If no process runs there, it is deleted now.
            self._processes[path] += 1
            self.leave(path)

    async def close(self) -> None:
        if not self._is_lasting:
            for session in list(self._of):
                self.session_ended(session)
        if self._background.tasks:
            await asyncio.wait(self._background.tasks)
        await self._background.close()

    async def _delete(self, path: str) -> None:
        if path in self._processes:
            # A process needed it again meanwhile.
            return
        try:
            await asyncio.to_thread(shutil.rmtree, path)
        except FileNotFoundError:
            # Its own process may have deleted it.
            pass
        except OSError as failed:
            logger.warning("%s cannot be deleted: %s", path, failed.strerror)
