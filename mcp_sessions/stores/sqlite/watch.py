"""Whether a file that is served is still the one at its path.

A deleted file stays open for who has it open. So all calls would succeed, and all of it would be
gone with the process. Another process could serve a new file at the same path meanwhile. So the
places are looked at before a call is served, at most every ``FRESH`` seconds, and twice a second by
the way.

A file that is emptied or cut has the same inode. So the file may not become shorter than this
process and other programs made it. The file is never opened here: a process that closes any
descriptor of a file loses all its locks on the file (POSIX), SQLite's included, and another program
that reads the file would then delete its log.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from pathlib import Path
from time import monotonic

from mcp_sessions.errors import StoreRefused

logger = logging.getLogger(__name__)

FRESH = 0.05
"""Seconds for which a look is good."""


class Watch:
    def __init__(self, path: Path, files: Sequence[Path]) -> None:
        self._path = path
        self._files = files
        self._known: dict[Path, tuple[int, int]] = {}
        self._length = 0
        """Bytes that the file has at least."""

        self._looked_at = 0.0
        self._lost: Path | None = None

    def begin(self, length: int) -> None:
        """Watch the files that are there now.

        Args:
            length: See :meth:`note`.
        """
        found = ((file, _identity(file)) for file in self._files)
        self._known = {file: identity for file, identity in found if identity is not None}
        self._lost = None
        self.note(length)

    def note(self, length: int) -> None:
        """Note that the file is as it should be now.

        Args:
            length: Bytes that the committed pages take. The file may be longer or shorter, until
                the write-ahead log is copied.
        """
        try:
            self._length = min(length, os.stat(self._files[0]).st_size)
        except OSError:
            # The next look says so.
            self._length = length

    def end(self) -> None:
        self._known, self._lost = {}, None

    @property
    def is_lost(self) -> bool:
        return self._lost is not None

    def look(self, *, now: float | None = None) -> None:
        """Look if the last look is old.

        Args:
            now: Seconds of a clock that nobody sets; None: look in any case.

        Raises:
            StoreRefused: A file was deleted, moved, replaced or overwritten. It is served again
                if the file is back.
        """
        if now is None or now - self._looked_at >= FRESH:
            self._looked_at = now if now is not None else monotonic()
            self._compare()
        if self._lost is not None:
            raise StoreRefused(
                f"{self._lost} was deleted, moved, replaced or overwritten while it is served. "
                "Restore it, or restart the server",
                "lost",
            )

    def _compare(self) -> None:
        lost = next((file for file, known in self._known.items() if _identity(file) != known), None)
        if lost is None and self._known and not self._is_whole():
            lost = self._files[0]
        if lost is not None and self._lost is None:
            logger.error(
                "%s was deleted, moved, replaced or overwritten while it is served: requests are "
                "refused. Restore it, or restart the server",
                lost,
            )
        elif lost is None and self._lost is not None:
            logger.warning("%s is back: requests are served again", self._path)
        self._lost = lost

    def _is_whole(self) -> bool:
        try:
            size = os.stat(self._files[0]).st_size
        except OSError:
            return False
        return 0 < size >= self._length


def _identity(file: Path) -> tuple[int, int] | None:
    try:
        found = os.stat(file)
    except OSError:
        return None
    return found.st_dev, found.st_ino
