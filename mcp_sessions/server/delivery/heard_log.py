"""The log of a connection's GET stream, as one credential may hear it.

Whoever opened the stream shall not hear what a stronger credential started (SEC3). So an event
is handed over when it was found that it may be heard; until then it is left in the log, and
who reads the log asks. A session that needs more scopes than the stream was opened with ends
the stream: to hear it, its client has to come back with the stronger credential.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from mcp_sessions.core.log import LoggedEvent
from mcp_sessions.errors import Refusal
from mcp_sessions.ids import SessionId
from mcp_sessions.server.delivery.streams import StreamLog
from mcp_sessions.stores.contract import SessionStore


class HeardLog:
    """One stream's way to it."""

    __slots__ = ("_cleared", "_log", "_over", "_scopes", "_store", "is_too_weak")

    def __init__(
        self,
        log: StreamLog,
        store: SessionStore,
        scopes: frozenset[str],
        cleared: Collection[SessionId],
        over: set[SessionId],
    ) -> None:
        """Read ``log`` with a credential of ``scopes``.

        Args:
            cleared: The sessions that were found to need no others.
            over: Sessions of which nothing is handed over any more; those that are found to
                have ended are added.
        """
        self._log = log
        self._store = store
        self._scopes = scopes
        self._cleared = set(cleared)
        self._over = over
        self.is_too_weak = False
        """Something is in the log, or will be, that the credential may not hear."""

    def begin(self, session_id: SessionId, scopes: frozenset[str]) -> None:
        """A session that needs ``scopes`` is attached."""
        if self._scopes >= scopes:
            self._cleared.add(session_id)
        else:
            self.is_too_weak = True

    def is_cleared(self, event: LoggedEvent) -> bool:
        """Whether an event may be heard, as far as is known without asking."""
        return event.origin is None or event.origin in self._cleared

    def is_over(self, event: LoggedEvent) -> bool:
        """Whether an event is of a session of which nothing is handed over any more."""
        return event.origin in self._over

    async def read(self, position: str) -> tuple[Sequence[LoggedEvent], Refusal | None]:
        """What follows a position; nothing where it is too weak for that."""
        events, refusal = await self._log.read(position)
        origins = {event.origin for event in events if event.origin is not None}
        for origin in origins - self._cleared:
            record = await self._store.load(origin, now=0)
            if record is None:
                # It is over, and nothing of it is handed over any more.
                self._over.add(origin)
            elif not self._scopes >= record.principal.scopes:
                self.is_too_weak = True
                return (), refusal
            self._cleared.add(origin)
        return events, refusal
