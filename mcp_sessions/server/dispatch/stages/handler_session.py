from __future__ import annotations

import logging
import weakref
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from mcp_sessions.core.messages import NotNamed, encode
from mcp_sessions.core.states import Mode
from mcp_sessions.core.visibility import STATE_KEY, Visibility
from mcp_sessions.errors import ConfigurationError, SessionNotFound
from mcp_sessions.ids import SessionId
from mcp_sessions.server.calls.table import Call, Outcome, Stage
from mcp_sessions.server.cluster.replica import Replica
from mcp_sessions.server.connection.connection import ClientConnection, Inbound
from mcp_sessions.server.delivery.delivery import Delivery
from mcp_sessions.server.dispatch.stages.concealing import Concealing
from mcp_sessions.server.requests.handle import HandleKind, SessionHandle, StateCheck
from mcp_sessions.server.requests.session_visibility import Notify
from mcp_sessions.stores.limits import check_state, text_size
from mcp_sessions.stores.memory.memory_store import MemoryStore
from mcp_sessions.stores.records import SessionRecord

logger = logging.getLogger(__name__)


class HandlerSession(Stage):
    """Makes the handles of one server, which share their locks.

    A session is the one that the client started, else its conversation's, else its connection's.

    Args:
        attach: Attaches a session to the connection where it was named, if nobody receives its
            events.
        check_token: Raises if a state could not be sent to the client that keeps it.
        visibility: What is hidden outside of a session.
    """

    def __init__(
        self,
        replica: Replica,
        delivery: Delivery,
        *,
        attach: Callable[[SessionRecord, Inbound], Awaitable[None]],
        check_token: StateCheck,
        visibility: Visibility,
    ) -> None:
        self._store, self._clock = replica.store, replica.clock
        self._policy, self._publisher, self._attach = replica.policy, delivery.publisher, attach
        kinds = partial(HandleKind, visibility, delivery.connections)
        self.concealing = Concealing(visibility)
        self._by_client = kinds("session", self._store, check_token)
        self._by_host = kinds("conversation", self._store, self._check_size)
        self._by_wire = kinds("connection", self._store, self._check_size)
        self._on_pipes: weakref.WeakKeyDictionary[
            ClientConnection, tuple[HandleKind, SessionRecord]
        ] = weakref.WeakKeyDictionary()

    async def before(self, call: Call) -> Outcome | None:
        inbound, record = call.inbound, call.record
        connection, pipe = inbound.connection, None
        # A client of the modern era gets no message that it did not ask for.
        receiver = None if inbound.peer.modern else connection
        if record is not None:
            if call.named:
                await self._attach(record, inbound)
            kind, notify = self._by_client, partial(self._publish, record.session_id)
        elif call.conversation is not None:
            kind, record = self._by_host, call.conversation.record
            notify = self._way_to(receiver)
        elif connection is None or call.request.session is NotNamed.NULL:
            return None
        else:
            kind, record = self._by_wire, inbound.http.record
            if record is None:
                # A pipe or a WebSocket cannot outlive this process, so neither does what is
                # remembered of it, and no store is asked.
                pipe = connection
                kind, record = self._on_pipes.get(connection) or await self._begun(connection)
            notify = self._way_to(receiver)
        call.handler_record = record
        call.handle = SessionHandle(kind, record, notify, pipe)
        if STATE_KEY in record.state.values and not self.concealing.is_on:
            # Its handlers hide names. If the operator does so as well, the stage follows anyway.
            return await self.concealing.before(call)
        return None

    async def _begun(self, pipe: ClientConnection) -> tuple[HandleKind, SessionRecord]:
        own = MemoryStore()
        # Neither suspends, so no other request of the connection does this meanwhile. A session of
        # this mode has no deadline: it ends with the connection.
        await own.open(self._policy)
        made = await own.create(Mode.CONNECTION, pipe.principal, peer=None, now=self._clock())
        known = self._on_pipes[pipe] = replace(self._by_wire, store=own), made
        return known

    def _way_to(self, connection: ClientConnection | None) -> Notify:
        if connection is None:
            return _not_notified
        return partial(self._publisher.send_sessionless, connection, wait=True)

    def _check_size(self, record: SessionRecord, state: Mapping[str, Any]) -> None:
        sizes = (text_size(key) + len(encode(value)) for key, value in state.items())
        check_state(sum(sizes), self._policy)

    async def _publish(
        self, session_id: SessionId, method: str, params: Mapping[str, Any] | None
    ) -> None:
        if not self._store.remembers:
            raise ConfigurationError(
                "session events need a store: make the layer with one instead of store=None"
            )
        if not await self._publisher.publish(session_id, method, params, wait=True):
            raise SessionNotFound(session_id)


async def _not_notified(method: str, params: Mapping[str, Any] | None) -> None:
    logger.debug("dropped %s: no standalone channel", method)
