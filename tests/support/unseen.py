"""Fails the test in which a task died, or was left, and nobody saw it.

For every test, a pytest plugin that `tests.conftest` registers:

1. A task or a future that ended with an exception which nobody took.
2. Background work of the library that failed (`mcp_sessions.background` logs it as an error),
   unless the test says that it makes it fail:
   ``@pytest.mark.fails_in_background("the name of the work")``. Then it must.
3. A task of the library that was running when its event loop was closed, a few turns after
   everything else had ended, and that nobody had cancelled.

A store that is away is none of these: background work warns of it and goes on.
"""

import asyncio
import logging
import weakref
from asyncio import base_events, runners
from collections.abc import Generator, Iterable
from pathlib import Path
from typing import Any, cast

import pytest

from mcp_sessions import background

ROOT = Path(__file__).parents[2]
_OURS = tuple(f"{ROOT / name}/" for name in ("mcp_sessions", "transports", "conformance"))
_TURNS = 100
"""Of a loop that is about to be closed, in which a task may still come to its end: some, over a
store that suspends at every step."""

MARKER = "fails_in_background"


class Unseen:
    def __init__(self) -> None:
        self._noted: list[str] = []
        self._closing = False
        self._failed: list[tuple[str, str]] = []
        """The names of background work that failed, and what was logged."""

    def watch(self) -> None:
        """From now on, in every event loop of asyncio's in this process."""
        handler = _Handler(self._failed)
        logging.getLogger(background.__name__).addHandler(handler)
        loops = cast(Any, base_events.BaseEventLoop)
        call_handler = loops.call_exception_handler
        closing = cast(Any, runners)
        cancel_all = closing._cancel_all_tasks

        def notified(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
            # What cancelling the rest makes of the standard library's own is not ours.
            if not self._closing:
                self._noted.append(_described(context))
            call_handler(loop, context)

        def left(loop: asyncio.AbstractEventLoop) -> None:
            turns = iter(range(_TURNS))
            while _left_in(loop) and next(turns, None) is not None:
                loop.run_until_complete(asyncio.sleep(0))
            self._noted += [f"left at work: {task.get_name()}: {task!r}" for task in _left_in(loop)]
            self._closing = True
            try:
                cancel_all(loop)
            finally:
                self._closing = False

        loops.call_exception_handler = notified
        closing._cancel_all_tasks = left

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self) -> None:
        """Begin anew: what the fixtures of a whole module leave is sent with its last test."""
        self._noted.clear()
        self._failed.clear()

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Generator[None, None, None]:
        """Look when the test has ended; the loop of most is closed then."""
        yield
        self._check_failed(item)
        self._check(closed=True)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_teardown(self, item: pytest.Item) -> Generator[None, None, None]:
        """Look again when its fixtures are gone."""
        yield
        self._check(closed=False)

    def _check_failed(self, item: pytest.Item) -> None:
        marker = item.get_closest_marker(MARKER)
        expected = set[str](marker.args if marker is not None else ())
        failed, names = list(self._failed), {name for name, _ in self._failed}
        self._failed.clear()
        if names != expected:
            lines = [text for name, text in failed if name not in expected]
            lines += [f"did not fail: {name}" for name in sorted(expected - names)]
            _fail(lines)

    def _check(self, *, closed: bool) -> None:
        lines = list(self._noted)
        self._noted.clear()
        if not closed:
            lines += [text for _, text in self._failed]
            self._failed.clear()
        for task in _known_tasks():
            if closed and not task.get_loop().is_closed():
                continue
            if task.done() and cast(Any, task)._log_traceback:
                # Asked for, so that it is not notified once more when it is collected.
                lines.append(f"nobody took its exception: {task!r}: {task.exception()!r}")
        if lines:
            _fail(lines)


class _Handler(logging.Handler):
    """Keeps what the library logged of background work that failed."""

    def __init__(self, failed: list[tuple[str, str]]) -> None:
        super().__init__(logging.ERROR)
        self._failed = failed

    def emit(self, record: logging.LogRecord) -> None:
        """Keep the work's name and the record as text."""
        name = str(record.args[0] if isinstance(record.args, tuple) else record.args)
        self._failed.append((name, logging.Formatter().format(record)))


def _known_tasks() -> Iterable["asyncio.Task[Any]"]:
    """Every task that is not collected yet, of whichever loop, done or not."""
    # The name is another one since Python 3.12.
    tasks: Any = asyncio.tasks
    known = getattr(tasks, "_all_tasks", None) or getattr(tasks, "_scheduled_tasks", ())
    # A server's thread may begin a task meanwhile. So does the standard library ask, too.
    for _ in range(1_000):
        try:
            return list(cast("weakref.WeakSet[asyncio.Task[Any]]", known))
        except RuntimeError:
            continue
    raise AssertionError("tasks begin faster than they can be listed")


def _left_in(loop: asyncio.AbstractEventLoop) -> list["asyncio.Task[Any]"]:
    return [t for t in asyncio.all_tasks(loop) if _is_ours(t) and not t.cancelling()]


def _is_ours(task: "asyncio.Task[Any]") -> bool:
    code = getattr(task.get_coro(), "cr_code", None)
    return code is not None and code.co_filename.startswith(_OURS)


def _described(context: dict[str, Any]) -> str:
    about = context.get("task") or context.get("future") or context.get("handle")
    return f"{context.get('message')}: {about!r}: {context.get('exception')!r}"


def _fail(lines: list[str]) -> None:
    pytest.fail("unseen by anybody:\n" + "\n".join(lines), pytrace=False)
