"""Send a handler's messages outside of its request: the standalone way to a client."""

from __future__ import annotations

import logging
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass
from typing import Any

from mcp_sessions.core.log import Draft
from mcp_sessions.errors import INVALID_REQUEST
from mcp_sessions.ids import digest
from mcp_sessions.server.connection.connection import ClientConnection
from mcp_sessions.server.delivery.delivery import Delivery
from mcp_sessions.server.delivery.questions import check_may_ask
from mcp_sessions.server.upstream.port import Outbound, PeerError, PeerRequest
from mcp_sessions.stores.contract import SessionStore
from mcp_sessions.stores.records import SessionRecord

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Ways:
    store: SessionStore
    delivery: Delivery
    spawn: Callable[[Coroutine[Any, Any, None]], object]


@dataclass(slots=True, eq=False, repr=False)
class SessionOutbound:
    _ways: Ways
    _record: SessionRecord

    async def notify(self, method: str, params: Mapping[str, Any] | None) -> None:
        """Send a notification to the session. After the session's end it only makes a line in the
        log.

        The client gets no update of a resource that is hidden from it.
        """
        session_id = self._record.session_id
        if await self._ways.delivery.hidden_updates.is_hidden_from(session_id, method, params):
            return
        if not await self._ways.delivery.publisher.publish(session_id, method, params, wait=True):
            logger.debug("dropped %s: session %s has ended", method, digest(session_id))

    async def send_request(self, asked: PeerRequest) -> dict[str, Any]:
        """Send a request to the client. If no connection is attached, it waits until one is."""
        session_id = self._record.session_id
        # Its handler is running, so it lives, whatever its idle deadline says.
        record = await self._ways.store.load(session_id, now=0)
        if record is None:
            raise PeerError(INVALID_REQUEST, "the session ended before its client could be asked")
        attachment = record.attachment
        connections = self._ways.delivery.connections
        connection = await connections.find(attachment.connection_id) if attachment else None
        if connection is not None:
            check_may_ask(connection.peer, asked.method)
        elif attachment is None or not await connections.is_there(attachment.connection_id):
            check_may_ask(record.client.peer, asked.method)
        # Otherwise the process that has the connection says whether its client can be asked.
        questions = self._ways.delivery.questions
        question = questions.new(record.principal, session_id, asked)

        async def send(message: bytes) -> None:
            await self._ways.delivery.publisher.push(session_id, message, question)

        return await questions.ask(question, send, lambda message: self._ways.spawn(send(message)))


@dataclass(slots=True, eq=False, repr=False)
class ConnectionOutbound:
    _ways: Ways
    _connection: ClientConnection

    async def notify(self, method: str, params: Mapping[str, Any] | None) -> None:
        """Send a notification. The client gets no update of a resource that is hidden from it."""
        if await self._ways.delivery.hidden_updates.is_hidden_from_connection(
            self._connection, method, params
        ):
            return
        await self._ways.delivery.publisher.send_sessionless(
            self._connection, method, params, wait=True
        )

    async def send_request(self, asked: PeerRequest) -> dict[str, Any]:
        connection = self._connection
        check_may_ask(connection.peer, asked.method)
        questions = self._ways.delivery.questions
        question = questions.new(connection.principal, None, asked)

        async def send(message: bytes) -> None:
            await connection.send(Draft(message, None, question.log_key))

        return await questions.ask(question, send, lambda message: self._ways.spawn(send(message)))


class LateOutbound:
    def __init__(self) -> None:
        self._bound: Outbound | None = None

    def bind(self, outbound: Outbound) -> None:
        self._bound = outbound

    async def notify(self, method: str, params: Mapping[str, Any] | None) -> None:
        if self._bound is None:
            logger.debug("dropped %s: no standalone channel", method)
            return
        await self._bound.notify(method, params)

    async def send_request(self, asked: PeerRequest) -> dict[str, Any]:
        if self._bound is None:
            check_may_ask(None, asked.method)
            raise AssertionError("a peer without a handshake was asked")
        return await self._bound.send_request(asked)
