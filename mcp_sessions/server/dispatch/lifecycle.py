"""How sessions begin and end: made, ended on purpose, expired, evicted where there are too many.

The one task that looks at the clock by itself is here.

`Presence` keeps the sessions that cannot be idle: one of their requests runs, or their client is
there. Rules that must hold, and that ``tests/server/dispatch/test_presence.py`` owns:

1. Only what the client takes or answers proves that it is there: see
   :attr:`~mcp_sessions.server.connection.binding.Transport.is_taken`. A connection
   that is merely open proves nothing.
2. The process that has the connection moves the deadline in the store. So each replica sees it,
   and the rule of expiry stays where it is (:mod:`mcp_sessions.core.life`).
3. A session whose client has gone is idle from then on, and not from an earlier moment.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Protocol

from mcp_sessions import metrics
from mcp_sessions.background import report
from mcp_sessions.core.client_description import outlined
from mcp_sessions.core.ends import EndReason, StoreMade
from mcp_sessions.core.life import asleep_by, idle_times
from mcp_sessions.core.story import Why, detaches
from mcp_sessions.errors import LimitReached, StoreRefused, StoreUnavailable
from mcp_sessions.ids import ConnectionId, SessionId, digest, process_of
from mcp_sessions.principal import ANONYMOUS, Principal
from mcp_sessions.server.cluster.replica import Replica
from mcp_sessions.server.cluster.replica_messages import SessionEnded
from mcp_sessions.server.connection.connection import ClientConnection
from mcp_sessions.server.delivery.connections import ConnectionRegistry
from mcp_sessions.server.delivery.delivery import Delivery
from mcp_sessions.server.delivery.stored_connection import StoredConnection
from mcp_sessions.server.dispatch.history import History
from mcp_sessions.server.dispatch.sealed_state import SealedState
from mcp_sessions.server.requests.long_calls import LongOnes
from mcp_sessions.server.requests.runner import RequestRunner
from mcp_sessions.stores.contract import SessionStore
from mcp_sessions.stores.limits import most_of_one
from mcp_sessions.stores.records import Mode, Peer, SessionRecord

logger = logging.getLogger(__name__)

_BATCH = 256
"""Sessions ended before others may run."""

_HEAVY = 10 * _BATCH
"""Sessions ended for their bytes by one call. Each call measures all that have room."""

_SETTLING = 2.0
"""Seconds that the store has for the last ends, when the layer stops."""

_PAUSE = 1.0
"""Seconds after which it is looked again what could make room, if nothing could."""


class OnSessionEnd(Protocol):
    """Releases what the wrapped server has of a session that ended, or sleeps."""

    def __call__(self, session_id: SessionId, *, sleeps: bool = False) -> Awaitable[None]: ...


class Lifecycle:
    def __init__(
        self,
        replica: Replica,
        delivery: Delivery,
        runner: RequestRunner,
        *,
        sealed: SealedState,
        history: History,
        session_ended: OnSessionEnd,
        binds: bool,
        measure: Callable[[], Awaitable[None]],
    ) -> None:
        self._store, self._bus = replica.store, replica.bus
        self._policy, self._clock, self._stories = replica.policy, replica.clock, replica.stories
        self._connections, self._attachments = delivery.connections, delivery.attachments
        self._pending_writes, self._runner, self._sealed = delivery.pending_writes, runner, sealed
        self._history, self._session_ended, self._binds = history, session_ended, binds
        self._measure = measure
        # The store hands each record out once.
        self._ended: deque[SessionRecord] = deque()
        self._made_at = self._clock()
        self._emptied: StoreMade | None = None
        self._room = asyncio.Lock()
        self._looked: Counter[bool] = Counter()
        self._in_vain_at = -math.inf
        self._own_in_vain: dict[Principal, float] = {}
        # A busy session is touched at least three times per idle timeout, so that no
        # replica sees it past its deadline, or asleep.
        shortest = min(self._policy.idle_timeout, *idle_times(self._policy).values())
        self.interval = max(0.05, min(5.0, shortest / 3))
        """Seconds between two rounds."""

        self._coming = max(self._policy.min_evictable_idle_time, self._policy.reconnect_spread)
        """Seconds in which clients come back after a restart."""

        self._long_ones = LongOnes(self._runner, delivery.questions, self._stories, self._clock)
        self._presence = Presence(
            self._store, self._connections, self._runner.held, self._clock, shortest
        )

    async def create(
        self,
        mode: Mode,
        principal: Principal,
        peer: Peer | None,
        session_id: SessionId | None = None,
    ) -> SessionRecord:
        """A new session.

        Args:
            session_id: See :meth:`SessionStore.create`.

        Raises:
            LimitReached: Too many are open, even after those were ended that can be (SES20); or
                the client says too much of itself.
        """
        if mode is Mode.PROTOCOL and peer is not None:
            peer = replace(peer, initialize_params=outlined(peer.initialize_params))
        create = partial(self._store.create, mode, principal, peer=peer, session_id=session_id)
        try:
            record = await create(now=self._clock())
        except LimitReached as reached:
            if reached.limit == "max_client_bytes":
                raise
            # If it is one principal's own limit, the sessions of others do not count.
            evicts = reached.limit == "max_sessions" or principal == ANONYMOUS
            record = await self._create_at_limit(create, principal, evicts, reached.limit)
        if record.is_new:
            self._history.started(record)
        return record

    async def _create_at_limit(
        self,
        create: Callable[..., Awaitable[SessionRecord]],
        principal: Principal,
        evicts: bool,
        limit: str,
    ) -> SessionRecord:
        """In place of what has expired, else of the oldest conversations of the same principal and
        of his sessions that sleep, else of what sleeps or is nobody's, if ``evicts``.

        Raises:
            LimitReached: There is nothing of these.
        """
        ways = [partial(self._make_room, evicts, limit)]
        if self._binds or limit == "max_sessions_per_principal":
            own = partial(self._evict_own, principal, limit)
            ways = [partial(self._make_room, False, limit), own, *(ways if evicts else ())]
        for makes_room in ways[:-1]:
            await makes_room()
            with suppress(LimitReached):
                return await create(now=self._clock())
        await ways[-1]()
        return await create(now=self._clock())

    async def finish(self, session_id: SessionId, reason: EndReason) -> bool:
        """End a session for ever; False if it was not there.

        The log is closed first: whatever is appended or written from then on is refused.
        """
        record = await self._store.end(session_id)
        if record is None:
            return False
        self._history.ended([record], reason)
        # It has ended, and nobody can end it again: what runs for it ends, if not now then
        # when the store is back.
        await self._pending_writes.settle({("forget", session_id): partial(self.forget, record)})
        await self._history.remember()
        return True

    async def forget(self, record: SessionRecord) -> None:
        session_id, attachment = record.session_id, record.attachment
        connection_id = attachment.connection_id if attachment is not None else None
        self._sealed.forget(session_id)
        # Answered first (END6): a closed connection ends the streams that carry answers.
        await self._runner.abort_session(session_id)
        for carried, fencing_epoch in record.client.carried.items():
            gone = detaches(self._clock(), Why.CONNECTION_ENDED, self._stories.replica)
            await self._store.detach(carried, fencing_epoch, gone)
        await self._part(session_id, connection_id)
        if connection_id is not None and self._connections.local(connection_id) is None:
            if process_of(connection_id) is None:
                await self._store.drop_origin(SessionId(connection_id), session_id)
        await self._bus.try_send(SessionEnded(session_id=session_id, connection_id=connection_id))

    async def forget_here(self, session_id: SessionId, connection_id: ConnectionId | None) -> None:
        """End what runs here for a session that another process ended.

        Args:
            session_id: Of either mode.
            connection_id: The connection that it was attached to, as far as is known.
        """
        self._sealed.forget(session_id)
        await self._runner.abort_session(session_id)
        await self._part(session_id, connection_id)

    async def _part(self, session_id: SessionId, connection_id: ConnectionId | None) -> None:
        gone = self._connections.local(ConnectionId(session_id))
        if gone is not None:
            await self._attachments.remove(gone)
            gone.transport.close()
        async with self._attachments.session_lock(session_id):
            # An event that was stored before the end is not handed over after it.
            for connection in self._connections_of(session_id, connection_id):
                connection.attached.pop(session_id, None)
                await connection.withdraw(session_id, has_ended=True)
                await self._attachments.unwatch(session_id, connection)
        await self._connections.close_peers(session_id)
        await self._session_ended(session_id)

    def _connections_of(
        self, session_id: SessionId, connection_id: ConnectionId | None
    ) -> list[ClientConnection]:
        connection = self._connections.local(connection_id) if connection_id is not None else None
        if connection is not None or not self._bus.is_shared:
            return [connection] if connection is not None else []
        # Another process ended it, and does not know this one's connections.
        return [
            connection
            for connection in self._connections.all()
            if session_id in connection.attached
        ]

    # --- rounds ------------------------------------------------------------------------------

    async def run(self) -> None:
        slept_at, pause = -math.inf, self._policy.idle_timeout / 10
        with suppress(StoreUnavailable):
            # From now on another one is noticed. If the store is away, from the first round on.
            await self._history.emptied()
        while True:
            await asyncio.sleep(self.interval)
            try:
                await self.round()
                await self.tell()
                await self.measure()
                if self._clock() - slept_at >= pause:
                    await self.sleep()
                    slept_at = self._clock()
            except StoreUnavailable:
                logger.warning("the store is away; expired sessions wait")

    async def tell(self) -> None:
        """Add to the stories of sessions what no step of the store brought there.

        Raises:
            StoreUnavailable: Some of it is lost.
        """
        self._long_ones.look()
        self._runner.calls.round()
        await self._stories.write()

    async def measure(self) -> None:
        """Ask the store for its size, if anybody reads metrics.

        Raises:
            StoreUnavailable: The next round asks again.
        """
        metrics.look_for_provider()
        if metrics.measures:
            await self._measure()

    async def settle(self) -> None:
        """Note the ends that no round has noted yet. The layer stops, and waits for no store that
        is away.
        """
        try:
            async with asyncio.timeout(_SETTLING):
                await self._history.ended_outside()
                await self._history.remember()
                await self._stories.write(is_last=True)
        except (StoreUnavailable, TimeoutError) as failed:
            logger.debug("the last ends of sessions are not remembered: %s", failed)

    async def round(self) -> int:
        """Do one round: move the deadlines of busy sessions, and end expired ones. Return the
        number that ended.
        """
        now = self._clock()
        self._emptied = await self._history.emptied() or self._emptied
        if self._emptied is not None:
            # If the store fails meanwhile, the next round does it.
            await self._forget_lost(self._emptied)
            self._emptied = None
        held = await self._presence.keep()
        # Sessions that an operator ended outside of this process still run here.
        self._ended.extend(await self._history.ended_outside())
        await self._forget_all()
        count = 0
        while True:
            expired = await self._store.expire(now=now, held=held, limit=_BATCH)
            self._note_ended(expired, None)
            await self._forget_all()
            count += len(expired)
            if len(expired) < _BATCH:
                return count
            await asyncio.sleep(0)

    async def _forget_lost(self, made: StoreMade) -> None:
        known: set[SessionId] = set(self._runner.held)
        for connection in self._connections.all():
            known.update(connection.attached)
            if isinstance(connection, StoredConnection):
                # Only the store knew the other sessions that it carries.
                known.add(connection.session_id)
                if connection.last_current is not None:
                    known.add(connection.last_current)
        now = self._clock()
        lost = [each for each in known if await self._store.load(each, now=now) is None]
        await self._history.lost_with_store(lost, made)
        for session_id in lost:
            await self.forget_here(session_id, None)

    async def sleep(self) -> None:
        """Give back what sessions take that nobody uses, and that live on: what this process has of
        connections over HTTP, and their past in the store. Their next request finds the rest. If
        what sleeps holds too many bytes, end the least recently used.
        """
        now = self._clock()
        if asleep_by(now, self._policy) == -math.inf:
            return
        for connection in self._connections.all():
            if (
                isinstance(connection, StoredConnection)
                and not (connection.is_streaming or self._runner.calls.has(connection.id))
                and connection.session_id not in self._runner.held
                and self._connections.in_use_at(connection) <= now - self._policy.idle_timeout
            ):
                await self._connections.release(connection)
                await self._session_ended(connection.session_id, sleeps=True)
        await self._store.sleep(now=now)
        ended = _HEAVY
        while ended == _HEAVY:
            # Each round asks the store, and others have their turn.
            ended = await self._evict_heavy()

    async def _evict_heavy(self) -> int:
        """End sessions if those that sleep hold more than ``max_sleeping_bytes``. Return the
        number.
        """
        most = self._policy.max_sleeping_bytes
        held = frozenset(self._runner.held)
        heavy = await self._store.evict_heavy(now=self._clock(), most=most, held=held, limit=_HEAVY)
        if heavy:
            logger.warning(
                "sleeping sessions hold more than %d bytes (max_sleeping_bytes): %d unused ones "
                "were ended",
                most,
                len(heavy),
            )
        self._note_ended(heavy, EndReason.LIMIT, "max_sleeping_bytes")
        await self._forget_all()
        return len(heavy)

    async def _make_room(self, evicts: bool, limit: str) -> None:
        """A limit is reached: end what has expired; if that is nothing, sessions that are nobody's
        and hold nothing (SES20), many at once, so that not everyone who comes has to wait for it.

        Args:
            evicts: Whether sessions that live may be ended.
            limit: The limit that is reached.
        """
        looked = self._looked[evicts]
        async with self._room:
            if looked != self._looked[evicts]:
                # Somebody else did it meanwhile. A failed attempt counts, too. Otherwise all
                # callers wait for a store that is away, one after the other.
                return
            try:
                if not await self.round() and evicts:
                    await self._evict(limit)
            finally:
                self._looked.update({False, evicts})

    async def _evict_own(self, principal: Principal, limit: str) -> None:
        now = self._clock()
        if 0 <= now - self._own_in_vain.get(principal, -math.inf) < _PAUSE:
            return
        most = most_of_one(Mode.CONVERSATION, self._policy) or self._policy.max_sessions
        evicted = await self._store.evict_own(
            principal,
            now=now,
            unused_for=self._policy.min_evictable_idle_time,
            held=frozenset(self._runner.held),
            # Some of many at once: to look for them takes as long as they are many.
            limit=max(1, most // 100),
        )
        if evicted:
            logger.warning(
                "too many sessions of one user, or of all users: %d unused ones of the same user "
                "were ended. max_sessions is %d, max_sessions_per_principal is %s",
                len(evicted),
                self._policy.max_sessions,
                self._policy.max_sessions_per_principal or "not set",
            )
        else:
            if len(self._own_in_vain) >= _BATCH:
                self._own_in_vain.clear()
            self._own_in_vain[principal] = now
        self._note_ended(evicted, EndReason.LIMIT, limit)
        await self._forget_all()

    async def _evict(self, limit: str) -> None:
        now = self._clock()
        if 0 <= now - self._in_vain_at < _PAUSE:
            return
        streaming = {
            connection.transport_session
            for connection in self._connections.all()
            if connection.transport_session is not None and connection.is_streaming
        }
        evicted = await self._store.evict(
            now=now,
            unused_for=self._policy.min_evictable_idle_time,
            held=streaming | self._runner.held.keys(),
            limit=_BATCH,
            # Another process may have a stream open that this one does not know of. Or the one
            # before this had it, and its client is just coming back.
            opened=self._store.exchange is None and not 0 <= now - self._made_at < self._coming,
        )
        if evicted:
            logger.warning(
                "too many sessions (%s is %s): %d unused ones were ended",
                limit,
                getattr(self._policy, limit),
                len(evicted),
            )
        else:
            self._in_vain_at = now
        self._note_ended(evicted, EndReason.LIMIT, limit)
        await self._forget_all()

    def _note_ended(
        self, records: Sequence[SessionRecord], reason: EndReason | None, limit: str | None = None
    ) -> None:
        self._ended.extend(records)
        self._history.ended(records, reason, limit)

    async def _forget_all(self) -> None:
        """End what runs here for sessions that have ended. One for which that fails has its
        turn again in the next round, after all others.
        """
        await self._history.remember()
        for _ in range(len(self._ended)):
            if not self._ended:
                # Another task does the rest meanwhile.
                return
            record = self._ended.popleft()
            try:
                await self.forget(record)
            except StoreUnavailable as failed:
                self._ended.append(record)
                logger.warning(
                    "the process and the requests of session %s end later: %s",
                    digest(record.session_id),
                    failed,
                )
            except Exception as failed:
                # A defect, and the next sessions have to end all the same.
                self._ended.append(record)
                report("the end of an expired session", failed)
            except BaseException:
                self._ended.append(record)
                raise


_PARTS = 10
"""Into so many the idle time is divided: a deadline is moved once in each."""


@dataclass(slots=True)
class _Seen:
    touched_at: float
    sessions: frozenset[SessionId]


@dataclass(slots=True, eq=False, repr=False)
class Presence:
    """Moves the deadlines of the sessions that cannot be idle in this process.

    Args:
        _running: The sessions that have a request running, as they are now.
        _idle_time: Seconds: the shortest time after which an unused session expires.
    """

    _store: SessionStore
    _connections: ConnectionRegistry
    _running: Collection[SessionId]
    _clock: Callable[[], float]
    _idle_time: float
    _seen: dict[ConnectionId, _Seen] = field(init=False, default_factory=dict[ConnectionId, _Seen])

    async def keep(self) -> frozenset[SessionId]:
        """Move the deadlines that are due; every session that cannot be idle.

        Raises:
            StoreUnavailable: Some were not moved. They are due still.
        """
        now = self._clock()
        there = {each.id: each for each in self._connections.all() if each.transport.is_taken}
        left = [self._seen[each] for each in self._seen.keys() - there.keys()]
        due = [each for each in there.values() if self._is_due(each, now)]
        found = {each.id: _Seen(now, await _sessions_of(each)) for each in due}
        touched = set(self._running).union(*(each.sessions for each in (*left, *found.values())))
        if touched:
            await self._store.touch(touched, now=now)
        self._seen = {each: seen for each, seen in self._seen.items() if each in there} | found
        return frozenset(self._running).union(*(each.sessions for each in self._seen.values()))

    def _is_due(self, connection: ClientConnection, now: float) -> bool:
        seen = self._seen.get(connection.id)
        # A clock that was set back is no reason to wait.
        return seen is None or not 0 <= now - seen.touched_at < self._idle_time / _PARTS


async def _sessions_of(connection: ClientConnection) -> frozenset[SessionId]:
    try:
        return await connection.sessions()
    except StoreRefused:
        # Perhaps it cannot be read. Its own requests say why.
        return frozenset()
