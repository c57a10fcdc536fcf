"""Event logs in a SQLite file: what is stored, who is told, and who hears it. Each call is one
transaction; what it does to the rows is in ``logs.py``, ``changes.py`` and ``attachment.py``.
"""

from __future__ import annotations

from collections.abc import Sequence

from mcp_sessions.core.log import Draft, LoggedEvent
from mcp_sessions.core.states import Mode
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
from mcp_sessions.stores.records import Appended, Attached, Audience, Relayed, ServerChange, Told
from mcp_sessions.stores.sqlite import attachment, changes, logs, sessions
from mcp_sessions.stores.sqlite.served_file import SMALL, ServedFile, is_small
from mcp_sessions.stores.sqlite.transaction import Transaction

_AUDIENCE = 128
"""Sessions asked for at once while a change is told: a fraction of a millisecond."""


class Events(ServedFile):
    """The part of the store that is about events."""

    async def append(
        self, session_id: SessionId, draft: Draft, *, now: float, stream: StreamName = EVENTS
    ) -> Appended | None:

        def work(tx: Transaction) -> Appended | None:
            session = sessions.brief(tx, session_id)
            if session is None or now >= session.ends_at:
                return None
            log = logs.opened(tx, session.sid, stream)
            window = sessions.window_of_stream(session, stream, self._window)
            event, replaced = logs.append(tx, log, draft, window, now=now)
            if event.number == 1 and stream not in (EVENTS, GET_STREAM):
                logs.evict_responses(tx, session.sid, stream, window, now=now)
            return Appended(event, session.attachment, replaced)

        return await self._writer.call(work, short=is_small(draft.before))

    async def renew(self, session_id: SessionId) -> None:

        def work(tx: Transaction) -> None:
            session = sessions.brief(tx, session_id)
            if session is not None and session.mode is Mode.PROTOCOL:
                logs.drop(tx, session.sid, EVENTS)
                logs.opened(tx, session.sid, EVENTS)

        await self._writer.call(work)

    async def audience(self, change: ServerChange, after: str | None) -> Audience:
        page = int(after) if after is not None else 0
        return await self._writer.call(
            lambda tx: changes.audience(tx, change, after=page, limit=_AUDIENCE)
        )

    async def tell(
        self,
        session_ids: Sequence[SessionId],
        change: ServerChange,
        *,
        now: float,
        again: bool = False,
    ) -> Sequence[Told]:
        """See :meth:`SessionStore.tell`. A call that failed has stored nothing."""
        return await self._writer.call(
            lambda tx: changes.tell(tx, session_ids, change, self._window, now=now),
            short=change.size * len(session_ids) <= SMALL,
        )

    async def read(
        self,
        session_id: SessionId,
        after: str | None,
        *,
        now: float,
        stream: StreamName = EVENTS,
        limit: int | None = None,
    ) -> tuple[Sequence[LoggedEvent], Refusal | None]:

        def work(tx: Transaction) -> tuple[Sequence[LoggedEvent], Refusal | None]:
            session = sessions.brief(tx, session_id)
            log = logs.find(tx, session.sid, stream) if session is not None else None
            if session is None or log is None:
                return (), Refusal.UNKNOWN_POSITION
            window = sessions.window_of_stream(session, stream, self._window)
            return logs.since_id(tx, log, after, window, now=now, limit=limit)

        return await self._writer.call(work)

    async def head(self, session_id: SessionId, *, stream: StreamName = EVENTS) -> Position | None:

        def work(tx: Transaction) -> Position | None:
            session = sessions.brief(tx, session_id)
            log = logs.find(tx, session.sid, stream) if session is not None else None
            return log.position if log is not None else None

        return await self._writer.call(work, short=True)

    async def open_stream(self, session_id: SessionId, stream: StreamName) -> Position | None:

        def work(tx: Transaction) -> Position | None:
            session = sessions.brief(tx, session_id)
            return logs.opened(tx, session.sid, stream).position if session is not None else None

        return await self._writer.call(work, short=True)

    async def drop_stream(self, session_id: SessionId, stream: StreamName) -> None:

        def work(tx: Transaction) -> None:
            session = sessions.brief(tx, session_id)
            if session is not None:
                logs.drop(tx, session.sid, stream)

        await self._writer.call(work)

    async def drop_origin(
        self,
        session_id: SessionId,
        origin: SessionId,
        *,
        stream: StreamName = GET_STREAM,
        fencing_epoch: FencingEpoch | None = None,
    ) -> None:
        await self._writer.call(
            lambda tx: attachment.drop_origin(
                tx, session_id, origin, stream=stream, fencing_epoch=fencing_epoch
            )
        )

    async def carry(
        self,
        connection: SessionId,
        origin: SessionId,
        fencing_epoch: FencingEpoch,
        after: Position,
    ) -> bool:
        return await self._writer.call(
            lambda tx: attachment.carry(tx, connection, origin, fencing_epoch, after)
        )

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
        return await self._writer.call(
            lambda tx: attachment.relay(
                tx,
                connection,
                origin,
                fencing_epoch,
                event,
                now=now,
                skips=skips,
                window=self._window,
            ),
            short=is_small(event.payload),
        )

    async def attach(
        self,
        session_id: SessionId,
        connection_id: ConnectionId | None,
        *,
        now: float,
        position: str | None = None,
        only_if_free: bool = False,
    ) -> Attached | None:
        return await self._writer.call(
            lambda tx: attachment.attach(
                tx,
                session_id,
                connection_id,
                now=now,
                position=position,
                only_if_free=only_if_free,
                window=self._window,
            )
        )

    async def detach(self, session_id: SessionId, fencing_epoch: FencingEpoch) -> bool:
        return await self._writer.call(
            lambda tx: attachment.detach(tx, session_id, fencing_epoch), short=True
        )
