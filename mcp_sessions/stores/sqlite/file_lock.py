"""One process at a time: a lock on a file, which the system releases when its holder dies.

The lock is a POSIX record lock on a file of its own, next to the one that it stands for: it
belongs to the process, so neither a forked child nor ``kill -9`` leaves it behind. Its text
is the holder's process id, for people. Such a lock does not keep out its own process, and
closing any descriptor of the file releases it; a table of what this process holds answers
for both.
"""

from __future__ import annotations

import asyncio
import logging
import os
import threading
import time
from pathlib import Path

from mcp_sessions.errors import ConfigurationError

try:
    import fcntl
except ImportError:  # pragma: no cover
    fcntl = None

logger = logging.getLogger(__name__)

PATIENCE = 3.0
"""Seconds for which the lock is asked for before somebody else is taken to have it for good:
who is started again may meet the last moments of the process before."""

_QUIET = 0.3
"""Seconds of it that are not worth a line in the log: an operator's command has the lock for a
moment."""

_held: set[str] = set()
_taking = threading.Lock()
"""Two event loops of this process may ask at once, and the system would let both have it."""


class Locked(Exception):
    def __init__(self, holder: int | None) -> None:
        super().__init__(holder)
        self.holder = holder
        """Its process id; None: it did not write it down yet."""

    def __str__(self) -> str:
        return f"process {self.holder}" if self.holder is not None else "another process"


class FileLock:
    """A lock that is held from :meth:`acquire` to :meth:`release`, or to the process's end.

    Args:
        path: The lock's file. It is made when needed, and never removed.
    """

    def __init__(self, path: Path) -> None:
        # Two names of one file are one lock.
        self._path = os.path.realpath(path)
        self.path = Path(self._path)
        """The path of the file."""

        self._file: int | None = None

    def acquire(self) -> None:
        """Take the lock, or fail at once.

        Raises:
            Locked: This or another process has it.
            ConfigurationError: This system has no such locks.
            OSError: The file cannot be made.
        """
        if fcntl is None:
            raise ConfigurationError("this system has no POSIX file locks, which sqlite:// needs")
        with _taking:
            self._acquire()

    def _acquire(self) -> None:
        assert fcntl is not None
        if self._path in _held:
            raise Locked(os.getpid())
        file = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError):
            holder = os.read(file, 32).strip()
            os.close(file)
            raise Locked(int(holder) if holder.isdigit() else None) from None
        except OSError:
            os.close(file)
            raise
        if not _is_at(file, self._path):
            # Another process deleted the file meanwhile, and may have the lock of a new one.
            os.close(file)
            raise Locked(None)
        os.ftruncate(file, 0)
        os.pwrite(file, b"%d\n" % os.getpid(), 0)
        self._file = file
        _held.add(self._path)

    async def acquire_patiently(self, path: Path) -> None:
        """Take the lock, and wait for a while for whoever has it.

        Args:
            path: The file that the lock protects, for the log.

        Raises:
            Locked, ConfigurationError, OSError: See :meth:`acquire`.
        """
        started, is_logged = time.monotonic(), False
        while True:
            try:
                self.acquire()
                return
            except Locked as held:
                waited = time.monotonic() - started
                # This process does not release its own lock because of a wait.
                if waited >= (_QUIET if held.holder == os.getpid() else PATIENCE):
                    raise
                if waited >= _QUIET and not is_logged:
                    is_logged = True
                    logger.info("%s is in use by %s: waiting for up to %g s", path, held, PATIENCE)
                await asyncio.sleep(0.02)

    def release(self) -> None:
        if self._file is not None:
            with _taking:
                os.close(self._file)
                self._file = None
                _held.discard(self._path)


def _is_at(file: int, path: str) -> bool:
    try:
        there = os.stat(path)
    except OSError:
        return False
    return os.path.samestat(os.fstat(file), there)
