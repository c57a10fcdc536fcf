"""Count requests by a name, for an operator who asks: those that name a session that is not there,
and those that a limit refuses.

Only what is refused is counted. So a client that never gives up is found, and one that floods.
"""

from __future__ import annotations

from collections.abc import Callable

_MOST = 100
"""Names that are counted. The one that came longest ago goes first."""


class RecentCounts:
    """Args:
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
