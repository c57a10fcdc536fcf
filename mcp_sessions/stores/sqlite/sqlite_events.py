"""Event logs in a SQLite file: what is stored, and who gets it. Each call is one transaction; what
it does to the rows of a log is in ``log_rows.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from mcp_sessions.core.entitlement import is_entitled
from mcp_sessions.core.life import has_come
from mcp_sessions.core.log import Draft, LoggedEvent
from mcp_sessions.core.states import Mode
from mcp_sessions.errors import Refusal
from mcp_sessions.ids import EVENTS, GET_STREAM, Position, SessionId, StreamName
from mcp_sessions.stores.records import Appended, AppendedChange, Audience, ServerChange, StreamHead
from mcp_sessions.stores.sqlite import log_rows, session_rows
from mcp_sessions.stores.sqlite.log_rows import LogRow
from mcp_sessions.stores.sqlite.served_file import SMALL, ServedFile, is_small
from mcp_sessions.stores.sqlite.session_rows import Brief
from mcp_sessions.stores.sqlite.transaction import Transaction, text_bytes

_AUDIENCE = 128
"""Sessions asked for at once while a change is sent: a fraction of a millisecond."""


class EventsInFile(ServedFile):
    async def append(
        self, session_id: SessionId, draft: Draft, *, now: float, stream: StreamName = EVENTS
    ) -> Appended | None:

        def work(tx: Transaction, session: Brief) -> Appended | None:
            log = log_rows.opened(tx, session.sid, stream)
            window = session_rows.window_of_stream(session, stream, self._window)
            event, replaced = log_rows.append(tx, log, draft, window, now=now)
            if event.number == 1 and stream not in (EVENTS, GET_STREAM):
                log_rows.evict_responses(tx, session.sid, stream, window, now=now)
            return Appended(event, session.attachment, replaced)

        return await self._within(session_id, work, None, now=now, short=is_small(draft.before))

    async def audience(self, change: ServerChange, after: str | None) -> Audience:
        page = int(after) if after is not None else 0

        def work(tx: Transaction) -> Audience:
            if change.uri is not None:
                rows = tx.execute(
                    "SELECT sid, session_id FROM subscriptions JOIN sessions USING (sid)"
                    " WHERE uri = ? AND sid > ? ORDER BY sid LIMIT ?",
                    (text_bytes(change.uri), page, _AUDIENCE),
                ).fetchall()
            else:
                rows = tx.execute(
                    "SELECT sid, session_id FROM sessions WHERE sid > ? ORDER BY sid LIMIT ?",
                    (page, _AUDIENCE),
                ).fetchall()
            following = str(rows[-1][0]) if len(rows) == _AUDIENCE else None
            return Audience([SessionId(session_id) for _, session_id in rows], following)

        return await self._writer.call(work)

    async def append_change(
        self,
        session_ids: Sequence[SessionId],
        change: ServerChange,
        *,
        now: float,
        again: bool = False,
    ) -> Sequence[AppendedChange]:
        uri = text_bytes(change.uri) if change.uri is not None else None
        marks = ",".join("?" * len(session_ids))

        def work(tx: Transaction) -> Sequence[AppendedChange]:
            rows = tx.execute(
                "SELECT session_id, sid, mode, ends_at, connection_id, fencing_epoch, lists,"
                " EXISTS (SELECT 1 FROM subscriptions AS s WHERE s.sid = sessions.sid"
                " AND s.uri = ?),"
                " EXISTS (SELECT 1 FROM carried AS c WHERE c.sid = sessions.sid)"
                f" FROM sessions WHERE session_id IN ({marks})",
                (uri, *session_ids),
            ).fetchall()
            found = {row[0]: row for row in rows}
            changes = [
                self._append_change(tx, found[each], change, now, again)
                for each in session_ids
                if each in found
            ]
            return [each for each in changes if each is not None]

        return await self._writer.call(
            work, short=len(change.bare.before) * len(session_ids) <= SMALL
        )

    def _append_change(
        self, tx: Transaction, row: Sequence[Any], change: ServerChange, now: float, again: bool
    ) -> AppendedChange | None:
        session_id, sid, stored_mode, ends_at, *attached, lists, subscribes, carries = row
        mode = Mode(stored_mode)
        if has_come(ends_at, now) or not is_entitled(
            mode,
            uri=change.uri,
            listed=change.listed,
            is_subscribed=bool(subscribes),
            lists=session_rows.load_json(lists) if lists is not None else None,
            carries=bool(carries),
        ):
            return None
        stream, draft = change.draft_for(mode, session_id, again=again)
        log = log_rows.opened(tx, sid, stream)
        event, replaced = log_rows.append(tx, log, draft, self._window, now=now)
        attachment = session_rows.stored_attachment(*attached)
        return AppendedChange(session_id, stream, event, attachment, replaced)

    async def read(
        self,
        session_id: SessionId,
        after: str | None,
        *,
        now: float,
        stream: StreamName = EVENTS,
        limit: int | None = None,
    ) -> tuple[Sequence[LoggedEvent], Refusal | None]:

        unknown: tuple[Sequence[LoggedEvent], Refusal | None] = (), Refusal.UNKNOWN_POSITION

        def work(tx: Transaction, session: Brief) -> tuple[Sequence[LoggedEvent], Refusal | None]:
            log = log_rows.find(tx, session.sid, stream)
            if log is None:
                return unknown
            window = session_rows.window_of_stream(session, stream, self._window)
            return log_rows.since_id(tx, log, after, window, now=now, limit=limit)

        return await self._within(session_id, work, unknown)

    async def head(self, session_id: SessionId, *, stream: StreamName = EVENTS) -> Position | None:
        return await self._position(session_id, stream, log_rows.find)

    async def heads(self, streams: Sequence[tuple[SessionId, StreamName]]) -> Sequence[StreamHead]:
        def work(tx: Transaction) -> list[StreamHead]:
            heads: list[StreamHead] = []
            for session_id, stream in streams:
                session = session_rows.brief(tx, session_id)
                if session is None:
                    heads.append(StreamHead(False, None))
                    continue
                log = log_rows.find(tx, session.sid, stream)
                carried = tx.execute("SELECT 1 FROM carried WHERE sid = ?", (session.sid,))
                position = log.position if log is not None else None
                heads.append(StreamHead(True, position, carried.fetchone() is not None))
            return heads

        return await self._writer.call(work)

    async def open_stream(self, session_id: SessionId, stream: StreamName) -> Position | None:
        return await self._position(session_id, stream, log_rows.opened)

    async def _position(
        self,
        session_id: SessionId,
        stream: StreamName,
        log_of: Callable[[Transaction, int, StreamName], LogRow | None],
    ) -> Position | None:
        def work(tx: Transaction, session: Brief) -> Position | None:
            log = log_of(tx, session.sid, stream)
            return log.position if log is not None else None

        return await self._within(session_id, work, None, short=True)

    async def drop_stream(self, session_id: SessionId, stream: StreamName) -> None:
        await self._within(session_id, lambda tx, s: log_rows.drop(tx, s.sid, stream), None)
