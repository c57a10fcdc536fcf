"""The directories that are made for sessions (``{session}`` in ``cwd``), and their end.

Rules, owned by ``tests/server/upstream/stdio/test_directories.py``:

1. A directory is its session's, whichever process runs there. It is deleted with all that it holds
   once the session is over, and no process runs there.
2. One for a process outside of any session is deleted with that process: nobody has its name again.
3. A session that may go on keeps its directory: its process ended, it is another replica's now, or
   the layer stops and the store outlives it.
4. What cannot be deleted is a line in the log.
"""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
from collections import Counter
from typing import Final

from mcp_sessions.background import Background

logger = logging.getLogger(__name__)

_KNOWN: Final = 10_000
"""Sessions whose directories are known. Those of older ones stay."""


class Directories:
    """Those of one command.

    Args:
        lasting: Sessions outlive this process.
    """

    def __init__(self, *, lasting: bool) -> None:
        self._is_lasting = lasting
        self._of: dict[str, str] = {}
        """By session: its directory."""

        self._processes = Counter[str]()
        """By directory: how many run there."""

        self._over: set[str] = set()
        """Those that are deleted once nothing runs there."""

        self._background = Background()

    async def enter(self, path: str, cwd: str, session: str | None) -> None:
        """A process begins there.

        Args:
            path: What is deleted in the end: it names the session, or whose else it is.
            cwd: Where it runs, there or below.
            session: Whose it is; None: of no session.

        Raises:
            OSError: It cannot be made.
        """
        self._processes[path] += 1
        if session is None:
            self._over.add(path)
        else:
            self._of.pop(session, None)
            self._of[session] = path
            if len(self._of) > _KNOWN:
                del self._of[next(iter(self._of))]
        try:
            await asyncio.to_thread(os.makedirs, cwd, 0o700, True)
        except BaseException:
            self.leave(path)
            raise

    def leave(self, path: str) -> None:
        """A process that began there is no more."""
        self._processes[path] -= 1
        if self._processes[path] <= 0:
            del self._processes[path]
            if path in self._over:
                self._over.discard(path)
                self._background.run("the end of a directory", self._delete(path))

    def session_over(self, session: str, before: str | None = None) -> None:
        """Nobody comes back for a session.

        Args:
            before: Its directory, if it ran there before the layer was started; None: unknown.
        """
        path = self._of.pop(session, before)
        if path is not None:
            self._over.add(path)
            # Of one in which nothing runs it is now.
            self._processes[path] += 1
            self.leave(path)

    async def close(self) -> None:
        """No process runs any more."""
        if not self._is_lasting:
            for session in list(self._of):
                self.session_over(session)
        if self._background.tasks:
            await asyncio.wait(self._background.tasks)
        await self._background.close()

    async def _delete(self, path: str) -> None:
        if path in self._processes:
            # It was needed again meanwhile.
            return
        try:
            await asyncio.to_thread(shutil.rmtree, path)
        except FileNotFoundError:
            # Its own process may have done so.
            pass
        except OSError as failed:
            logger.warning("%s cannot be deleted: %s", path, failed.strerror)
