from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import TypeVar

Key = TypeVar("Key")
Value = TypeVar("Value")


class Recent(OrderedDict[Key, Value]):
    """The newest entries, a limited number. :meth:`keep` makes an entry the newest one."""

    def __init__(self, most: int) -> None:
        super().__init__()
        self._most = most

    def keep(self, key: Key, value: Value) -> None:
        self[key] = value
        self.move_to_end(key)
        if len(self) > self._most:
            self.popitem(last=False)


_MOST = 100
"""Names that are counted. The one that came longest ago goes first."""


class RecentCounts:
    """Count requests by a name, for an operator who asks.

    Only what is refused is counted: requests that name a session that is not there, and those that
    a limit refuses. So a client that never gives up is found, and one that floods.

    Args:
        shown: Makes of a name what is kept.
    """

    def __init__(self, shown: Callable[[str], str] = str) -> None:
        self._shown, self._counts = shown, dict[str, int]()

    def add(self, name: str) -> None:
        name = self._shown(name)
        self._counts[name] = self._counts.pop(name, 0) + 1
        if len(self._counts) > _MOST:
            del self._counts[next(iter(self._counts))]

    def read(self) -> dict[str, int]:
        """Name → requests since the process began."""
        return dict(self._counts)
