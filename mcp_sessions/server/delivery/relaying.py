"""Session events on their way to the GET stream of a transport-mode session.

That stream is a log in the store, whichever process has it open. Whoever stored an event of
a session relays it there, and the store keeps them in order; who sees that an older one is
missing reads the session's log and relays it too. So nothing is lost with a process that
died between the two steps: the next one to come by does its second.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from mcp_sessions.core.log import LoggedEvent
from mcp_sessions.ids import FencingEpoch, Position, SessionId
from mcp_sessions.stores.contract import SessionStore


class Relay:
    """The way of one session's events to one connection's stream, under one epoch."""

    def __init__(
        self,
        store: SessionStore,
        clock: Callable[[], float],
        connection: SessionId,
        origin: SessionId,
        fencing_epoch: FencingEpoch,
    ) -> None:
        """Take what it works with.

        Args:
            connection: The transport-mode session whose GET stream it is.
            origin: The session whose events they are.
        """
        self._store = store
        self._clock = clock
        self._connection = connection
        self._origin = origin
        self._fencing_epoch = fencing_epoch
        self.entries: list[LoggedEvent] = []
        """What became entries of the stream by now."""

    async def one(self, event: LoggedEvent) -> bool:
        """Relay an event, and what comes before it if nobody did.

        Returns:
            False if what comes before it is gone from the session's window: the stream
            would have a hole.
        """
        missing_after = await self._store_entry(event, skips=False)
        return missing_after is None or await self.after(missing_after)

    async def whole(self, events: Sequence[LoggedEvent]) -> None:
        """Relay what was read from the log as a whole: what is not in it was replaced."""
        for event in events:
            await self._store_entry(event, skips=True)

    async def after(self, position: Position) -> bool:
        """Relay what stands in the session's log after a position; False as in :meth:`one`."""
        events, refusal = await self._store.read(
            self._origin, position.event_id(), now=self._clock()
        )
        if refusal is not None:
            return False
        await self.whole(events)
        return True

    async def catch_up(self, head: Position) -> bool:
        """Relay what nobody relayed up to the session's head, if this still is its
        attachment; False as in :meth:`one`.
        """
        if head.number == 0:
            return True
        newest = Position(head.log_epoch, head.number - 1)
        events, refusal = await self._store.read(self._origin, newest.event_id(), now=self._clock())
        if refusal is not None or not events:
            # What was newest is too old to be replayed by now, and so is all before it.
            return True
        # Asked after the events were read: what they are was stored before another
        # connection took the session, if any did.
        record = await self._store.load(self._origin, now=0)
        attachment = record.attachment if record is not None else None
        if attachment is None or attachment.fencing_epoch != self._fencing_epoch:
            return True
        return await self.one(events[-1])

    async def _store_entry(self, event: LoggedEvent, *, skips: bool) -> Position | None:
        relayed = await self._store.relay(
            self._connection,
            self._origin,
            self._fencing_epoch,
            event,
            now=self._clock(),
            skips=skips,
        )
        if relayed.event is not None:
            self.entries.append(relayed.event)
        return relayed.missing_after
