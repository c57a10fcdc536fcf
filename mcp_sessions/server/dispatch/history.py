"""Record the start and the end of each session once.

A record is a line in the log, an entry of the audit, a count, and the data of ``mcp-sessions
sessions show`` in the store.

The store hands each session that ends to one process (``SessionStore.end``, ``expire``, ``evict``,
``ended_outside``). That process writes.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterable, Sequence

from mcp_sessions import metrics
from mcp_sessions.core.ends import MOST_ENDS, EndReason, SessionEnd, StoreMade, times_of
from mcp_sessions.core.life import lifetime_ends_first
from mcp_sessions.errors import StoreUnavailable
from mcp_sessions.ids import SessionId, digest
from mcp_sessions.server.cluster.replica import Replica
from mcp_sessions.server.reporting.audit import Audit
from mcp_sessions.stores.ends_contract import end_of
from mcp_sessions.stores.record_changes import Tell
from mcp_sessions.stores.records import SessionRecord

logger = logging.getLogger(__name__)


class History:
    def __init__(self, replica: Replica, audit: Audit) -> None:
        self._store, self._audit = replica.store, audit
        self._policy, self._clock, self._stories = replica.policy, replica.clock, replica.stories
        self._waiting = deque[SessionEnd](maxlen=MOST_ENDS)
        """Ends that the store does not have yet."""

        self._made: StoreMade | None = None

    def started(self, record: SessionRecord) -> None:
        metrics.session_made(record.mode.value)
        name = digest(record.session_id)
        logger.info("session %s started (%s)", name, record.mode.value)
        self._audit.session_started(name, record.mode.value, record.principal)

    def ended(
        self, records: Iterable[SessionRecord], reason: EndReason | None, limit: str | None = None
    ) -> None:
        """Sessions ended, and the store gave their records to this process. Call
        :meth:`remember` soon.

        Args:
            reason: None: they expired.
            limit: The limit that they made room for.
        """
        now = self._clock()
        for record in records:
            age, idle = times_of(
                record.mode,
                created_at=record.life.created_at,
                expires_at=record.life.expires_at,
                now=now,
                policy=self._policy,
            )
            is_old = lifetime_ends_first(record.life)
            why = reason or (EndReason.LIFETIME if is_old else EndReason.IDLE)
            Tell(self._stories.forget(record.session_id)).edit(record)
            end = end_of(record, why, now, age=age, idle=idle, limit=limit)
            self._waiting.append(end)
            self._write(end, record)

    async def remember(self) -> None:
        """Write the new ends to the store. If it is away, they are written later."""
        if not self._waiting:
            return
        ends = list(self._waiting)
        self._waiting.clear()
        try:
            await self._store.remember_ends(ends, now=self._clock())
        except StoreUnavailable as failed:
            # The next round tries again. Its own calls say that the store is away.
            logger.debug("the ends of %d sessions are stored later: %s", len(ends), failed)
            self._waiting.extendleft(reversed(ends))
        except BaseException:
            self._waiting.extendleft(reversed(ends))
            raise

    async def ended_outside(self) -> list[SessionRecord]:
        """Write down which sessions ended, though no server ended them; the records of those that
        this process may have something of.
        """
        found = await self._store.ended_outside(now=self._clock())
        new: list[SessionEnd] = []
        for end, record in found:
            self._write(end, record)
            if record is not None:
                new.append(end)
        self._waiting.extend(new)
        return [record for _, record in found if record is not None]

    async def emptied(self) -> StoreMade | None:
        made = await self._store.made(now=self._clock())
        if made is None:
            return None
        known, self._made = self._made, made
        if known is None or known.name == made.name:
            return None
        if made.is_new:
            logger.warning("the store was emptied or replaced: the sessions in it are gone")
        return made

    async def lost_with_store(self, session_ids: Sequence[SessionId], made: StoreMade) -> None:
        """Note sessions of a store that was emptied. Several processes may report them."""
        # Equal for all of them: the store takes each once.
        ends = [SessionEnd(digest(each), EndReason.EMPTIED, made.at) for each in session_ids]
        for end in await self._store.remember_ends(ends, now=self._clock()):
            self._write(end, None)

    def _write(self, end: SessionEnd, record: SessionRecord | None) -> None:
        mode = end.mode.value if end.mode is not None else "unknown"
        metrics.session_ended(mode, end.reason.kind)
        if metrics.measures and end.age is not None:
            metrics.lasted(_DURATION, end.age, _attributes(end, record))
        logger.info("session %s ended: %s", end.session, end)
        self._audit.session_ended(end, record.principal if record is not None else None)


_DURATION = "mcp.server.session.duration"


def _attributes(end: SessionEnd, record: SessionRecord | None) -> dict[str, str]:
    """Return the attributes of its duration. It has an error if neither its client, an operator nor
    time ended it. A session may use several networks, so it names none.
    """
    found: dict[str, str] = {}
    peer = record.client.peer if record is not None else None
    if peer is not None:
        found["mcp.protocol.version"] = peer.protocol_version
    if end.reason in (EndReason.LIMIT, EndReason.EMPTIED, EndReason.LOST):
        found["error.type"] = end.reason.value
    return found
