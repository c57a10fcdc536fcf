from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from mcp_sessions.core.ends import EndReason, SessionEnd
from mcp_sessions.core.life import has_come
from mcp_sessions.core.states import Mode
from mcp_sessions.core.story import NOTHING, Why, detaches
from mcp_sessions.ids import SessionId, process_of
from mcp_sessions.principal import Principal
from mcp_sessions.server.cluster.codec import encode
from mcp_sessions.server.cluster.replica_messages import SessionEnded
from mcp_sessions.server.upstream.port import noted
from mcp_sessions.stores.contract import SessionStore
from mcp_sessions.stores.records import SessionRecord


@dataclass(frozen=True, slots=True)
class SessionInfo:
    """One live session."""

    id: SessionId
    """A credential where there is no other: do not log it."""

    mode: Literal["protocol", "transport", "conversation"]
    """Made by ``session/start`` or ``sessions/create``, by ``initialize`` over HTTP, or by the
    server for a conversation."""

    principal: Principal
    created_at: float
    """Seconds since 1970."""

    expires_at: float
    """Seconds since 1970; if nothing more happens."""

    is_attached: bool
    """Whether a connection receives its events."""

    subscriptions: frozenset[str]
    """Resource URIs."""


_NAMES: Mapping[Mode, Literal["protocol", "conversation"]] = {
    Mode.PROTOCOL: "protocol",
    Mode.CONVERSATION: "conversation",
}


@dataclass(slots=True, eq=False, repr=False)
class Sessions:
    """Lists and ends the sessions of a store.

    Args:
        finish: Ends a session, and what runs for it.
    """

    _store: SessionStore
    _clock: Callable[[], float]
    _finish: Callable[[SessionId, EndReason], Awaitable[bool]]

    async def list(
        self, *, principal: Principal | None = None, mode: Mode | None = None
    ) -> list[SessionInfo]:
        """The live sessions, oldest first.

        Args:
            principal: Only this one's.
            mode: Only of this mode.
        """
        now = self._clock()
        records = await noted(self._store.all_sessions(principal))
        return [
            SessionInfo(
                record.session_id,
                _NAMES.get(record.mode, "transport"),
                record.principal,
                record.life.created_at,
                record.life.expires_at,
                record.attachment is not None,
                record.client.subscriptions,
            )
            for record in sorted(records, key=lambda record: record.life.created_at)
            if not has_come(record.life.expires_at, now)
            and record.mode not in (Mode.TASK, Mode.KEYS)
            and (mode is None or record.mode is mode)
        ]

    async def end(self, session_id: str) -> bool:
        """End a session of either mode, as its client would; False if it is not there."""
        return await noted(self._finish(SessionId(session_id), EndReason.OPERATOR))

    async def ended(self) -> Sequence[SessionEnd]:
        """How sessions ended, oldest first: the newest 10,000, each for seven days."""
        return await noted(self._store.ends(now=self._clock()))


async def ended_outside(store: SessionStore, record: SessionRecord) -> None:
    """A session has ended in a shared store: take out what it left in others, and tell every
    replica, as the one would that had ended it (``Lifecycle.forget``).

    Raises:
        StoreUnavailable: Not all of it was done; the replicas find out in their rounds.
    """
    connection_id = record.attachment.connection_id if record.attachment is not None else None
    if record.mode is Mode.TRANSPORT:
        for session_id, fencing_epoch in record.client.carried.items():
            gone = detaches(time.time(), Why.CONNECTION_ENDED, NOTHING)
            await store.detach(session_id, fencing_epoch, gone)
    elif connection_id is not None and process_of(connection_id) is None:
        await store.drop_origin(SessionId(connection_id), record.session_id)
    if store.exchange is not None:
        ended = SessionEnded(session_id=record.session_id, connection_id=connection_id)
        await store.exchange.send(encode(ended, sender=""))
