"""Send the command's logs to stderr, one record on a line, as text or as JSON.

The library logs to ``mcp_sessions.*`` and configures nothing; this command configures it. The
library logs no whole session id, no token and no key. Other libraries promise no such thing, so
``--log-level`` sets ``mcp_sessions.*`` alone. Theirs stay at warnings: at debug level the MCP SDK,
for example, logs whole messages.

``serve --audit FILE|-`` writes a JSON object on a line for each request that was served. Each line
is one write at the end of the file, so that several processes may share it. If the file was moved
away, a new one is made. If a write fails, requests are served all the same. The log says so once,
and again once writing works again.
"""

from __future__ import annotations

import json
import logging
import os
import select
import sys
import threading
from collections.abc import Mapping
from datetime import UTC, datetime
from types import TracebackType
from typing import Any, TextIO

from mcp_sessions.errors import ConfigurationError
from mcp_sessions.unopened import reason_of

logger = logging.getLogger(__name__)


LEVELS = ("debug", "info", "warning", "error")
FORMATS = ("text", "json")

# Attributes that every record has. Any other came as `extra=`, and belongs in the JSON.
_STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}


def configure(
    *, level: str, format: str, access: bool = False, stream: TextIO | None = None
) -> None:
    """Send the process's logs to stderr. A second call replaces the first.

    Args:
        level: One of ``LEVELS``: the lowest level that ``mcp_sessions.*`` logs.
        format: One of ``FORMATS``.
        access: Whether ``mcp_sessions.access`` logs, at any level.
        stream: Instead of stderr, for tests.
    """
    # FastMCP adds handlers with a format of their own when it is imported.
    os.environ.setdefault("FASTMCP_LOG_ENABLED", "false")
    if format == "json":
        os.environ["FASTMCP_LOG_ENABLED"] = "false"
        _log_what_python_prints()
    handler = NeverWaiting(sys.stderr if stream is None else stream)
    handler.setFormatter(JsonFormatter() if format == "json" else TextFormatter())
    root = logging.getLogger()
    for old in root.handlers[:]:
        root.removeHandler(old)
    root.addHandler(handler)
    root.setLevel(logging.WARNING)
    logging.getLogger("mcp_sessions").setLevel(level.upper())
    logging.getLogger("mcp_sessions.access").setLevel(logging.INFO if access else logging.WARNING)


def is_json() -> bool:
    return any(isinstance(handler.formatter, JsonFormatter) for handler in logging.root.handlers)


def say(message: str, level: int = logging.INFO, **members: object) -> None:
    record = logging.LogRecord("mcp_sessions.cli", level, "", 0, message, (), None)
    vars(record).update(members)
    print(JsonFormatter().format(record), file=sys.stderr, flush=True)


def complain(program: str, message: str) -> None:
    if is_json():
        say(f"{program}: {message}", logging.ERROR)
    else:
        print(f"{program}: {message}", file=sys.stderr)


def take_over() -> None:
    """Remove handlers that write to a terminal from the loggers of the target and its imports.
    Their records then go the way of all others. This happens only with JSON: text may have any
    format.
    """
    if not is_json():
        return
    for name in list(logging.root.manager.loggerDict):
        logger = logging.getLogger(name)
        for handler in logger.handlers[:]:
            if _writes_to_terminal(handler):
                logger.removeHandler(handler)
                logger.propagate = True
    for handler in logging.root.handlers[:]:
        if _writes_to_terminal(handler) and not isinstance(handler.formatter, JsonFormatter):
            logging.root.removeHandler(handler)


def _writes_to_terminal(handler: logging.Handler) -> bool:
    stream: object = getattr(handler, "stream", None)
    # Handlers of Rich have a console instead.
    return stream in (sys.stderr, sys.stdout) or hasattr(handler, "console")


def _log_what_python_prints() -> None:
    logging.captureWarnings(True)
    log = logging.getLogger("mcp_sessions.cli")

    def uncaught(
        kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        log.critical("uncaught: %s", kind.__name__, exc_info=(kind, error, trace))

    def log_uncaught(args: threading.ExceptHookArgs | sys.UnraisableHookArgs) -> None:
        if args.exc_value is not None:
            uncaught(args.exc_type, args.exc_value, args.exc_traceback)

    sys.excepthook = uncaught
    threading.excepthook = sys.unraisablehook = log_uncaught


class NeverWaiting(logging.StreamHandler[TextIO]):
    """Write lines without waiting. If the reader of the log's pipe is slow, lines are left out and
    the server continues. Once the pipe accepts text again, a line says how many lines are missing.
    """

    _left_out = 0
    _cut = ""
    """Text that ends the last line, if it was cut."""

    def emit(self, record: logging.LogRecord) -> None:
        try:
            text = self.format(record) + self.terminator
            if self._left_out:
                text = f"{self._cut}{self._missing()}{self.terminator}{text}"
            at_once = _PIPE_BUF if text.isascii() else _PIPE_BUF // 4
            for start in range(0, len(text), at_once):
                if not _takes(self.stream):
                    self._left_out += 1
                    self._cut = self.terminator if start else self._cut
                    return
                self.stream.write(text[start : start + at_once])
                self.flush()
            self._left_out, self._cut = 0, ""
        except Exception:
            self.handleError(record)

    def _missing(self) -> str:
        said = f"{self._left_out} log lines were dropped: the reader of the log is too slow"
        return self.format(
            logging.LogRecord("mcp_sessions.cli", logging.WARNING, "", 0, said, (), None)
        )


_PIPE_BUF: int = getattr(select, "PIPE_BUF", 512)
"""Bytes that a pipe takes whole and at once, if it takes any (POSIX)."""


def _takes(stream: TextIO) -> bool:
    if not hasattr(select, "poll"):
        return True
    pipe = select.poll()
    try:
        pipe.register(stream, select.POLLOUT)
    except (OSError, ValueError, TypeError):
        # It has no descriptor. The write itself shows what is wrong with it.
        return True
    return bool(pipe.poll(0))


class TextFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        # A peer's text may have line breaks, which must not forge a record.
        text = " ".join(record.getMessage().splitlines())
        line = f"{time_of(record)} {record.levelname} {record.name}: {text}"
        return f"{line}\n{trace}" if (trace := _traceback(self, record)) else line


class JsonFormatter(logging.Formatter):
    """Format a record as a JSON object on one line. ``extra=`` members become its members."""

    def format(self, record: logging.LogRecord) -> str:
        content: dict[str, object] = {
            "time": time_of(record),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if trace := _traceback(self, record):
            content["traceback"] = trace
        for name, value in extra_of(record).items():
            content.setdefault(name, value)
        return json.dumps(content, default=str)


def extra_of(record: logging.LogRecord) -> dict[str, object]:
    members: Mapping[str, object] = vars(record)
    return {name: value for name, value in members.items() if name not in _STANDARD}


def time_of(record: logging.LogRecord) -> str:
    moment = datetime.fromtimestamp(record.created, UTC)
    return moment.isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _traceback(formatter: logging.Formatter, record: logging.LogRecord) -> str:
    return formatter.formatException(record.exc_info) if record.exc_info else ""


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
