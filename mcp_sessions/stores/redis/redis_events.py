from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from mcp_sessions.core.log import PAGE_BYTES, Draft, LoggedEvent
from mcp_sessions.core.story import Entry
from mcp_sessions.errors import Refusal
from mcp_sessions.ids import (
    EVENTS,
    GET_STREAM,
    ConnectionId,
    FencingEpoch,
    LogEpoch,
    Position,
    SessionEventId,
    SessionId,
    StreamName,
    parse_position,
)
from mcp_sessions.security import mint_log_epoch
from mcp_sessions.stores.records import (
    Appended,
    AppendedChange,
    Attached,
    Audience,
    Relayed,
    ServerChange,
    StreamHead,
)
from mcp_sessions.stores.redis.commands import readable
from mcp_sessions.stores.redis.lists import PAGE, Lists
from mcp_sessions.stores.redis.record_codec import (
    ScriptAnswer,
    decoded,
    event_at,
    events_of,
    optional,
    stored_attachment,
    unpacked,
    unreadable,
)
from mcp_sessions.stores.redis.redis_connection import Value

logger = logging.getLogger(__name__)


class EventsInRedis(Lists):
    @readable
    async def append(
        self, session_id: SessionId, draft: Draft, *, now: float, stream: StreamName = EVENTS
    ) -> Appended | None:
        now = await self._clock.at(now)
        since = await self._clock.at(draft.since) if draft.since is not None else None
        answer = await self._on(
            session_id,
            "append",
            *self._moment(now),
            stream,
            repr(since) if since is not None else "",
            draft.before,
            *optional(draft.after, draft.key, draft.origin, draft.name),
        )
        if answer is None:
            return None
        epoch, number, payload, connection, fence, replaced = answer
        place = Position(LogEpoch(epoch.decode()), int(number))
        event = event_at(place, payload, now, draft.key, draft.origin)
        return Appended(event, stored_attachment(connection, fence), bool(replaced))

    @readable
    async def audience(self, change: ServerChange, after: str | None) -> Audience:
        """Scan for the audience, page by page. A scan finds every session that exists all the time.

        A cursor is valid only at the server that gave it.
        """
        cursor = after if after is not None else "0"
        if change.uri is not None:
            key = self._subscribers_key(change.uri)
            following, flat = await self._command("HSCAN", key, cursor, "COUNT", PAGE)
            # A token: when it was made, a random part, its session.
            found = [SessionId(token.partition(b" ")[2].decode()) for token in flat[1::2]]
        else:
            following, flat = await self._command("ZSCAN", self._all, cursor, "COUNT", PAGE)
            found = await self._ids(flat[::2])
        return Audience(found, following.decode() if following != b"0" else None)

    @readable
    async def append_change(
        self,
        session_ids: Sequence[SessionId],
        change: ServerChange,
        *,
        now: float,
        again: bool = False,
    ) -> Sequence[AppendedChange]:
        answers = await self._on_each(
            "append_change",
            [self._key(session_id) for session_id in session_ids],
            *self._moment(now),
            change.id,
            repr(change.at) if again else "",
            change.uri or "",
            change.listed or "",
            *change.event.parts,
            change.bare.before,
            *optional(change.event.key),
        )
        changes: list[AppendedChange] = []
        for session_id, answer in zip(session_ids, answers, strict=True):
            if answer == b"broken":
                logger.error("a change is not in a session's log: a value in Redis cannot be read")
            elif answer not in (b"gone", b"not entitled"):
                changes.append(_appended_of(session_id, change, now, answer))
            elif change.uri is not None:
                await self._tidy_subscriber(change.uri, session_id)
        return changes

    @readable
    async def read(
        self,
        session_id: SessionId,
        after: str | None,
        *,
        now: float,
        stream: StreamName = EVENTS,
        limit: int | None = None,
    ) -> tuple[Sequence[LoggedEvent], Refusal | None]:
        now = await self._clock.at(now)
        answer = await self._on(
            session_id,
            "read",
            *self._moment(now),
            stream,
            *_read_position(after),
            limit if limit is not None else "",
            PAGE_BYTES,
        )
        if answer[0] is not None:
            return (), Refusal(answer[0].decode())
        return events_of(LogEpoch(answer[1].decode()), answer[2]), None

    async def head(self, session_id: SessionId, *, stream: StreamName = EVENTS) -> Position | None:
        return await self._head(session_id, stream)

    async def open_stream(self, session_id: SessionId, stream: StreamName) -> Position | None:
        return await self._head(session_id, stream, make=True)

    @readable
    async def _head(
        self, session_id: SessionId, stream: StreamName, *, make: bool = False
    ) -> Position | None:
        (answer,) = await self._heads([session_id], stream, make=make)
        if answer == b"broken":
            raise unreadable(answer)
        return _head_of(answer).position

    @readable
    async def heads(self, streams: Sequence[tuple[SessionId, StreamName]]) -> Sequence[StreamHead]:
        found = dict[tuple[SessionId, StreamName], StreamHead]()
        # Nearly all that are asked for together have the same name.
        for stream in {name for _, name in streams}:
            ids = [session_id for session_id, name in streams if name == stream]
            answers = await self._heads(ids, stream)
            for session_id, answer in zip(ids, answers, strict=True):
                found[session_id, stream] = _head_of(answer)
        return [found[each] for each in streams]

    async def _heads(
        self, session_ids: Sequence[SessionId], stream: StreamName, *, make: bool = False
    ) -> list[ScriptAnswer]:
        keys = [self._key(each) for each in session_ids]
        return await self._on_each("heads", keys, stream, mint_log_epoch(), int(make))

    def _moment(self, now: float) -> tuple[Value, ...]:
        """What a script takes first that appends to a log, or reads it."""
        return repr(now), mint_log_epoch(), *self._window

    async def drop_stream(self, session_id: SessionId, stream: StreamName) -> None:
        await self._on(session_id, "drop_stream", stream)

    async def drop_origin(
        self,
        session_id: SessionId,
        origin: SessionId,
        *,
        stream: StreamName = GET_STREAM,
        fencing_epoch: FencingEpoch | None = None,
    ) -> None:
        epoch = fencing_epoch if fencing_epoch is not None else ""
        await self._on(session_id, "drop_origin", stream, origin, mint_log_epoch(), epoch)

    @readable
    async def carry(
        self, connection: SessionId, origin: SessionId, fencing_epoch: FencingEpoch, after: Position
    ) -> bool:
        position = (after.log_epoch, after.number, mint_log_epoch())
        return bool(await self._on(connection, "carry", origin, fencing_epoch, *position))

    @readable
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
        now = await self._clock.at(now)
        key = event.key[1] if event.key is not None else None
        answer = await self._on(
            connection,
            "relay",
            *self._moment(now),
            origin,
            fencing_epoch,
            event.event_id.partition("-")[0],
            event.number,
            int(skips),
            event.payload,
            *optional(key),
        )
        if answer is None:
            return Relayed()
        place = Position(LogEpoch(answer[1].decode()), int(answer[2]))
        if answer[0] == b"missing":
            return Relayed(missing_after=place)
        return Relayed(event_at(place, event.payload, now, key, origin))

    @readable
    async def attach(
        self,
        session_id: SessionId,
        connection_id: ConnectionId | None,
        *,
        now: float,
        position: Position | None = None,
        only_if_free: bool = False,
        entry: Entry | None = None,
    ) -> Attached | None:
        now = await self._clock.at(now)
        answer = await self._on(
            session_id,
            "attach",
            *self._moment(now),
            *_position_args(position),
            *optional(connection_id),
            int(only_if_free),
            *await self._dated(entry),
        )
        if answer is None:
            return None
        fence, epoch, number, previous, previous_fence, reason, entries, maker, waits = answer
        log_epoch = LogEpoch(epoch.decode())
        return Attached(
            FencingEpoch(int(fence)),
            Position(log_epoch, int(number)).event_id(),
            stored_attachment(previous, previous_fence),
            events_of(log_epoch, entries),
            Refusal(reason.decode()) if reason is not None else None,
            frozenset(unpacked(maker)[0]),
            SessionEventId(decoded(waits)) if waits is not None else None,
        )

    @readable
    async def detach(
        self, session_id: SessionId, fencing_epoch: FencingEpoch, entry: Entry | None = None
    ) -> bool:
        added = await self._dated(entry)
        return bool(await self._on(session_id, "detach", fencing_epoch, *added))

    async def _dated(self, entry: Entry | None) -> tuple[Value, ...]:
        return () if entry is None else (repr(await self._clock.at(entry.at)), entry.text)


def _head_of(answer: ScriptAnswer) -> StreamHead:
    if answer is None:
        return StreamHead(False, None)
    if answer == b"broken":
        # The others' are asked for in the same call. Its own requests fail, and say why.
        return StreamHead(True, None)
    carries, *position = answer
    if not position:
        return StreamHead(True, None, bool(carries))
    epoch, number = position
    return StreamHead(True, Position(LogEpoch(epoch.decode()), int(number)), bool(carries))


def _appended_of(
    session_id: SessionId, change: ServerChange, now: float, answer: Sequence[Any]
) -> AppendedChange:
    stream, epoch, number, payload, connection, fence, replaced = answer
    place = Position(LogEpoch(epoch.decode()), int(number))
    return AppendedChange(
        session_id,
        StreamName(stream.decode()),
        event_at(place, payload, now, change.event.key, None),
        stored_attachment(connection, fence),
        bool(replaced),
    )


def _read_position(event_id: str | None) -> tuple[Value, ...]:
    position = parse_position(event_id) if event_id is not None else None
    if position is None and event_id is not None:
        return Refusal.UNKNOWN_POSITION.value, "", 0
    return _position_args(position)


def _position_args(position: Position | None) -> tuple[Value, ...]:
    """Return why the position is refused (empty: it is not), its epoch and its number."""
    if position is None:
        return Refusal.NO_POSITION.value, "", 0
    return "", position.log_epoch, position.number
