"""Track the session's attachment to a connection.

A session is attached to at most one connection, and the store decides which. This module applies
that to the connections of this process.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, Awaitable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial

from mcp_sessions import metrics
from mcp_sessions.core.log import Draft, LoggedEvent
from mcp_sessions.core.states import Mode
from mcp_sessions.core.story import NOTHING, Entry, Why, detaches
from mcp_sessions.errors import Detached, Refusal, StoreUnavailable
from mcp_sessions.ids import (
    EVENTS,
    GET_STREAM,
    ConnectionId,
    FencingEpoch,
    Position,
    SessionId,
    StreamName,
    digest,
    position_of,
    process_of,
)
from mcp_sessions.locks import Locks
from mcp_sessions.server.cluster.replica import Replica
from mcp_sessions.server.cluster.replica_messages import (
    Displaced,
    SessionAttached,
    StreamLate,
    Withdrawn,
)
from mcp_sessions.server.connection.connection import ClientConnection
from mcp_sessions.server.delivery.connections import ConnectionRegistry
from mcp_sessions.server.delivery.pending_writes import PendingWrites
from mcp_sessions.server.delivery.questions import PendingQuestions, may_ask
from mcp_sessions.server.reporting.stories import word_of
from mcp_sessions.stores.record_changes import RenewEvents
from mcp_sessions.stores.records import Attached, Attachment, SessionRecord

logger = logging.getLogger(__name__)


class Attachments:
    def __init__(
        self,
        replica: Replica,
        connections: ConnectionRegistry,
        *,
        questions: PendingQuestions,
        pending_writes: PendingWrites,
    ) -> None:
        self._store, self._bus, self._clock = replica.store, replica.bus, replica.clock
        self._replica = replica.stories.replica
        self._connections, self._questions, self._pending_writes = (
            connections,
            questions,
            pending_writes,
        )
        self._session_locks = Locks[SessionId]()
        self.session_lock = self._session_locks.of
        """Held for one step of a session's story: an event that was stored must be handed
        over before the next one is, and before or after a takeover, never in its middle,
        however the store suspends in between (ATT6).
        """

        self.is_busy = self._session_locks.is_held
        """Whether a session is in such a step."""

        pending_writes.report_late = self._is_late

    async def attach(
        self,
        session_id: SessionId,
        connection: ClientConnection | None,
        *,
        why: str,
        position: Position | None = None,
        only_if_free: bool = False,
        instance: str | None = None,
        had: Attachment | None = None,
    ) -> Attached | None:
        """Make ``connection`` the session's only one, and hand over the events that it missed.

        Args:
            connection: None: nothing can be pushed to it. The old connection is displaced, and the
                events wait.
            why: For the session's story, see :class:`~mcp_sessions.core.story.Why`.
            position: The client's last event, as the client says.
            only_if_free: Answer None if another connection is attached.
            instance: The client's name for itself. The displaced client gets it (TKO12).
            had: The attachment that the caller read. It is notified too if the store's answer is
                lost.

        Returns:
            None if the session has ended or is not free.

        Raises:
            StoreUnavailable: Unknown whether it is attached. A connection that lost it is notified.
        """
        async with self._attaching(session_id, connection):
            newer = connection.kind if connection is not None else None
            if connection is not None:
                # Before it is attached: what is stored from then on is received here.
                if self._bus.is_shared:
                    await self._watch(session_id, connection)
            attached, now = None, self._clock()
            try:
                attached = await self._store.attach(
                    session_id,
                    connection.id if connection is not None else None,
                    now=now,
                    position=position,
                    only_if_free=only_if_free,
                    entry=Entry(now, f"attached {newer or 'none'} {self._replica} {why}"),
                )
            except StoreUnavailable:
                if had is not None:
                    self._notify_later(_lost(session_id, had, Detached.TAKEN_OVER, newer, instance))
                raise
            finally:
                if attached is None and connection and session_id not in connection.attached:
                    await self.unwatch(session_id, connection)
            if attached is None:
                return None
            previous = attached.previous
            try:
                if connection is not None:
                    await self._begin(session_id, connection, attached, position)
            finally:
                # It has lost the session, whatever becomes of the one that takes it.
                if previous is not None and (
                    connection is None or previous.connection_id != connection.id
                ):
                    lost = _lost(session_id, previous, Detached.TAKEN_OVER, newer, instance)
                    await self._surely(lost, self._displace(lost))
                refusal = attached.refusal.value if attached.refusal is not None else None
                metrics.attached(newer or "none", len(attached.replay), refusal)
            if connection is not None and session_id in self._questions.by_session:
                await self._ask_again(session_id, connection)
            if self._bus.is_shared:
                # Processes with open questions for this session's client ask them again.
                await self._bus.try_send(SessionAttached(session_id=session_id))
            return attached

    @asynccontextmanager
    async def _attaching(
        self, session_id: SessionId, connection: ClientConnection | None
    ) -> AsyncGenerator[None]:
        """Hold a session's lock while it is attached. Detach it later if the attach failed, or its
        connection closed meanwhile.
        """
        async with self.session_lock(session_id):
            is_whole = False
            try:
                yield
                is_whole = True
            finally:
                gone = connection is not None and self._connections.local(connection.id) is None
                if connection is not None and (gone or not is_whole):
                    self._part_later(session_id, connection)

    def _part_later(self, session_id: SessionId, connection: ClientConnection) -> None:
        """Detach a session whose attach failed half way, or whose connection closed meanwhile: the
        store may have it as attached.
        """

        async def part() -> None:
            async with self.session_lock(session_id):
                record = await self._store.load(session_id, now=0)
                attachment = record.attachment if record is not None else None
                if attachment is None or attachment.connection_id != connection.id:
                    return
                epoch = attachment.fencing_epoch
                if await self._epoch_at(connection, session_id) != epoch:
                    connection.attached.pop(session_id, None)
                    entry = self._detached(Why.NOT_ATTACHED)
                    await self._store.detach(session_id, epoch, entry)
                    await self.unwatch(session_id, connection)

        self._pending_writes.add(("part", session_id, connection.id), part)

    async def _epoch_at(
        self, connection: ClientConnection, session_id: SessionId
    ) -> FencingEpoch | None:
        """The epoch with which a connection has a session; None: it has none, or is closed."""
        if process_of(connection.id) is None:
            its_own = await self._store.load(SessionId(connection.id), now=0)
            return its_own.client.carried.get(session_id) if its_own is not None else None
        gone = self._connections.local(connection.id) is None
        return None if gone else connection.attached.get(session_id)

    def _notify_later(self, lost: Displaced) -> None:
        async def write() -> None:
            async with self.session_lock(lost.session_id):
                record = await self._store.load(lost.session_id, now=0)
                has = record.attachment if record is not None else None
                # A new epoch on the same connection displaces nobody.
                stays = has is not None and has.connection_id == lost.connection_id
                if record is not None and not stays:
                    await self._displace(lost)

        name = ("displaced", lost.session_id, lost.connection_id, lost.fencing_epoch)
        self._pending_writes.add(name, write)

    async def _ask_again(self, session_id: SessionId, connection: ClientConnection) -> None:
        """A session has a new connection: what is open goes there too (ASK2), if its
        client can answer it; else it waits for one that can.
        """
        for question in list(self._questions.by_session.get(session_id, ())):
            if may_ask(connection.peer, question.asked.method):
                draft = Draft(question.message, None, question.log_key, session_id)
                await connection.send(draft, unless=question.is_answered)

    async def _begin(
        self,
        session_id: SessionId,
        connection: ClientConnection,
        attached: Attached,
        position: Position | None,
    ) -> None:
        if position is None or attached.refusal is not None:
            position = position_of(attached.head)
        read = partial(self._read, session_id, connection)
        if not await connection.begin(session_id, attached, position, read):
            # Over by now, or attached there anew by another process: then this changes
            # nothing.
            entry = self._detached(Why.NOT_ATTACHED)
            await self._store.detach(session_id, attached.fencing_epoch, entry)
            await self.unwatch(session_id, connection)

    async def _read(
        self, session_id: SessionId, connection: ClientConnection, after: str
    ) -> tuple[Sequence[LoggedEvent], Refusal | None]:
        events, refusal = await self._store.read(session_id, after, now=self._clock())
        if not (self._bus.is_shared and events):
            return events, refusal
        # Asked after they were read: what was read then is from before any takeover.
        stays = await self.check_attached(session_id, connection, waits=False)
        return (events, refusal) if stays else ((), None)

    async def displaced_at_replica(self, lost: Displaced, connection: ClientConnection) -> None:
        """Another process displaced a connection of this one, as it says."""
        await self._surely(lost, self.check_attached(lost.session_id, connection, notice=lost))

    async def _surely(self, lost: Displaced, displacing: Awaitable[object]) -> None:
        try:
            await displacing
        except StoreUnavailable as failed:
            logger.warning(
                "the connection that lost a session in a takeover is notified later: %s", failed
            )
            self._notify_later(lost)

    def _detached(self, why: str, connection: ClientConnection | None = None) -> Entry:
        method = connection.last_method if connection is not None else None
        last = word_of(method) if method is not None else NOTHING
        return detaches(self._clock(), why, self._replica, last)

    async def detach(
        self,
        session_id: SessionId,
        connection: ClientConnection,
        fencing_epoch: FencingEpoch,
        *,
        why: str,
    ) -> None:
        async with self.session_lock(session_id):
            connection.attached.pop(session_id, None)
            entry = self._detached(why, connection)
            await self._detach_stored({session_id: fencing_epoch}, entry)
            await connection.withdraw(session_id, fencing_epoch)
            await self.unwatch(session_id, connection)

    async def remove(self, connection: ClientConnection, *, why: str = Why.CLOSED) -> None:
        """Detach the sessions of a closed connection: in the store when that is there."""
        attached, entry = dict(connection.attached), self._detached(why, connection)
        connection.attached.clear()
        try:
            await self._connections.release(connection)
            for session_id in attached:
                await self.unwatch(session_id, connection)
        finally:
            await self._detach_stored(attached, entry)

    async def _detach_stored(
        self, attached: Mapping[SessionId, FencingEpoch], entry: Entry
    ) -> None:
        """In the store, when that is there."""
        detach = self._store.detach
        await self._pending_writes.settle(
            {("detach", *each): partial(detach, *each, entry) for each in attached.items()}
        )

    async def displace(self, session_id: SessionId, reason: Detached) -> None:
        """Take a session from its connection without giving it to another: its client has
        to resume it.
        """
        async with self.session_lock(session_id):
            await self.displace_locked(session_id, reason)

    async def write_late_events(self, record: SessionRecord) -> None:
        """Write the events for which :meth:`end_stream` ended the stream of an HTTP connection.

        Raises:
            StoreUnavailable: They still wait.
        """
        await self._pending_writes.flush_late((record.session_id, GET_STREAM))
        for session_id in record.client.carried:
            await self._pending_writes.flush_late((session_id, EVENTS))

    async def _is_late(self, log: tuple[SessionId, StreamName]) -> None:
        session_id, name = log
        if name in (EVENTS, GET_STREAM):
            await self.end_stream(session_id)

    async def end_stream(self, session_id: SessionId) -> None:
        """The store takes no events of a session, or of an HTTP connection. End the stream that
        waits for them, wherever it is: its client comes back, and learns that the store is away.
        """
        here = (c.id for c in self._connections.all() if session_id in (c.id, *c.attached))
        connection_id = next(here, None) or await self._where(session_id)
        if connection_id is None:
            await self.end_streams()
            return
        late = StreamLate(session_id=session_id, connection_id=connection_id)
        await self.end_late_stream(late)
        await self._bus.try_send(late)

    async def _where(self, session_id: SessionId) -> ConnectionId | None:
        """The connection that gets the events of a session. None: unknown."""
        try:
            record = await self._store.load(session_id, now=0)
        except StoreUnavailable:
            return None
        attachment = record.attachment if record is not None else None
        return attachment.connection_id if attachment is not None else ConnectionId(session_id)

    async def end_streams(self) -> None:
        """End every stream here: nobody knows whose events wait."""
        for connection in self._connections.all():
            await self._end_stream_here(connection)

    async def end_late_stream(self, late: StreamLate) -> None:
        connection = self._connections.local(late.connection_id)
        if connection is not None:
            await self._end_stream_here(connection, late.session_id)

    async def _end_stream_here(
        self, connection: ClientConnection, only: SessionId | None = None
    ) -> None:
        if not connection.is_one_wire or connection.kind == "listen":
            connection.transport.cut()
            return
        for session_id, epoch in list(connection.attached.items()):
            if only not in (None, session_id):
                continue
            if connection.knows_extension or connection.kind == "stdio":
                # Its other requests go on. The process at a pipe ends with it.
                await connection.notify_detached(session_id, Detached.EVICTED)
                await self.detach(session_id, connection, epoch, why=Detached.EVICTED.value)
            else:
                connection.transport.cut()

    async def renew_locked(self, session_id: SessionId) -> None:
        """Replace a session's event log after a loss; an attached client must resume."""
        record = await self._store.load(session_id, now=0)
        if record is None or record.mode is not Mode.PROTOCOL:
            return
        await self._store.change(session_id, RenewEvents())
        if record.attachment is not None:
            await self.displace_locked(session_id, Detached.EVICTED)

    async def displace_locked(self, session_id: SessionId, reason: Detached) -> None:
        record = await self._store.load(session_id, now=0)
        had = record.attachment if record is not None else None
        try:
            entry = self._detached(reason.value)
            attached = await self._store.attach(session_id, None, now=entry.at, entry=entry)
        except StoreUnavailable:
            if had is not None:
                self._notify_later(_lost(session_id, had, reason))
            raise
        if attached is not None and attached.previous is not None:
            lost = _lost(session_id, attached.previous, reason)
            await self._surely(lost, self._displace(lost))

    async def _displace(self, lost: Displaced) -> None:
        session_id, connection_id = lost.session_id, lost.connection_id
        connection = self._connections.local(connection_id)
        if connection is None:
            home = process_of(connection_id)
            if home is not None:
                if self._bus.is_remote(home):
                    await self._bus.try_send(lost, to=home)
                return
            connection = await self._connections.find(connection_id)
            if connection is None:
                return
        await self._displaced_here(lost, connection)
        if self._bus.is_shared and not connection.is_one_wire:
            # Its stream may be open anywhere; what waits there unsent is taken back.
            await self._bus.try_send(Withdrawn(session_id=session_id, connection_id=connection_id))

    async def _displaced_here(self, lost: Displaced, connection: ClientConnection) -> None:
        session_id, epoch, reason = lost.session_id, lost.fencing_epoch, lost.reason
        # Only if the old connection did not attach it anew meanwhile.
        if connection.attached.get(session_id, epoch) != epoch:
            return
        connection.attached.pop(session_id, None)
        # A listen stream after a listen stream is the same client going on.
        if not lost.newer == connection.kind == "listen":
            await connection.notify_detached(session_id, reason, instance=lost.instance)
        await connection.withdraw(session_id, epoch)
        if self._bus.is_shared:
            await self.unwatch(session_id, connection)
        metrics.detached(reason.value)
        if logger.isEnabledFor(logging.DEBUG):
            logger.debug("session %s left its connection: %s", digest(session_id), reason.value)

    async def check_attached(
        self,
        session_id: SessionId,
        connection: ClientConnection,
        *,
        waits: bool = True,
        notice: Displaced | None = None,
    ) -> bool:
        """Whether a session is attached to a connection of this process still; if another
        process displaced it, that is made good here.

        Args:
            session_id: The session.
            connection: The connection.
            waits: Until it is made good; False: the caller has the session's lock, or reads
                its log.
            notice: The message of the other process, if there was one: the reason, and the new
                connection.
        """
        fencing_epoch = connection.attached.get(session_id)
        if fencing_epoch is None:
            return False
        attachment = Attachment(connection.id, fencing_epoch)
        record = await self._store.load(session_id, now=0)
        if record is None:
            # Its end is reported by another way.
            return False
        if record.attachment == attachment:
            return True
        lost = notice or _lost(session_id, attachment, Detached.TAKEN_OVER)
        lost = replace(lost, fencing_epoch=fencing_epoch)
        displacing = self._displaced_locked(lost, connection)
        if waits:
            await displacing
        else:
            self._bus.spawn(displacing)
        return False

    async def _displaced_locked(self, lost: Displaced, connection: ClientConnection) -> None:
        async with self.session_lock(lost.session_id):
            if connection.attached.get(lost.session_id) == lost.fencing_epoch:
                await self._displaced_here(lost, connection)

    async def _watch(self, session_id: SessionId, connection: ClientConnection) -> None:
        """Receive events that other processes store for a session that is attached here."""
        if connection.is_one_wire:
            await self._bus.watch(session_id, EVENTS, connection)

    async def unwatch(self, session_id: SessionId, connection: ClientConnection) -> None:
        if connection.is_one_wire:
            await self._bus.unwatch(session_id, EVENTS, connection)


def _lost(
    session_id: SessionId,
    had: Attachment,
    reason: Detached,
    newer: str | None = None,
    instance: str | None = None,
) -> Displaced:
    return Displaced(
        session_id=session_id,
        connection_id=had.connection_id,
        fencing_epoch=had.fencing_epoch,
        reason=reason,
        newer=newer,
        instance=instance,
    )
