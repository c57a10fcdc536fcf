"""Represent a transport-mode session's connection over HTTP, which lives in the store.

The store has a log of the GET stream, whichever process has the stream open. A
:class:`StoredConnection` is one process's view of it, and can be made again at any time. It keeps
the last current session, as a guess. Another process may change that at any moment, so decisions
use the record that came with their own request.

The process that stored an event of a session relays it to that log, and the store keeps them in
order. A process that finds an older one missing reads the session's log and relays it too. So
nothing is lost with a process that died between the two steps: the next one does the second.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Protocol

from mcp_sessions.core.log import Draft, LoggedEvent
from mcp_sessions.core.story import Why
from mcp_sessions.errors import Refusal, StoreUnavailable
from mcp_sessions.ids import (
    GET_STREAM,
    ConnectionId,
    FencingEpoch,
    Position,
    SessionId,
    position_of,
)
from mcp_sessions.server.cluster.replica import ClusterBus
from mcp_sessions.server.cluster.replica_messages import GetStreamOpened
from mcp_sessions.server.connection.binding import ReadEvents, Transport
from mcp_sessions.server.connection.connection import ClientConnection, Unless
from mcp_sessions.server.delivery.pending_writes import PendingWrite
from mcp_sessions.server.delivery.streams import StreamLog
from mcp_sessions.server.reporting.stories import Stories, word_of
from mcp_sessions.stores.contract import SessionStore
from mcp_sessions.stores.record_changes import SetCurrent, SetStreamOpened
from mcp_sessions.stores.records import (
    Appended,
    Attached,
    Attachment,
    CurrentSession,
    Peer,
    SessionRecord,
)

_SAME_MOMENT = 1.0
"""Seconds; longer than a message between two processes takes."""


class OpenStream(Protocol):
    @property
    def last(self) -> str: ...

    @property
    def was_slow(self) -> bool:
        """Whether it was cut since its client took nothing."""
        ...

    @property
    def has_sent(self) -> bool: ...

    def cut(self) -> None: ...


@dataclass(slots=True, eq=False, repr=False)
class StreamRelay:
    """The way of one session's events to one connection's stream, under one epoch.

    Args:
        connection: The transport-mode session whose GET stream it is.
        origin: The session whose events they are.
    """

    _store: SessionStore
    _clock: Callable[[], float]
    _connection: SessionId
    _origin: SessionId
    _fencing_epoch: FencingEpoch
    entries: list[LoggedEvent] = field(default_factory=list[LoggedEvent])
    """The events that are entries of the stream by now."""

    async def one(self, event: LoggedEvent) -> bool:
        """Relay an event, and what comes before it if nobody did.

        Returns:
            False if what comes before it is gone from the session's window: the stream
            would have a hole.
        """
        missing_after = await self._store_entry(event, skips=False)
        return missing_after is None or await self.after(missing_after)

    async def whole(self, events: Sequence[LoggedEvent]) -> None:
        """Relay events that were read from the log as a whole: missing ones were replaced."""
        for event in events:
            await self._store_entry(event, skips=True)

    async def after(self, position: Position) -> bool:
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
            # The newest event is too old to be replayed by now, and so are all before it.
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


class StoredConnection(ClientConnection):
    __slots__ = (
        "_bus",
        "_clock",
        "_heads",
        "_opened",
        "_stories",
        "_opened_at_replica",
        "_is_first_due",
        "_log",
        "_sent",
        "_store",
        "_stream",
        "ended",
        "session_id",
    )

    def __init__(
        self,
        record: SessionRecord,
        peer: Peer,
        transport: Transport,
        log: StreamLog,
        *,
        store: SessionStore,
        clock: Callable[[], float],
        bus: ClusterBus,
        stories: Stories,
    ) -> None:
        self.session_id = record.session_id
        connection_id = ConnectionId(record.session_id)
        super().__init__(
            connection_id, "http", record.principal, peer, transport, record.session_id
        )
        self._log = log
        self._store = store
        self._clock = clock
        self._bus = bus
        self._stories = stories
        self._stream: OpenStream | None = None
        self._opened = (0.0, 0.0)
        """When its stream was opened here: by the event loop, and since 1970."""

        self.ended: set[SessionId] = set()
        """Attached sessions that were found to have ended: none of their events is sent."""

        self._heads: dict[SessionId, Position] = {}
        self._sent: str | None = None
        self._opened_at_replica = False
        self._is_first_due = False

    @property
    def is_streaming(self) -> bool:
        return self._stream is not None

    async def current(self) -> CurrentSession | None:
        record = await self._store.load(self.session_id, now=0)
        return record.client.current if record is not None else None

    async def sessions(self) -> frozenset[SessionId]:
        record = await self._store.load(self.session_id, now=0)
        if record is None:
            return frozenset()
        here, current = [self.session_id, *record.client.carried], record.client.current
        return frozenset(here if current is None else [*here, current.session_id])

    async def set_current(self, current: CurrentSession | None) -> None:
        await self._store.change(self.session_id, SetCurrent(current))

    def saw(self, record: SessionRecord) -> None:
        self._current = record.client.current

    @property
    def last_current(self) -> SessionId | None:
        """The current session in the newest record. It may be another one by now."""
        return self._current.session_id if self._current is not None else None

    # --- what its log gets ----------------------------------------------------------------

    async def begin(
        self, session_id: SessionId, attached: Attached, after: Position, read: ReadEvents
    ) -> bool:
        epoch = attached.fencing_epoch
        self.transport.begin(session_id, attached, after, read)
        if not await self._store.carry(self.session_id, session_id, epoch, after):
            return False
        relay = self._relay(session_id, epoch)
        await relay.whole(attached.replay)
        if self._bus.is_shared:
            # Stored by others, who found that it was not carried here yet.
            newest = attached.replay[-1].event_id if attached.replay else after.event_id()
            await relay.after(position_of(newest))
        self._offer(relay.entries)
        return True

    async def deliver(
        self, session_id: SessionId, event: LoggedEvent, fencing_epoch: FencingEpoch
    ) -> bool:
        relay = self._relay(session_id, fencing_epoch)
        try:
            whole = await relay.one(event)
        except StoreUnavailable:
            self._read_again()
            raise
        self._offer(relay.entries)
        return whole

    def appended(
        self, session_id: SessionId, event: LoggedEvent, attachment: Attachment | None
    ) -> None:
        self.transport.offer(self.session_id, event)

    async def send(self, draft: Draft, unless: Unless | None = None) -> None:
        """Send a message. It waits for the GET stream to open, and for the store."""
        await self._log.append(draft, self._sent_by_us, lost=self._lose, unless=unless)

    async def _sent_by_us(self, appended: Appended | None) -> None:
        if appended is not None:
            self.transport.offer(self.session_id, appended.event)

    def _lose(self) -> PendingWrite:
        """Begin the log anew: its client comes back, and gets messages to read everything again."""

        async def begin_anew() -> None:
            await self._log.drop()
            self._read_again()

        return begin_anew

    async def withdraw(
        self,
        session_id: SessionId,
        fencing_epoch: FencingEpoch | None = None,
        *,
        has_ended: bool = False,
    ) -> None:
        await self._store.drop_origin(self.session_id, session_id, fencing_epoch=fencing_epoch)
        self.transport.withdraw(session_id)

    async def withdrawn_at_replica(self, session_id: SessionId) -> None:
        """Another process took a session off this connection: take back what is not handed
        to the network yet.
        """
        if not self.is_streaming or await self._carries(session_id):
            return
        stream = self._stream
        if stream is None:  # Its client went meanwhile.
            return
        self.transport.withdraw(session_id)
        if await self._carries(session_id):
            # Attached anew meanwhile: what was taken back may be of now. The client comes
            # back with its position and gets what is right.
            stream.cut()

    async def _carries(self, session_id: SessionId) -> bool:
        record = await self._store.load(self.session_id, now=0)
        return record is not None and session_id in record.client.carried

    def _relay(self, session_id: SessionId, fencing_epoch: FencingEpoch) -> StreamRelay:
        return StreamRelay(self._store, self._clock, self.session_id, session_id, fencing_epoch)

    def _offer(self, entries: Sequence[LoggedEvent]) -> None:
        for entry in entries:
            self.transport.offer(self.session_id, entry)

    def _read_again(self) -> None:
        """Read the log again: an entry may be there that was not sent, since the store did not
        answer. No later entry may show the gap.
        """
        self.transport.check_position(self.session_id, None)

    async def catch_up(self) -> list[SessionId]:
        """Relay what a process stored for this connection's sessions and had no time to
        relay: it died.

        Returns:
            Sessions that cannot go on here: what is missing is gone from their window.

        Raises:
            StoreUnavailable: Not all of it was relayed.
        """
        record = await self._store.load(self.session_id, now=0)
        lost: list[SessionId] = []
        if record is None:
            return lost
        for session_id, fencing_epoch in record.client.carried.items():
            head = await self._store.head(session_id)
            if head is None or head == self._heads.get(session_id):
                continue
            relay = self._relay(session_id, fencing_epoch)
            if not await relay.catch_up(head):
                lost.append(session_id)
            self._offer(relay.entries)
            self._heads[session_id] = head
        return lost

    # --- its GET stream ----------------------------------------------------------------------

    @property
    def handed(self) -> str | None:
        """The last event that a GET stream of it was handed; None: not known here. One that
        looks open may be dead: what it was handed is not sent twice.
        """
        return self._stream.last if self._stream is not None else self._sent

    async def is_first(self, was_opened: bool) -> bool:
        """Whether nobody was served a GET stream before (HTL3). A client that got 503 instead,
        after the store had noted it or while that was unknown, still has its first one to come.
        """
        if not was_opened:
            try:
                if await self._store.change(self.session_id, SetStreamOpened()):
                    self._is_first_due = True
            except BaseException:
                self._is_first_due = True
                raise
        return self._is_first_due

    async def events_after(
        self, position: str, scopes: frozenset[str], cleared: set[SessionId]
    ) -> tuple[Sequence[LoggedEvent], Refusal | None] | None:
        """Return the events after a position of its log that a credential may get.

        None: the credential is too weak for these events.

        Args:
            position: The id of an event.
            scopes: The scopes of the credential.
            cleared: The sessions that need no other scopes; more are added.
        """
        events, refusal = await self._store.read(
            self.session_id, position, now=self._clock(), stream=GET_STREAM
        )
        for origin in {event.origin for event in events if event.origin is not None} - cleared:
            record = await self._store.load(origin, now=0)
            if record is None:
                self.ended.add(origin)
            elif not scopes >= record.principal.scopes:
                return None
            cleared.add(origin)
        return events, refusal

    @asynccontextmanager
    async def streaming(self, stream: OpenStream) -> AsyncGenerator[None]:
        """A GET stream is open while the block runs; the one before it ends now, wherever it
        is.

        Raises:
            StoreUnavailable: Nothing was sent.
        """
        older = (self._sent, self._opened_at_replica)
        is_served, is_first = False, self._is_first_due
        self._stream = stream
        self._opened = (asyncio.get_running_loop().time(), self._clock())
        self._opened_at_replica = False
        self._heads.clear()
        try:
            await self._bus.watch(self.session_id, GET_STREAM, self)
            await self.announce_opened()
            is_served, self._is_first_due = True, False
            after = position_of(stream.last).number
            self._tell(f"attached http {self._stories.replica} {Why.OPENED} free {after} - - - -")
            yield
        finally:
            stream.cut()
            if self._stream is stream:
                self._stream = None
                if not is_served:
                    # Nothing was sent: what the one before it was handed still counts.
                    self._sent, self._opened_at_replica = older
                else:
                    self._sent = None if self._opened_at_replica else stream.last
                    # One that was cut before it sent anything was none.
                    is_none = not (stream.has_sent or self._opened_at_replica)
                    self._is_first_due = is_first and is_none
                    why = Why.SLOW if stream.was_slow else Why.CLOSED
                    last = f" {word_of(self.last_method)}" if self.last_method else ""
                    self._tell(f"detached {why} {self._stories.replica}{last}")
                await self._bus.unwatch(self.session_id, GET_STREAM, self)

    def _tell(self, text: str) -> None:
        self._stories.note(self.session_id, text)

    def opened_at_replica(self, opened: tuple[float, str]) -> bool:
        """End the older GET stream: another process serves one of this connection.

        Args:
            opened: When, by its clock, and its name.

        Returns:
            False if this one is the newer of two that were opened at the same moment: the
            other process has to be notified.
        """
        if self._stream is not None:
            age = asyncio.get_running_loop().time() - self._opened[0]
            # In one moment the clocks decide, in both processes alike. After that, theirs is
            # the newer one, whatever the clocks say.
            if age <= _SAME_MOMENT and opened < (self._opened[1], self._bus.process):
                return False
        # Events that were sent there are not sent twice. The last of them is not known here.
        self._opened_at_replica, self._sent, self._is_first_due = True, None, False
        if self._stream is not None:
            self._stream.cut()
        return True

    async def announce_opened(self, *, to: str | None = None) -> None:
        at = self._opened[1]
        await self._bus.try_send(GetStreamOpened(session_id=self.session_id, at=at), to=to)
