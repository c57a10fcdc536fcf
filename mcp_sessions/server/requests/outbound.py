"""Send a handler's messages outside of its request: the standalone way to a client."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from mcp_sessions.core.log import Draft
from mcp_sessions.errors import INVALID_REQUEST, StoreUnavailable
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
        delivery = self._ways.delivery
        hidden = partial(delivery.hidden_updates.is_hidden_from, session_id, method, params)
        publish = delivery.publisher.publish
        if not await publish(session_id, method, params, wait=True, unless=hidden):
            logger.debug("dropped %s: session %s has ended", method, digest(session_id))

    async def send_request(self, asked: PeerRequest) -> dict[str, Any]:
        """Send a request to the client. If no connection is attached, or the store is away, it
        waits until one is, and until the store is back.
        """
        session_id, record = self._record.session_id, self._record
        try:
            record = await self._check_may_ask(asked.method)
        except StoreUnavailable:
            # The client that the session had is as good as any.
            check_may_ask(record.client.peer, asked.method)
        questions = self._ways.delivery.questions
        question = questions.new(record.principal, session_id, asked)

        async def send(message: bytes) -> None:
            await self._ways.delivery.publisher.push(session_id, message, question)

        return await questions.ask(
            question, send, lambda message: questions.send_withdrawal(send(message))
        )

    async def _check_may_ask(self, method: str) -> SessionRecord:
        """Return the session as it is, if its client can be asked."""
        # Its handler is running, so it lives, whatever its idle deadline says.
        record = await self._ways.store.load(self._record.session_id, now=0)
        if record is None:
            raise PeerError(INVALID_REQUEST, "the session ended before its client could be asked")
        attachment = record.attachment
        connections = self._ways.delivery.connections
        connection = await connections.find(attachment.connection_id) if attachment else None
        if connection is not None:
            check_may_ask(connection.peer, method)
        elif attachment is None or not await connections.is_there(attachment.connection_id):
            check_may_ask(record.client.peer, method)
        # Otherwise the process that has the connection says whether its client can be asked.
        return record


@dataclass(slots=True, eq=False, repr=False)
class ConnectionOutbound:
    _ways: Ways
    _connection: ClientConnection

    async def notify(self, method: str, params: Mapping[str, Any] | None) -> None:
        """Send a notification. The client gets no update of a resource that is hidden from it."""
        delivery, connection = self._ways.delivery, self._connection
        hidden = partial(
            delivery.hidden_updates.is_hidden_from_connection, connection, method, params
        )
        await delivery.publisher.send_sessionless(
            connection, method, params, wait=True, unless=hidden
        )

    async def send_request(self, asked: PeerRequest) -> dict[str, Any]:
        connection = self._connection
        check_may_ask(connection.peer, asked.method)
        questions = self._ways.delivery.questions
        question = questions.new(connection.principal, None, asked)

        async def send(message: bytes) -> None:
            await connection.send(Draft(message, None, question.log_key))

        return await questions.ask(
            question, send, lambda message: questions.send_withdrawal(send(message))
        )


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
