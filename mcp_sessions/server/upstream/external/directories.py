"""Make directories for sessions (``{session}`` in ``cwd``), and delete them.

Rules, owned by ``tests/server/upstream/external/command/test_directories.py``:

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
from collections import Counter
from typing import Final

from mcp_sessions.background import Background
from mcp_sessions.core.recent import Recent

logger = logging.getLogger(__name__)

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
