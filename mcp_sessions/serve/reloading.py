"""Read files again while a server runs: at SIGHUP, or when one of them has changed.

Rules, owned by ``tests/serve/test_reloading.py``:

1. One reload runs at a time. If others are asked for meanwhile, one more follows.
2. If a reload fails, nothing has changed, and one line in the log says why.
3. A signal that comes before the server is ready is not lost: the files are read again then.
4. A file has changed if its time, size or number differ from those before the last reload.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
from collections.abc import Awaitable, Callable, Iterable
from types import FrameType

from mcp_sessions.errors import ConfigurationError, StoreUnavailable
from mcp_sessions.serve.systemd import READY, notify, reloading

logger = logging.getLogger(__name__)

LOOKS = 1.0
"""Seconds between two looks at the files."""


class EarlySignal:
    """Handles SIGHUP until the server is ready. Otherwise SIGHUP would end the process."""

    def __init__(self) -> None:
        self.came = False

    def __call__(self, number: int, frame: FrameType | None) -> None:
        self.came = True


def handle_early() -> None:
    """Handle SIGHUP from now on, in a process that reads files again when it is ready."""
    if hasattr(signal, "SIGHUP"):
        signal.signal(signal.SIGHUP, EarlySignal())
        # The process that keeps the workers has it blocked until now.
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGHUP})


class Reloading:
    """Runs reloads, one after the other.

    Args:
        reload: Reads the files, and returns what has changed. It raises ``ConfigurationError`` or
            ``StoreUnavailable`` if it changed nothing.
        files: Are looked at. None: only a signal leads to a reload.
        every: Seconds between two looks.
    """

    def __init__(
        self,
        reload: Callable[[], Awaitable[str]],
        files: Iterable[str] | None = None,
        *,
        every: float = LOOKS,
    ) -> None:
        self._reload = reload
        self._files = tuple(files) if files is not None else None
        self._every = every
        self._asked = asyncio.Event()
        self._stamps = self._look()

    def ask(self) -> None:
        self._asked.set()

    def ask_at_signal(self) -> None:
        """Have the files read again at each SIGHUP, and for one that came early."""
        if not hasattr(signal, "SIGHUP"):
            return
        before = signal.getsignal(signal.SIGHUP)
        asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, self.ask)
        if isinstance(before, EarlySignal) and before.came:
            self.ask()

    async def run(self) -> None:
        while True:
            await self._wait()
            self._asked.clear()
            # Before the files are read: what is written meanwhile is a change.
            self._stamps = self._look()
            await self._once()

    async def _wait(self) -> None:
        while not self._asked.is_set():
            try:
                async with asyncio.timeout(self._every if self._files is not None else None):
                    await self._asked.wait()
            except TimeoutError:
                if self._look() != self._stamps:
                    return

    async def _once(self) -> None:
        notify(reloading())
        try:
            logger.info("reloaded: %s", await self._reload())
        except (ConfigurationError, StoreUnavailable) as wrong:
            logger.error("not reloaded, everything is served as before: %s", wrong)
        finally:
            notify(READY)

    def _look(self) -> list[tuple[int, int, int] | None]:
        return [_stamp(file) for file in self._files or ()]


def _stamp(file: str) -> tuple[int, int, int] | None:
    try:
        found = os.stat(file)
    except OSError:
        return None
    # The time of the last change: it also moves with the mode of a file.
    return found.st_ctime_ns, found.st_size, found.st_ino
