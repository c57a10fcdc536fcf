"""Start processes before a client needs them. They have got no message yet.

Rules:

1. Together with the processes of clients they are never more than ``max_children``.
2. A process that is taken, or dies, is replaced. If it dies again and again, there is a pause.
3. If none was taken for as long as a process may be idle, they end. The next client then waits for
   its start, and causes the next ones to start.
4. The first start of a command is kept here, too. It is not replaced when it is taken, or dies.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable

from mcp_sessions.background import Background
from mcp_sessions.core.backoff import Backoff
from mcp_sessions.server.upstream.external.process import ChildProcess, Label

logger = logging.getLogger(__name__)

_PAUSE = 0.1
"""Seconds between taking a process and starting the next one."""

_LOOK_EVERY = 5.0
"""Seconds between two checks for room."""


class WarmProcesses:
    """Keep the waiting processes of one command.

    Args:
        count: Waiting processes, at most.
        idle: Seconds after which they end if none is taken.
        start: Starts one. Raises ``OSError``.
        ended: Called with one that ended before it was taken.
    """

    def __init__(
        self,
        count: int,
        idle: float,
        start: Callable[[Label], Awaitable[ChildProcess]],
        ended: Callable[[ChildProcess], None],
    ) -> None:
        self._count = count
        self._idle = idle
        self._start = start
        self._ended = ended
        self._first: str | None = None
        """The name of the server whose first start is to be made."""

        self._ready: dict[ChildProcess, Label] = {}
        self._stopping: set[ChildProcess] = set()
        """Processes that died while they waited, until nothing of them is left."""

        self._starting = asyncio.Lock()
        self._wanted = asyncio.Event()
        self._backoff = Backoff(base=1, cap=30)
        self._background = Background()
        self._room: Callable[[], int] | None = None
        """None: it does not run."""

        self._filling: asyncio.Task[None] | None = None
        self._changes = 0
        """How often the command changed."""

    def run(self, room: Callable[[], int]) -> None:
        self._room = room
        if self._count or self._first is not None:
            self._filling = self._background.loop(
                "the start of processes for --warm", lambda: self._fill(room)
            )

    def start_first(self, title: str) -> None:
        self._first = title
        self._wanted.set()
        if self._room is not None and self._filling is None:
            self.run(self._room)

    def change(self, count: int, idle: float) -> None:
        self._count, self._idle = count, idle
        self._changes += 1
        ready, self._ready = list(self._ready), {}
        self._background.run("the end of processes for --warm", _stop_all(ready))
        self._wanted.set()
        if self._room is not None and self._filling is None:
            self.run(self._room)

    async def take(self, of: Callable[[], str]) -> ChildProcess | None:
        if not self._ready and self._starting.locked():
            # A process that is starting counts already.
            async with self._starting:
                pass
        self._wanted.set()
        # The task that watches a dead process ends the processes that it left.
        process = next((each for each in self._ready if not each.has_ended), None)
        if process is not None:
            self._backoff.progressed()
            self._ready.pop(process).given_to(of)
        return process

    async def close(self) -> None:
        await self._background.close()
        await self._end()

    async def _fill(self, room: Callable[[], int]) -> None:
        loop = asyncio.get_running_loop()
        used_at, is_idle = loop.time(), False
        while True:
            if self._first is not None and room() > 0:
                title, self._first = self._first, None
                await self._add(title)
            while not is_idle and len(self._ready) < min(self._count, room()):
                await self._add()
            try:
                async with asyncio.timeout(_LOOK_EVERY):
                    await self._wanted.wait()
                self._wanted.clear()
                used_at, is_idle = loop.time(), False
                # The client that took one gets its handshake and first answer without a start at
                # the same time.
                await asyncio.sleep(_PAUSE)
            except TimeoutError:
                if loop.time() - used_at >= self._idle and not is_idle:
                    is_idle = True
                    await self._end()

    async def _add(self, first: str | None = None) -> None:
        """Start one.

        Args:
            first: The name of the server whose first start it is.
        """
        named = None if first is None else lambda: f"{first}, first start"
        label, changes = Label(named), self._changes
        try:
            async with self._starting:
                process = await self._start(label)
                if changes != self._changes:
                    # It is of the command before.
                    await process.stop()
                    return
                self._ready[process] = label
        except OSError as failed:
            if first is not None:
                warn_of(first, str(failed.strerror))
                return
            logger.warning("a process for --warm cannot be started: %s", failed.strerror)
            await asyncio.sleep(self._backoff.failed(1.0))
            return
        self._background.run("watching a process for --warm", self._watch(process, first))

    async def _watch(self, process: ChildProcess, first: str | None) -> None:
        await process.ended()
        if self._ready.pop(process, None) is None:
            return
        self._stopping.add(process)
        self._ended(process)
        said = await process.last_words()
        if first is not None:
            warn_of(first, said)
        else:
            logger.warning("a process for --warm exited: %s", said)
        await process.stop()
        self._stopping.discard(process)
        await asyncio.sleep(self._backoff.failed(1.0))
        self._wanted.set()

    async def _end(self) -> None:
        ready, self._ready = list(self._ready), {}
        await _stop_all([*ready, *self._stopping])


def warn_of(name: str, why: str) -> None:
    logger.warning(
        "%s failed its first start: %s. Its clients get this error until a start succeeds.",
        name,
        why,
    )


async def _stop_all(processes: Iterable[ChildProcess]) -> None:
    await asyncio.gather(*(process.stop() for process in processes))
