"""Read the output of a process: lines, within bounds, each taken in its order.

A line is taken as it comes, in the same turn of the event loop, as long as no line needs a wait.
Later bytes are held. If there are many, no more is read until they are taken.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final

from mcp_sessions.background import Background, give_way, report
from mcp_sessions.server.upstream.external.child_requests import Later

CHUNK: Final = 65_536
"""Bytes that are held before no more is read. Each end of a line that is too long has as many."""

_AT_ONCE: Final = 100
"""Lines that are taken before other tasks have their turn."""

_READING: Final = "reading from a child process"


@dataclass(frozen=True, slots=True)
class TooLong:
    head: bytes
    tail: bytes


Line = bytes | TooLong
"""A line that is not blank, without its end."""

Take = Callable[[Line], Later | None]
"""Function that takes a line. It returns work that has to be done before the next line."""


class Lines:
    """Split bytes into lines, as they come.

    Args:
        longest: Bytes of one line, at most. No more bytes of a longer line are held at any time.
    """

    def __init__(self, longest: int) -> None:
        self._longest = longest
        self._held: list[bytes] = []
        self._size = 0
        self._head: bytes | None = None

    def lines_in(self, chunk: bytes) -> Iterator[Line]:
        """Return the lines that end in a chunk. All have to be taken before the next chunk
        comes.
        """
        *ends, rest = chunk.split(b"\n")
        for end in ends:
            line = end
            is_long = len(end) + self._size > self._longest or self._head is not None
            if self._held or is_long:
                self._hold(end)
                line, self._held, self._size = b"".join(self._held), [], 0
            if is_long:
                head = line[:CHUNK] if self._head is None else self._head
                yield TooLong(head, line[-CHUNK:])
                self._head = None
            elif line and not line.isspace():
                yield line
        if rest:
            self._hold(rest)
        if self._size > self._longest or self._head is not None:
            line = b"".join(self._held)
            self._head = line[:CHUNK] if self._head is None else self._head
            self._held, self._size = [line[-CHUNK:]], 0

    def _hold(self, piece: bytes) -> None:
        self._held.append(piece)
        self._size += len(piece)


class Output:
    """The output of one process. Bytes that come before it is read are held as well."""

    def __init__(self) -> None:
        self._has_ended = False
        self._pipe: asyncio.ReadTransport | None = None
        self._chunks: deque[bytes] = deque()
        self._size = 0
        self._is_paused = False
        self._reader: _Reader | None = None
        self._is_working = False
        self._is_left = False

    def opened(self, pipe: asyncio.ReadTransport) -> None:
        self._pipe = pipe

    def feed(self, chunk: bytes) -> None:
        if self._is_left:
            return
        self._chunks.append(chunk)
        self._size += len(chunk)
        self._go_on()
        pipe = self._pipe
        if self._size > CHUNK and not self._is_paused and pipe and not pipe.is_closing():
            self._is_paused = True
            pipe.pause_reading()

    def end(self) -> None:
        self._has_ended = True
        self._go_on()

    def read(
        self, longest: int, take: Take, ended: Callable[[], None], background: Background
    ) -> None:
        """Read the output from its beginning, once.

        Args:
            longest: Bytes of a line, at most.
            take: Takes a line.
            ended: Called when no line is taken any more.
            background: Runs the reading while a line needs a wait.
        """
        self._reader = _Reader(Lines(longest), take, ended, background)
        self._go_on()

    def leave(self) -> None:
        reader, self._reader = self._reader, None
        self._is_left = True
        self._chunks.clear()
        self._size = 0
        self._resume()
        if reader is not None:
            reader.ended()

    def _go_on(self) -> None:
        if self._reader is None or self._is_working:
            return
        try:
            later = self._take_some()
        except Exception as defect:
            report(_READING, defect)
            self.leave()
            return
        if later is not None:
            self._work(later)
        elif self._has_ended:
            self.leave()

    def _take_some(self) -> Later | None:
        for _ in range(_AT_ONCE):
            line = self._next()
            if line is None or self._reader is None:
                return None
            later = self._reader.take(line)
            if later is not None:
                return later
        return give_way

    def _next(self) -> Line | None:
        while self._reader is not None:
            line = next(self._reader.now, None)
            if line is not None or not self._chunks:
                return line
            chunk = self._chunks.popleft()
            self._size -= len(chunk)
            self._resume()
            self._reader.now = self._reader.lines.lines_in(chunk)
        return None

    def _resume(self) -> None:
        pipe = self._pipe
        if self._is_paused and self._size <= CHUNK and pipe is not None and not pipe.is_closing():
            self._is_paused = False
            pipe.resume_reading()

    def _work(self, later: Later) -> None:
        if self._reader is None:
            return
        self._is_working = True
        self._reader.background.run(_READING, self._finish_work(later))

    async def _finish_work(self, later: Later | None) -> None:
        try:
            while later is not None:
                await later()
                later = self._take_some()
        except BaseException:
            self.leave()
            raise
        finally:
            self._is_working = False
        self._go_on()


@dataclass(slots=True, eq=False)
class _Reader:
    lines: Lines
    take: Take
    ended: Callable[[], None]
    background: Background
    now: Iterator[Line] = iter(())
