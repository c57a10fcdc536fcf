"""Server-wide changes: a resource or a list is another one, and everyone entitled hears it.

1. A protocol-mode session hears of a change by an event of its own. Who listens outside of
   any (a pipe, a WebSocket, the GET stream of a transport-mode session) is told the bare
   notification.
2. Changes are told one after the other, in the order in which they were announced.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from contextvars import Context, ContextVar
from typing import Any

from mcp_sessions.background import watched
from mcp_sessions.core.coalescing import coalescing_key
from mcp_sessions.core.log import Draft
from mcp_sessions.core.messages import EventTemplate, notification_message, plain_draft
from mcp_sessions.errors import StoreUnavailable
from mcp_sessions.ids import GET_STREAM, ConnectionId
from mcp_sessions.policy import SessionPolicy
from mcp_sessions.server.connection import TransportConnection
from mcp_sessions.server.hub import Hub
from mcp_sessions.server.publisher import Publisher
from mcp_sessions.stores.base import Mode, SessionRecord, SessionStore

logger = logging.getLogger(__name__)

RESOURCE_UPDATED = "notifications/resources/updated"

_YIELD_EVERY = 128
"""Sessions that one server-wide change visits before others may run."""

_Change = tuple[str, Mapping[str, Any] | None, asyncio.Future[None]]
"""Method, params, and who waits until it was told."""


class Announced:
    """What one request announced, itself or by what it started: its answer waits for that,
    and for nothing that others announced.
    """

    __slots__ = ("_is_open", "_newest", "_outer")

    def __init__(self, outer: Announced | None = None) -> None:
        """Take what it is a part of.

        Args:
            outer: Waits for the same, too.
        """
        self._outer = outer
        self._newest: asyncio.Future[None] | None = None
        self._is_open = True

    def add(self, told: asyncio.Future[None]) -> None:
        """A change was announced. They are told in order, so the newest is told last."""
        if self._is_open:
            self._newest = told
        if self._outer is not None:
            self._outer.add(told)

    async def settled(self) -> None:
        """Wait until all that was announced so far is stored. What a task that outlives the
        request announces later is waited for by nobody.
        """
        newest = self._newest
        if newest is not None and not newest.done():
            await asyncio.shield(newest)
        self._is_open, self._newest = False, None


_ANNOUNCED: ContextVar[Announced | None] = ContextVar("mcp_sessions_announced", default=None)
"""Where what is announced is noted: by this task, by what it started, and by a callback of
the server's own bus that runs inside of either."""


def enter_request() -> Announced:
    """What this task announces from now on, and what it starts."""
    announced = Announced()
    _ANNOUNCED.set(announced)
    return announced


@contextmanager
def noting() -> Generator[Announced]:
    """What is announced inside, whoever else notes it."""
    announced = Announced(_ANNOUNCED.get())
    token = _ANNOUNCED.set(announced)
    try:
        yield announced
    finally:
        _ANNOUNCED.reset(token)


class Changes:
    """Tells what was announced."""

    def __init__(
        self,
        store: SessionStore,
        hub: Hub,
        publisher: Publisher,
        policy: SessionPolicy,
        clock: Callable[[], float],
    ) -> None:
        self._store = store
        self._hub = hub
        self._publisher = publisher
        self._policy = policy
        self._clock = clock
        self._announced: deque[_Change] = deque()
        self._fan_out: asyncio.Task[None] | None = None

    def announce(self, method: str, params: Mapping[str, Any] | None) -> None:
        """A resource or a list of the server changed: tell everyone who is entitled.

        Returns at once. Who called :func:`enter_request` or :func:`noting` before can wait
        until every session has its event.
        """
        told = asyncio.get_running_loop().create_future()
        self._announced.append((method, params, told))
        announced = _ANNOUNCED.get()
        if announced is not None:
            announced.add(told)
        if self._fan_out is None or self._fan_out.done():
            # In a context of its own: it is no part of the request that came first.
            self._fan_out = asyncio.create_task(self._tell_everyone(), context=Context())
            watched("telling what changed", self._fan_out)

    async def _tell_everyone(self) -> None:
        while self._announced:
            method, params, told = self._announced.popleft()
            try:
                await self._tell(method, params)
            except StoreUnavailable:
                # A change that cannot be stored is told to nobody: a session that saw it
                # live could not replay it.
                logger.exception("%s could not be stored", method)
            except Exception:
                # The boundary to whoever announced it: what is wrong with one change must
                # not silence the next, or whoever waits for it.
                logger.exception("%s could not be told", method)
            finally:
                told.set_result(None)
            # However many were announced at once, others run in between.
            await asyncio.sleep(0)

    async def _tell(self, method: str, params: Mapping[str, Any] | None) -> None:
        key = coalescing_key(method, params, self._policy.coalescing)
        template = EventTemplate(method, params, key)
        bare = plain_draft(notification_message(method, params), key)
        is_update = method == RESOURCE_UPDATED
        if self._hub.replicas is not None:
            # Once for all sessions, here; their bare connections are told by each of them.
            await self._hub.replicas.tell("change", method=method, params=params)
        if is_update:
            audience = await self._store.subscribers(str((params or {}).get("uri", "")))
        else:
            audience = [record.session_id for record in await self._store.all_sessions()]
        await self.tell_bare(method, params)
        for count, session_id in enumerate(audience, 1):
            # Past its deadline it may still be at work, and hears of changes: only who is
            # gone from the store is left out. (``now=0``: by no deadline.)
            record = await self._store.load(session_id, now=0)
            if record is None:
                continue
            if record.mode is Mode.PROTOCOL:
                if is_update or record.lists is None or _list_of(method) in record.lists:
                    await self._publisher.publish_template(session_id, template)
            elif is_update or not record.carried:
                # A list change is told once: by a session that is attached here, or bare.
                await self._send_to_stream(record, bare)
            if count % _YIELD_EVERY == 0:
                await asyncio.sleep(0)

    async def tell_bare(self, method: str, params: Mapping[str, Any] | None) -> None:
        """Tell the pipes and WebSockets of this process that hear a change for themselves."""
        key = coalescing_key(method, params, self._policy.coalescing)
        draft = plain_draft(notification_message(method, params), key)
        for connection in self._bare_audience(method, params):
            await connection.send(draft)

    async def _send_to_stream(self, record: SessionRecord, draft: Draft) -> None:
        connection = self._hub.local(ConnectionId(record.session_id))
        if connection is not None:
            await connection.send(draft)
        else:
            await self._store.append(record.session_id, draft, now=self._clock(), stream=GET_STREAM)

    def _bare_audience(
        self, method: str, params: Mapping[str, Any] | None
    ) -> list[TransportConnection]:
        """The pipes and WebSockets that hear a change outside of any session."""
        if method == RESOURCE_UPDATED:
            return self._hub.bare_subscribers(str((params or {}).get("uri", "")))
        return [
            connection
            for connection in self._hub.connections()
            if connection.transport_session is None
            and connection.peer.initialize_params is not None
            and not connection.peer.modern
            and not connection.attached
        ]


def _list_of(method: str) -> str:
    """``tools`` of ``notifications/tools/list_changed``."""
    return method.split("/")[1]
