"""Hold the tables of a memory store, and decide which of its sessions end or sleep: by time, or to
make room.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mcp_sessions.core.client_description import size_of
from mcp_sessions.core.life import (
    SLEEPERS,
    asleep_by,
    deadline_of,
    has_come,
    idle_deadline,
    idle_time,
    idle_times,
    is_unused,
    new_life,
    unused_by,
)
from mcp_sessions.core.log import UNBOUNDED, EventLog, Window, window_of
from mcp_sessions.core.messages import encode
from mcp_sessions.core.request_keys import RequestKeys
from mcp_sessions.core.states import UNNAMED, Mode
from mcp_sessions.ids import EVENTS, GET_STREAM, Position, SessionId, StreamName
from mcp_sessions.policy import SessionPolicy
from mcp_sessions.principal import ANONYMOUS, Principal
from mcp_sessions.security import mint_log_epoch, mint_session_id
from mcp_sessions.stores.limits import text_size
from mcp_sessions.stores.records import Data, Peer, SessionClient, SessionRecord
from mcp_sessions.stores.whole_sessions import WholeSession, whole_log


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

    holder: str | None = None
    """Who keeps what only one process keeps of it (``Exchange.claim``)."""

    lost_epochs: int = 0
    """So many fencing epochs at the most has the database lost. Some processes still know them."""


@dataclass(slots=True)
class Owner:
    principal: Principal
    """As the oldest request said it: many sessions hold this one."""

    sessions: int = 0


_POLICY = SessionPolicy()
_IDLE_TIMES = idle_times(_POLICY)
_WINDOW = window_of(_POLICY)


def window_for(mode: Mode, stream: StreamName, window: Window) -> Window:
    """Return the window of a log. That of an agent's session is kept whole."""
    return UNBOUNDED if mode is Mode.AGENT and stream == EVENTS else window


def new_session(
    session_id: SessionId | None,
    mode: Mode,
    principal: Principal,
    peer: Peer | None,
    now: float,
    policy: SessionPolicy,
) -> MemorySession:
    """Return a session that is made now, with a new id if it has none."""
    life = new_life(mode, now=now, policy=policy)
    client = SessionClient(peer)
    record = SessionRecord(session_id or mint_session_id(), mode, principal, life, client)
    record.is_new = True
    if mode in UNNAMED:
        return MemorySession(record, None)
    return MemorySession(
        record, EventLog(mint_log_epoch(), window_for(mode, EVENTS, window_of(policy)))
    )


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


class Tables:
    def __init__(self) -> None:
        self._policy, self._idle_times, self._window = _POLICY, _IDLE_TIMES, _WINDOW
        self._sessions: dict[SessionId, MemorySession] = {}
        # Those of the last reading of all pages, in order.
        self._listed: list[SessionId] = []
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


class Expiring(Tables):
    def _use(self, record: SessionRecord, now: float) -> None:
        idle, ends_at = self._idle_times[record.mode], record.life.ends_at
        record.life.expires_at = idle_deadline(now=now, idle_timeout=idle, ends_at=ends_at)

    async def expire(
        self, *, now: float, held: Collection[SessionId], limit: int
    ) -> Sequence[SessionRecord]:
        expired: list[SessionRecord] = []
        returned: list[tuple[float, SessionId]] = []
        # Not a name for the heap: ending a session may replace it by a shorter one.
        while self._deadlines and has_come(self._deadlines[0][0], now) and len(expired) < limit:
            _, session_id = heapq.heappop(self._deadlines)
            session = self._sessions.get(session_id)
            if session is None:
                continue
            record, life = session.record, session.record.life
            if has_come(deadline_of(life.expires_at, life.ends_at, held=session_id in held), now):
                self._forget(session)
                expired.append(record)
                continue
            if has_come(life.expires_at, now):
                self._use(record, now)
            returned.append((life.expires_at, session_id))
        for entry in returned:
            heapq.heappush(self._deadlines, entry)
        return expired

    async def evict(
        self,
        *,
        now: float,
        unused_for: float,
        held: Collection[SessionId],
        limit: int,
        opened: bool,
    ) -> Sequence[SessionRecord]:
        asleep, idle = asleep_by(now, self._policy), idle_time(Mode.TRANSPORT, self._policy)
        latest = unused_by(Mode.TRANSPORT, now, unused_for, self._policy)

        def order(record: SessionRecord) -> tuple[bool, bool, float]:
            used_at = record.life.expires_at - idle
            was_used = used_at - record.life.created_at > unused_for
            return not has_come(record.life.expires_at, asleep), was_used, used_at

        def goes(record: SessionRecord) -> bool:
            if is_unused(record.life, asleep) and record.mode in SLEEPERS:
                return True
            client = record.client
            return (
                record.mode is Mode.TRANSPORT
                and is_unused(record.life, latest)
                and record.principal == ANONYMOUS
                and (opened or not client.stream_opened)
                and not (client.subscriptions or client.carried or client.current)
            )

        return self._evict(goes, order, held, limit)

    async def evict_own(
        self,
        principal: Principal,
        *,
        now: float,
        unused_for: float,
        held: Collection[SessionId],
        limit: int,
    ) -> Sequence[SessionRecord]:
        latest = dict.fromkeys(SLEEPERS, asleep_by(now, self._policy))
        for mode in (Mode.CONVERSATION, Mode.KEYS):
            # That of a conversation for both: the time of its keys is not counted as unused.
            latest[mode] = unused_by(Mode.CONVERSATION, now, unused_for, self._policy)

        def goes(record: SessionRecord) -> bool:
            return (
                is_unused(record.life, latest.get(record.mode, -math.inf))
                and record.principal == principal
            )

        return self._evict(goes, lambda record: record.life.expires_at, held, limit)

    def _evict(
        self,
        goes: Callable[[SessionRecord], bool],
        order: Callable[[SessionRecord], Any],
        held: Collection[SessionId],
        limit: int,
    ) -> list[SessionRecord]:
        records = (session.record for session in self._sessions.values())
        candidates = (
            record for record in records if goes(record) and record.session_id not in held
        )
        going = heapq.nsmallest(limit, candidates, key=order)
        for record in going:
            self._forget(self._sessions[record.session_id])
        return going

    async def evict_heavy(
        self, *, now: float, most: int, held: Collection[SessionId], limit: int
    ) -> Sequence[SessionRecord]:
        by = asleep_by(now, self._policy)
        asleep = [each for each in self._sessions.values() if is_unused(each.record.life, by)]
        asleep.sort(key=lambda each: each.record.life.expires_at, reverse=True)
        heavy: set[SessionId] = set()
        size = 0
        for session in asleep:
            size += _size_of(session) if size <= most else 0
            if size > most:
                heavy.add(session.record.session_id)

        def goes(record: SessionRecord) -> bool:
            return record.session_id in heavy

        if not heavy:
            return []
        return self._evict(goes, lambda record: record.life.expires_at, held, limit)

    async def sleep(self, *, now: float) -> None:
        since, self._slept_by = self._slept_by, asleep_by(now, self._policy)
        for session in self._sessions.values():
            record = session.record
            if (
                record.mode in SLEEPERS
                and is_unused(record.life, self._slept_by)
                and not has_come(record.life.expires_at, since)
            ):
                stream = (session.streams or {}).get(GET_STREAM)
                session.streams = {GET_STREAM: stream} if stream is not None else None
                for log in (session.events, stream):
                    if log is not None:
                        log.empty()


def _size_of(session: MemorySession) -> int:
    logs = [session.events, *(session.streams or {}).values()]
    record, data, keys = session.record, session.data, session.keys
    return (
        sum(log.size for log in logs if log is not None)
        + (keys.size if keys is not None else 0)
        + (json_size(data.value) if data is not None else 0)
        + json_size(dict(record.state.values))
        + session.uri_bytes
        + (size_of(record.client.peer.initialize_params) if record.client.peer is not None else 0)
    )


def json_size(value: Any) -> int:
    try:
        return len(encode(value))
    except TypeError:
        # This store keeps what is no JSON, too.
        return len(repr(value))
