from __future__ import annotations

import heapq
import math
from dataclasses import dataclass

from mcp_sessions.core.life import idle_times
from mcp_sessions.core.log import EventLog, window_of
from mcp_sessions.core.request_keys import RequestKeys
from mcp_sessions.ids import EVENTS, Position, SessionId, StreamName
from mcp_sessions.policy import SessionPolicy
from mcp_sessions.principal import Principal
from mcp_sessions.security import mint_log_epoch
from mcp_sessions.stores.records import Data, SessionRecord


@dataclass(slots=True)
class MemorySession:
    record: SessionRecord
    events: EventLog | None
    """None: a session that no client knows of had no event yet."""

    streams: dict[StreamName, EventLog] | None = None
    keys: RequestKeys | None = None
    data: Data | None = None
    uri_bytes: int = 0
    """The bytes of its subscriptions, in sum."""


@dataclass(slots=True)
class Owner:
    principal: Principal
    """As the oldest request said it: many sessions hold this one."""

    sessions: int = 0


_POLICY = SessionPolicy()
_IDLE_TIMES = idle_times(_POLICY)
_WINDOW = window_of(_POLICY)


class Tables:
    def __init__(self) -> None:
        self._policy, self._idle_times, self._window = _POLICY, _IDLE_TIMES, _WINDOW
        self._sessions: dict[SessionId, MemorySession] = {}
        self._by_principal: dict[Principal, Owner] = {}
        self._by_uri: dict[str, dict[SessionId, None]] = {}
        # Connection → the last event of each carried session that its GET stream has.
        self._relayed: dict[SessionId, dict[SessionId, Position]] = {}
        # (deadline, session id): a deadline that was moved since is pushed anew when its
        # old entry comes up, so that a request costs nothing here.
        self._deadlines: list[tuple[float, SessionId]] = []
        # The deadline up to which sessions were made to sleep.
        self._slept_by = -math.inf

    def _serve(self, policy: SessionPolicy) -> None:
        self._policy = policy
        self._idle_times = idle_times(policy)
        self._window = window_of(policy)

    def _log(self, session_id: SessionId, stream: StreamName) -> EventLog | None:
        session = self._sessions.get(session_id)
        if session is None:
            return None
        if stream == EVENTS:
            return session.events
        return session.streams.get(stream) if session.streams is not None else None

    def _stream(self, session: MemorySession, stream: StreamName) -> EventLog:
        if stream == EVENTS:
            if session.events is None:
                session.events = EventLog(mint_log_epoch(), self._window)
            return session.events
        if session.streams is None:
            session.streams = {}
        log = session.streams.get(stream)
        if log is None:
            log = session.streams[stream] = EventLog(mint_log_epoch(), self._window)
        return log

    def _forget(self, session: MemorySession) -> None:
        """A session has ended: it is remembered in no list (END2)."""
        record = session.record
        del self._sessions[record.session_id]
        self._relayed.pop(record.session_id, None)
        self._compact()
        owner = self._by_principal[record.principal]
        owner.sessions -= 1
        if not owner.sessions:
            del self._by_principal[record.principal]
        for uri in record.client.subscriptions:
            self._forget_subscription(record.session_id, uri)

    def _compact(self) -> None:
        """Sessions that ended leave nothing behind (END2), not their deadlines either."""
        if len(self._deadlines) > 2 * len(self._sessions) + 16:
            live = [session.record for session in self._sessions.values()]
            self._deadlines = [
                (record.life.expires_at, record.session_id)
                for record in live
                if record.life.expires_at != math.inf
            ]
            heapq.heapify(self._deadlines)

    def _forget_subscription(self, session_id: SessionId, uri: str) -> None:
        sessions = self._by_uri.get(uri)
        if sessions is None:
            return
        sessions.pop(session_id, None)
        if not sessions:
            del self._by_uri[uri]
