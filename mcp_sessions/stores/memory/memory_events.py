from __future__ import annotations

from collections.abc import Sequence

from mcp_sessions.core import attachment
from mcp_sessions.core.attachment import Carry, RelayStep
from mcp_sessions.core.entitlement import is_entitled
from mcp_sessions.core.life import has_come
from mcp_sessions.core.log import Draft, LoggedEvent
from mcp_sessions.core.story import Entry, outcome, told
from mcp_sessions.errors import Refusal
from mcp_sessions.ids import (
    EVENTS,
    GET_STREAM,
    ConnectionId,
    FencingEpoch,
    Position,
    SessionId,
    StreamName,
)
from mcp_sessions.stores.memory.tables import Tables
from mcp_sessions.stores.records import (
    Appended,
    AppendedChange,
    Attached,
    Audience,
    Relayed,
    ServerChange,
    StreamHead,
    attachment_of,
)


class EventsInMemory(Tables):
    async def append(
        self, session_id: SessionId, draft: Draft, *, now: float, stream: StreamName = EVENTS
    ) -> Appended | None:
        session = self._sessions.get(session_id)
        if session is None or has_come(session.record.life.ends_at, now):
            return None
        log = self._stream(session, stream)
        replaced = log.would_replace(draft)
        return Appended(log.append(draft, now=now), session.record.attachment, replaced)

    async def audience(self, change: ServerChange, after: str | None) -> Audience:
        """Return the audience as one page: a hundred thousand ids take a millisecond."""
        known = self._sessions if change.uri is None else self._by_uri.get(change.uri, ())
        return Audience(list(known), None)

    async def append_change(
        self,
        session_ids: Sequence[SessionId],
        change: ServerChange,
        *,
        now: float,
        again: bool = False,
    ) -> Sequence[AppendedChange]:
        changes: list[AppendedChange] = []
        for session_id in session_ids:
            session = self._sessions.get(session_id)
            if session is None or has_come(session.record.life.ends_at, now):
                continue
            record = session.record
            if not is_entitled(
                record.mode,
                uri=change.uri,
                listed=change.listed,
                is_subscribed=change.uri in record.client.subscriptions,
                lists=record.client.lists,
                carries=bool(record.client.carried),
            ):
                continue
            stream, draft = change.draft_for(record.mode, session_id, again=again)
            log = self._stream(session, stream)
            replaced = log.would_replace(draft)
            event = log.append(draft, now=now)
            changes.append(AppendedChange(session_id, stream, event, record.attachment, replaced))
        return changes

    async def read(
        self,
        session_id: SessionId,
        after: str | None,
        *,
        now: float,
        stream: StreamName = EVENTS,
        limit: int | None = None,
    ) -> tuple[Sequence[LoggedEvent], Refusal | None]:
        log = self._log(session_id, stream)
        if log is None:
            return (), Refusal.UNKNOWN_POSITION
        return log.since_id(after, now=now, limit=limit)

    async def head(self, session_id: SessionId, *, stream: StreamName = EVENTS) -> Position | None:
        log = self._log(session_id, stream)
        return log.head if log is not None else None

    async def heads(self, streams: Sequence[tuple[SessionId, StreamName]]) -> Sequence[StreamHead]:
        heads: list[StreamHead] = []
        for session_id, stream in streams:
            session, log = self._sessions.get(session_id), self._log(session_id, stream)
            carries = session is not None and bool(session.record.client.carried)
            position = log.head if log is not None else None
            heads.append(StreamHead(session is not None, position, carries))
        return heads

    async def open_stream(self, session_id: SessionId, stream: StreamName) -> Position | None:
        session = self._sessions.get(session_id)
        return self._stream(session, stream).head if session is not None else None

    async def drop_stream(self, session_id: SessionId, stream: StreamName) -> None:
        session = self._sessions.get(session_id)
        if session is not None and session.streams is not None:
            session.streams.pop(stream, None)

    async def drop_origin(
        self,
        session_id: SessionId,
        origin: SessionId,
        *,
        stream: StreamName = GET_STREAM,
        fencing_epoch: FencingEpoch | None = None,
    ) -> None:
        session = self._sessions.get(session_id)
        if session is None:
            return
        if not attachment.may_drop(session.record.client.carried.get(origin), fencing_epoch):
            return
        log = self._log(session_id, stream)
        if log is not None:
            log.drop_origin(origin)
        relayed = self._relayed.get(session_id)
        if relayed is None or stream != GET_STREAM:
            return
        if relayed.pop(origin, None) is not None:
            carried = dict(session.record.client.carried)
            carried.pop(origin, None)
            session.record.client.carried = carried

    async def carry(
        self, connection: SessionId, origin: SessionId, fencing_epoch: FencingEpoch, after: Position
    ) -> bool:
        session = self._sessions.get(connection)
        if session is None:
            return False
        carries = attachment.carry(session.record.client.carried.get(origin), fencing_epoch)
        if carries is not Carry.BEGINS:
            return carries is Carry.CONTINUES
        log = self._log(connection, GET_STREAM)
        if log is not None:
            log.drop_origin(origin)
        session.record.client.carried = {**session.record.client.carried, origin: fencing_epoch}
        self._relayed.setdefault(connection, {})[origin] = after
        return True

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
        session, after = self._sessions.get(connection), self._relayed.get(connection)
        if session is None or after is None or has_come(session.record.life.ends_at, now):
            return Relayed()
        carried = session.record.client.carried.get(origin)
        if carried is None:
            return Relayed()
        position = event.position
        relays, last = attachment.relay(
            carried,
            after[origin],
            position,
            fencing_epoch=fencing_epoch,
            skips=skips,
        )
        if relays is not RelayStep.STORED:
            return Relayed(missing_after=last if relays is RelayStep.TOO_EARLY else None)
        after[origin] = position
        key = event.key[1] if event.key is not None else None
        log = self._stream(session, GET_STREAM)
        return Relayed(log.append(Draft(event.payload, None, key, origin), now=now))

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
        session = self._sessions.get(session_id)
        if session is None or has_come(session.record.life.ends_at, now):
            return None
        record = session.record
        previous = record.attachment
        attached = attachment.attach(
            attachment.state_of(is_attached=previous is not None),
            connection_id,
            fencing_epoch=FencingEpoch(record.fencing_epoch + session.lost_epochs),
            waits_from=record.client.waits_from,
            only_if_free=only_if_free,
        )
        if attached is None:
            return None
        session.lost_epochs = 0
        log = session.events if session.events is not None else self._stream(session, EVENTS)
        replay, refusal = log.replay(position, now=now)
        counts, head = log.counts, log.head.event_id()
        record.fencing_epoch, record.client.waits_from = attached.fencing_epoch, attached.waits_from
        record.attachment = attachment_of(attached.connection_id, attached.fencing_epoch)
        if entry is not None:
            facts = outcome(
                previous is not None and previous.connection_id != connection_id,
                position,
                head=counts.head,
                replayed=len(replay),
                evicted=counts.evicted,
                refusal=refusal.value if refusal is not None else None,
            )
            record.story = told(record.story, entry.at, entry.text + facts)
        return Attached(
            record.fencing_epoch,
            head,
            previous,
            replay,
            refusal,
            record.principal.scopes,
            attached.listens_from,
        )

    async def detach(
        self, session_id: SessionId, fencing_epoch: FencingEpoch, entry: Entry | None = None
    ) -> bool:
        session = self._sessions.get(session_id)
        if session is None:
            return False
        record = session.record
        if not attachment.detaches(
            attachment.state_of(is_attached=record.attachment is not None),
            fencing_epoch=record.fencing_epoch,
            attached_with=fencing_epoch,
        ):
            return False
        record.attachment = None
        if entry is not None:
            record.story = told(record.story, entry.at, entry.text)
        return True
