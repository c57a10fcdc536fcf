"""The sessions that cannot be idle: one of their requests runs, or their client is there.

Rules that must hold, and that ``tests/server/dispatch/test_presence.py`` owns:

1. Only what the client takes or answers proves that it is there: see
   :attr:`~mcp_sessions.server.connection.binding.Transport.is_taken`. A connection
   that is merely open proves nothing.
2. The process that has the connection moves the deadline in the store. So each replica sees it,
   and the rule of expiry stays where it is (:mod:`mcp_sessions.core.life`).
3. A session whose client has gone is idle from then on, and not from an earlier moment.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, field

from mcp_sessions.ids import ConnectionId, SessionId
from mcp_sessions.server.connection.connection import ClientConnection
from mcp_sessions.server.delivery.connections import ConnectionRegistry
from mcp_sessions.stores.contract import SessionStore

_PARTS = 10
"""Into so many the idle time is divided: a deadline is moved once in each."""


@dataclass(slots=True)
class _Seen:
    touched_at: float
    sessions: frozenset[SessionId]


@dataclass(slots=True, eq=False, repr=False)
class Presence:
    """Moves the deadlines of the sessions that cannot be idle in this process.

    Args:
        _running: The sessions that have a request running, as they are now.
        _idle_time: Seconds: the shortest time after which an unused session expires.
    """

    _store: SessionStore
    _connections: ConnectionRegistry
    _running: Collection[SessionId]
    _clock: Callable[[], float]
    _idle_time: float
    _seen: dict[ConnectionId, _Seen] = field(init=False, default_factory=dict[ConnectionId, _Seen])

    async def keep(self) -> frozenset[SessionId]:
        """Move the deadlines that are due; every session that cannot be idle.

        Raises:
            StoreUnavailable: Some were not moved. They are due still.
        """
        now = self._clock()
        there = {each.id: each for each in self._connections.all() if each.transport.is_taken}
        left = [self._seen[each] for each in self._seen.keys() - there.keys()]
        due = [each for each in there.values() if self._is_due(each, now)]
        found = {each.id: _Seen(now, await each.sessions()) for each in due}
        touched = set(self._running).union(*(each.sessions for each in (*left, *found.values())))
        if touched:
            await self._store.touch(touched, now=now)
        self._seen = {each: seen for each, seen in self._seen.items() if each in there} | found
        return frozenset(self._running).union(*(each.sessions for each in self._seen.values()))

    def _is_due(self, connection: ClientConnection, now: float) -> bool:
        seen = self._seen.get(connection.id)
        # A clock that was set back is no reason to wait.
        return seen is None or not 0 <= now - seen.touched_at < self._idle_time / _PARTS
