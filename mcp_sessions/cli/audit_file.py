"""Write ``serve --audit FILE|-``: a JSON object on a line for each request that was served.

Each line is one write at the end of the file, so that several processes may share it. If the file
was moved away, a new one is made. If a write fails, requests are served all the same. The log says
so once, and again once writing works again.
"""

from __future__ import annotations

import json
import logging
import os
from typing import Any

from mcp_sessions.cli.logs import extra_of, time_of
from mcp_sessions.errors import ConfigurationError
from mcp_sessions.unopened import reason_of

logger = logging.getLogger(__name__)

STDOUT = "-"
_STDOUT = 1


class AuditFile(logging.Handler):
    """Write the records of ``mcp_sessions.audit`` to a file or to standard output.

    Args:
        path: The file, or ``-`` for standard output.

    Raises:
        ConfigurationError: The file cannot be written.
    """

    def __init__(self, path: str) -> None:
        super().__init__()
        self._path = path
        self._lost = 0
        self._is_torn = False
        try:
            self._file = _STDOUT if path == STDOUT else _opened(path)
            os.fstat(self._file)
        except OSError as failed:
            raise ConfigurationError(f"--audit {path}: {reason_of(failed, path)}") from failed

    def install(self) -> None:
        logger = logging.getLogger("mcp_sessions.audit")
        logger.addHandler(self)
        logger.propagate = False
        # An application's own configuration may have disabled every logger that there was.
        logger.disabled = False
        logger.setLevel(logging.INFO)

    def emit(self, record: logging.LogRecord) -> None:
        """Write one line. A failed write does not fail the request."""
        members: dict[str, Any] = {"time": time_of(record), **extra_of(record)}
        line = json.dumps(members, default=str).encode() + b"\n"
        try:
            self._write(b"\n" + line if self._is_torn else line)
        except OSError as failed:
            self._lost += 1
            if self._lost == 1:
                logger.warning(
                    "--audit: requests are served, but not recorded: %s", failed.strerror
                )
            return
        if self._lost:
            logger.warning("--audit: requests are recorded again; %d are missing", self._lost)
            self._lost = 0

    def _write(self, line: bytes) -> None:
        if self._path != STDOUT and not _is_there(self._path, self._file):
            file = _opened(self._path)
            os.close(self._file)
            self._file, self._is_torn = file, False
        written = os.write(self._file, line)
        self._is_torn = written < len(line)
        if self._is_torn:
            # The next line starts on a new line.
            raise OSError(0, "the line was written in part")

    def close(self) -> None:
        if self._path != STDOUT and self._file >= 0:
            os.close(self._file)
            self._file = -1
        super().close()


def _opened(path: str) -> int:
    # Without blocking: to open a named pipe without a reader is then an error, not a wait.
    how = os.O_WRONLY | os.O_APPEND | os.O_CREAT | getattr(os, "O_NONBLOCK", 0)
    return os.open(path, how, 0o600)


def _is_there(path: str, file: int) -> bool:
    try:
        return os.path.samestat(os.stat(path), os.fstat(file))
    except FileNotFoundError:
        return False
