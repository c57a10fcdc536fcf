"""Count the running requests of each connection, session or principal."""

from __future__ import annotations

from collections.abc import Hashable

from mcp_sessions.ids import ConnectionId, SessionId
from mcp_sessions.principal import ANONYMOUS, Principal


class Load:
    """Counts what each has at work; who has none costs nothing.

    Args:
        most: Of one.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._counts: dict[Hashable, int] = {}

    def __len__(self) -> int:
        return len(self._counts)

    def is_full(self, whose: Hashable) -> bool:
        """Whether that one may begin nothing more. None is nobody, and has no bound."""
        return whose is not None and self._counts.get(whose, 0) >= self._most

    def add(self, whose: Hashable) -> None:
        """Count one more running request."""
        if whose is not None:
            self._counts[whose] = self._counts.get(whose, 0) + 1

    def remove(self, whose: Hashable) -> None:
        if whose is None:
            return
        left = self._counts[whose] - 1
        if left:
            self._counts[whose] = left
        else:
            del self._counts[whose]


def load_of(
    connection_id: ConnectionId | None, session_id: SessionId | None, principal: Principal
) -> Hashable:
    """Return the key under which a message counts as load.

    The key is its connection. A message without a connection counts for its session, and otherwise
    for its principal. None: the message counts for no one. Without authentication all clients share
    one principal.

    Args:
        connection_id: The connection it arrived on.
        session_id: The session that it belongs to, or names.
        principal: The principal that sent it.
    """
    return connection_id or session_id or (principal if principal != ANONYMOUS else None)
