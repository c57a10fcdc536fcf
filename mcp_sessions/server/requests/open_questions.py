"""Hold the questions of one running request to its client, until they are answered.

1. A client that joins the request gets its open questions, too.
2. A question that may be about another running request of the same client passes to that one when
   its own request ends. Otherwise the question fails, and is withdrawn.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, Protocol

from mcp_sessions.errors import INTERNAL_ERROR
from mcp_sessions.server.calls.detached import IN_BACKGROUND
from mcp_sessions.server.calls.table import Call
from mcp_sessions.server.delivery.questions import PendingQuestion, may_ask
from mcp_sessions.server.requests.shared import Shared
from mcp_sessions.server.upstream.port import PeerRequest


class Asking(Protocol):
    """The running request that asks."""

    done: bool
    waiters: list[Call]

    @property
    def is_awaited(self) -> bool: ...

    @property
    def transport(self) -> str: ...

    async def emit(self, message: bytes, log_key: str) -> None: ...


class OpenQuestions:
    def __init__(self, request: Asking, shared: Shared) -> None:
        self._request, self._shared = request, shared
        self._open: dict[PendingQuestion, Sequence[OpenQuestions]] = {}
        """With the questions of each other request that one may be about."""

        self._heirs: dict[PendingQuestion, OpenQuestions] = {}
        """Those that took over its open questions when its request ended."""

        self._withdrawals: set[asyncio.Task[None]] = set()

    async def ask(self, asked: PeerRequest, about: Sequence[OpenQuestions]) -> dict[str, Any]:
        """Ask the client that waits for the request, and return its result.

        Args:
            about: The questions of the running requests that it may be about.

        Raises:
            PeerError: See :meth:`Outbound.send_request`.
        """
        request, questions = self._request, self._shared.questions
        question = questions.new(request.waiters[-1].inbound.principal, None, asked)
        self._open[question] = about
        try:
            return await questions.ask(
                question,
                lambda message: request.emit(message, question.log_key),
                lambda message: self._holder(question)._given_up(message, question.log_key),
            )
        finally:
            del self._holder(question)._open[question]

    async def ask_again(self) -> None:
        """Send each question to the client that joined last."""
        asked = self._request.waiters[-1].inbound.asked
        for question in list(self._open):
            # Each may be answered, or a new one be asked, while the one before it is sent.
            if not question.future.done() and may_ask(asked, question.asked.method):
                await self._request.emit(question.message, question.log_key)

    def end(self) -> None:
        """Pass each question on, or withdraw it: its request has ended."""
        reason = "the request that asked is complete"
        for question, about in list(self._open.items()):
            heir = self._heir_of(question)
            if heir is not None:
                # Its client has it, and may well answer it.
                self._heirs[question] = heir
                heir._open[question] = about
                continue
            withdrawal = None if question.future.done() else question.withdraw(reason)
            self._shared.questions.fail(question, INTERNAL_ERROR, reason)
            if withdrawal is not None:
                self._withdraw(withdrawal, question.log_key)

    async def withdrawn(self, timeout: float) -> None:
        """Wait until its client has the withdrawals."""
        if self._withdrawals:
            await asyncio.wait(self._withdrawals, timeout=timeout)

    def _heir_of(self, question: PendingQuestion) -> OpenQuestions | None:
        request = self._request
        connection = request.waiters[-1].inbound.connection
        if question.future.done() or connection is None or not request.is_awaited:
            return None
        for other in reversed(self._open[question]):
            inbound = other._request.waiters[-1].inbound
            is_same = inbound.connection is connection and inbound.principal == question.principal
            if is_same and not other._request.done:
                return other
        return None

    def _holder(self, question: PendingQuestion) -> OpenQuestions:
        heir = self._heirs.get(question)
        return heir._holder(question) if heir is not None else self

    def _given_up(self, message: bytes, log_key: str) -> None:
        # Over HTTP its own way is gone with its answer: an answer after that is ignored.
        if not self._request.done or self._request.transport != "http":
            self._withdraw(message, log_key)

    def _withdraw(self, message: bytes, log_key: str) -> None:
        task = self._shared.background.run(IN_BACKGROUND, self._request.emit(message, log_key))
        self._withdrawals.add(task)
        task.add_done_callback(self._withdrawals.discard)
