"""Ask clients that are at other replicas, and pass what clients answer to the replica that asked.

The id of a question names the process that asked. The client may answer at any process. It sends
its answer once, so an answer that cannot be passed on now waits.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, assert_never

from mcp_sessions.core.log import Draft
from mcp_sessions.core.messages import Answer, encode, error_body
from mcp_sessions.errors import INVALID_REQUEST
from mcp_sessions.ids import SessionId, process_of
from mcp_sessions.principal import Principal
from mcp_sessions.server.cluster.codec import understands
from mcp_sessions.server.cluster.pending import RelayedOutcome
from mcp_sessions.server.cluster.relay import Asker, RequestRelay, Serve
from mcp_sessions.server.cluster.replica_messages import (
    QuestionAnswer,
    QuestionProgress,
    SessionQuestion,
)
from mcp_sessions.server.delivery.connections import ConnectionRegistry
from mcp_sessions.server.delivery.pending_writes import PendingWrites, nothing
from mcp_sessions.server.delivery.questions import (
    PendingQuestion,
    PendingQuestions,
    log_key_of,
    may_ask,
)
from mcp_sessions.stores.records import Attachment

_TAKEN: RelayedOutcome = ({}, None)


class RemoteQuestions:
    def __init__(
        self,
        relay: RequestRelay,
        connections: ConnectionRegistry,
        pending: PendingQuestions,
        pending_writes: PendingWrites,
    ) -> None:
        self._relay, self._connections, self._pending = relay, connections, pending
        self._pending_writes = pending_writes

    async def send(
        self,
        session_id: SessionId,
        message: bytes,
        question: PendingQuestion,
        attachment: Attachment,
    ) -> None:
        """Send a question, or its withdrawal, to the process that has the session's connection. If
        the session is not attached there, the question is sent again where it is attached next.

        Raises:
            StoreUnavailable: Unknown whether it was sent. A repeat is harmless.
        """
        home = process_of(attachment.connection_id)
        if home is None:
            return
        asked = SessionQuestion(
            session_id=session_id,
            connection_id=attachment.connection_id,
            fencing_epoch=attachment.fencing_epoch,
            text=message.decode(),
            id=question.id,
            method=question.asked.method,
        )
        await self._relay.notify(home, asked)

    # --- where it is answered -------------------------------------------------------------------

    async def answer(self, answer: Answer, principal: Principal) -> bool:
        """Take a client's answer to a question of any process; False if no such one lives."""
        if self._pending.resolve(answer, principal):
            return True
        if not isinstance(answer.id, str):
            return False
        process = process_of(answer.id)
        if not self._relay.bus.is_remote(process) or not understands(process):
            return False
        answered = QuestionAnswer(
            id=answer.id, result=answer.result, error=answer.error, principal=principal
        )
        lives = True

        async def pass_on() -> None:
            nonlocal lives
            lives = await self._relay.bus.is_alive(process)
            if lives:
                await self._relay.notify(process, answered)

        await self._pending_writes.settle(
            {("answer", answer.id, principal): pass_on},
            owner=principal,
            size=len(encode(answer.result or answer.error)),
            lost=lambda: nothing,
        )
        return lives

    async def progress(self, params: Mapping[str, Any] | None, principal: Principal) -> None:
        """Take a client's progress on a question of any process."""
        await self._pending.progress(params, principal)
        token = (params or {}).get("progressToken")
        process = process_of(token) if isinstance(token, str) else None
        if self._relay.bus.is_remote(process):
            progress = QuestionProgress(params=params, principal=principal)
            await self._relay.try_notify(process, progress)

    # --- what other processes ask here ----------------------------------------------------------

    def server_of(self, request: SessionQuestion | QuestionAnswer | QuestionProgress) -> Serve:
        match request:
            case SessionQuestion():
                return self._asked
            case QuestionAnswer():
                return self._answered
            case QuestionProgress():
                return self._progressed
            case _:
                assert_never(request)

    async def _asked(self, asker: Asker, asked: SessionQuestion) -> RelayedOutcome:
        session_id = asked.session_id
        connection = self._connections.local(asked.connection_id)
        if connection is None or connection.attached.get(session_id) != asked.fencing_epoch:
            return _TAKEN
        if may_ask(connection.peer, asked.method):
            key = log_key_of(asked.id)
            await connection.send(Draft(asked.text.encode(), None, key, session_id))
            return _TAKEN
        error = error_body(INVALID_REQUEST, f"the client cannot be asked {asked.method!r}")
        principal = connection.principal
        refused = QuestionAnswer(id=asked.id, result=None, error=error, principal=principal)
        await self._relay.try_notify(asker.process, refused)
        return _TAKEN

    async def _answered(self, _: Asker, answered: QuestionAnswer) -> RelayedOutcome:
        answer = Answer(answered.id, answered.result, answered.error)
        self._pending.resolve(answer, answered.principal)
        return _TAKEN

    async def _progressed(self, _: Asker, reported: QuestionProgress) -> RelayedOutcome:
        await self._pending.progress(reported.params, reported.principal)
        return _TAKEN
