"""Find what a launcher runs, such as ``npx`` or ``uvx``, so that processes start without it.

A launcher installs a server, starts it, and then only waits for its end. That takes more memory
than many a server.

Rules, owned by ``tests/server/upstream/external/test_launcher.py``:

1. The launcher runs once, until it has started the server. The system says what that is: its
   program, arguments and environment. Then both are killed: the server got no message.
2. What it said holds until the layer is started again, or gets another command.
3. It is the server if no other child of the launcher has the same standard input, output and
   directory as the launcher.
4. On any doubt each process starts through the launcher, and a line in the log says why. It is a
   doubt if a file of the server is gone. It is one, too, if a process ends before its first message
   which the launcher can start.
5. A client waits for the launcher as long as a start may take. Then its process starts through the
   launcher, which goes on for the others.
6. A directory or a variable that names a session or a principal is no other's. So a launcher that
   gets one starts each process itself.
"""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
from collections.abc import Awaitable, Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Final

from mcp_sessions.background import Background
from mcp_sessions.external_server import StdioServer
from mcp_sessions.server.upstream.external.process import ChildProcess

logger = logging.getLogger(__name__)

_LAUNCHERS: Final = (("npx",), ("npm", "exec"), ("npm", "x"), ("uvx",), ("uv", "tool", "run"))
_LOOKS: Final = 0.01
"""Seconds between two looks at the processes of the launcher."""

_INSTALLS: Final = 10
"""Times of a start that a launcher has: it may have to download and install the server first."""


@dataclass(frozen=True, slots=True)
class Command:
    """A command as the system starts it."""

    program: str
    arguments: tuple[str, ...]
    """The first one is its name."""

    env: dict[str, str]
    files: tuple[str, ...]
    """Paths that it needs."""

    def gone(self) -> str | None:
        return next((path for path in self.files if not os.path.exists(path)), None)


class _Doubt(Exception):
    """It is not certain what the launcher runs."""


class Launcher:
    """The launcher of one command.

    Args:
        server: The command. It need not be a launcher.
        start: Starts it once.
        background: Runs the search. It ends with it.
    """

    def __init__(
        self,
        server: StdioServer,
        start: Callable[[StdioServer], Awaitable[ChildProcess]],
        background: Background,
    ) -> None:
        self._server = server
        self._start = start
        self._background = background
        self._seconds = _INSTALLS * server.start_timeout
        self._found: Command | None = None
        self._is_known = not _is_launcher(server)
        self._looking: asyncio.Task[None] | None = None
        self._is_doubted = False
        self._retries = 0

    async def command(self) -> Command | None:
        """Return what to start. None: the command as it was given."""
        if not self._is_known:
            if self._looking is None:
                self._looking = self._background.run("finding what a launcher runs", self._look())
            # Another start waits for it, too. If the launcher installs for longer, it goes on.
            await asyncio.wait({self._looking}, timeout=self._server.start_timeout)
        found = self._found
        if found is None or self._is_doubted:
            return None
        gone = found.gone()
        if gone is not None:
            self._give_up(f"{gone} is gone")
        return self._found

    def began(self, *, directly: bool, answered: bool) -> None:
        """Note that a process sent its first message, or ended before it.

        Args:
            directly: Whether it was started without the launcher.
            answered: False: it ended.
        """
        if directly and not answered:
            self._is_doubted = True
            self._retries += 1
        elif not directly and self._is_doubted:
            self._is_doubted = False
            if answered and self._found is not None:
                self._give_up("without it, a process ended")

    def retries(self) -> bool:
        """Whether a start that ended has to be made again, with the launcher."""
        self._retries -= (does := self._retries > 0)
        return does

    def _give_up(self, why: str) -> None:
        self._found = None
        logger.warning("%s: each process starts through %s: %s", *self._names(), why)

    def _names(self) -> tuple[str, str]:
        return self._server.title, os.path.basename(self._server.command)

    async def _look(self) -> None:
        process: ChildProcess | None = None
        try:
            process = await self._start(self._server)
            async with asyncio.timeout(self._seconds):
                while (found := _started_by(process.pid, self._server)) is None:
                    if process.has_ended:
                        raise _Doubt("it ended")
                    await asyncio.sleep(_LOOKS)
            self._found = found
            logger.info("%s: its processes start without %s", *self._names())
        except _Doubt as doubt:
            self._give_up(str(doubt))
        except TimeoutError:
            self._give_up(f"it started nothing in {self._seconds:g} seconds")
        except OSError as failed:
            self._give_up(str(failed.strerror))
        finally:
            self._is_known = True
            if process is not None:
                process.kill()
                await process.stop()


def _is_launcher(server: StdioServer) -> bool:
    words = (os.path.basename(server.command), *server.args)
    is_one = any(words[: len(each)] == each for each in _LAUNCHERS)
    return is_one and not server.has_template and os.path.isdir("/proc/self/task")


def _started_by(launcher: int, server: StdioServer) -> Command | None:
    """Return the server that a launcher started. None: there is none yet.

    Raises:
        _Doubt: It may be none.
    """
    try:
        servers = [each for each in children_of(launcher) if _is_alike(each, launcher)]
        if not servers:
            return None
        if len(servers) > 1:
            raise _Doubt("it runs several processes")
        return _command_of(servers[0], server)
    except (FileNotFoundError, ProcessLookupError):
        # It ended meanwhile.
        return None
    except PermissionError as failed:
        raise _Doubt("its processes cannot be read") from failed


def _is_alike(child: int, launcher: int) -> bool:
    return _words(child, "cmdline") not in ([], _words(launcher, "cmdline")) and all(
        os.readlink(f"/proc/{child}/{name}") == os.readlink(f"/proc/{launcher}/{name}")
        for name in ("fd/0", "fd/1")
    )


def _command_of(pid: int, server: StdioServer) -> Command:
    arguments, pairs = _words(pid, "cmdline"), _words(pid, "environ")
    env = dict(each.split("=", 1) for each in pairs if "=" in each)
    path = env.get("PATH", os.defpath)
    program = shutil.which(arguments[0], path=path)
    if program is None or not os.path.samefile(program, f"/proc/{pid}/exe"):
        raise _Doubt("its process has another name than its program")
    if not os.path.samefile(f"/proc/{pid}/cwd", server.cwd or os.curdir):
        raise _Doubt("it changes the directory")
    given = server.env.get("PATH", "").split(os.pathsep)
    own = [each for each in path.split(os.pathsep) if each not in given]
    needed = [each for each in (program, *arguments, *own) if os.path.isabs(each)]
    files = tuple(each for each in needed if os.path.exists(each))
    return Command(program, tuple(arguments), env, files)


def _words(pid: int, name: str) -> list[str]:
    with open(f"/proc/{pid}/{name}", "rb") as file:
        return [os.fsdecode(each) for each in file.read().split(b"\0")[:-1]]


_GONE = (FileNotFoundError, ProcessLookupError, PermissionError)


def children_of(pid: int) -> list[int]:
    """Return the children of a process: those of each of its threads."""
    found: list[int] = []
    with suppress(*_GONE):
        for thread in os.listdir(f"/proc/{pid}/task"):
            with open(f"/proc/{pid}/task/{thread}/children") as file:
                found += map(int, file.read().split())
    return found


def memory_of(pid: int) -> int | None:
    """Return the bytes that a process and its descendants take. A page that several processes
    share counts as a part for each. None: the system does not say.
    """
    sizes = [size for each in _tree(pid) if (size := _size(each)) is not None]
    return sum(sizes) if sizes else None


def _tree(pid: int) -> Iterator[int]:
    yield pid
    for child in children_of(pid):
        yield from _tree(child)


def _size(pid: int) -> int | None:
    with suppress(*_GONE), open(f"/proc/{pid}/smaps_rollup") as file:
        for line in file:
            if line.startswith("Pss:"):
                return int(line.split()[1]) * 1024
    return None
