"""Where the command's logs go: stderr, one record per line, as text or as JSON.

The library logs to ``mcp_sessions.*`` and configures nothing; this is the command
doing it. What is logged is the library's business, and it logs no whole session id,
no token and no key. Other libraries promise no such thing, so ``--log-level`` is for
``mcp_sessions.*`` alone and theirs stay at warnings: at debug level the MCP SDK, for
one, logs whole messages.
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
from typing import TextIO

LEVELS = ("debug", "info", "warning", "error")
FORMATS = ("text", "json")

# What every record has; anything else was given as `extra=` and belongs in the JSON.
_STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}


def configure(
    *, level: str, format: str, access: bool = False, stream: TextIO | None = None
) -> None:
    """Send the process's logs to stderr. A second call replaces the first.

    Args:
        level: One of ``LEVELS``: the lowest that ``mcp_sessions.*`` logs.
        format: One of ``FORMATS``.
        access: Whether ``mcp_sessions.access`` logs, whatever the level.
        stream: Instead of stderr, for tests.
    """
    # FastMCP, when it is imported, makes handlers of its own, which write as they like.
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
    """Whether what is written to stderr is to be JSON."""
    return any(isinstance(handler.formatter, JsonFormatter) for handler in logging.root.handlers)


def say(message: str, level: int = logging.INFO, **members: object) -> None:
    """Write a line of this command's own to stderr as JSON, whatever the log's level."""
    record = logging.LogRecord("mcp_sessions.cli", level, "", 0, message, (), None)
    vars(record).update(members)
    print(JsonFormatter().format(record), file=sys.stderr, flush=True)


def complain(program: str, message: str) -> None:
    """Write to stderr, in one line, why this command ends."""
    if is_json():
        say(f"{program}: {message}", logging.ERROR)
    else:
        print(f"{program}: {message}", file=sys.stderr)


def take_over() -> None:
    """Take the handlers that write to a terminal from the loggers that the target, or what it
    imports, gave any: their records go the way of all others. Only if that is JSON: as text
    they may look as they like.
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
    # Rich's handlers have a console instead.
    return stream in (sys.stderr, sys.stdout) or hasattr(handler, "console")


def _log_what_python_prints() -> None:
    """Warnings, and exceptions that nobody catches, become records."""
    logging.captureWarnings(True)
    log = logging.getLogger("mcp_sessions.cli")

    def uncaught(
        kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        log.critical("uncaught: %s", kind.__name__, exc_info=(kind, error, trace))

    def uncaught_elsewhere(args: threading.ExceptHookArgs | sys.UnraisableHookArgs) -> None:
        if args.exc_value is not None:
            uncaught(args.exc_type, args.exc_value, args.exc_traceback)

    sys.excepthook = uncaught
    threading.excepthook = sys.unraisablehook = uncaught_elsewhere


class NeverWaiting(logging.StreamHandler[TextIO]):
    """Leaves out lines that would have to wait. If nobody reads the pipe of the log, the server
    goes on. As soon as somebody does, a line says how many are missing.
    """

    _left_out = 0
    _cut = ""
    """What ends the last line, if it was cut."""

    def emit(self, record: logging.LogRecord) -> None:
        """Write a record, or count it."""
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
        said = f"the log lost {self._left_out} lines: nobody read it"
        return self.format(
            logging.LogRecord("mcp_sessions.cli", logging.WARNING, "", 0, said, (), None)
        )


_PIPE_BUF: int = getattr(select, "PIPE_BUF", 512)
"""Bytes that a pipe takes whole and at once, if it takes any (POSIX)."""


def _takes(stream: TextIO) -> bool:
    """Whether a stream takes a few bytes at once."""
    try:
        return not hasattr(select, "poll") or bool(select.select((), (stream,), (), 0)[1])
    except (OSError, ValueError, TypeError):
        # It has no descriptor. What is wrong with it shows as it is written.
        return True


class TextFormatter(logging.Formatter):
    """``2026-07-28T12:00:00Z INFO mcp_sessions.server: text``."""

    def format(self, record: logging.LogRecord) -> str:
        """One line, and a traceback below it if there is one."""
        # A peer may put line breaks into what is logged; they must not forge a record.
        text = " ".join(record.getMessage().splitlines())
        line = f"{time_of(record)} {record.levelname} {record.name}: {text}"
        return f"{line}\n{trace}" if (trace := _traceback(self, record)) else line


class JsonFormatter(logging.Formatter):
    """One JSON object per line; ``extra=`` members are members of it."""

    def format(self, record: logging.LogRecord) -> str:
        """One line, also with a traceback."""
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
    """What it was given as ``extra=``."""
    members: Mapping[str, object] = vars(record)
    return {name: value for name, value in members.items() if name not in _STANDARD}


def time_of(record: logging.LogRecord) -> str:
    """When it was made: UTC, with milliseconds."""
    moment = datetime.fromtimestamp(record.created, UTC)
    return moment.isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _traceback(formatter: logging.Formatter, record: logging.LogRecord) -> str:
    return formatter.formatException(record.exc_info) if record.exc_info else ""
