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
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Mapping, Sequence
from contextvars import Context
from typing import Any

from mcp_sessions import method_names
from mcp_sessions.background import give_way, stopped, watched
from mcp_sessions.core.backoff import Backoff
from mcp_sessions.core.coalescing import coalescing_key
from mcp_sessions.core.messages import notification_message, plain_draft
from mcp_sessions.core.named import updated_uri
from mcp_sessions.core.recent import Recent
from mcp_sessions.errors import StoreUnavailable
from mcp_sessions.ids import SessionId
from mcp_sessions.server.cluster.environment import Environment
from mcp_sessions.server.cluster.replica_messages import ChangedOutside, ServerChanged
from mcp_sessions.server.connection.connection import ClientConnection
from mcp_sessions.server.delivery.attachments import Attachments
from mcp_sessions.server.delivery.connections import ConnectionRegistry
from mcp_sessions.server.delivery.hidden_updates import HiddenUpdates
from mcp_sessions.server.delivery.publisher import Publisher
from mcp_sessions.server.delivery.waiting_changes import WaitingChange, WaitingChanges, note
from mcp_sessions.stores.contract import CHANGES_AT_ONCE

logger = logging.getLogger(__name__)

_LAST_WORDS = 5.0
"""Seconds that what is announced has to be sent when the server stops."""

_ALONE = 3
"""Failures after which the sessions of a change are notified one by one: it may be one of them
that the store fails for."""

_SEEN = 1_000
"""Changes of other processes that are known if they come again."""


class ChangeBroadcaster:
    def __init__(
        self,
        environment: Environment,
        publisher: Publisher,
        *,
        connections: ConnectionRegistry,
        attachments: Attachments,
        hidden_updates: HiddenUpdates | None,
    ) -> None:
        self._store, self._bus = environment.store, environment.bus
        self._policy, self._clock = environment.policy, environment.clock
        self._connections, self._attachments = connections, attachments
        self._publisher, self._hidden_updates = publisher, hidden_updates
        self._waiting = WaitingChanges(self._policy, self._clock)
        self._renewed: set[SessionId] = set()
        """The sessions that know of the changes that were lost."""

        self._fan_out: asyncio.Task[None] | None = None
        self._seen = Recent[str, None](_SEEN)

    def announce(
        self, method: str, params: Mapping[str, Any] | None, is_outside: bool = False
    ) -> None:
        """A resource or a list of the server changed: tell everyone who is entitled.

        Returns at once. Who called
        :data:`~mcp_sessions.server.delivery.waiting_changes.ANNOUNCED` or
        :func:`~mcp_sessions.server.delivery.waiting_changes.noting` before can wait until every
        session has its event, or the store failed.

        Args:
            is_outside: Only listens outside of sessions get it. Those of this process have it.
        """
        if is_outside:
            change = ChangedOutside(method=method, params=params)
            self._bus.spawn(self._bus.try_send(change))
            return
        try:
            waiting = self._waiting.keep(method, params)
        except (TypeError, ValueError, RecursionError):
            # The announcer does not wait, and other changes are sent.
            logger.exception("%s could not be sent to the sessions", method)
            return
        note(waiting.number, waiting.outcome)
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

    async def close(self) -> None:
        """Send the announced changes, if the store is there and it does not take long; log the
        rest.
        """
        fan_out, self._fan_out = self._fan_out, None
        if fan_out is not None:
            if not self._waiting.is_away:
                await asyncio.wait({fan_out}, timeout=_LAST_WORDS)
            await stopped(fan_out)
        self._waiting.close()

    # --- sending -----------------------------------------------------------------------------

    async def _notify_everyone(self) -> None:
        backoff = Backoff(base=0.2, cap=5.0)
        while self._waiting or self._waiting.need_renewal:
            if not self._waiting:
                try:
                    await self._renew_everyone()
                    backoff.progressed()
                except StoreUnavailable:
                    await asyncio.sleep(backoff.failed(random.random()))
                continue
            waiting = self._waiting.first()
            try:
                await self._notify_sessions(waiting)
            except StoreUnavailable as failed:
                self._waiting.postpone(waiting, failed)
                await asyncio.sleep(backoff.failed(random.random()))
                continue
            except Exception:
                # The boundary to whoever announced it: what is wrong with one change must
                # not silence the next, or whoever waits for it.
                logger.exception("%s could not be sent to the sessions", waiting.method)
            backoff.progressed()
            self._waiting.answered()
            self._waiting.remove(waiting)
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
            await self.notify_sessionless(waiting.method, waiting.params)
        failed: StoreUnavailable | None = None
        cursor = None
        while True:
            page = await self._store.audience(change, cursor)
            waiting.is_served = True
            session_ids = [each for each in page.session_ids if each not in waiting.done]
            failed = await self._notify_page(waiting, session_ids) or failed
            cursor = page.following
            if cursor is None:
                break
        failed = await self._notify_busy(waiting) or failed
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
        locks = [self._attachments.session_lock(session_id) for session_id in session_ids]
        held: list[asyncio.Lock] = []
        try:
            for lock in locks:
                await lock.acquire()
                held.append(lock)
            again = not waiting.unsure.isdisjoint(session_ids)
            waiting.unsure.update(session_ids)
            changes = await self._store.append_change(
                session_ids, waiting.change, now=self._clock(), again=again
            )
            waiting.unsure.difference_update(session_ids)
            waiting.done.update(session_ids)
            self._waiting.answered()
            await self._publisher.hand_over(changes)
        finally:
            for lock in held:
                lock.release()

    async def _renew_everyone(self) -> None:
        """Replace every session's event log after an unknown loss; attached clients must resume.

        Raises:
            StoreUnavailable: There are some left.
        """
        self._waiting.begin_renewal()
        loop = asyncio.get_running_loop()
        everyone = self._waiting.change(0, method_names.TOOLS_CHANGED, None, None)
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
            self._waiting.renewal_failed()
            raise
        self._renewed.clear()

    async def notify_sessionless(self, method: str, params: Mapping[str, Any] | None) -> None:
        audience = self._sessionless_audience(method, params)
        if not audience:
            return
        key = coalescing_key(method, params, self._policy.coalescing)
        draft = plain_draft(notification_message(method, params), key)
        for connection in audience:
            await connection.send(draft)

    def _sessionless_audience(
        self, method: str, params: Mapping[str, Any] | None
    ) -> list[ClientConnection]:
        if method == method_names.RESOURCE_UPDATED:
            return self._connections.sessionless_subscribers(updated_uri(params))
        return [
            connection
            for connection in self._connections.all()
            if connection.transport_session is None
            and connection.peer.initialize_params is not None
            and not connection.peer.modern
            and not connection.attached
        ]
