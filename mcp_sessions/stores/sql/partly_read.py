"""Logs and keys of which a step read some rows only.

They decide as whole ones do. If a decision needs a row that was not read, they raise
:class:`NotRead`. The step then reads more, and decides anew.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence

from mcp_sessions.core.log import LoggedEvent
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


class ReadEvents(dict[int, LoggedEvent]):
    """The events of a log that were read, by number.

    Args:
        read: Ranges of numbers. Each is (after, last): every event in it was read.
    """

    def __init__(self, events: Iterable[LoggedEvent], read: Sequence[tuple[int, int]]) -> None:
        super().__init__((event.number, event) for event in events)
        self._read = read
        self.stored = frozenset(self)
        """The numbers that have a row."""

    def __contains__(self, number: object) -> bool:
        if super().__contains__(number):
            return True
        if isinstance(number, int) and any(after < number <= last for after, last in self._read):
            return False
        raise NotRead


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
