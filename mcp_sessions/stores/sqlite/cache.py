"""The records of a SQLite file that are in memory: those of the sessions used last.

They are never newer than the file, and never older than an answer that somebody has: the
writer tells of each commit here before anybody else hears of it. Only an idle deadline may be
ahead of the file, by a hundredth of the idle timeout; then the file is told.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass

from mcp_sessions.core.lifetime import idle_deadline
from mcp_sessions.ids import SessionId
from mcp_sessions.policy import SessionPolicy
from mcp_sessions.stores.records import SessionRecord
from mcp_sessions.stores.sqlite import sessions
from mcp_sessions.stores.sqlite.transaction import Changes
from mcp_sessions.stores.sqlite.writer import Writer

logger = logging.getLogger(__name__)

MAX_HOT = 10_000
"""Records kept in memory."""

_COALESCED = 0.01
"""Of the idle timeout: how far a deadline moves in memory before the file is told."""


@dataclass(slots=True)
class _Hot:
    """A record in memory."""

    record: SessionRecord
    written: float
    """The deadline that the file has."""


class HotRecords:
    """The records in memory, and their deadlines."""

    def __init__(self, writer: Writer) -> None:
        self._writer = writer
        self._idle_timeout = math.inf
        # The one used last is at the end.
        self._hot: OrderedDict[SessionId, _Hot] = OrderedDict()

    def serve(self, policy: SessionPolicy) -> None:
        """From now on deadlines go by the idle timeout of ``policy``."""
        self._idle_timeout = policy.idle_timeout

    def on_commit(self, changes: Changes) -> None:
        """What a transaction did is in the file."""
        for session_id, change in changes:
            hot = self._hot.get(session_id)
            if change is None:
                self._hot.pop(session_id, None)
            elif isinstance(change, SessionRecord):
                # One that is there already has been told of every change since.
                if hot is None:
                    self._keep(session_id, change)
            elif hot is not None:
                before = hot.record.expires_at
                change(hot.record)
                if hot.record.expires_at != before:
                    hot.written = hot.record.expires_at

    def _keep(self, session_id: SessionId, record: SessionRecord) -> None:
        self._hot[session_id] = _Hot(record, record.expires_at)
        while len(self._hot) > MAX_HOT:
            oldest, hot = self._hot.popitem(last=False)
            if hot.record.expires_at != hot.written:
                # Before whatever reads that session next.
                self._write({oldest: hot.record.expires_at})

    def known(self, session_id: SessionId) -> SessionRecord | None:
        """The record, if it is in memory."""
        hot = self._hot.get(session_id)
        return hot.record if hot is not None else None

    async def find(self, session_id: SessionId) -> SessionRecord | None:
        """The record, read from the file if it is not in memory; None: there is none."""
        hot = self._hot.get(session_id)
        if hot is None:
            found = await self._writer.call(lambda tx: sessions.load(tx, session_id), short=True)
            # Not there any more: ended in that same commit, or pushed out by newer ones.
            return self.known(session_id) or found
        self._hot.move_to_end(session_id)
        return hot.record

    def clear(self) -> None:
        """The store is closed."""
        self._hot.clear()

    # --- idle deadlines --------------------------------------------------------------------

    def deadline(self, now: float, ends_at: float) -> float:
        """When a session that was used now expires, if nobody uses it again."""
        return idle_deadline(now=now, idle_timeout=self._idle_timeout, ends_at=ends_at)

    def move_deadline(self, session_id: SessionId, record: SessionRecord, now: float) -> None:
        """A session was used. Nobody waits for the file."""
        record.expires_at = self.deadline(now, record.ends_at)
        hot = self._hot.get(session_id)
        if hot is None or hot.record is not record:
            self._write({session_id: record.expires_at})
        elif abs(record.expires_at - hot.written) >= _COALESCED * self._idle_timeout:
            hot.written = record.expires_at
            self._write({session_id: record.expires_at})

    def moved(self, *, written_by: float = math.inf) -> dict[SessionId, float]:
        """The deadlines that the file does not have as they are.

        Args:
            written_by: Those only which in the file are no later.
        """
        return {
            session_id: hot.record.expires_at
            for session_id, hot in self._hot.items()
            if hot.record.expires_at != hot.written and hot.written <= written_by
        }

    def were_written(self, deadlines: Mapping[SessionId, float]) -> None:
        """The file has these."""
        for session_id, deadline in deadlines.items():
            hot = self._hot.get(session_id)
            if hot is not None:
                hot.written = deadline

    def _write(self, deadlines: Mapping[SessionId, float]) -> None:
        # A deadline on its way to the file is in memory all the same.
        written = self._writer.call(lambda tx: sessions.move_deadlines(tx, deadlines), short=True)
        written.add_done_callback(lambda done: self._deadlines_written(deadlines, done))

    def _deadlines_written(
        self, deadlines: Mapping[SessionId, float], done: asyncio.Future[None]
    ) -> None:
        if done.cancelled() or done.exception() is None:
            return
        logger.warning("an idle deadline could not be stored: %s", done.exception())
        # Whoever comes next tries again.
        self.were_written(dict.fromkeys(deadlines, -math.inf))
