from dataclasses import dataclass

MAX_LINE = 16 * 1024 * 1024
"""Bytes of one line; a longer one is no server-sent event that we would wait for."""


class TooLong(Exception):
    def __str__(self) -> str:
        return f"a line of an event stream is longer than {MAX_LINE} bytes"


@dataclass(frozen=True)
class Event:
    data: str
    id: str | None
    """The id that this event itself has; None: it has none."""


class Reader:
    def __init__(self) -> None:
        self._rest = b""
        self._data: list[str] = []
        self._id: str | None = None
        self._after_cr = False
        self.is_at_start = True

    def feed(self, chunk: bytes) -> list[Event]:
        """The events that are complete with this chunk.

        Raises:
            TooLong: A line is too long.
            UnicodeDecodeError: A line is no UTF-8.
        """
        if self._after_cr and chunk.startswith(b"\n"):
            chunk = chunk[1:]
        if chunk:
            self._after_cr = chunk.endswith(b"\r")
        # Only at CR, LF and CRLF: `bytes.splitlines` splits there, `str.splitlines` at more
        # characters.
        lines = (self._rest + chunk).splitlines(keepends=True)
        self._rest = b""
        events: list[Event] = []
        for raw in lines:
            if not raw.endswith((b"\r", b"\n")):
                self._rest = raw
                break
            event = self._line(raw.rstrip(b"\r\n").decode())
            if event is not None:
                events.append(event)
        if len(self._rest) > MAX_LINE:
            raise TooLong
        return events

    def _line(self, line: str) -> Event | None:
        if self.is_at_start:
            line = line.removeprefix("\ufeff")
            self.is_at_start = False
        if not line:
            data, event_id = self._data, self._id
            self._data, self._id = [], None
            return Event("\n".join(data), event_id) if data or event_id is not None else None
        field, _, value = line.partition(":")
        value = value.removeprefix(" ")
        if field == "data":
            self._data.append(value)
        elif field == "id" and "\0" not in value:
            self._id = value
        return None
