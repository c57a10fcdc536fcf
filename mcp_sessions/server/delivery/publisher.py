"""Send the server's own messages to clients.

A session event is stored first and sent second. It has its id and its position in the log before
any client sees it, so it can always be replayed (EVT10).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from mcp_sessions import metrics
from mcp_sessions.background import give_way
from mcp_sessions.core.coalescing_key import coalescing_key
from mcp_sessions.core.log import Draft, LoggedEvent
from mcp_sessions.core.messages import EventTemplate, notification_message, plain_draft
from mcp_sessions.errors import Detached, StoreUnavailable
from mcp_sessions.ids import EVENTS, GET_STREAM, ConnectionId, SessionId, process_of
from mcp_sessions.server.cluster.replica import Replica
from mcp_sessions.server.connection.connection import ClientConnection, Unless
from mcp_sessions.server.delivery.attachments import Attachments
from mcp_sessions.server.delivery.connections import ConnectionRegistry
from mcp_sessions.server.delivery.pending_writes import Instead
from mcp_sessions.server.delivery.questions import (
    PendingQuestion,
    PendingQuestions,
    RemoteQuestions,
    may_ask,
)
from mcp_sessions.server.delivery.stored_connection import StreamRelay
from mcp_sessions.server.delivery.streams import StreamLog, Streams
from mcp_sessions.stores.records import Appended, AppendedChange, Attachment

logger = logging.getLogger(__name__)


class Publisher:
    def __init__(
        self,
        replica: Replica,
        connections: ConnectionRegistry,
        attachments: Attachments,
        *,
        questions: PendingQuestions,
        remote_questions: RemoteQuestions,
        streams: Streams,
    ) -> None:
        self._store, self._policy, self._clock = (
            replica.store,
            replica.policy,
            replica.clock,
        )
        self._connections, self._attachments = connections, attachments
        self._questions, self._remote_questions = questions, remote_questions
        self._streams = streams

    async def publish(
        self,
        session_id: SessionId,
        method: str,
        params: Mapping[str, Any] | None,
        *,
        wait: bool = False,
        unless: Unless | None = None,
    ) -> bool:
        """Store an event of a session and hand it to the attached connection, if any. If the store
        is away, the event waits for it.

        Args:
            unless: Says that the event is not for its client.
            wait: Wait for room at the connection: for the session's own handlers, so that
                they cannot outrun their client.

        Returns:
            False if the session has ended; then nothing was stored.
        """
        key = coalescing_key(method, params, self._policy.coalescing)
        draft = EventTemplate(method, params, key).draft(session_id)
        connection: ClientConnection | None = None
        has_ended = False

        async def hand_over(appended: Appended | None) -> None:
            nonlocal connection, has_ended
            has_ended = appended is None
            if appended is None:
                return
            if appended.replaced:
                metrics.coalesced()
            if appended.attachment is not None:
                connection = self._connections.local(appended.attachment.connection_id)
                await self._hand_over(session_id, appended.event, appended.attachment)

        lose = self._lose(session_id)
        await self._log(session_id).append(draft, hand_over, lost=lose, unless=unless)
        if wait and connection is not None:
            await connection.transport.drain()
        elif wait:
            # A handler that only emits must let others run.
            await asyncio.sleep(0)
        return not has_ended

    def _log(self, session_id: SessionId) -> StreamLog:
        return self._streams(
            session_id, EVENTS, partial(self._attachments.session_lock, session_id)
        )

    def _lose(self, session_id: SessionId) -> Instead:
        return lambda: partial(self._attachments.renew_locked, session_id)

    async def hand_over(self, changes: Sequence[AppendedChange]) -> None:
        """Hand a change over wherever its sessions are attached; the caller has their locks. If
        the store does not answer, it is handed over again later: nobody gets it twice.
        """
        attached: dict[ConnectionId, list[AppendedChange]] = {}
        for each in changes:
            if each.replaced:
                metrics.coalesced()
            if each.stream == GET_STREAM:
                connection = self._connections.local(ConnectionId(each.session_id))
                if connection is not None:
                    connection.appended(each.session_id, each.event, None)
            elif each.attachment is not None:
                attached.setdefault(each.attachment.connection_id, []).append(each)
        if attached:
            # One connection after the other would be one round trip after the other.
            await asyncio.gather(*map(self._hand_over_all, attached.values()))

    async def _hand_over_all(self, changes: Sequence[AppendedChange]) -> None:
        for session_id, _, event, attachment, _ in changes:
            if attachment is None:
                continue
            try:
                await self._hand_over(session_id, event, attachment)
            except StoreUnavailable:
                step = partial(self._hand_over, session_id, event, attachment)
                self._log(session_id).later(step, lost=self._lose(session_id))
            except Exception:
                # The boundary between connections: what is wrong with one is nothing to others.
                logger.exception("an event could not be delivered")
            # A store in this process answers at once, and others are served in between.
            await give_way()

    async def _hand_over(
        self, session_id: SessionId, event: LoggedEvent, attachment: Attachment
    ) -> None:
        connection = self._connections.local(attachment.connection_id)
        if connection is not None:
            whole = await connection.deliver(session_id, event, attachment.fencing_epoch)
        elif process_of(attachment.connection_id) is None:
            stream = SessionId(attachment.connection_id)
            epoch = attachment.fencing_epoch
            whole = await StreamRelay(self._store, self._clock, stream, session_id, epoch).one(
                event
            )
        else:
            # The connection's process watches the session's log.
            whole = True
        if not whole:
            await self._attachments.displace_locked(session_id, Detached.EVICTED)

    async def send_sessionless(
        self,
        connection: ClientConnection,
        method: str,
        params: Mapping[str, Any] | None,
        *,
        wait: bool = False,
        unless: Unless | None = None,
    ) -> None:
        key = coalescing_key(method, params, self._policy.coalescing)
        await connection.send(plain_draft(notification_message(method, params), key), unless)
        if wait:
            await connection.transport.drain()

    async def push_open(self, session_id: SessionId) -> None:
        for question in list(self._questions.by_session.get(session_id, ())):
            await self.push(session_id, question.message, question)

    async def push(self, session_id: SessionId, message: bytes, question: PendingQuestion) -> None:
        """Send a request of ours, or its withdrawal, to a session's client. If the session is not
        attached, it waits. If the store is away, it waits for the store.

        Args:
            session_id: The session.
            message: Encoded.
            question: The request of ours that it is of.
        """
        step = partial(self._push, session_id, message, question)
        lose = self._lose(session_id)
        await self._log(session_id).then(step, holds=message, lost=lose, overlaps=True)

    async def _push(self, session_id: SessionId, message: bytes, question: PendingQuestion) -> None:
        # Its handler is running, so it lives, whatever its idle deadline says.
        record = await self._store.load(session_id, now=0)
        attachment = record.attachment if record is not None else None
        if attachment is None or (question.is_withdrawn and message is question.message):
            return
        connection = await self._connections.find(attachment.connection_id)
        if connection is not None:
            if may_ask(connection.peer, question.asked.method):
                await connection.send(Draft(message, None, question.log_key, session_id))
            return
        self._remote_questions.send(session_id, message, question, attachment)
