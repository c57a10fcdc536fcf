"""Requests of ours to clients: elicitation, sampling, roots; open until the first answer."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import InitVar, dataclass, field
from typing import Any

from mcp_sessions import method_names
from mcp_sessions.core.messages import (
    Answer,
    error_body,
    notification_message,
    request_message,
    with_meta,
)
from mcp_sessions.errors import INVALID_REQUEST
from mcp_sessions.ids import SessionId
from mcp_sessions.principal import Principal
from mcp_sessions.security import mint_request_id
from mcp_sessions.server.upstream.port import REQUEST_TIMEOUT, NotAskable, PeerError, PeerRequest
from mcp_sessions.server.upstream.rounds import Rounds
from mcp_sessions.stores.records import Peer


def log_key_of(question_id: str) -> str:
    """The key of a question in a stream's log: a client that reopens the stream does not get it if
    it was withdrawn.
    """
    return f"asked {question_id}"


@dataclass(slots=True, eq=False, repr=False)
class PendingQuestion:
    principal: Principal
    session_id: SessionId | None
    asked: PeerRequest
    process: InitVar[str | None]
    id: str = field(init=False)
    message: bytes = field(init=False)
    future: asyncio.Future[Answer] = field(init=False)
    is_withdrawn: bool = False
    _sending: asyncio.Task[None] | None = field(init=False, default=None)
    """Sends it, or its withdrawal, to another replica."""

    def __post_init__(self, process: str | None) -> None:
        self.id = mint_request_id(process)
        params = self.asked.params
        if self.asked.on_progress is not None:
            params = with_meta(params, {"progressToken": self.id})
        self.message = request_message(self.id, self.asked.method, params)
        self.future = asyncio.get_running_loop().create_future()

    @property
    def log_key(self) -> str:
        return log_key_of(self.id)

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
        except asyncio.CancelledError:
            _withdraw(question, notify, "cancelled")
            raise
        finally:
            if not question.is_withdrawn:
                question.is_sent_by(None)
            self._open.pop(question.id, None)
            del of_session[question]
            if not of_session:
                del self.by_session[question.session_id]
        if answer.error is not None:
            error = answer.error
            raise PeerError(error["code"], error["message"], error.get("data"))
        return answer.result or {}

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
