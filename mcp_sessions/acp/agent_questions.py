"""Track the agent's questions to its client, and accept their answers.

Rules that must hold, and that ``tests/acp/test_link.py`` owns:

1. The agent asks a client only for what it declared. Other questions fail at once.
2. The first answer counts, from any client. If no client can answer, the agent gets an error.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

from mcp_sessions.acp.negotiation import may_be_called
from mcp_sessions.core.messages import error_body
from mcp_sessions.errors import INTERNAL_ERROR, METHOD_NOT_FOUND

logger = logging.getLogger(__name__)

Json = dict[str, Any]
Answered = Callable[[Json], None]
"""Takes the answer to a request of the agent: ``{"result": …}`` or ``{"error": …}``."""


@dataclass(slots=True, eq=False)
class Question:
    """A request of the agent to its client; after a takeover also to the next client.

    The first answer counts, whoever gives it.
    """

    session_id: str | None
    method: str
    params: Json
    answered: Answered
    ended: bool = False
    _asked: int = 0
    """Clients that may still answer."""

    def goes_to_one_more(self) -> None:
        self._asked += 1

    def answer(self, answer: Json) -> None:
        if not self.ended:
            self.ended = True
            self.answered(answer)

    def refuse(self, code: int, text: str, data: Json | None = None) -> None:
        self.answer({"error": error_body(code, text, data)})

    def lost(self) -> None:
        self._asked -= 1
        if not self._asked:
            self.refuse(INTERNAL_ERROR, "the client is gone")


class Questions:
    def __init__(self, send: Callable[[Json], None]) -> None:
        self._send = send
        self._capabilities: Json = {}
        self._is_closed = False
        self._open: dict[int, Question] = {}
        self._last_id = -1

    def declared(self, capabilities: Json) -> None:
        self._capabilities = capabilities

    def ask(self, question: Question) -> None:
        """Ask the client. If that fails, the failure is the answer."""
        if self._is_closed:
            question.refuse(INTERNAL_ERROR, "the client is gone")
        elif not self.may_be_asked(question):
            method = question.method
            text = f"the client does not support {method}: it did not declare it"
            question.refuse(METHOD_NOT_FOUND, text, {"method": method})
        else:
            self._last_id += 1
            self._open[self._last_id] = question
            question.goes_to_one_more()
            message = {
                "jsonrpc": "2.0",
                "id": self._last_id,
                "method": question.method,
                "params": question.params,
            }
            self._send(message)

    def may_be_asked(self, question: Question) -> bool:
        return may_be_called(question.method, question.params, self._capabilities)

    def about(self, session_id: str) -> list[Question]:
        return [
            question
            for question in self._open.values()
            if question.session_id == session_id and not question.ended
        ]

    def answered(self, message: Json) -> None:
        given = message.get("id")
        known = isinstance(given, int) and not isinstance(given, bool)
        question = self._open.pop(cast(int, given), None) if known else None
        if question is None:
            logger.debug("dropped an answer to a question that was not asked")
        elif "error" not in message:
            question.answer({"result": message["result"]})
        elif isinstance(message["error"], dict):
            question.answer({"error": message["error"]})
        else:
            question.refuse(INTERNAL_ERROR, "the client's answer is malformed")

    def close(self) -> None:
        self._is_closed = True
        left, self._open = self._open, {}
        for question in left.values():
            question.lost()
