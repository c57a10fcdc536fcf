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


MOST = 4
"""An event of more than this many limits in length is not read."""


class EventTooLarge(Exception):
    """One event has more than `MOST` times the limit."""


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
        max_bytes: Of the data of one event. More is dropped (`ReadEvent.dropped`).
    """

    def __init__(self, *, max_bytes: int) -> None:
        self._limit = max_bytes
        self._line = bytearray()
        self._after_cr = False
        self._is_first = True
        self._clear()

    def _clear(self) -> None:
        self._data: bytearray | None = None
        self._id: str | None = None
        self._event = ""
        self._retry: int | None = None
        self._size = 0

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
            whole, self._line = bytes(self._line + line), bytearray()
            event = self._take(whole)
            if event is not None:
                found.append(event)
        self._count(len(rest))
        self._line += rest
        return found

    def _count(self, size: int) -> None:
        self._size += size
        if self._size > self._limit * MOST:
            raise EventTooLarge

    def _take(self, line: bytes) -> ReadEvent | None:
        if self._is_first:
            line, self._is_first = line.removeprefix(_BOM), False
        if not line:
            event = None
            if self._data is not None or self._id is not None or self._retry is not None:
                data, dropped = bytes(self._data or b""), None
                if len(data) > self._limit:
                    dropped = Outline()
                    dropped.feed(data)
                    data = b""
                event = ReadEvent(self._id, data, self._event or "message", self._retry, dropped)
            self._clear()
            return event
        if line.startswith(b":"):
            self._size -= len(line)
            return None
        name, _, value = line.partition(b":")
        value = value.removeprefix(b" ")
        match name:
            case b"data":
                if self._data is None:
                    self._data = bytearray(value)
                else:
                    self._data += b"\n" + value
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
