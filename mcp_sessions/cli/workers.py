"""Serve with several processes that share one listening socket, for ``serve --workers N``.

Rules, owned by ``tests/cli/test_workers.py``:

1. The first worker is started alone. It reports an error of the target or the store, and then no
   other worker is started. Only the first worker tries the servers outside of it.
2. A worker that exits is started again after a back-off, so that a worker that crashes at once is
   not restarted as fast as it crashes. The others serve meanwhile, from the same socket.
3. SIGTERM and SIGINT are passed on. The keeper exits once every worker has drained. It closes its
   socket at once: while it has it open, the system accepts connections that no process serves.
4. A worker stops if its keeper dies.
5. SIGHUP is passed on, if workers have files to read again. A worker that starts gets it when it
   handles it: before that the signal would end it.
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
from typing import cast

from mcp_sessions.core.backoff import Backoff
from mcp_sessions.protocol_versions import Eras
from mcp_sessions.security import mint_key
from mcp_sessions.serve.systemd import READY, STOPPING, VARIABLE, notify

logger = logging.getLogger(__name__)

STEADY = 60.0
"""Seconds after which a worker's exit is not the consequence of its start."""

_INTERRUPTED = 130


class Workers:
    """Start and keep the processes that serve.

    Args:
        arguments: Arguments of ``serve``. Each worker gets them as well.
        number: Number of workers.
        keys: ``MCP_SESSIONS_KEYS``; None: new keys for all workers, which last as long as this
            process.
        reloads: Whether they read files again at SIGHUP.
    """

    def __init__(
        self,
        arguments: Sequence[str],
        listener: socket.socket,
        *,
        number: int,
        keys: str | None,
        reloads: bool,
    ) -> None:
        self._command = [sys.executable, "-m", "mcp_sessions.cli", "serve"]
        self._arguments = arguments
        self._number = number
        self._listener = listener
        self._keys_end = not keys
        self._environment = {**os.environ, "MCP_SESSIONS_KEYS": keys or mint_key()}
        # systemd learns of all of them from this process.
        self._environment.pop(VARIABLE, None)
        self._reloads = reloads
        self._running: set[asyncio.subprocess.Process] = set()
        self._stopping = asyncio.Event()
        self._interrupted = False
        # Only this process holds the writing end. The system closes it when this process exits.
        self._alive, self._keeps = os.pipe()

    async def run(self, on_started: Callable[[Eras], None]) -> int:
        """Keep the workers until stopped, and return the exit status.

        Args:
            on_started: Called once, when the first worker accepts connections, with the eras that
                it speaks.
        """
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._stop, number)
        if self._reloads:
            loop.add_signal_handler(signal.SIGHUP, self._reload)
        first, is_ready = await self._start(is_first=True)
        if not (eras := await is_ready):
            status = await first.wait()
            return self._status() if self._stopping.is_set() else abs(status) or 1
        on_started(cast("Eras", eras.decode()))
        notify(READY)
        others = [self._keep(number, None) for number in range(2, self._number + 1)]
        await asyncio.gather(self._keep(1, first), *others)
        return self._status()

    def _status(self) -> int:
        return _INTERRUPTED if self._interrupted else 0

    def _stop(self, number: signal.Signals) -> None:
        self._interrupted = self._interrupted or number == signal.SIGINT
        self._stopping.set()
        notify(STOPPING)
        self._listener.close()
        for process in self._running:
            process.send_signal(number)

    def _reload(self) -> None:
        for process in self._running:
            process.send_signal(signal.SIGHUP)

    async def _keep(self, number: int, process: asyncio.subprocess.Process | None) -> None:
        loop, backoff = asyncio.get_running_loop(), Backoff(base=1, cap=30)
        while not self._stopping.is_set():
            begun = loop.time()
            try:
                if process is None:
                    process, _ = await self._start()
            except OSError as failed:
                # The system lacks resources. It may have them later, and the others serve.
                logger.error("worker %d cannot be started: %s", number, failed)
            else:
                status = await process.wait()
                self._running.discard(process)
                process = None
                if self._stopping.is_set():
                    return
                logger.error("worker %d exited with status %d; it is restarted", number, status)
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
        """Start a worker. The future has its eras once it accepts connections, and is empty if it
        exits before.
        """
        listener = self._listener.fileno()
        says_from, says_to = os.pipe()
        # The worker inherits that, until it handles the signal (`handle_early`).
        blocked = {signal.SIGHUP} if self._reloads else set[signal.Signals]()
        signal.pthread_sigmask(signal.SIG_BLOCK, blocked)
        try:
            process = await asyncio.create_subprocess_exec(
                *self._command,
                "--worker",
                f"{listener},{says_to},{self._alive},{int(self._keys_end)},{int(is_first)}",
                *self._arguments,
                stdin=asyncio.subprocess.DEVNULL,
                pass_fds=(listener, says_to, self._alive),
                env=self._environment,
                # Ctrl-C is for this process, which passes it on.
                start_new_session=True,
            )
        finally:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, blocked)
            os.close(says_to)
        self._running.add(process)
        if self._stopping.is_set():
            # The keeper was stopped while this worker started.
            process.send_signal(signal.SIGTERM)
        return process, asyncio.get_running_loop().run_in_executor(None, _said, says_from)


_LONGEST = 16
"""Bytes of the eras, at most."""


def _said(descriptor: int) -> bytes:
    try:
        return os.read(descriptor, _LONGEST)
    finally:
        os.close(descriptor)


def is_first_worker(descriptors: str) -> bool:
    return descriptors.endswith(",1")


class Worker:
    def __init__(self, descriptors: str) -> None:
        listener, self._says_to, self._alive, ends, _ = map(int, descriptors.split(","))
        self.keys_end = bool(ends)
        """Whether the keys of the workers end with their keeper."""

        self.listener = socket.socket(fileno=listener)

    def begin(self) -> None:
        threading.Thread(target=self._watch, daemon=True, name="the keeper's life").start()

    def is_ready(self, eras: Eras) -> None:
        os.write(self._says_to, eras.encode())
        os.close(self._says_to)

    def _watch(self) -> None:
        os.read(self._alive, 1)
        os.kill(os.getpid(), signal.SIGTERM)
