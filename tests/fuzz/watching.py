"""Sees what no fuzzed input may cause: a traceback, a task that died, something left, growth.

`Watch` sees it in this process, where the layer runs:

* a record in the log that has a traceback, or any record of `mcp_sessions.background` at ERROR;
* whatever reaches the event loop's exception handler, or `sys.unraisablehook`;
* `Counts` and `Handles` of what is there, which a fuzzer compares.
"""

import asyncio
import ctypes
import gc
import logging
import os
import sys
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from mcp_sessions import background
from tests.support.children import children_of

MIB = 1_048_576


class Watch(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self._seen: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        text = logging.Formatter("%(levelname)s %(name)s: %(message)s").format(record)
        work_failed = record.name == background.__name__ and record.levelno >= logging.ERROR
        if record.exc_info or "Traceback (most recent call last)" in text or work_failed:
            self._seen.append(f"logged: {text}")

    def loop_failed(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        failed: BaseException | None = context.get("exception")
        self._seen.append(f"event loop: {context.get('message')}: {_noted(failed)}")

    def unraisable(self, failed: "sys.UnraisableHookArgs") -> None:
        self._seen.append(f"unraisable: {failed.err_msg} {failed.object!r}: {failed.exc_value!r}")

    def taken(self) -> list[str]:
        seen, self._seen = self._seen, []
        return seen

    @contextmanager
    def watching(self) -> Generator[None]:
        """Watch this process and the running event loop until the block ends."""
        loop, root = asyncio.get_running_loop(), logging.getLogger()
        before: Callable[[Any], object] = sys.unraisablehook
        handler_before = loop.get_exception_handler()
        root.addHandler(self)
        loop.set_exception_handler(self.loop_failed)
        sys.unraisablehook = self.unraisable
        try:
            yield
        finally:
            sys.unraisablehook = before
            loop.set_exception_handler(handler_before)
            root.removeHandler(self)


def _noted(failed: BaseException | None) -> str:
    if failed is None:
        return "no exception"
    record = logging.LogRecord("", 0, "", 0, "", None, (type(failed), failed, failed.__traceback__))
    return logging.Formatter("%(message)s").format(record).strip()


@dataclass(frozen=True)
class Handles:
    """The system's facts about this process and its loop, after garbage was collected."""

    tasks: int
    files: int
    """Open descriptors."""

    processes: int
    """Children of this process."""

    @staticmethod
    def now() -> "Handles":
        gc.collect()
        return Handles(
            len(asyncio.all_tasks()),
            len(os.listdir("/proc/self/fd")),
            len(children_of(os.getpid())),
        )


@dataclass(frozen=True)
class Counts:
    """The counts, after garbage was collected. To count objects takes long: there are a million in
    a run of all tests.
    """

    memory: int
    """Bytes in memory (RSS)."""

    objects: int
    """Those that the garbage collector knows."""

    tasks: int
    files: int
    processes: int

    @staticmethod
    def now() -> "Counts":
        handles = Handles.now()
        _give_back()
        with open("/proc/self/statm") as statm:
            pages = int(statm.read().split()[1])
        return Counts(
            pages * os.sysconf("SC_PAGE_SIZE"),
            len(gc.get_objects()) + gc.get_freeze_count(),
            handles.tasks,
            handles.files,
            handles.processes,
        )

    def __str__(self) -> str:
        return (
            f"{self.memory / MIB:.0f} MiB, {self.objects} objects, {self.tasks} tasks, "
            f"{self.files} files, {self.processes} processes"
        )

    def grown_from(self, before: "Counts") -> list[str]:
        """The counts that grew too much since ``before``."""
        bounds = {
            "memory": before.memory + 48 * MIB,
            "objects": before.objects * 1.25 + 20_000,
            "tasks": before.tasks + 20,
            "files": before.files + 20,
            "processes": before.processes + 4,
        }
        return [
            f"growth: {name} from {getattr(before, name)} to {getattr(self, name)}"
            for name, bound in bounds.items()
            if getattr(self, name) > bound
        ]


def _give_back() -> None:
    """Have the C library give back what is free, where it can."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
