"""Hold the questions of the running requests to their clients, until they are answered.

1. A question belongs to each running request that it may be about. It stands on the response of the
   newest of them that its client listens to. A request that was sent again has several responses.
2. If its client listens to none of the responses on which it stands, it is put on another one of
   its requests: on one that the client still listens to, or else on the first one for which it
   comes back. A repeated request gets the questions of its response once more.
3. The first answer counts. It is taken back from the other responses, and from one that its client
   reads later.
4. If the request on whose response it stands ends, it waits as long as another request is open that
   it may be about: its client may have it already. Else it fails, and is withdrawn.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from mcp_sessions.errors import INTERNAL_ERROR
from mcp_sessions.server.calls.detached import IN_BACKGROUND
from mcp_sessions.server.calls.table import Call
from mcp_sessions.server.delivery.questions import PendingQuestion, may_ask
from mcp_sessions.server.requests.shared import Shared
from mcp_sessions.server.upstream.port import PeerRequest


class Asking(Protocol):
    """The running request that asks."""

    listener: Call

    @property
    def is_awaited(self) -> bool: ...


@dataclass(slots=True, eq=False)
class _Asked:
    question: PendingQuestion
    about: list[OpenQuestions]
    """Of each running request that it may be about, the newest last."""

    on: dict[Call, OpenQuestions] = field(default_factory=dict[Call, "OpenQuestions"])
    """The sendings on whose responses it stands, each with those of its request."""

    left: dict[Call, OpenQuestions] = field(default_factory=dict[Call, "OpenQuestions"])
    """Those of requests that ended meanwhile. Their client may have yet to read the response."""

    @property
    def is_open(self) -> bool:
        return not self.question.future.done()

    @property
    def is_heard(self) -> bool:
        return any(_is_heard(each) for each in self.on)

    def listener(self) -> OpenQuestions | None:
        """Return the newest that may get it, and whose client listens."""
        able = (each for each in reversed(self.about) if each.is_heard and each.may_get(self))
        return next(able, None)

    def withdraw(self, message: bytes) -> None:
        for sending, of in (self.on | self.left).items():
            if of.can_take_back(sending):
                of.take_back(sending, message, self.question.log_key)


def _is_heard(sending: Call) -> bool:
    return sending.inbound.channel.is_open


class OpenQuestions:
    """Those of one running request."""

    def __init__(self, request: Asking, shared: Shared) -> None:
        self._request, self._shared = request, shared
        self._open: dict[_Asked, None] = {}
        self._puts: set[asyncio.Future[None]] = set()
        self._is_answered = False

    async def ask(self, request: PeerRequest, about: Sequence[OpenQuestions]) -> dict[str, Any]:
        """Ask the client that waits for the request, and return its result.

        Args:
            about: The questions of the running requests that it may be about. None: of this one.

        Raises:
            PeerError: See :meth:`Outbound.send_request`.
        """
        questions = self._shared.questions
        question = questions.new(self._request.listener.inbound.principal, None, request)
        asked = _Asked(question, list(about) or [self])
        for each in asked.about:
            each._open[asked] = None
        to = asked.listener() or self
        try:
            return await questions.ask(question, lambda _: to._put(asked), asked.withdraw)
        finally:
            for each in asked.about:
                del each._open[asked]
            is_left = any(of.can_take_back(sending) for sending, of in asked.left.items())
            is_read = len(asked.on) == 1 and asked.is_heard and not is_left
            if not is_read and (taken_back := question.withdraw("answered")) is not None:
                asked.withdraw(taken_back)

    @property
    def is_heard(self) -> bool:
        return self._request.is_awaited

    async def ask_again(self) -> None:
        """Ask the client that joined last."""
        for asked in list(self._open):
            if self in asked.on.values() or not asked.is_heard:
                await self._put(asked)

    def listening_changed(self) -> None:
        """Put each question that its client cannot have on a response to which it listens."""
        for asked in self._open:
            if not asked.is_heard:
                self._pass_on(asked)

    def _pass_on(self, asked: _Asked) -> None:
        to = asked.listener()
        if to is not None:
            self._shared.background.run(IN_BACKGROUND, to._put(asked))

    def may_get(self, asked: _Asked) -> bool:
        question, inbound = asked.question, self._request.listener.inbound
        is_its_client = inbound.principal == question.principal
        return is_its_client and may_ask(inbound.asked, question.asked.method)

    async def _put(self, asked: _Asked) -> None:
        # It may be answered, or its request end, while the one before it is sent.
        if self not in asked.about:
            self._pass_on(asked)
        elif asked.is_open and self.may_get(asked):
            sending = self._request.listener
            asked.on[sending] = self
            is_put: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._puts.add(is_put)
            try:
                question = asked.question
                await sending.inbound.channel.emit(question.message, question.log_key)
            finally:
                self._puts.discard(is_put)
                is_put.set_result(None)

    def end(self) -> None:
        """Leave each question to the others, or withdraw it: its request has ended."""
        reason = "the request that asked is complete"
        for asked in list(self._open):
            asked.about.remove(self)
            del self._open[asked]
            own = [sending for sending, of in asked.on.items() if of is self]
            for sending in own:
                del asked.on[sending]
                # It may wait for the store. On a connection of its own the client has it.
                if sending.inbound.transport == "http" or not _is_heard(sending):
                    asked.left[sending] = self
            if asked.on or not own:
                continue
            if any(each.may_get(asked) for each in asked.about):
                self._leave(asked)
                continue
            is_over = asked.is_open and not asked.question.asked.may_move
            withdrawal = asked.question.withdraw(reason) if is_over else None
            self._shared.questions.fail(asked.question, INTERNAL_ERROR, reason)
            if withdrawal is not None:
                for sending in own:
                    self.take_back(sending, withdrawal, asked.question.log_key)

    def _leave(self, asked: _Asked) -> None:
        connection = self._request.listener.inbound.connection
        for other in reversed(asked.about):
            sending = other._request.listener
            is_same = sending.inbound.connection is connection
            if self.is_heard and connection is not None and is_same:
                # Its client has it, and may well answer it.
                asked.on[sending] = other
                return
        self._pass_on(asked)

    async def sent(self, timeout: float) -> None:
        """Wait until its client has the questions and the withdrawals."""
        if self._puts:
            await asyncio.wait(self._puts, timeout=timeout)
        self._is_answered = True

    def can_take_back(self, sending: Call) -> bool:
        # Over HTTP its own way is gone with its answer, unless its client has yet to read that.
        is_over_http = sending.inbound.transport == "http"
        return not (self._is_answered and is_over_http and _is_heard(sending))

    def take_back(self, sending: Call, message: bytes, log_key: str) -> None:
        emits = sending.inbound.channel.emit(message, log_key)
        task = self._shared.background.run(IN_BACKGROUND, emits)
        self._puts.add(task)
        task.add_done_callback(self._puts.discard)
