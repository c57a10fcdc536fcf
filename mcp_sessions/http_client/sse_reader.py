"""Server-sent events, read: bytes in, events out, wherever the bytes are split.

The other direction is in `sse`. The rules are those of the HTML standard, 9.2.6; lines are
split here and not by ``str.splitlines``, which would also split at U+2028, which JSON may
contain as it is.
"""

from __future__ import annotations

from dataclasses import dataclass

from mcp_sessions.core.outline import Outline
from mcp_sessions.core.resume import is_sendable

_BOM = b"\xef\xbb\xbf"


MAX_RETRY = 3_600_000
"""Milliseconds: no server is left alone for longer than an hour because it said so."""

_RETRY_DIGITS = len(str(MAX_RETRY))


MOST = 16
"""An event of more than this many limits in length is not skipped."""

_OTHER_LINE = 65_536
"""Bytes of a line that is no data, in an event that is skipped."""


class EventTooLarge(Exception):
    """One event has more bytes than the limit."""


@dataclass(frozen=True, slots=True)
class ReadEvent:
    """An event. If it has neither data nor an id, there is no event."""

    id: str | None
    """The event's own ``id`` field; None: it has none."""

    data: bytes
    """Without a final line feed; empty: a priming event, which only carries its id."""

    event: str
    """Its type; ``message`` if it names none."""

    retry: int | None
    """Milliseconds, `MAX_RETRY` at the most."""

    dropped: Outline | None = None
    """The outline of the data, if it was too large to be kept; then ``data`` is empty."""


@dataclass(slots=True)
class Position:
    """How far a stream was read, and what its server says of the next one."""

    id: str | None = None
    """The event to go on from; None: there is none that can be sent."""

    retry: float | None = None
    """Seconds."""

    def note(self, event: ReadEvent) -> None:
        if event.id:
            self.id = event.id if is_sendable(event.id) else None
        if event.retry is not None:
            self.retry = event.retry / 1000


class SseReader:
    """The events of one stream.

    Args:
        max_bytes: Of one event.
        drops: Skip data above the limit (`ReadEvent.dropped`), up to `MOST` times the limit.
    """

    def __init__(self, *, max_bytes: int, drops: bool = False) -> None:
        self._limit = max_bytes
        self._drops = drops
        self._line = bytearray()
        self._after_cr = False
        self._is_first = True
        self._clear()

    def _clear(self) -> None:
        self._data: list[bytes] = []
        self._id: str | None = None
        self._event = ""
        self._retry: int | None = None
        self._size = 0
        self._outline: Outline | None = None
        self._in_data = False

    def feed(self, chunk: bytes) -> list[ReadEvent]:
        """The events that ``chunk`` completes.

        Raises:
            EventTooLarge: And nothing more may be fed.
        """
        if not chunk:
            return []
        if self._after_cr and chunk.startswith(b"\n"):
            chunk = chunk[1:]
        self._after_cr = chunk.endswith(b"\r")
        found: list[ReadEvent] = []
        # CR, LF and CRLF all end a line; a CR at the very end already did.
        *lines, rest = chunk.replace(b"\r\n", b"\n").replace(b"\r", b"\n").split(b"\n")
        for line in lines:
            self._count(len(line))
            if self._outline is not None:
                event = self._skip(self._outline, line, ends=True)
                if event is not None:
                    found.append(event)
                continue
            whole, self._line = bytes(self._line + line), bytearray()
            event = self._take(whole)
            if event is not None:
                found.append(event)
        self._count(len(rest))
        if self._outline is not None:
            self._skip(self._outline, rest, ends=False)
        else:
            self._line += rest
        return found

    def _count(self, size: int) -> None:
        self._size += size
        if self._size <= self._limit or self._outline is not None:
            if self._size > self._limit * MOST:
                raise EventTooLarge
            return
        is_comment = self._line.startswith(b":")
        if not self._drops or is_comment:
            raise EventTooLarge
        self._outline = Outline()
        if self._data:
            # At once: it may be a great many lines.
            self._outline.feed(b"\n".join(self._data) + b"\n")
        self._data.clear()

    def _skip(self, outline: Outline, piece: bytes, *, ends: bool) -> ReadEvent | None:
        if self._in_data:
            outline.feed(piece)
        else:
            self._line += piece
            if self._line.startswith(b"data:"):
                self._in_data = True
                outline.feed(bytes(self._line[len(b"data:") :]))
                self._line.clear()
            elif len(self._line) > _OTHER_LINE:
                raise EventTooLarge
        if not ends:
            return None
        whole, self._line = bytes(self._line), bytearray()
        was_data, self._in_data = self._in_data, False
        if was_data:
            return None
        if whole:
            self._take(whole)
            return None
        event = ReadEvent(self._id, b"", self._event or "message", self._retry, outline)
        self._clear()
        return event

    def _take(self, line: bytes) -> ReadEvent | None:
        if self._is_first:
            line, self._is_first = line.removeprefix(_BOM), False
        if not line:
            event = None
            if self._data or self._id is not None or self._retry is not None:
                event = ReadEvent(
                    self._id, b"\n".join(self._data), self._event or "message", self._retry
                )
            self._clear()
            return event
        if line.startswith(b":"):
            self._size -= len(line)
            return None
        name, _, value = line.partition(b":")
        value = value.removeprefix(b" ")
        match name:
            case b"data":
                self._data.append(value)
            case b"id":
                if b"\0" not in value:
                    self._id = value.decode("utf-8", "replace")
            case b"event":
                self._event = value.decode("utf-8", "replace")
            case b"retry":
                if value.isdigit():
                    # Python converts only so many digits, and a longer one is no other number.
                    digits = value.lstrip(b"0") or b"0"
                    is_long = len(digits) > _RETRY_DIGITS
                    self._retry = MAX_RETRY if is_long else min(int(digits), MAX_RETRY)
            case _:
                pass
        return None
