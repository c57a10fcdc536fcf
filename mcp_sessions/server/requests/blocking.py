"""Say which call blocks the event loop: nobody else is served meanwhile.

A thread asks each event loop for a turn, a few times in a second. If none comes, the thread looks
at what the loop's own thread runs. A call pays nothing for that.

Rules that must hold, and that ``tests/server/requests/test_blocking.py`` owns:

1. A call is named only if the thread saw it several times in a row, with no turn in between: then
   nothing else ran. Otherwise the line says that the call is not known, and where the code is.
2. A look counts once, however long ago the one before it was. So no call is named because the
   whole process was stopped.
3. There is one thread for a loop, however many layers it has. It ends with the last of them.
"""

from __future__ import annotations

import asyncio
import logging
import sys
import threading
import time
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import FrameType
from typing import Final

from mcp_sessions.server.reporting.loggable import loggable_method, loggable_name
from mcp_sessions.server.requests.running import RunningRequest

logger = logging.getLogger(__name__)

WITHIN: Final = 1.0
"""Seconds without a turn of the loop, of which there is a line."""

_LOOKS: Final = 2
"""In that time."""

_COMPONENTS: Final = ("mcp.server.mcpserver.", "fastmcp.")
"""Where the classes ``Tool`` and ``Prompt`` are whose objects a server runs."""


@dataclass(frozen=True, slots=True)
class Running:
    """What a loop's thread runs at a moment."""

    where: str
    """The file, the line and the function."""

    call: RunningRequest | None = None
    """The innermost call whose handler this is. None: it is no call, or one's own task."""

    component: str | None = None
    """The name of the server's tool or prompt that it runs, as the server has it."""

    def __str__(self) -> str:
        if self.call is None:
            return "which call blocks it is not known"
        request = self.call.request
        method, name = loggable_method(request.method), loggable_name(request.params)
        if name is not None and name != self.component:
            name = self.call.name_for_log
        return f"{method} of {name!r} blocks it" if name is not None else f"{method} blocks it"


def running_in(frame: FrameType | None) -> Running:
    """Find out what a thread runs.

    Args:
        frame: Its innermost one. None: it runs nothing.
    """
    if frame is None:
        return Running("no code of Python")
    code = frame.f_code
    where = f"{code.co_filename}:{frame.f_lineno} ({code.co_qualname})"
    handles, inner = RunningRequest.run_handler.__code__, list[FrameType]()
    while frame is not None and frame.f_code is not handles:
        inner.append(frame)
        frame = frame.f_back
    if frame is None:
        return Running(where)
    methods = (it for it in inner if it.f_code.co_varnames[:1] == ("self",))
    names = (_component(it.f_locals.get("self")) for it in methods)
    return Running(where, frame.f_locals["self"], next(filter(None, names), None))


def _component(candidate: object) -> str | None:
    for kind in type(candidate).__mro__:
        if kind.__name__ in ("Tool", "Prompt") and kind.__module__.startswith(_COMPONENTS):
            name: object = getattr(candidate, "name", None)
            return name if isinstance(name, str) else None
    return None


@dataclass(slots=True, eq=False, repr=False)
class LoopWatch:
    """Watches the loop that it is made in.

    Args:
        within: Seconds; see ``WITHIN``.
    """

    _within: float = WITHIN
    users: int = field(init=False, default=0)
    _loop: asyncio.AbstractEventLoop = field(init=False, default_factory=asyncio.get_running_loop)
    _watched: int = field(init=False, default_factory=threading.get_ident)
    _ended: threading.Event = field(init=False, default_factory=threading.Event)
    _thread: threading.Thread = field(init=False)
    _has_turned: bool = field(init=False, default=True)
    _asked_at: float = field(init=False, default=0.0)
    _call: RunningRequest | None = field(init=False, default=None)
    _looks: int = field(init=False, default=0)
    """How many looks in a row saw this call."""

    _said: str | None = field(init=False, default=None)

    def start(self) -> None:
        self._thread = threading.Thread(
            target=self._watch, daemon=True, name="the watch over the event loop"
        )
        self._thread.start()

    def close(self) -> None:
        self._ended.set()
        # It may wait for whoever reads the log.
        self._thread.join(timeout=1)

    def step(self, now: float) -> None:
        """Look whether the loop had a turn, and ask for the next one.

        Args:
            now: Seconds, on any clock.

        Raises:
            RuntimeError: The loop is closed.
        """
        if not self._has_turned:
            return self._look(now)
        self._has_turned, self._asked_at = False, now
        self._call, self._looks, self._said = None, 0, None
        self._loop.call_soon_threadsafe(self._turn)

    def _watch(self) -> None:
        while not self._ended.wait(self._within / _LOOKS):
            try:
                self.step(time.monotonic())
            except RuntimeError:
                return

    def _turn(self) -> None:
        self._has_turned = True

    def _look(self, now: float) -> None:
        frames = sys._current_frames()  # pyright: ignore[reportPrivateUsage]
        running = running_in(frames.get(self._watched))
        if running.call is None or running.call is not self._call:
            self._call, self._looks = running.call, 0
        self._looks += 1
        asked = now - self._asked_at
        if self._call is not None and self._looks > _LOOKS:
            said = str(running)
        elif self._said is None and asked >= 2 * self._within:
            said = str(Running(running.where))
        else:
            return
        if said != self._said and not self._has_turned:
            self._said = said
            logger.warning(
                "the event loop had no turn for %.1f s: %s, at %s", asked, said, running.where
            )


_WATCHES: dict[asyncio.AbstractEventLoop, LoopWatch] = {}


@contextmanager
def watched_loop() -> Generator[None]:
    """Watch the running loop, if nobody does."""
    loop = asyncio.get_running_loop()
    if (watch := _WATCHES.get(loop)) is None:
        watch = _WATCHES[loop] = LoopWatch()
        watch.start()
    watch.users += 1
    try:
        yield
    finally:
        watch.users -= 1
        if not watch.users:
            del _WATCHES[loop]
            watch.close()
