"""A whole session as the objects of a store in Python."""

from __future__ import annotations

from collections.abc import Mapping

from mcp_sessions.core.log import EventLog, Window
from mcp_sessions.core.request_keys import RequestKeys
from mcp_sessions.ids import EVENTS, Position, SessionId
from mcp_sessions.policy import SessionPolicy
from mcp_sessions.stores.limits import text_size
from mcp_sessions.stores.memory.tables import MemorySession, window_for
from mcp_sessions.stores.whole_sessions import WholeSession, whole_log


def session_of(whole: WholeSession, window: Window, policy: SessionPolicy) -> MemorySession:
    logs = {
        name: EventLog.restored(
            log.counts,
            window_for(whole.record.mode, name, window),
            {event.number: event for event in log.events},
            dict(log.names),
        )
        for name, log in whole.logs.items()
    }
    session = MemorySession(whole.record, logs.pop(EVENTS, None), logs or None)
    if whole.keys:
        session.keys = RequestKeys.of(
            whole.keys, max_bytes=policy.request_key_bytes, lifetime=policy.request_key_lifetime
        )
    session.data = whole.data
    uris = whole.record.client.subscriptions
    session.uri_bytes = sum(map(text_size, uris))
    return session


def whole_of(session: MemorySession, carried: Mapping[SessionId, Position]) -> WholeSession:
    logs = dict(session.streams or {})
    if session.events is not None:
        logs[EVENTS] = session.events
    return WholeSession(
        session.record,
        session.data,
        {name: whole_log(log) for name, log in logs.items()},
        session.keys.in_order() if session.keys is not None else [],
        dict(carried),
    )
