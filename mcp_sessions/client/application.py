"""The application's side: what it asked and was asked, and what it is told from here."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from mcp_sessions.client import stamping, wire
from mcp_sessions.client.dialer import CONNECTION_CLOSED, Json
from mcp_sessions.client.listening import Listens
from mcp_sessions.client.outcome import OnResume, ResumeOutcome
from mcp_sessions.client.peer import Peer
from mcp_sessions.client.requests import Pending, Questions, Requests
from mcp_sessions.errors import OUTCOME_UNKNOWN

logger = logging.getLogger(__name__)


@dataclass(slots=True, eq=False, repr=False)
class Application:
    """One client's application.

    Args:
        deliver: Gives it a message.
        hang_up: Ends its side, as a stock transport does whose connection is gone.
    """

    deliver: Callable[[Json], Awaitable[None]]
    hang_up: Callable[[], Awaitable[None]]
    _on_resume: OnResume | None
    _peer: Peer
    requests: Requests = field(default_factory=Requests)
    questions: Questions = field(default_factory=Questions)
    listens: Listens = field(default_factory=Listens)
    names_sessions: bool = False
    """It speaks of sessions of its own."""

    def asks(self, message: Json, headers: Mapping[str, str], *, now: float) -> Pending:
        """It asked something."""
        if message["method"] in wire.OUR_METHODS or stamping.names_own_session(message):
            self.names_sessions = True
        pending = Pending(message["id"], message, headers, now)
        self.requests.add(pending)
        return pending

    async def answer(self, pending: Pending, code: int, text: str, data: Any = None) -> None:
        """Answer a request from here, unless it was answered."""
        if self.requests.done(pending):
            self.listens.remove(pending.app_id)
            await self.deliver(wire.error_answer(pending.app_id, code, text, data))

    async def give_up_on(self, pending: Pending) -> None:
        """Answer what the server will not answer any more."""
        if pending.first_sent is not None:
            await self.answer(pending, OUTCOME_UNKNOWN, "Outcome unknown")
        else:
            await self.answer(pending, CONNECTION_CLOSED, "Connection closed: it was never sent")

    async def tell_everything_changed(self) -> None:
        """There was a gap: what the application may have missed, it reads again (CLI4)."""
        if self._peer.is_modern:
            for message in self.listens.everything():
                await self.deliver(message)
            return
        for name in self._peer.abilities.lists:
            await self.deliver(wire.notification(f"notifications/{name}/list_changed"))
        for uri in list(self._peer.subscribed):
            await self.deliver(wire.notification(wire.RESOURCE_UPDATED, {"uri": uri}))

    async def forget_questions(self) -> None:
        """Whoever asked them is gone, with its session: the application need not think on."""
        for question_id in self.questions.forget():
            params = {"requestId": question_id, "reason": "the session of the server is over"}
            await self.deliver(wire.notification(wire.CANCELLED, params))

    async def tell_outcome(self, outcome: ResumeOutcome) -> None:
        """Call the application's ``on_resume``."""
        if self._on_resume is None:
            return
        try:
            told = self._on_resume(outcome)
            if inspect.isawaitable(told):
                await told
        except Exception:
            # The application's own function: what is wrong with it must not end the session.
            logger.exception("on_resume raised")
