"""Hold the application's side: its requests, its open questions, and what it is notified of."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from mcp_sessions import method_names
from mcp_sessions.client import explaining, rpc
from mcp_sessions.client.dialer import CONNECTION_CLOSED, Failure, Json
from mcp_sessions.client.explaining import Loss
from mcp_sessions.client.known_server import KnownServer
from mcp_sessions.client.listen_streams import Listens
from mcp_sessions.client.requests import PendingRequest, Questions, Requests
from mcp_sessions.client.resume_report import ConnectionLost, OnLost, OnResume, ResumeOutcome
from mcp_sessions.client.state import Runtime
from mcp_sessions.errors import OUTCOME_UNKNOWN

logger = logging.getLogger(__name__)

_Value = TypeVar("_Value")

_CLOSED = "the transport was closed"


@dataclass(frozen=True, slots=True)
class Callbacks:
    deliver: Callable[[Json], Awaitable[None]]
    """Takes a message."""

    hang_up: Callable[[], Awaitable[None]]
    """Ends its side, as a stock transport does whose connection is gone."""

    on_lost: OnLost | None = None
    on_resume: OnResume | None = None


@dataclass(slots=True, eq=False, repr=False)
class Application:
    _callbacks: Callbacks
    _peer: KnownServer
    _runtime: Runtime
    deliver: Callable[[Json], Awaitable[None]] = field(init=False)
    hang_up: Callable[[], Awaitable[None]] = field(init=False)
    loss: Loss | None = field(init=False, default=None)
    """Its connection is lost, and ``on_resume`` did not follow so far."""

    requests: Requests = field(init=False, default_factory=Requests)
    questions: Questions = field(init=False, default_factory=Questions)
    listens: Listens = field(init=False, default_factory=Listens)
    why_ended: str | None = field(init=False, default=None)
    """Why its side was ended, and what to do, if not for the server's end."""

    def __post_init__(self) -> None:
        self.deliver, self.hang_up = self._callbacks.deliver, self._callbacks.hang_up

    def asks(self, message: Json, headers: Mapping[str, str], *, now: float) -> PendingRequest:
        pending = PendingRequest(message["id"], message, headers, asked_at=now)
        self.requests.add(pending)
        return pending

    async def end(self, why: str) -> None:
        self.why_ended = why
        await self.hang_up()

    async def answer(self, pending: PendingRequest, code: int, text: str, data: Any = None) -> None:
        await self.conclude(pending, rpc.error_answer(pending.app_id, code, text, data))

    async def conclude(self, pending: PendingRequest, answer: Json) -> None:
        if self.requests.done(pending):
            self.listens.remove(pending.app_id)
            await self.deliver({**answer, "id": pending.app_id})
            self.forget(pending)

    def forget(self, pending: PendingRequest) -> None:
        self._peer.hosted.settled(pending)
        pending.settled.set()

    async def give_up_on(self, pending: PendingRequest, cause: str = "") -> None:
        """Answer what the server will not answer any more.

        Args:
            cause: Why; empty: the loss of the connection.
        """
        lasted = self.loss.lasted(self._runtime.clock()) if self.loss is not None else ""
        if pending.first_sent is not None:
            cause = cause or pending.cause or lasted or _CLOSED
            text = explaining.may_have_run(pending.message, cause)
            await self.answer(pending, OUTCOME_UNKNOWN, text)
        else:
            cause = cause or lasted or pending.cause or _CLOSED
            text = explaining.not_sent(pending.message, cause)
            await self.answer(pending, CONNECTION_CLOSED, text)

    async def report_everything_changed(self) -> None:
        """Ask the application to read everything again after a gap in its events (CLI4)."""
        if self._peer.is_modern:
            for message in self.listens.everything():
                await self.deliver(message)
            return
        for name in () if self._peer.hosted.has_attached else self._peer.abilities.lists:
            # A session of its own tells it of the lists (EVT11).
            await self.deliver(rpc.notification(method_names.CHANGED[name]))
        for uri in list(self._peer.subscribed):
            await self.deliver(rpc.notification(method_names.RESOURCE_UPDATED, {"uri": uri}))

    async def forget_questions(self) -> None:
        for question_id in self.questions.forget():
            params = {"requestId": question_id, "reason": "the session of the server has ended"}
            await self.deliver(rpc.notification(method_names.CANCELLED, params))

    def lost(self, address: str, failure: Failure) -> None:
        """Log that the connection is lost, and call ``on_lost``: once until it is replaced."""
        cause, known = explaining.cause_of(failure, address), self.loss
        if known is not None:
            # The cause may change: refused first, then 502.
            self.loss = Loss(cause, known.since)
            return
        self.loss = Loss(cause, self._runtime.clock())
        logger.warning("connection lost: %s", cause)
        if self._callbacks.on_lost is not None:
            # Nothing waits for an async one: it may itself wait for the next connection.
            value = _called("on_lost", self._callbacks.on_lost, ConnectionLost(cause, address))
            if value is not None:
                self._runtime.tasks.start_soon(_finished, "on_lost", value)

    async def report_outcome(self, outcome: ResumeOutcome) -> None:
        loss, self.loss = self.loss, None
        if loss is not None and not outcome.has_ended and outcome.reason != "gave_up":
            seconds = self._runtime.clock() - loss.since
            logger.info("%s: connected again after %.1f s", outcome.connected_to, seconds)
        if self._callbacks.on_resume is not None:
            value = _called("on_resume", self._callbacks.on_resume, outcome)
            if value is not None:
                await _finished("on_resume", value)


def _called(
    name: str, function: Callable[[_Value], Awaitable[None] | None], value: _Value
) -> Awaitable[None] | None:
    try:
        result = function(value)
    except Exception:
        # The application's own function: what is wrong with it must not end the session.
        logger.exception("%s raised", name)
        return None
    return result if inspect.isawaitable(result) else None


async def _finished(name: str, value: Awaitable[None]) -> None:
    try:
        await value
    except Exception:
        # See above.
        logger.exception("%s raised", name)
