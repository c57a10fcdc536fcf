"""Log one line for a collector that takes nothing, where the SDK logs tracebacks.

Rules, owned by ``tests/cli/test_telemetry_failures.py``:

1. An outage is one line, and another one each :data:`AGAIN` seconds as long as it lasts.
2. The line has the reason, and nothing of a request: a URL or a header may hold a key.
3. Other records of OpenTelemetry go the way of all records.
"""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Callable
from http import HTTPStatus
from typing import Final

logger = logging.getLogger(__name__)

AGAIN: Final = 600.0
"""Seconds between two lines about an outage."""

_PHRASES: Final = frozenset(status.phrase for status in HTTPStatus)
_EXPORT: Final = ("export", "_shared_internal")
"""Parts of the names of the loggers that report an export."""

_SILENT: Final = "no answer in time"
_CAUSES: Final = 20
"""Number of causes of an exception that are searched, at most."""


class TelemetryFailures(logging.Handler):
    def __init__(self, clock: Callable[[], float]) -> None:
        super().__init__(logging.WARNING)
        self._clock = clock
        self._endpoints: list[str] = []
        self._silent_until = -math.inf
        self._latest: str | None = None
        self._is_stopped = False

    def install(self, endpoint: str) -> None:
        logger = logging.getLogger("opentelemetry")
        logger.addHandler(self)
        logger.propagate = False
        if endpoint not in self._endpoints:
            self._endpoints.append(endpoint)

    def stop(self) -> None:
        """Log nothing more: the process exits, and threads of the SDK may still try."""
        self._is_stopped = True

    def emit(self, record: logging.LogRecord) -> None:
        if self._is_stopped:
            return
        if any(part in record.name for part in _EXPORT):
            reason = _reason(record)
            if "retrying" in str(record.msg):
                self._latest = reason or self._latest
            else:
                self.failed(reason)
        elif record.name.startswith("opentelemetry.util"):
            # These records quote headers that OpenTelemetry cannot read.
            text = re.sub("%[a-z]", "***", str(record.msg))
            logger.log(record.levelno, "OpenTelemetry: %s", text)
        else:
            logging.root.handle(record)

    def failed(self, reason: str | None) -> None:
        """Log that an export failed.

        Args:
            reason: None: the reason of the latest try.
        """
        # It takes no lock: the handler of SIGTERM calls it, and must not wait for a thread that
        # logs.
        now = self._clock()
        if self._is_stopped or now < self._silent_until:
            return
        self._silent_until = now + AGAIN
        logger.warning(
            "metrics or traces were not exported to %s: %s",
            " and ".join(self._endpoints) or "anywhere",
            reason or self._latest or _SILENT,
        )


def _reason(record: logging.LogRecord) -> str | None:
    """Return why an export failed, without text of a request. None: the record does not say it."""
    arguments = record.args if isinstance(record.args, tuple) else ()
    errors = [each for each in arguments if isinstance(each, BaseException)]
    if record.exc_info and record.exc_info[1] is not None:
        errors.append(record.exc_info[1])
    for error in errors:
        return _reason_of(error)
    for each in arguments:
        if isinstance(each, int) and 400 <= each < 600:
            return f"status {each}"
        if each in _PHRASES:
            return str(each)
    return None


def _reason_of(error: BaseException) -> str:
    waiting, seen = [error], list[BaseException]()
    while waiting and len(seen) < _CAUSES:
        each = waiting.pop(0)
        seen.append(each)
        if isinstance(each, OSError) and each.errno is not None and each.strerror:
            return each.strerror
        if isinstance(each, TimeoutError):
            return _SILENT
        inside = (each.__cause__, each.__context__, getattr(each, "reason", None), *each.args)
        waiting += [one for one in inside if isinstance(one, BaseException) and one not in seen]
    return type(error).__name__
