"""Logs and keys of which a step read some rows, and that note what changed since.

They decide as whole ones do. If a decision needs a row that was not read, they raise
:class:`NotRead`. The step then reads more, and decides anew.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence

from mcp_sessions.core.log import LogCounts, LoggedEvent
from mcp_sessions.core.request_keys import KeyedRequest
from mcp_sessions.ids import RequestKey


class NotRead(Exception):
    """A decision needs rows that were not read. Nothing was changed."""


class LeftOut(bytes):
    """A value that was not read. Only its size is known."""

    size: int

    def __new__(cls, size: int) -> LeftOut:
        value = super().__new__(cls)
        value.size = size
        return value

    def __len__(self) -> int:
        return self.size


class NotedEvents(dict[int, LoggedEvent]):
    """The events of a log, by number, and which of them changed since they were written.

    Args:
        is_read: All that the log has are here.
    """

    __slots__ = ("added", "is_read", "removed")

    def __init__(self, events: Iterable[LoggedEvent] = (), *, is_read: bool = True) -> None:
        super().__init__((event.number, event) for event in events)
        self.is_read = is_read
        self.added: list[int] = []
        self.removed: list[int] = []

    def __setitem__(self, number: int, event: LoggedEvent) -> None:
        self.added.append(number)
        super().__setitem__(number, event)

    def pop(self, number: int, /) -> LoggedEvent:  # type: ignore[override]
        if number in self.added:
            # It never had a row.
            self.added.remove(number)
        else:
            self.removed.append(number)
        return super().pop(number)


class ReadEvents(NotedEvents):
    """The events of a log that were read.

    Args:
        read: Ranges of numbers. Each is (after, last): every event in it was read.
    """

    __slots__ = ("_read",)

    def __init__(self, events: Iterable[LoggedEvent], read: Sequence[tuple[int, int]]) -> None:
        super().__init__(events)
        self._read = read

    def __contains__(self, number: object) -> bool:
        if super().__contains__(number):
            return True
        if isinstance(number, int) and any(after < number <= last for after, last in self._read):
            return False
        raise NotRead

    def again(self) -> ReadEvents:
        """The same events, for another step."""
        return ReadEvents(self.values(), self._read)

    def oldest(self, most: int, counts: LogCounts) -> ReadEvents | None:
        """The first ones without their payloads, for the next step. None: no event was read.

        Args:
            counts: Those of the log.
        """
        numbers = sorted(self)[:most]
        end = numbers[-1] if len(numbers) < len(self) else counts.head
        read = self._read if len(self) < counts.kept else [(0, counts.head)]
        events = (self[number] for number in numbers)
        short = [event._replace(payload=LeftOut(len(event.payload))) for event in events]
        known = [(after, min(last, end)) for after, last in read]
        return ReadEvents(short, known) if short else None


def changed_events(events: Mapping[int, LoggedEvent]) -> tuple[Iterable[int], Iterable[int]]:
    """Return the numbers of the events that were added to a log, and of those that went. Of a log
    that was made anew, or emptied, all were added.
    """
    if isinstance(events, NotedEvents):
        return events.added, events.removed
    return events, ()


class NotedKeys(dict[RequestKey, KeyedRequest]):
    """The keys of a session, and which of them changed since they were written."""

    __slots__ = ("changed",)

    def __init__(self, known: Iterable[tuple[RequestKey, KeyedRequest]]) -> None:
        super().__init__(known)
        self.changed: set[RequestKey] = set()

    def __setitem__(self, key: RequestKey, entry: KeyedRequest) -> None:
        self.changed.add(key)
        super().__setitem__(key, entry)

    def pop(self, key: RequestKey, /) -> KeyedRequest:  # type: ignore[override]
        self.changed.add(key)
        return super().pop(key)


class Oldest(deque[RequestKey]):
    """The oldest of the keys that finished.

    Args:
        is_whole: There are no others.
    """

    def __init__(self, keys: Iterable[RequestKey], is_whole: bool) -> None:
        super().__init__(keys)
        self._is_whole = is_whole

    def __bool__(self) -> bool:
        if not len(self) and not self._is_whole:
            raise NotRead
        return bool(len(self))

    def popleft(self) -> RequestKey:
        if not len(self) and not self._is_whole:
            raise NotRead
        return super().popleft()
