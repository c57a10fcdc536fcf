"""No store at all: ``sessions/*`` only, for servers that remember nothing.

The session id is itself a sealed token with a fixed end, the ``state`` token is the state.
Both can be used again until that end: nothing is revoked, not by ``sessions/delete`` either.
There are no events, no subscriptions, no request keys and no ``session.data``.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from mcp_sessions.core.log import Draft, LoggedEvent
from mcp_sessions.core.states import Mode
from mcp_sessions.errors import Refusal
from mcp_sessions.ids import (
    EVENTS,
    GET_STREAM,
    ConnectionId,
    FencingEpoch,
    Position,
    RequestKey,
    SessionEventId,
    SessionId,
    StreamName,
)
from mcp_sessions.policy import SessionPolicy
from mcp_sessions.principal import Principal
from mcp_sessions.security import SessionSecurity
from mcp_sessions.stores.exchange import Exchange
from mcp_sessions.stores.records import (
    Admitted,
    Appended,
    Attached,
    Audience,
    CurrentSession,
    Data,
    KeyUse,
    Peer,
    Relayed,
    ServerChange,
    SessionRecord,
    Told,
)


class Stateless:
    """A :class:`~mcp_sessions.stores.contract.SessionStore` that stores nothing.

    Args:
        security: Seals and opens the session ids.
    """

    name = "stateless"
    survives_process = True
    """As far as its keys do."""

    remembers = False
    exchange: Exchange | None = None

    def __init__(self, security: SessionSecurity) -> None:
        self._security = security
        self._lifetime = SessionPolicy().stateless_lifetime

    async def open(self, policy: SessionPolicy) -> None:
        """Serve within the limits of ``policy``."""
        self._lifetime = policy.stateless_lifetime

    async def close(self) -> None:
        """There is nothing to let go of."""

    async def create(
        self, mode: Mode, principal: Principal, *, peer: Peer | None, now: float
    ) -> SessionRecord:
        """A session whose id says all that is known of it."""
        ends_at = now + self._lifetime
        session_id = self._security.seal_session_id(
            principal=principal, created_at=now, expires_at=ends_at
        )
        return self._record(session_id, principal, now, ends_at)

    async def load(self, session_id: SessionId, *, now: float) -> SessionRecord | None:
        """None: whose a session is cannot be told from its id alone."""
        return None

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
    ) -> Admitted | None:
        """Open the id. A request key is ignored: there is nowhere to record it."""
        opened = self._security.open_session_id(session_id, principal=principal, now=now)
        if opened is None:
            return None
        return Admitted(self._record(session_id, principal, *opened))

    async def touch(self, session_ids: Collection[SessionId], *, now: float) -> None:
        """The end of a session is fixed."""

    async def end(self, session_id: SessionId) -> SessionRecord | None:
        """Nothing is revoked."""
        return None

    async def expire(
        self, *, now: float, held: Collection[SessionId], limit: int
    ) -> Sequence[SessionRecord]:
        """There is nothing that could be ended."""
        return ()

    async def evict(
        self,
        *,
        now: float,
        unused_for: float,
        held: Collection[SessionId],
        limit: int,
        opened: bool,
    ) -> Sequence[SessionRecord]:
        """Nothing is kept."""
        return ()

    async def append(
        self, session_id: SessionId, draft: Draft, *, now: float, stream: StreamName = EVENTS
    ) -> Appended | None:
        """No events."""
        return None

    async def renew(self, session_id: SessionId) -> None:
        """No events."""

    async def audience(self, change: ServerChange, after: str | None) -> Audience:
        """Nobody knows which sessions there are."""
        return Audience((), None)

    async def tell(
        self,
        session_ids: Sequence[SessionId],
        change: ServerChange,
        *,
        now: float,
        again: bool = False,
    ) -> Sequence[Told]:
        """No events."""
        return ()

    async def read(
        self,
        session_id: SessionId,
        after: str | None,
        *,
        now: float,
        stream: StreamName = EVENTS,
        limit: int | None = None,
    ) -> tuple[Sequence[LoggedEvent], Refusal | None]:
        """No events."""
        return (), Refusal.UNKNOWN_POSITION

    async def head(self, session_id: SessionId, *, stream: StreamName = EVENTS) -> Position | None:
        """No events."""
        return None

    async def open_stream(self, session_id: SessionId, stream: StreamName) -> Position | None:
        """No streams."""
        return None

    async def drop_stream(self, session_id: SessionId, stream: StreamName) -> None:
        """No streams."""

    async def drop_origin(
        self,
        session_id: SessionId,
        origin: SessionId,
        *,
        stream: StreamName = GET_STREAM,
        fencing_epoch: FencingEpoch | None = None,
    ) -> None:
        """No streams."""

    async def carry(
        self,
        connection: SessionId,
        origin: SessionId,
        fencing_epoch: FencingEpoch,
        after: Position,
    ) -> bool:
        """No streams."""
        return False

    async def relay(
        self,
        connection: SessionId,
        origin: SessionId,
        fencing_epoch: FencingEpoch,
        event: LoggedEvent,
        *,
        now: float,
        skips: bool = False,
    ) -> Relayed:
        """No streams."""
        return Relayed()

    async def attach(
        self,
        session_id: SessionId,
        connection_id: ConnectionId | None,
        *,
        now: float,
        position: str | None = None,
        only_if_free: bool = False,
    ) -> Attached | None:
        """Nothing is attached: there is nothing to hear."""
        return None

    async def detach(self, session_id: SessionId, fencing_epoch: FencingEpoch) -> bool:
        """Nothing is attached."""
        return False

    async def set_current(self, session_id: SessionId, current: CurrentSession | None) -> None:
        """There are no transport-mode sessions."""

    async def mark_stream_opened(self, session_id: SessionId) -> bool:
        """There are no transport-mode sessions."""
        return False

    async def subscribe(self, session_id: SessionId, uri: str) -> bool:
        """No subscriptions."""
        return False

    async def unsubscribe(self, session_id: SessionId, uri: str) -> bool:
        """No subscriptions."""
        return False

    async def subscribers(self, uri: str) -> Sequence[SessionId]:
        """No subscriptions."""
        return ()

    async def set_filter(
        self, session_id: SessionId, uris: frozenset[str], lists: frozenset[str]
    ) -> bool:
        """No subscriptions."""
        return False

    async def set_waits_from(self, session_id: SessionId, event_id: SessionEventId | None) -> None:
        """No events."""

    async def all_sessions(self, principal: Principal | None = None) -> Sequence[SessionRecord]:
        """Nobody knows which sessions there are."""
        return ()

    async def change_state(
        self,
        session_id: SessionId,
        changed: Mapping[str, Any],
        removed: Collection[str],
        *,
        expected_version: int | None = None,
    ) -> SessionRecord | None:
        """The state is in its token; nothing is kept here."""
        return None

    async def finish_request(
        self, session_id: SessionId, key: RequestKey, outcome: bytes | None, *, now: float
    ) -> bool:
        """No request keys."""
        return False

    async def load_data(self, session_id: SessionId) -> Data | None:
        """No data."""
        return None

    async def replace_data(
        self, session_id: SessionId, value: Mapping[str, Any], *, expected_version: int
    ) -> bool:
        """No data."""
        return False

    def _record(
        self, session_id: SessionId, principal: Principal, created_at: float, ends_at: float
    ) -> SessionRecord:
        return SessionRecord(
            session_id,
            Mode.PROTOCOL,
            principal,
            created_at=created_at,
            expires_at=ends_at,
            ends_at=ends_at,
        )
