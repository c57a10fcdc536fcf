"""Decide which sessions of a memory store end, and which sleep: by time, or to make room."""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Collection, Sequence
from typing import Any

from mcp_sessions.core.client_description import size_of
from mcp_sessions.core.life import (
    SLEEPERS,
    asleep_by,
    deadline_of,
    has_come,
    idle_deadline,
    idle_time,
    is_unused,
    unused_by,
)
from mcp_sessions.core.messages import encode
from mcp_sessions.core.states import Mode
from mcp_sessions.ids import GET_STREAM, SessionId
from mcp_sessions.principal import ANONYMOUS, Principal
from mcp_sessions.stores.memory.tables import MemorySession, Tables
from mcp_sessions.stores.records import (
    SessionRecord,
)


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
