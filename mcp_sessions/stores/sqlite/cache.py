"""The records of a SQLite file that are in memory: those of the sessions used last.

They are never newer than the file, and never older than an answer that somebody has: the
writer tells of each commit here before anybody else learns of it. Only an idle deadline may be
ahead of the file, by a hundredth of the idle timeout; then the file is written.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass

from mcp_sessions.core.life import has_come, idle_deadline, idle_time
from mcp_sessions.core.states import Mode
from mcp_sessions.ids import SessionId
from mcp_sessions.policy import SessionPolicy
from mcp_sessions.stores.records import SessionRecord
from mcp_sessions.stores.sqlite import session_rows
from mcp_sessions.stores.sqlite.transaction import Changes
from mcp_sessions.stores.sqlite.watch import Watch
from mcp_sessions.stores.sqlite.writer import Writer

logger = logging.getLogger(__name__)

MAX_RECORDS = 10_000
"""Records kept in memory."""

_COALESCED = 0.01
"""Share of the idle timeout by which a deadline moves in memory before the file gets it."""


@dataclass(slots=True)
class _Entry:
    record: SessionRecord
    written: float
    """The deadline that the file has."""


class RecordCache:
    def __init__(self, writer: Writer, watch: Watch) -> None:
        self._writer = writer
        self._watch = watch
        self._policy = SessionPolicy()
        # The one used last is at the end.
        self._entries: OrderedDict[SessionId, _Entry] = OrderedDict()

    def serve(self, policy: SessionPolicy) -> None:
        self._policy = policy

    def on_commit(self, changes: Changes) -> None:
        for session_id, change in changes:
            entry = self._entries.get(session_id)
            if change is None:
                self._entries.pop(session_id, None)
            elif isinstance(change, SessionRecord):
                # One that is there already has got every change since.
                if entry is None:
                    self._keep(session_id, change)
            elif entry is not None:
                before = entry.record.life.expires_at
                change(entry.record)
                if entry.record.life.expires_at != before:
                    entry.written = entry.record.life.expires_at

    def _keep(self, session_id: SessionId, record: SessionRecord) -> None:
        self._entries[session_id] = _Entry(record, record.life.expires_at)
        while len(self._entries) > MAX_RECORDS:
            oldest, entry = self._entries.popitem(last=False)
            if entry.record.life.expires_at != entry.written:
                # Before whatever reads that session next.
                self._write({oldest: entry.record.life.expires_at})

    def known(self, session_id: SessionId) -> SessionRecord | None:
        entry = self._entries.get(session_id)
        return entry.record if entry is not None else None

    async def find(self, session_id: SessionId) -> SessionRecord | None:
        entry = self._entries.get(session_id)
        if entry is None or self._watch.is_lost:
            # Nothing is served from a file that is gone.
            found = await self._writer.call(
                lambda tx: session_rows.load(tx, session_id), short=True
            )
            # Not there any more: ended in that same commit, or pushed out by newer ones.
            return self.known(session_id) or found
        self._entries.move_to_end(session_id)
        return entry.record

    def clear(self) -> None:
        self._entries.clear()

    # --- idle deadlines --------------------------------------------------------------------

    def deadline(self, mode: Mode, now: float, ends_at: float) -> float:
        return idle_deadline(now=now, idle_timeout=idle_time(mode, self._policy), ends_at=ends_at)

    def move_deadline(self, session_id: SessionId, record: SessionRecord, now: float) -> None:
        """Note that a session was used, without a write to the file."""
        record.life.expires_at = self.deadline(record.mode, now, record.life.ends_at)
        entry = self._entries.get(session_id)
        if entry is None or entry.record is not record:
            self._write({session_id: record.life.expires_at})
            return
        moved_by = abs(record.life.expires_at - entry.written)
        if moved_by >= _COALESCED * self._policy.idle_timeout:
            entry.written = record.life.expires_at
            self._write({session_id: record.life.expires_at})

    def moved(self, *, written_by: float = math.inf) -> dict[SessionId, float]:
        """The deadlines that the file does not have as they are.

        Args:
            written_by: Those only which in the file are no later.
        """
        return {
            session_id: entry.record.life.expires_at
            for session_id, entry in self._entries.items()
            if entry.record.life.expires_at != entry.written and has_come(entry.written, written_by)
        }

    def were_written(self, deadlines: Mapping[SessionId, float]) -> None:
        for session_id, deadline in deadlines.items():
            entry = self._entries.get(session_id)
            if entry is not None:
                entry.written = deadline

    def _write(self, deadlines: Mapping[SessionId, float]) -> None:
        # A deadline on its way to the file is in memory all the same.
        written = self._writer.call(
            lambda tx: session_rows.move_deadlines(tx, deadlines), short=True
        )
        written.add_done_callback(lambda done: self._deadlines_written(deadlines, done))

    def _deadlines_written(
        self, deadlines: Mapping[SessionId, float], done: asyncio.Future[None]
    ) -> None:
        if done.cancelled() or done.exception() is None:
            return
        logger.warning("an idle deadline could not be stored: %s", done.exception())
        # The next use tries again.
        self.were_written(dict.fromkeys(deadlines, -math.inf))
