"""Note calls that run long, and questions that wait long, for the stories of their sessions.

The rounds of the process look at what runs. A call's own path has no part in this. What takes long
is noted once while it lasts, and once when it is over.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from mcp_sessions.ids import SessionId
from mcp_sessions.server.delivery.questions import PendingQuestions
from mcp_sessions.server.reporting.stories import Stories, word_of
from mcp_sessions.server.requests.runner import RequestRunner

LONG = 30.0
"""Seconds after which a call or a question is noted."""


@dataclass(slots=True)
class _Seen:
    session_id: SessionId
    what: str
    since: float
    is_noted: bool = False


@dataclass(slots=True, eq=False, repr=False)
class LongOnes:
    _runner: RequestRunner
    _questions: PendingQuestions
    _stories: Stories
    _clock: Callable[[], float]
    _seen: dict[object, _Seen] = field(init=False, default_factory=dict[object, _Seen])
    """Calls, and questions from their first look on."""

    def look(self) -> None:
        now, before, self._seen = self._clock(), self._seen, {}
        for each, new in self._open(now):
            seen = self._seen[each] = before.pop(each, new)
            if not seen.is_noted and now - seen.since >= LONG:
                self._note(seen, now)
        for ended in before.values():
            if ended.is_noted:
                self._note(ended, now)

    def _open(self, now: float) -> Iterator[tuple[object, _Seen]]:
        for running in self._runner.active:
            if running.sessions and not running.is_listen and now - running.started_at >= LONG:
                what = f"long {word_of(running.request.method)}"
                yield running, _Seen(running.sessions[0], what, running.started_at)
        for session_id, questions in self._questions.by_session.items():
            if session_id is not None:
                for question in questions:
                    what = f"asked {word_of(question.asked.method)}"
                    yield question, _Seen(session_id, what, now)

    def _note(self, seen: _Seen, now: float) -> None:
        seen.is_noted = True
        self._stories.note(seen.session_id, f"{seen.what} {now - seen.since:.0f}")
