"""Notify every entitled client that a resource or a list of the server changed.

1. A protocol-mode session gets a change as its own event. A client outside of any session (a pipe,
   a WebSocket, the GET stream of a transport-mode session) gets the bare notification.
2. Changes are sent one after the other, in the order in which they were announced. If more than
   ``EACH`` wait, a change coalesces with a waiting one of the same key.
3. Sessions are notified a few at a time, and at least half of the time is for other work.
4. While the store is away a change is kept. The remaining sessions get it when the store is back:
   none gets it twice, and none is left out. The kept changes are bounded (``KEPT``,
   ``KEPT_BYTES``).
5. A change beyond that bound is lost. Then the event log of every session is replaced: a client
   that reconnects with a position is refused, and reads its resources and lists again.
6. Only the announcer of a change waits for it. An announcement is noted in a context variable, so
   that it is found where the application announces it: in a handler, in a task that a handler
   started, in a worker thread that called back, in a listener of the server's own bus that runs
   inside of any of these. A bus that calls its listeners in another context does not say who
   published, so no one waits.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import random
import secrets
from collections import Counter, deque
from collections.abc import Collection, Generator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import Context, ContextVar
from dataclasses import dataclass, field
from typing import Any

from mcp_sessions import method_names
from mcp_sessions.background import give_way, stopped, watched
from mcp_sessions.core.backoff import Backoff
from mcp_sessions.core.coalescing_key import coalescing_key
from mcp_sessions.core.messages import EventTemplate, notification_message, plain_draft
from mcp_sessions.core.named import updated_uri
from mcp_sessions.core.recent import Recent
from mcp_sessions.errors import StoreUnavailable
from mcp_sessions.ids import SessionId
from mcp_sessions.server.cluster.replica import Replica
from mcp_sessions.server.cluster.replica_messages import ChangedOutside, ServerChanged
from mcp_sessions.server.delivery.attachments import Attachments
from mcp_sessions.server.delivery.connections import ConnectionRegistry
from mcp_sessions.server.delivery.hidden_updates import HiddenUpdates
from mcp_sessions.server.delivery.pending_writes import PATIENCE
from mcp_sessions.server.delivery.publisher import Publisher
from mcp_sessions.stores.contract import CHANGES_AT_ONCE
from mcp_sessions.stores.records import ServerChange

logger = logging.getLogger(__name__)

_LAST_WORDS = 5.0
"""Seconds that what is announced has to be sent when the server stops."""

_ALONE = 3
"""Failures after which the sessions of a change are notified one by one: it may be one of them
that the store fails for."""

_SEEN = 1_000
"""Changes of other processes that are known if they come again."""

EACH = 64
"""Changes that may wait before those with the same coalescing key are sent as one."""

KEPT = 10_000
"""Changes that may wait, in this process."""

KEPT_BYTES = 4_194_304
"""Bytes that their notifications may have together."""

_BEHIND = 8
"""Failures after which other changes are sent first."""


ChangeOutcome = StoreUnavailable | None
"""The outcome of a change: the reason why it is not stored for everyone yet; None: it is."""


@dataclass(slots=True, eq=False)
class Announced:
    outer: Announced | None = None
    """Waits for the same, too."""

    waiting: tuple[int, asyncio.Future[ChangeOutcome]] | None = None
    """The last of it that is not known to be stored, with its number among all."""

    is_open: bool = True

    def add(self, number: int, outcome: asyncio.Future[ChangeOutcome]) -> None:
        """Note a change that was announced, or that is sent together with such a change.

        Args:
            number: Its number among all. They are sent in order: the last one is waited for.
        """
        if self.is_open and (self.waiting is None or self.waiting[0] < number):
            self.waiting = number, outcome
        if self.outer is not None:
            self.outer.add(number, outcome)

    async def settled(self) -> ChangeOutcome:
        """Wait until all that was announced so far is stored, or the store failed. Later changes,
        of a task that outlives the request, are not waited for.
        """
        waiting, self.waiting, self.is_open = self.waiting, None, False
        if waiting is None:
            return None
        return await asyncio.shield(waiting[1])


ANNOUNCED: ContextVar[Announced | None] = ContextVar("mcp_sessions_announced", default=None)
"""Collects the changes that a task, and the tasks it starts, announce from now on."""


@contextmanager
def noting() -> Generator[Announced]:
    """Collect the changes that are announced inside. Outer collectors get them, too."""
    announced = Announced(ANNOUNCED.get())
    token = ANNOUNCED.set(announced)
    try:
        yield announced
    finally:
        ANNOUNCED.reset(token)


@dataclass(slots=True, eq=False)
class WaitingChange:
    number: int
    method: str
    params: Mapping[str, Any] | None
    change: ServerChange
    outcome: asyncio.Future[ChangeOutcome]
    waits_since: float
    """By the clock of the event loop: since it was announced, or since streams ended for it."""

    is_late: bool = field(init=False, default=False)
    """Streams ended for it."""

    is_sent_sessionless: bool = field(init=False, default=False)
    is_sent_to_replicas: bool = field(init=False, default=False)
    failures: int = field(init=False, default=0)
    """How often the store failed to tell, though it served something else just before."""

    is_served: bool = field(init=False, default=False)
    done: set[SessionId] = field(init=False, default_factory=set[SessionId])
    """The sessions that have it, or are not entitled."""

    unsure: set[SessionId] = field(init=False, default_factory=set[SessionId])
    """Those that may have it: the store failed in between."""

    busy: list[SessionId] = field(init=False, default_factory=list[SessionId])
    """Those that were in the middle of something when it was their turn."""

    def settle(self, outcome: ChangeOutcome) -> None:
        if not self.outcome.done():
            self.outcome.set_result(outcome)


class ChangeBroadcaster:
    def __init__(
        self,
        replica: Replica,
        publisher: Publisher,
        *,
        connections: ConnectionRegistry,
        attachments: Attachments,
        hidden_updates: HiddenUpdates | None,
    ) -> None:
        self._store, self._bus = replica.store, replica.bus
        self._policy, self._clock = replica.policy, replica.clock
        self._connections, self._attachments = connections, attachments
        self._publisher, self._hidden_updates = publisher, hidden_updates
        self._waiting: deque[WaitingChange] = deque()
        self._by_key: dict[str, WaitingChange] = {}
        """The waiting change of each coalescing key, if it is not begun."""

        self._bytes = 0
        self._away: ChangeOutcome = None
        """Why the store did not serve the last change. None: it did."""

        self._name = secrets.token_urlsafe(12)
        self._numbers = itertools.count(1)
        self._lost: Counter[str] = Counter()
        self._renews = False
        """Changes were lost: every session has to learn that."""

        self._renewed: set[SessionId] = set()
        """The sessions that know of the changes that were lost."""

        self._fan_out: asyncio.Task[None] | None = None
        self._seen = Recent[str, None](_SEEN)

    def announce(
        self, method: str, params: Mapping[str, Any] | None, is_outside: bool = False
    ) -> None:
        """A resource or a list of the server changed: tell everyone who is entitled.

        Returns at once. Who called :func:`noting` before, or has :data:`ANNOUNCED`, can wait until
        every session has its event, or the store failed.

        Args:
            is_outside: Only listens outside of sessions get it. Those of this process have it.
        """
        if is_outside:
            change = ChangedOutside(method=method, params=params)
            self._bus.spawn(self._bus.try_send(change))
            return
        try:
            waiting = self._keep(method, params)
        except (TypeError, ValueError, RecursionError):
            # The announcer does not wait, and other changes are sent.
            logger.exception("%s could not be sent to the sessions", method)
            return
        announced = ANNOUNCED.get()
        if announced is not None:
            announced.add(waiting.number, waiting.outcome)
        if self._fan_out is None or self._fan_out.done():
            # In a context of its own: it is no part of the request that came first.
            self._fan_out = asyncio.create_task(self._notify_everyone(), context=Context())
            watched("sending changes to sessions", self._fan_out)

    def is_new(self, change_id: str | None) -> bool:
        """Whether this is the first report of a change by another process.

        Args:
            change_id: None: a process of an earlier version tells, and tells once.
        """
        if change_id is None:
            return True
        if change_id in self._seen:
            return False
        self._seen.keep(change_id, None)
        return True

    def check(self, session_ids: Collection[SessionId]) -> None:
        """Raise ``StoreUnavailable`` if streams of some sessions ended for a change that still
        waits.
        """
        if self._away is not None and any(
            each.is_late and not each.unsure.isdisjoint(session_ids) for each in self._waiting
        ):
            raise self._away

    async def close(self) -> None:
        """Send the announced changes, if the store is there and it does not take long; log the
        rest.
        """
        fan_out, self._fan_out = self._fan_out, None
        if fan_out is not None:
            if self._away is None:
                await asyncio.wait({fan_out}, timeout=_LAST_WORDS)
            await stopped(fan_out)
        for waiting in self._waiting:
            waiting.settle(StoreUnavailable("the server stopped"))
            self._lost[waiting.method] += 1
        self._waiting.clear()
        self._by_key.clear()
        self._say_what_is_lost("the server stops")

    # --- the queue ---------------------------------------------------------------------------

    def _keep(self, method: str, params: Mapping[str, Any] | None) -> WaitingChange:
        """A change that waits from now on, or the one that it is sent with; if there are too
        many, one that is settled and does not wait.
        """
        key = coalescing_key(method, params, self._policy.coalescing)
        if key is not None and len(self._waiting) >= EACH:
            same = self._by_key.get(key)
            if same is not None:
                if self._away is not None:
                    same.settle(self._away)
                return same
        number = next(self._numbers)
        change = self._change(number, method, params, key)
        outcome = asyncio.get_running_loop().create_future()
        since = asyncio.get_running_loop().time()
        waiting = WaitingChange(number, method, params, change, outcome, since)
        size = len(change.bare.before)
        if len(self._waiting) >= KEPT or self._bytes + size > KEPT_BYTES:
            self._lost[method] += 1
            self._renews = True
            waiting.settle(StoreUnavailable("too many changes wait to be stored"))
            return waiting
        self._waiting.append(waiting)
        self._bytes += size
        if key is not None:
            self._by_key[key] = waiting
        if self._away is not None:
            waiting.settle(self._away)
        return waiting

    def _change(
        self, number: int, method: str, params: Mapping[str, Any] | None, key: str | None
    ) -> ServerChange:
        return ServerChange(
            f"{self._name}.{number}",
            self._clock(),
            updated_uri(method, params),
            method_names.CHANGED_KIND.get(method),
            EventTemplate(method, params, key),
            plain_draft(notification_message(method, params), key),
        )

    def _first(self) -> WaitingChange:
        """Return the next change. No later change coalesces with it."""
        waiting = self._waiting[0]
        key = waiting.change.event.key
        if key is not None and self._by_key.get(key) is waiting:
            del self._by_key[key]
        return waiting

    def _postpone(self, waiting: WaitingChange, failed: StoreUnavailable) -> None:
        if self._away is None:
            logger.warning(
                "%s did not reach all sessions yet; the server keeps it until the store is back: "
                "%s",
                waiting.method, failed,
            )  # fmt: skip
        self._away = failed
        for each in self._waiting:
            each.settle(failed)
        if waiting.is_served:
            waiting.failures += 1
            if waiting.failures % _BEHIND == 0:
                self._waiting.rotate(-1)

    async def _end_late_streams(self, waiting: WaitingChange) -> None:
        """Nobody waits for ever: see :meth:`Attachments.end_stream`."""
        now = asyncio.get_running_loop().time()
        if now < waiting.waits_since + PATIENCE:
            return
        waiting.waits_since, waiting.is_late = now, True
        if not waiting.is_served:
            # Nobody knows whom it is for.
            await self._attachments.end_streams()
        for session_id in list(waiting.unsure):
            await self._attachments.end_stream(session_id)

    def _say_what_is_lost(self, why: str) -> None:
        if self._lost:
            logger.error(
                "changes were lost, and sessions miss them (%s): %s",
                why, ", ".join(f"{count} x {method}" for method, count in self._lost.items()),
            )  # fmt: skip
        self._lost.clear()

    # --- sending -----------------------------------------------------------------------------

    async def _notify_everyone(self) -> None:
        backoff = Backoff(base=0.2, cap=5.0)
        while self._waiting or self._renews:
            if not self._waiting:
                try:
                    await self._renew_everyone()
                    backoff.progressed()
                except StoreUnavailable:
                    await asyncio.sleep(backoff.failed(random.random()))
                continue
            waiting = self._first()
            try:
                await self._notify_sessions(waiting)
            except StoreUnavailable as failed:
                await self._end_late_streams(waiting)
                self._postpone(waiting, failed)
                await asyncio.sleep(backoff.failed(random.random()))
                continue
            except Exception:
                # The boundary to whoever announced it: what is wrong with one change must
                # not silence the next, or whoever waits for it.
                logger.exception("%s could not be sent to the sessions", waiting.method)
            backoff.progressed()
            self._away = None
            self._waiting.remove(waiting)
            self._bytes -= len(waiting.change.bare.before)
            waiting.settle(None)
            # However many were announced at once, others run in between.
            await give_way()

    async def _notify_sessions(self, waiting: WaitingChange) -> None:
        """Notify the sessions that are left.

        Raises:
            StoreUnavailable: There are some left.
        """
        change = waiting.change
        waiting.busy.clear()
        waiting.is_served = False
        if not waiting.is_sent_to_replicas:
            # Once for all sessions, here; their bare connections are notified by each of them.
            await self._bus.send(
                ServerChanged(id=change.id, method=waiting.method, params=waiting.params)
            )
            waiting.is_sent_to_replicas = True
        if not waiting.is_sent_sessionless:
            waiting.is_sent_sessionless = True
            await self.notify_sessionless(waiting.method, waiting.params, change.uri)
        failed: StoreUnavailable | None = None
        cursor = None
        while True:
            page = await self._store.audience(change, cursor)
            waiting.is_served = True
            failed = await self._notify_page(waiting, page.session_ids) or failed
            cursor = page.following
            if cursor is None:
                break
        failed = (await self._notify_busy(waiting) if waiting.busy else None) or failed
        if failed is not None:
            raise failed

    async def _notify_page(
        self, waiting: WaitingChange, session_ids: Sequence[SessionId]
    ) -> StoreUnavailable | None:
        """Notify some hundred sessions. Return the failure, if the store served only some of them.

        Raises:
            StoreUnavailable: It serves none.
        """
        loop = asyncio.get_running_loop()
        one_by_one = waiting.failures >= _ALONE
        step = 1 if one_by_one else CHANGES_AT_ONCE
        failed: StoreUnavailable | None = None
        for start in range(0, len(session_ids), step):
            begun = loop.time()
            free: list[SessionId] = []
            for session_id in dict.fromkeys(session_ids[start : start + step]):
                if session_id not in waiting.done:
                    # A wait for one session would delay all others.
                    is_busy = self._attachments.is_busy(session_id)
                    (waiting.busy if is_busy else free).append(session_id)
            try:
                await self._notify_some(waiting, free)
            except StoreUnavailable as away:
                if not one_by_one:
                    raise
                failed = away
            if start + step < len(session_ids):
                # Turns too: an event loop may round that little time to nothing.
                await asyncio.sleep(loop.time() - begun)
                await give_way()
        return failed

    async def _notify_busy(self, waiting: WaitingChange) -> StoreUnavailable | None:
        """Notify the sessions that were busy, each when it is not. Return a failure of some."""
        failed: StoreUnavailable | None = None
        for start in range(0, len(waiting.busy), CHANGES_AT_ONCE):
            outcomes = await asyncio.gather(
                *(
                    self._notify_some(waiting, [session_id])
                    for session_id in waiting.busy[start : start + CHANGES_AT_ONCE]
                ),
                return_exceptions=True,
            )
            for outcome in outcomes:
                if isinstance(outcome, StoreUnavailable):
                    failed = outcome
                elif outcome is not None:
                    raise outcome
        return failed

    async def _notify_some(self, waiting: WaitingChange, session_ids: Sequence[SessionId]) -> None:
        """Notify a few sessions. A failure for one hinders no other.

        Raises:
            StoreUnavailable: Not all of them are notified.
        """
        try:
            await self._notify_locked(waiting, session_ids)
        except StoreUnavailable:
            raise
        except Exception:
            if len(session_ids) > 1:
                for session_id in session_ids:
                    await self._notify_some(waiting, [session_id])
                return
            # The boundary between sessions: what is wrong with the log of one.
            logger.exception("%s could not be sent to a session", waiting.method)
            waiting.done.update(session_ids)

    async def _notify_locked(
        self, waiting: WaitingChange, session_ids: Sequence[SessionId]
    ) -> None:
        """Notify a few sessions. The stored event is handed over before anything else.

        Raises:
            StoreUnavailable: They are not notified.
        """
        session_ids = [each for each in session_ids if each not in waiting.done]
        hidden_updates = self._hidden_updates
        if hidden_updates is not None and hidden_updates.is_hidden_from_some(
            waiting.method, waiting.params
        ):
            change = (waiting.method, waiting.params)
            session_ids = [
                each
                for each in session_ids
                if not await hidden_updates.is_hidden_from(each, *change)
            ]
        if not session_ids:
            return
        held: list[asyncio.Lock] = []
        try:
            for session_id in session_ids:
                lock = self._attachments.session_lock(session_id)
                await lock.acquire()
                held.append(lock)
            again = not waiting.unsure.isdisjoint(session_ids)
            waiting.unsure.update(session_ids)
            changes = await self._store.append_change(
                session_ids, waiting.change, now=self._clock(), again=again
            )
            waiting.unsure.difference_update(session_ids)
            waiting.done.update(session_ids)
            self._away = None
            await self._publisher.hand_over(changes)
        finally:
            for lock in held:
                lock.release()

    async def _renew_everyone(self) -> None:
        """Replace every session's event log after an unknown loss; attached clients must resume.

        Raises:
            StoreUnavailable: There are some left.
        """
        self._say_what_is_lost("too many changes waited; every session has to resume")
        self._renews = False
        loop = asyncio.get_running_loop()
        everyone = self._change(0, method_names.TOOLS_CHANGED, None, None)
        cursor = None
        try:
            while True:
                page = await self._store.audience(everyone, cursor)
                for session_id in page.session_ids:
                    begun = loop.time()
                    if session_id not in self._renewed:
                        async with self._attachments.session_lock(session_id):
                            await self._attachments.renew_locked(session_id)
                        self._renewed.add(session_id)
                        await asyncio.sleep(loop.time() - begun)
                cursor = page.following
                if cursor is None:
                    break
        except StoreUnavailable:
            self._renews = True
            raise
        self._renewed.clear()

    async def notify_sessionless(
        self, method: str, params: Mapping[str, Any] | None, uri: str | None
    ) -> None:
        """Notify the clients of this process that are outside of any session.

        Args:
            uri: The resource that was updated; None: a list changed.
        """
        if uri is not None:
            audience = self._connections.sessionless_subscribers(uri)
        else:
            audience = [
                connection
                for connection in self._connections.all()
                if connection.transport_session is None
                and connection.peer.initialize_params is not None
                and not connection.peer.modern
                and not connection.attached
            ]
        if not audience:
            return
        key = coalescing_key(method, params, self._policy.coalescing)
        draft = plain_draft(notification_message(method, params), key)
        for connection in audience:
            await connection.send(draft)
