"""The connection of a transport-mode session over HTTP, which lives in the store.

What is sent on its GET stream is a log in the store, whichever process has the stream open.
This object is only what one process knows of it, and can be made anew at any time. It keeps
nothing of the session's record: another process may change that at any moment, and whoever
decides something asks the record that came with its own request.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Collection, Sequence
from contextlib import asynccontextmanager
from typing import Protocol

from mcp_sessions.core.log import Draft, LoggedEvent
from mcp_sessions.errors import Refusal, SessionNotFound, Status, StoreUnavailable
from mcp_sessions.ids import (
    GET_STREAM,
    ConnectionId,
    FencingEpoch,
    Position,
    SessionId,
    parse_position,
)
from mcp_sessions.server.cluster.bus import ClusterBus
from mcp_sessions.server.cluster.messages import GetStreamOpened
from mcp_sessions.server.connection import ClientConnection, ReadEvents, Transport
from mcp_sessions.server.delivery.heard_log import HeardLog
from mcp_sessions.server.delivery.relaying import Relay
from mcp_sessions.server.delivery.streams import StreamLog
from mcp_sessions.stores.contract import SessionStore
from mcp_sessions.stores.records import Attached, Attachment, CurrentSession, Peer, SessionRecord

_SAME_MOMENT = 1.0
"""Seconds; longer than a message between two processes takes."""


class OpenStream(Protocol):
    """A GET stream while it is open."""

    @property
    def last(self) -> str:
        """The id of the last event that was handed over."""
        ...

    def cut(self) -> None:
        """End it now."""
        ...


class StoredConnection(ClientConnection):
    """One process's view of such a connection."""

    __slots__ = (
        "_bus",
        "_clock",
        "_heads",
        "_log",
        "_opened",
        "_opened_elsewhere",
        "_over",
        "_owes_first",
        "_sent",
        "_store",
        "_stream",
        "session_id",
        "used_at",
    )

    def __init__(
        self,
        record: SessionRecord,
        peer: Peer,
        transport: Transport,
        *,
        store: SessionStore,
        clock: Callable[[], float],
        bus: ClusterBus,
    ) -> None:
        self.session_id = record.session_id
        connection_id = ConnectionId(record.session_id)
        super().__init__(
            connection_id, "http", record.principal, peer, transport, record.session_id
        )
        self._store = store
        self._clock = clock
        self._bus = bus
        self._log = StreamLog(store, clock, record.session_id, GET_STREAM)
        self._stream: OpenStream | None = None
        self._opened = (0.0, 0.0)
        """When its stream was opened here: by the event loop, and since 1970."""

        self._over: set[SessionId] = set()
        self._heads: dict[SessionId, Position] = {}
        self._sent: str | None = None
        self._opened_elsewhere = False
        self._owes_first = False
        self.used_at = clock()
        """When it was named last; seconds since 1970."""

    @property
    def is_streaming(self) -> bool:
        """See :class:`ClientConnection`."""
        return self._stream is not None

    def used(self) -> None:
        """A request named it."""
        self.used_at = self._clock()

    async def current(self) -> CurrentSession | None:
        """See :class:`ClientConnection`."""
        record = await self._store.load(self.session_id, now=0)
        return record.current if record is not None else None

    async def set_current(self, current: CurrentSession | None) -> None:
        """See :class:`ClientConnection`."""
        await self._store.set_current(self.session_id, current)

    # --- what its log is told ----------------------------------------------------------------

    async def begin(
        self, session_id: SessionId, attached: Attached, after: Position, read: ReadEvents
    ) -> bool:
        """See :class:`ClientConnection`."""
        epoch = attached.fencing_epoch
        self.transport.begin(session_id, attached, after, read)
        if not await self._store.carry(self.session_id, session_id, epoch, after):
            return False
        relay = self._relay(session_id, epoch)
        await relay.whole(attached.replay)
        if self._bus.is_shared:
            # Stored by others, who found that it was not carried here yet.
            newest = attached.replay[-1].event_id if attached.replay else after.event_id()
            await relay.after(_position(newest))
        self._offer(relay.entries)
        return True

    async def deliver(
        self, session_id: SessionId, event: LoggedEvent, fencing_epoch: FencingEpoch
    ) -> bool:
        """See :class:`ClientConnection`."""
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
        """See :class:`ClientConnection`: it became an entry of the GET stream."""
        self.transport.offer(self.session_id, event)

    async def send(self, draft: Draft) -> None:
        """See :class:`ClientConnection`. It waits for the GET stream to open."""
        try:
            appended = await self._log.append(draft)
        except StoreUnavailable:
            self._read_again()
            raise
        if appended is not None:
            self._offer((appended.event,))

    async def withdraw(
        self, session_id: SessionId, fencing_epoch: FencingEpoch | None = None
    ) -> None:
        """See :class:`ClientConnection`."""
        await self._store.drop_origin(self.session_id, session_id, fencing_epoch=fencing_epoch)
        self.transport.withdraw(session_id)

    async def session_over(self, session_id: SessionId) -> None:
        """See :class:`ClientConnection`."""
        await self.withdraw(session_id)

    async def withdrawn_elsewhere(self, session_id: SessionId) -> None:
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
        return record is not None and session_id in record.carried

    def _relay(self, session_id: SessionId, fencing_epoch: FencingEpoch) -> Relay:
        return Relay(self._store, self._clock, self.session_id, session_id, fencing_epoch)

    def _offer(self, entries: Sequence[LoggedEvent]) -> None:
        for entry in entries:
            self.transport.offer(self.session_id, entry)

    def _read_again(self) -> None:
        """An entry may be in the log without having been handed over: the store did not say.
        Nothing need follow it that would show the gap.
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
        for session_id, fencing_epoch in record.carried.items():
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

    async def position(
        self, last_event_id: str | None, *, was_opened: bool
    ) -> tuple[Position, Refusal | None, bool]:
        """Where a new GET stream starts.

        Args:
            last_event_id: What the client says it has.
            was_opened: One was open before, as the store says.

        Returns:
            The position; why what came before it is lost, if it is; and whether the stream
            goes on where an earlier one ended (or is the first).

        Raises:
            SessionNotFound: It is over.
        """
        self.used()
        first = await self._is_first(was_opened)
        head = await self._log.open()
        if head is None:
            # Admitted by this very request, and ended since.
            raise SessionNotFound(self.session_id, status=Status.NOT_FOUND)
        if last_event_id is None and not first:
            # What was never handed to any stream of this connection still goes out. One that
            # looks open may be dead: what it was handed is not told twice.
            sent = self._stream.last if self._stream is not None else self._sent
            if sent is None:
                # That stream was open in another process, or before this one: what it was
                # handed is not known.
                lost = Refusal.NO_POSITION if head.number > 0 else None
                return head, lost, False
            _, refusal = await self._log.read(sent)
            return head if refusal is not None else _position(sent), None, False
        if last_event_id is None:
            last_event_id = Position(head.log_epoch, 0).event_id()
        if parse_position(last_event_id) is None:
            # However long it is: no store is asked for what is no id (SEC8).
            return head, Refusal.UNKNOWN_POSITION, False
        _, refusal = await self._log.read(last_event_id)
        if refusal is not None:
            return head, refusal, False
        return _position(last_event_id), None, True

    async def _is_first(self, was_opened: bool) -> bool:
        """Whether nobody was served a GET stream before (HTL6). Who was answered 503 instead,
        after the store had noted it or while that was unknown, comes for the first one again.
        """
        if not was_opened:
            try:
                if await self._store.mark_stream_opened(self.session_id):
                    self._owes_first = True
            except BaseException:
                self._owes_first = True
                raise
        return self._owes_first

    def heard(self, scopes: frozenset[str], cleared: Collection[SessionId]) -> HeardLog:
        """The log of its GET stream, as a credential with those scopes may hear it.

        Args:
            scopes: The credential's.
            cleared: The sessions that were found to need no others.
        """
        return HeardLog(self._log, self._store, scopes, cleared, self._over)

    @asynccontextmanager
    async def streaming(self, stream: OpenStream) -> AsyncGenerator[None]:
        """A GET stream is open while the block runs; the one before it ends now, wherever it
        is.

        Raises:
            StoreUnavailable: Nothing was sent.
        """
        older = (self._sent, self._opened_elsewhere)
        is_served = False
        self._stream = stream
        self._opened = (asyncio.get_running_loop().time(), self._clock())
        self._opened_elsewhere = False
        self._heads.clear()
        try:
            await self._bus.watch(self.session_id, GET_STREAM, self)
            await self.tell_opened()
            is_served, self._owes_first = True, False
            yield
        finally:
            stream.cut()
            self.used()
            if self._stream is stream:
                self._stream = None
                if not is_served:
                    # Nothing was sent: what the one before it was handed still counts.
                    self._sent, self._opened_elsewhere = older
                else:
                    self._sent = None if self._opened_elsewhere else stream.last
                await self._bus.unwatch(self.session_id, GET_STREAM, self)

    def opened_elsewhere(self, opened: tuple[float, str]) -> bool:
        """Another process serves a GET stream of this connection: the older one ends.

        Args:
            opened: When, by its clock, and its name.

        Returns:
            False if this one is the newer of two that were opened at the same moment: the
            other process has to be told.
        """
        if self._stream is not None:
            age = asyncio.get_running_loop().time() - self._opened[0]
            # In one moment the clocks decide, in both processes alike. After that, theirs is
            # the newer one, whatever the clocks say.
            if age <= _SAME_MOMENT and opened < (self._opened[1], self._bus.process):
                return False
        # What was handed out there is not told twice; where that ended is not known here.
        self._opened_elsewhere, self._sent, self._owes_first = True, None, False
        if self._stream is not None:
            self._stream.cut()
        return True

    async def tell_opened(self, *, to: str | None = None) -> None:
        """Tell a process, or all others (None), that its newest GET stream is open here."""
        at = self._opened[1]
        await self._bus.tell(GetStreamOpened(session_id=self.session_id, at=at), to=to)


def _position(event_id: str) -> Position:
    position = parse_position(event_id)
    if position is None:
        raise AssertionError("the store read from this position")
    return position
