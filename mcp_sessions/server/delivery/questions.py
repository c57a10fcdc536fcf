"""Requests of ours to clients: elicitation, sampling, roots; open until the first answer.

Ask clients that are at other replicas, and pass what clients answer to the replica that asked.

The id of a question names the process that asked. The client may answer at any process, and sends
its answer once. So:

1. A question and an answer are repeated until the other replica has it, or is dead.
2. A client over HTTP is told that its answer is accepted when the replica that asked has it.
3. Answers that wait are bounded in bytes. Whoever has most loses first.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Hashable, Mapping
from dataclasses import InitVar, dataclass, field
from typing import Any, Final, assert_never

from mcp_sessions import method_names
from mcp_sessions.background import Background
from mcp_sessions.core.fair_bound import FairBound
from mcp_sessions.core.log import Draft
from mcp_sessions.core.messages import (
    Answer,
    encode,
    error_body,
    notification_message,
    request_message,
    with_meta,
)
from mcp_sessions.errors import INVALID_REQUEST, OutcomeUnknown, StoreUnavailable
from mcp_sessions.ids import SessionId, process_of
from mcp_sessions.principal import Principal
from mcp_sessions.security import mint_request_id
from mcp_sessions.server.cluster.pending import RelayedOutcome
from mcp_sessions.server.cluster.relay import (
    WITHIN_ENDED,
    Asker,
    RequestRelay,
    Serve,
    Unserved,
)
from mcp_sessions.server.cluster.replica_messages import (
    QuestionAnswer,
    QuestionProgress,
    SessionQuestion,
)
from mcp_sessions.server.delivery.connections import ConnectionRegistry
from mcp_sessions.server.upstream.port import REQUEST_TIMEOUT, NotAskable, PeerError, PeerRequest
from mcp_sessions.server.upstream.rounds import Rounds
from mcp_sessions.stores.records import Attachment, Peer


def log_key_of(question_id: str) -> str:
    """The key of a question in a stream's log: a client that reopens the stream does not get it if
    it was withdrawn.
    """
    return f"asked {question_id}"


def log_key_for(message: Mapping[str, Any]) -> str | None:
    """The key of a message of a response; None: it is no question, nor the withdrawal of one."""
    asked: object = message.get("id")
    if message.get("method") == method_names.CANCELLED:
        params: Mapping[str, Any] = message.get("params") or {}
        asked = params.get("requestId")
    return log_key_of(asked) if isinstance(asked, str) else None


@dataclass(slots=True, eq=False, repr=False)
class PendingQuestion:
    principal: Principal
    session_id: SessionId | None
    asked: PeerRequest
    process: InitVar[str | None]
    id: str = field(init=False)
    message: bytes = field(init=False)
    future: asyncio.Future[Answer] = field(init=False)
    ended: asyncio.Future[None] = field(init=False)
    """Done when it was answered, or given up."""

    is_withdrawn: bool = False
    """Its client was told that it is given up, or is not to be told."""

    _sending: asyncio.Task[None] | None = field(init=False, default=None)
    """Sends it, or its withdrawal, to another replica."""

    def __post_init__(self, process: str | None) -> None:
        self.id = self.asked.id = self.asked.id or mint_request_id(process)
        params = self.asked.params
        if self.asked.on_progress is not None:
            params = with_meta(params, {"progressToken": self.id})
        self.message = request_message(self.id, self.asked.method, params)
        loop = asyncio.get_running_loop()
        self.future, self.ended = loop.create_future(), loop.create_future()

    @property
    def log_key(self) -> str:
        return log_key_of(self.id)

    async def is_answered(self) -> bool:
        return self.future.done()

    def is_sent_by(self, sending: asyncio.Task[None] | None) -> None:
        """Stop what sent it until now."""
        if self._sending is not None:
            self._sending.cancel()
        self._sending = sending

    def withdraw(self, reason: str) -> bytes | None:
        """Withdraw the question: return the message for its client (ASK6), once."""
        if self.is_withdrawn:
            return None
        self.is_withdrawn = True
        return notification_message(
            method_names.CANCELLED, {"requestId": self.id, "reason": reason}
        )


class PendingQuestions:
    """The open requests to clients of this process.

    Ids are random and unique over all sessions, and kept when a request is sent again; the
    first answer from any of the owner's connections counts.

    Args:
        process: Named in every id, where answers may come to other processes.
        rounds: Asks clients of the 2026 era. None: nothing here does.
    """

    def __init__(self, process: str | None = None, rounds: Rounds | None = None) -> None:
        self.rounds = rounds
        self._open: dict[str, PendingQuestion] = {}
        self.by_session: dict[SessionId | None, dict[PendingQuestion, None]] = {}
        """Those that a session's standalone channel sent; None: of no session."""

        self._process = process
        self._background = Background()

    def send_withdrawal(self, sending: Coroutine[Any, Any, None]) -> None:
        """Send a withdrawal in the background, whatever becomes of the request."""
        self._background.run("the withdrawal of a question", sending)

    async def settle(self, timeout: float) -> None:
        """Let handlers that were cancelled give their questions up, and clients hear of it, for so
        many seconds (ASK6).
        """
        loop = asyncio.get_running_loop()
        until = loop.time() + timeout
        ended = {question.ended for question in self._open.values()}
        for waits in (ended, self._background.tasks):
            if waits:
                await asyncio.wait(waits, timeout=max(0, until - loop.time()))

    async def close(self) -> None:
        await self._background.close()

    def new(
        self, principal: Principal, session_id: SessionId | None, asked: PeerRequest
    ) -> PendingQuestion:
        return PendingQuestion(principal, session_id, asked, self._process)

    def get(self, question_id: str) -> PendingQuestion | None:
        return self._open.get(question_id)

    async def ask(
        self,
        question: PendingQuestion,
        send: Callable[[bytes], Awaitable[None]],
        notify: Callable[[bytes], object],
    ) -> dict[str, Any]:
        """Send a request and wait for its answer.

        Args:
            question: The request.
            send: Sends it.
            notify: Begins to send what its client gets if it is given up. It may not wait:
                whoever gives a request up may be cancelled.

        Raises:
            PeerError: See :meth:`Outbound.send_request`.
        """
        self._open[question.id] = question
        of_session = self.by_session.setdefault(question.session_id, {})
        of_session[question] = None
        try:
            await send(question.message)
            async with asyncio.timeout(question.asked.timeout):
                answer = await question.future
        except TimeoutError:
            _withdraw(question, notify, "timed out")
            raise PeerError(REQUEST_TIMEOUT, "Request timed out") from None
        except asyncio.CancelledError as cancelled:
            if question.asked.may_move and cancelled.args == (WITHIN_ENDED,):
                # It goes on under its id with another request, which may be at another replica.
                question.is_withdrawn = True
            else:
                _withdraw(question, notify, "cancelled")
            raise
        finally:
            if not question.is_withdrawn:
                question.is_sent_by(None)
            question.ended.set_result(None)
            self._open.pop(question.id, None)
            del of_session[question]
            if not of_session:
                del self.by_session[question.session_id]
        return _result_of(answer)

    async def ask_there(
        self,
        asked: PeerRequest,
        principal: Principal,
        ask: Callable[[str], Coroutine[Any, Any, dict[str, Any]]],
    ) -> dict[str, Any]:
        """Have another process ask, and take an answer that comes to this one, too.

        Args:
            ask: Has it ask under an id, and returns the result.

        Raises:
            PeerError: See :meth:`Outbound.send_request`.
        """
        question = self.new(principal, None, asked)
        self._open[question.id] = question
        asking = asyncio.create_task(ask(question.id))
        # Its error counts for nothing if the answer came here.
        asking.add_done_callback(lambda task: task.cancelled() or task.exception())
        try:
            await asyncio.wait({asking, question.future}, return_when=asyncio.FIRST_COMPLETED)
            if question.future.done():
                return _result_of(question.future.result())
            return asking.result()
        finally:
            asking.cancel()
            question.ended.set_result(None)
            del self._open[question.id]

    def resolve(self, answer: Answer, principal: Principal) -> bool:
        question = self._open.get(answer.id) if isinstance(answer.id, str) else None
        if question is None or question.principal != principal or question.future.done():
            return False
        question.future.set_result(answer)
        return True

    async def progress(self, params: Mapping[str, Any] | None, principal: Principal) -> None:
        members = params or {}
        token, progress = members.get("progressToken"), members.get("progress")
        question = self._open.get(token) if isinstance(token, str) else None
        if question is None or question.principal != principal:
            return
        on_progress = question.asked.on_progress
        if on_progress is None:
            return
        if isinstance(progress, (int, float)) and not isinstance(progress, bool):
            total, message = members.get("total"), members.get("message")
            await on_progress(
                float(progress),
                float(total) if isinstance(total, (int, float)) else None,
                message if isinstance(message, str) else None,
            )

    def fail(self, question: PendingQuestion, code: int, message: str) -> None:
        if not question.future.done():
            question.future.set_result(Answer(question.id, None, error_body(code, message)))


def _result_of(answer: Answer) -> dict[str, Any]:
    if answer.error is not None:
        error = answer.error
        raise PeerError(error["code"], error["message"], error.get("data"))
    return answer.result or {}


def _withdraw(question: PendingQuestion, notify: Callable[[bytes], object], reason: str) -> None:
    if question.future.done() and not question.future.cancelled():
        # It was answered in that moment.
        return
    message = question.withdraw(reason)
    if message is not None:
        notify(message)


def may_ask(peer: Peer | None, method: str) -> bool:
    try:
        check_may_ask(peer, method)
    except PeerError:
        return False
    return True


def check_may_ask(peer: Peer | None, method: str) -> None:
    """Server-to-client requests go only to a handshake-era peer that declared it answers.

    Raises:
        PeerError: It did not, or there was no handshake.
    """
    if peer is None or peer.modern or peer.initialize_params is None:
        raise NotAskable(method)
    capability = method_names.QUESTIONS.get(method)
    if capability is not None and capability not in peer.capabilities:
        raise PeerError(INVALID_REQUEST, f"the client did not declare {capability!r}")


_TAKEN: RelayedOutcome = ({}, None)

_CONFIRMED: Final = 5.0
"""Seconds in which a replica that can be reached confirms an answer."""

_MOST_BYTES: Final = 16_777_216
"""Bytes of answers that wait for their replicas."""

_Name = tuple[str, Principal]
"""A question, and who answers."""


class RemoteQuestions:
    def __init__(
        self, relay: RequestRelay, connections: ConnectionRegistry, pending: PendingQuestions
    ) -> None:
        self._relay, self._connections, self._pending = relay, connections, pending
        self.waiting: dict[_Name, tuple[asyncio.Task[None], asyncio.Future[bool]]] = {}
        """Answers that are passed on, each with whether the process that asked lives."""

        self._bound = FairBound[_Name](most=float("inf"), most_bytes=_MOST_BYTES)
        self._withdrawals = set[asyncio.Task[None]]()
        """Those that are on their way."""

    def send(
        self,
        session_id: SessionId,
        message: bytes,
        question: PendingQuestion,
        attachment: Attachment,
    ) -> None:
        """Begin to send a question, or its withdrawal, to the process that has the session's
        connection. If the session is not attached there, the question is sent again where it is
        attached next.
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
        # What is sent later takes the place of what is not there yet.
        sending = self._relay.bus.spawn(self._send(home, asked, question))
        question.is_sent_by(sending)
        if question.is_withdrawn:
            self._withdrawals.add(sending)
            sending.add_done_callback(self._withdrawals.discard)

    async def settle(self, timeout: float) -> None:
        """The same as :meth:`PendingQuestions.settle`, for clients at other replicas, too."""
        await self._pending.settle(timeout)
        if self._withdrawals:
            await asyncio.wait(self._withdrawals, timeout=timeout)

    async def _send(self, home: str, asked: SessionQuestion, question: PendingQuestion) -> None:
        try:
            sent = await self._relay.ask(home, asked, is_repeatable=True)
        except (Unserved, OutcomeUnknown):
            return
        if sent.error is not None:
            self._pending.fail(question, sent.error["code"], sent.error["message"])

    # --- where it is answered -------------------------------------------------------------------

    def answer(
        self, answer: Answer, principal: Principal, share: Hashable
    ) -> bool | asyncio.Future[bool]:
        """Take a client's answer to a question of any process.

        Args:
            share: The client's (``calls/shares.py``).

        Returns:
            False if no such process lives. A future if it is passed on.
        """
        is_open_here = self._pending.resolve(answer, principal)
        process = process_of(answer.id) if isinstance(answer.id, str) else None
        if not isinstance(answer.id, str) or not self._relay.bus.is_remote(process):
            return is_open_here
        name = answer.id, principal
        if name not in self.waiting:
            answered = QuestionAnswer(
                id=answer.id, result=answer.result, error=answer.error, principal=principal
            )
            lives: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
            task = self._relay.bus.spawn(self._pass_on(process, answered, lives))
            self.waiting[name] = task, lives
            task.add_done_callback(lambda _: self._passed_on(name))
            size = len(encode(answer.result or answer.error))
            for lost in self._bound.add(name, share, None, size):
                self.waiting[lost][0].cancel()
            return lives
        return self.waiting[name][1]

    async def _pass_on(
        self, process: str, answered: QuestionAnswer, lives: asyncio.Future[bool]
    ) -> None:
        try:
            await self._relay.ask(process, answered, is_repeatable=True)
        except (Unserved, OutcomeUnknown):
            lives.set_result(False)
        else:
            lives.set_result(True)

    def _passed_on(self, name: _Name) -> None:
        _, lives = self.waiting.pop(name)
        lives.cancel()
        self._bound.remove(name)

    async def progress(self, params: Mapping[str, Any] | None, principal: Principal) -> None:
        """Take a client's progress on a question of any process."""
        await self._pending.progress(params, principal)
        token = (params or {}).get("progressToken")
        process = process_of(token) if isinstance(token, str) else None
        if self._relay.bus.is_remote(process):
            progress = QuestionProgress(params=params, principal=principal)
            await self._relay.notify(process, progress)

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

    async def _asked(self, _: Asker, asked: SessionQuestion) -> RelayedOutcome:
        session_id = asked.session_id
        connection = self._connections.local(asked.connection_id)
        if connection is None or connection.attached.get(session_id) != asked.fencing_epoch:
            return _TAKEN
        if not may_ask(connection.peer, asked.method):
            text = f"the client cannot be asked {asked.method!r}"
            return None, error_body(INVALID_REQUEST, text)
        key = log_key_of(asked.id)
        await connection.send(Draft(asked.text.encode(), None, key, session_id))
        return _TAKEN

    async def _answered(self, _: Asker, answered: QuestionAnswer) -> RelayedOutcome:
        answer = Answer(answered.id, answered.result, answered.error)
        self._pending.resolve(answer, answered.principal)
        return _TAKEN

    async def _progressed(self, _: Asker, reported: QuestionProgress) -> RelayedOutcome:
        await self._pending.progress(reported.params, reported.principal)
        return _TAKEN


async def confirmed(passed_on: asyncio.Future[bool]) -> bool:
    """Wait until the replica that asked has an answer; False: it is dead.

    Raises:
        StoreUnavailable: It has not said so. This process goes on trying.
    """
    await asyncio.wait({passed_on}, timeout=_CONFIRMED)
    if not passed_on.done() or passed_on.cancelled():
        raise StoreUnavailable("the replica that asked did not confirm an answer")
    return passed_on.result()
