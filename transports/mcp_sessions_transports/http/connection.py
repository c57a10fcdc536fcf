"""A transport-mode session over HTTP, as a connection: its GET stream and its POST streams.

Its session lives in the store; this object is only what is open in this process, and can be
made anew at any time. It keeps nothing of the session's record: another process may change
that at any moment, and whoever decides something asks the record that came with its own
request.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection, Sequence

from starlette.types import Receive, Send

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
from mcp_sessions.policy import SessionPolicy
from mcp_sessions.server.cluster.bus import ClusterBus
from mcp_sessions.server.cluster.messages import GetStreamOpened
from mcp_sessions.server.connection import ReadEvents
from mcp_sessions.server.delivery.relaying import Relay
from mcp_sessions.server.delivery.streams import Streams
from mcp_sessions.server.upstream.port import UpstreamPeer
from mcp_sessions.stores.contract import SessionStore
from mcp_sessions.stores.records import Attached, Attachment, CurrentSession, Peer, SessionRecord
from mcp_sessions_transports.http.channel import ResponseStreams
from mcp_sessions_transports.http.get_stream import GetStream
from mcp_sessions_transports.http.sse import SSE_HEADERS, retry_event

logger = logging.getLogger(__name__)


class HttpConnection:
    """A :class:`~mcp_sessions.server.connection.TransportConnection` over HTTP."""

    kind = "http"

    __slots__ = (
        "_clock",
        "_elsewhere",
        "_bus",
        "_get",
        "_get_opened",
        "_heads",
        "_is_over",
        "_owes_first",
        "_over",
        "_policy",
        "_primes",
        "_sent",
        "_store",
        "attached",
        "close_stream",
        "id",
        "peer",
        "principal",
        "requests",
        "responses",
        "session_id",
        "transport_session",
        "upstream_peers",
        "used_at",
    )

    is_leaving = False
    """A request has a connection of its own, which the server that runs us sees to."""

    def __init__(
        self,
        record: SessionRecord,
        peer: Peer,
        store: SessionStore,
        policy: SessionPolicy,
        clock: Callable[[], float],
        *,
        primes: bool,
        bus: ClusterBus,
    ) -> None:
        """Take what it works with.

        Args:
            primes: The client understands an event without data.
        """
        self.session_id = record.session_id
        self.id = ConnectionId(record.session_id)
        self.transport_session: SessionId | None = record.session_id
        self.principal = record.principal
        self.peer = peer
        self.attached: dict[SessionId, FencingEpoch] = {}
        self.upstream_peers: dict[SessionId | None, UpstreamPeer] = {}
        self.responses = ResponseStreams(
            record.session_id, Streams(store, clock), policy.max_finished_streams
        )
        self.close_stream: Callable[[], Awaitable[None]] | None = None
        if primes:
            self.close_stream = self._close_stream
        self._store = store
        self._policy = policy
        self._clock = clock
        self._primes = primes
        self._bus = bus
        self._get: GetStream | None = None
        self._get_opened = (0.0, 0.0)
        self._over: set[SessionId] = set()
        self._heads: dict[SessionId, Position] = {}
        self._sent: str | None = None
        self._elsewhere = False
        self._is_over = False
        self._owes_first = False
        self.used_at = clock()
        """When it was named last; seconds since 1970."""

    # --- the port ------------------------------------------------------------------------

    async def current(self) -> CurrentSession | None:
        """See :class:`TransportConnection`."""
        record = await self._store.load(self.session_id, now=0)
        return record.current if record is not None else None

    async def set_current(self, current: CurrentSession | None) -> None:
        """See :class:`TransportConnection`."""
        await self._store.set_current(self.session_id, current)

    async def begin(
        self, session_id: SessionId, attached: Attached, after: Position, read: ReadEvents
    ) -> bool:
        """See :class:`TransportConnection`."""
        epoch = attached.fencing_epoch
        if self._get is not None:
            self._get.begin(session_id, attached.scopes)
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
        """See :class:`TransportConnection`."""
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
        """See :class:`TransportConnection`: it became an entry of the GET stream."""
        self._offer((event,))

    def check_position(self, session_id: SessionId, head: Position | None) -> None:
        """See :class:`TransportConnection`."""
        if self._get is not None:
            self._get.check_position(head)

    async def send(self, draft: Draft) -> None:
        """See :class:`TransportConnection`. It waits for the GET stream to open."""
        try:
            appended = await self._store.append(
                self.session_id, draft, now=self._clock(), stream=GET_STREAM
            )
        except StoreUnavailable:
            self._read_again()
            raise
        if appended is not None:
            self._offer((appended.event,))

    async def withdraw(
        self, session_id: SessionId, fencing_epoch: FencingEpoch | None = None
    ) -> None:
        """See :class:`TransportConnection`."""
        await self._store.drop_origin(self.session_id, session_id, fencing_epoch=fencing_epoch)
        if self._get is not None:
            self._get.stream.purge(session_id)

    async def withdrawn_elsewhere(self, session_id: SessionId) -> None:
        """Another process took a session off this connection: take back what is not handed
        to the network yet.
        """
        if not self.is_streaming or await self._carries(session_id):
            return
        get = self._get
        if get is None:  # Its client went meanwhile.
            return
        get.stream.purge(session_id)
        if await self._carries(session_id):
            # Attached anew meanwhile: what was taken back may be of now. The client comes
            # back with its position and gets what is right.
            get.stream.cut()

    async def _carries(self, session_id: SessionId) -> bool:
        record = await self._store.load(self.session_id, now=0)
        return record is not None and session_id in record.carried

    def _relay(self, session_id: SessionId, fencing_epoch: FencingEpoch) -> Relay:
        return Relay(self._store, self._clock, self.session_id, session_id, fencing_epoch)

    def _offer(self, entries: Sequence[LoggedEvent]) -> None:
        if self._get is not None:
            for entry in entries:
                self._get.offer(entry)

    async def session_over(self, session_id: SessionId) -> None:
        """See :class:`TransportConnection`."""
        await self.withdraw(session_id)

    async def drain(self) -> None:
        """See :class:`TransportConnection`."""
        if self._get is not None:
            await self._get.drain()
        else:
            # A handler that only emits must let others run.
            await asyncio.sleep(0)

    def _read_again(self) -> None:
        """An entry may be in the log without having been handed over: the store did not say.
        Nothing need follow it that would show the gap.
        """
        if self._get is not None:
            self._get.check_position(None)

    def hold(self) -> Callable[[], None]:
        """See :class:`TransportConnection`."""
        return self._get.stream.hold() if self._get is not None else lambda: None

    # --- the GET stream --------------------------------------------------------------------

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
        self.used_at = self._clock()
        now = self._clock()
        first = await self._is_first(was_opened)
        head = await self._store.open_stream(self.session_id, GET_STREAM)
        if head is None:
            # Admitted by this very request, and ended since.
            raise SessionNotFound(self.session_id, status=Status.NOT_FOUND)
        if last_event_id is None and not first:
            # What was never handed to any stream of this connection still goes out. One that
            # looks open may be dead: what it was handed is not told twice.
            sent = self._get.last if self._get is not None else self._sent
            if sent is None:
                # That stream was open in another process, or before this one: what it was
                # handed is not known.
                lost = Refusal.NO_POSITION if head.number > 0 else None
                return head, lost, False
            return await self._from(sent, head, now), None, False
        if last_event_id is None:
            last_event_id = Position(head.log_epoch, 0).event_id()
        if parse_position(last_event_id) is None:
            # However long it is: no store is asked for what is no id (SEC8).
            return head, Refusal.UNKNOWN_POSITION, False
        _, refusal = await self._store.read(
            self.session_id, last_event_id, now=now, stream=GET_STREAM
        )
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

    async def _from(self, event_id: str, head: Position, now: float) -> Position:
        _, refusal = await self._store.read(self.session_id, event_id, now=now, stream=GET_STREAM)
        return head if refusal is not None else _position(event_id)

    async def serve_get(
        self,
        after: Position,
        first: Sequence[bytes],
        receive: Receive,
        send: Send,
        *,
        scopes: frozenset[str],
        cleared: Collection[SessionId],
    ) -> None:
        """Serve the GET stream until it ends; the one before it ends now, wherever it is.

        Args:
            after: What the client has.
            first: Messages that it opens with; see :meth:`GetStream.open_with`.
            receive: ASGI's.
            send: ASGI's.
            scopes: Those of the credential that opened it.
            cleared: The sessions that were found to need no others.

        Raises:
            StoreUnavailable: Nothing was sent.
        """
        if self._get is not None:
            self._get.stream.cut()
        get = GetStream(
            self.session_id,
            after,
            scopes=scopes,
            cleared=cleared,
            over=self._over,
            store=self._store,
            policy=self._policy,
            clock=self._clock,
            is_checked=self._bus.is_shared,
        )
        older = (self._sent, self._elsewhere)
        is_served = False
        self._get = get
        self._get_opened = (asyncio.get_running_loop().time(), self._clock())
        self._elsewhere = False
        self._heads.clear()
        get.open_with(first, primes=self._primes)
        if self._is_over:
            # Closed after this GET was admitted: its client comes back, and hears so.
            get.stream.finish()
        headers = [*SSE_HEADERS, (b"mcp-session-id", self.session_id.encode("ascii"))]
        try:
            await self._bus.watch(self.session_id, GET_STREAM, self)
            await self._tell_opened(to=None)
            is_served, self._owes_first = True, False
            await get.stream.serve(receive, send, headers)
        finally:
            get.stream.cut()
            self.used_at = self._clock()
            if self._get is get:
                self._get = None
                if not is_served:
                    # Nothing was sent: what the one before it was handed still counts.
                    self._sent, self._elsewhere = older
                else:
                    self._sent = None if self._elsewhere else get.last
                await self._bus.unwatch(self.session_id, GET_STREAM, self)

    def opened_elsewhere(self, opened: tuple[float, str], own: str) -> bool:
        """Another process serves a GET stream of this connection: the older one ends.

        Args:
            opened: When, by its clock, and its name.
            own: This process's.

        Returns:
            False if this one is the newer of two that were opened at the same moment: the
            other process has to be told.
        """
        if self._get is not None:
            age = asyncio.get_running_loop().time() - self._get_opened[0]
            # In one moment the clocks decide, in both processes alike. After that, theirs is
            # the newer one, whatever the clocks say.
            if age <= _SAME_MOMENT and opened < (self._get_opened[1], own):
                return False
        # What was handed out there is not told twice; where that ended is not known here.
        self._elsewhere, self._sent, self._owes_first = True, None, False
        self.cut_get()
        return True

    async def _tell_opened(self, *, to: str | None) -> None:
        at = self._get_opened[1]
        await self._bus.tell(GetStreamOpened(session_id=self.session_id, at=at), to=to)

    async def insist(self, process: str) -> None:
        """Tell a process whose GET stream is the older one."""
        await self._tell_opened(to=process)

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

    def cut_get(self) -> None:
        """End the GET stream now: its credential is good no more."""
        if self._get is not None:
            self._get.stream.cut()

    @property
    def is_streaming(self) -> bool:
        """Whether its GET stream is open."""
        return self._get is not None

    async def _close_stream(self) -> None:
        if self._get is not None:
            self._get.stream.finish()

    def come_back_after(self, seconds: float) -> None:
        """Tell whoever reads the GET stream when to open it again after it has ended."""
        if self._get is not None and self._primes:
            self._get.stream.push(retry_event(seconds))

    def close(self) -> None:
        """End every stream, after what was handed to it: the session is over, or the server
        stops.
        """
        self._is_over = True
        if self._get is not None:
            self._get.stream.finish()
        self.responses.close()


_SAME_MOMENT = 1.0
"""Seconds; longer than a message between two processes takes."""


def _position(event_id: str) -> Position:
    position = parse_position(event_id)
    if position is None:
        raise AssertionError("the store read from this position")
    return position
