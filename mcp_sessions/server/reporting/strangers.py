"""Count the requests that name a session that is not there, for an operator who asks.

Only what is refused is counted. A client that never gives up is found by the digest of what it
names.
"""

from __future__ import annotations

from mcp_sessions.ids import digest

_MOST = 100
"""Sessions that are counted. The one that was named longest ago goes first."""


class Strangers:
    def __init__(self) -> None:
        self._counts: dict[str, int] = {}

    def named(self, session_id: str) -> None:
        name = digest(session_id)
        self._counts[name] = self._counts.pop(name, 0) + 1
        if len(self._counts) > _MOST:
            del self._counts[next(iter(self._counts))]

    def counts(self) -> dict[str, int]:
        """Digest → requests since the process began."""
        return dict(self._counts)
