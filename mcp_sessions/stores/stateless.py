"""No store at all: ``sessions/*`` only, for servers that remember nothing.

The session id is itself a sealed token with a fixed end, the ``state`` token is the state.
Both can be used again until that end: nothing is revoked, not by ``sessions/delete`` either.
There are no events, no subscriptions, no request keys and no ``session.data``.
"""

from __future__ import annotations

from mcp_sessions.core.life import Life
from mcp_sessions.core.request_keys import KeyUse
from mcp_sessions.core.states import Mode
from mcp_sessions.ids import FencingEpoch, SessionId
from mcp_sessions.principal import Principal
from mcp_sessions.security import SessionSecurity
from mcp_sessions.stores.memory.memory_store import MemoryStore
from mcp_sessions.stores.records import Admitted, CurrentUse, Peer, SessionRecord


class Stateless(MemoryStore):
    """A store in memory that stays empty: whatever it is asked for is not there.
    It hands out sessions, and lets them be used, by what is sealed in their ids.

    Args:
        security: Seals and opens the session ids.
    """

    name = "stateless"
    survives_process = True
    """As far as its keys do."""

    remembers = False

    def __init__(self, security: SessionSecurity) -> None:
        super().__init__()
        self._security = security

    async def create(
        self,
        mode: Mode,
        principal: Principal,
        *,
        peer: Peer | None,
        now: float,
        session_id: SessionId | None = None,
    ) -> SessionRecord:
        """Make a session. Its id holds all facts about it."""
        ends_at = now + self._policy.stateless_lifetime
        session_id = self._security.seal_session_id(
            principal=principal, created_at=now, expires_at=ends_at
        )
        return _record(session_id, principal, now, ends_at)

    async def admit(
        self,
        session_id: SessionId,
        principal: Principal,
        *,
        mode: Mode,
        now: float,
        held: bool = False,
        fencing_epoch: FencingEpoch | None = None,
        key: KeyUse | None = None,
        current: CurrentUse | None = None,
    ) -> Admitted | None:
        """Open the id. A request key is ignored: there is nowhere to record it."""
        opened = self._security.open_session_id(session_id, principal=principal, now=now)
        if opened is None:
            return None
        return Admitted(_record(session_id, principal, *opened))


def _record(
    session_id: SessionId, principal: Principal, created_at: float, ends_at: float
) -> SessionRecord:
    return SessionRecord(
        session_id,
        Mode.PROTOCOL,
        principal,
        Life(created_at, expires_at=ends_at, ends_at=ends_at),
    )
