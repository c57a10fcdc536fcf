"""``serve --workers N``: processes that share one listening socket, and the one that keeps them.

Rules, owned by ``tests/cli/test_workers.py``:

1. The first worker is started alone. What is wrong with the target or the store it says, and
   then nothing more is started. Only that one tries the servers outside of it.
2. A worker that ends is started again, after a back-off: who dies at once is not started as
   fast as it dies. The others serve meanwhile, from the same socket.
3. SIGTERM and SIGINT are passed on, and end when every worker has drained. The socket is closed
   here at once: as long as anybody has it open, the system lets clients connect to nobody.
4. A worker whose keeper died stops as well.
"""

from __future__ import annotations

import asyncio
import logging
import os
import random
import signal
import socket
import sys
import threading
from collections.abc import Callable, Sequence

from mcp_sessions.core.backoff import Backoff
from mcp_sessions.security import mint_key

logger = logging.getLogger(__name__)

STEADY = 60.0
"""Seconds after which a worker's end is not the consequence of its start."""

_INTERRUPTED = 130


class Workers:
    """The processes that serve.

    Args:
        arguments: Of ``serve``; each worker gets them as well.
        number: How many there are.
        keys: ``MCP_SESSIONS_KEYS``; None: keys that end with this process, the same for all.
    """

    def __init__(
        self, arguments: Sequence[str], number: int, listener: socket.socket, keys: str | None
    ) -> None:
        self._command = [sys.executable, "-m", "mcp_sessions.cli", "serve"]
        self._arguments = arguments
        self._number = number
        self._listener = listener
        self._environment = {**os.environ, "MCP_SESSIONS_KEYS": keys or mint_key()}
        self._running: set[asyncio.subprocess.Process] = set()
        self._stopping = asyncio.Event()
        self._interrupted = False
        # Only this process has the end to write to: it is closed when this process is gone.
        self._alive, self._keeps = os.pipe()

    async def run(self, on_started: Callable[[], None]) -> int:
        """Keep them until stopped; the exit status.

        Args:
            on_started: Called once, when the first takes connections.
        """
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._stop, number)
        first, is_ready = await self._start(is_first=True)
        if not await is_ready:
            status = await first.wait()
            return self._status() if self._stopping.is_set() else abs(status) or 1
        on_started()
        others = [self._keep(number, None) for number in range(2, self._number + 1)]
        await asyncio.gather(self._keep(1, first), *others)
        return self._status()

    def _status(self) -> int:
        return _INTERRUPTED if self._interrupted else 0

    def _stop(self, number: signal.Signals) -> None:
        self._interrupted = self._interrupted or number == signal.SIGINT
        self._stopping.set()
        self._listener.close()
        for process in self._running:
            process.send_signal(number)

    async def _keep(self, number: int, process: asyncio.subprocess.Process | None) -> None:
        loop, backoff = asyncio.get_running_loop(), Backoff(base=1, cap=30)
        while not self._stopping.is_set():
            begun = loop.time()
            try:
                if process is None:
                    process, _ = await self._start()
            except OSError as failed:
                # The system has no room for it: perhaps later, and the others serve.
                logger.error("worker %d cannot be started: %s", number, failed)
            else:
                status = await process.wait()
                self._running.discard(process)
                process = None
                if self._stopping.is_set():
                    return
                logger.error("worker %d ended with status %d; it is started again", number, status)
            if loop.time() - begun >= STEADY:
                backoff.progressed()
            try:
                async with asyncio.timeout(backoff.failed(random.random())):
                    await self._stopping.wait()
            except TimeoutError:
                continue

    async def _start(
        self, *, is_first: bool = False
    ) -> tuple[asyncio.subprocess.Process, asyncio.Future[bytes]]:
        """A worker, and what it says when it takes connections; nothing, if it ends before."""
        listener = self._listener.fileno()
        says_from, says_to = os.pipe()
        try:
            process = await asyncio.create_subprocess_exec(
                *self._command,
                "--worker",
                f"{listener},{says_to},{self._alive},{int(is_first)}",
                *self._arguments,
                stdin=asyncio.subprocess.DEVNULL,
                pass_fds=(listener, says_to, self._alive),
                env=self._environment,
                # Ctrl-C is for this process, which passes it on.
                start_new_session=True,
            )
        finally:
            os.close(says_to)
        self._running.add(process)
        if self._stopping.is_set():
            # It was told to stop while this one was started.
            process.send_signal(signal.SIGTERM)
        return process, asyncio.get_running_loop().run_in_executor(None, _said, says_from)


def _said(descriptor: int) -> bytes:
    try:
        return os.read(descriptor, 1)
    finally:
        os.close(descriptor)


def is_first_worker(descriptors: str) -> bool:
    """Whether it is the one that is started alone.

    Args:
        descriptors: The value of ``--worker``.
    """
    return descriptors.endswith(",1")


class Worker:
    """What a worker was given by its keeper.

    Args:
        descriptors: The value of ``--worker``.
    """

    def __init__(self, descriptors: str) -> None:
        listener, self._says_to, self._alive, _ = map(int, descriptors.split(","))
        self.listener = socket.socket(fileno=listener)

    def begin(self) -> None:
        """Stop when the keeper is gone."""
        threading.Thread(target=self._watch, daemon=True, name="the keeper's life").start()

    def is_ready(self) -> None:
        """Say that connections are taken."""
        os.write(self._says_to, b"1")
        os.close(self._says_to)

    def _watch(self) -> None:
        os.read(self._alive, 1)
        os.kill(os.getpid(), signal.SIGTERM)
