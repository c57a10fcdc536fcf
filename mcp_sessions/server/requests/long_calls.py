"""Look at the calls that run long: send progress for silent ones, and note them in stories.

Some clients give a call up after minutes without progress, and a comment or a log message does not
help them. Questions that wait long are noted, too. What takes long is noted once while it lasts,
and once when it has ended.

Rules that must hold, and that ``tests/server/requests/test_silence.py`` owns:

1. A call that carries a progress token gets progress at least once in ``progress_every`` seconds,
   as long as a client waits for its answer.
2. A call's own path has no part in this: this module looks at the running calls a few times in
   each period.
3. A client that takes nothing delays no other. A call has one message of ours under way.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial

from mcp_sessions.core.messages import RequestId
from mcp_sessions.ids import SessionId
from mcp_sessions.server.delivery.questions import PendingQuestions
from mcp_sessions.server.reporting.stories import Stories, word_of
from mcp_sessions.server.requests.runner import RequestRunner
from mcp_sessions.server.requests.running import RunningRequest

_LOOKS = 10
"""How often the calls are looked at in one period."""

_SOONEST = 0.05
"""Seconds between two looks, at the least."""


@dataclass(slots=True, eq=False, repr=False)
class _Silent:
    _since: float
    """By the event loop."""

    _reported: int = 0
    _reporting: asyncio.Task[None] | None = None

    def lasts(self, now: float, reported: int, period: float) -> float:
        """For how many seconds it got no report.

        Args:
            reported: How many reports it was sent.
            period: Seconds since the last look.
        """
        if reported != self._reported:
            self._reported, self._since = reported, now - period
        return now - self._since

    def broken(self, now: float, report: Callable[[], asyncio.Task[None]]) -> None:
        self._since = now
        if self._reporting is None or self._reporting.done():
            self._reporting = report()


@dataclass(slots=True, eq=False, repr=False)
class LongSilences:
    """Breaks them, for the calls that run in this process.

    Args:
        every: Seconds; see ``SessionPolicy.progress_every``. 0: never.
        clock: The one by which calls know when they began.
    """

    _runner: RequestRunner
    _every: float
    _clock: Callable[[], float]
    _silent: dict[RunningRequest, _Silent] = field(
        init=False, default_factory=dict[RunningRequest, _Silent]
    )

    async def run(self) -> None:
        if not self._every:
            return
        period = max(_SOONEST, self._every / _LOOKS)
        while True:
            await asyncio.sleep(period)
            self._look(asyncio.get_running_loop().time(), period)

    def _look(self, now: float, period: float) -> None:
        before, self._silent = self._silent, {}
        for running in self._runner.active:
            silent = before.get(running)
            if silent is None:
                age = min(max(0.0, self._clock() - running.started_at), period)
                silent = _Silent(now - age)
            self._silent[running] = silent
            reported = running.reported.count if running.reported is not None else 0
            # The next look may be too late.
            if silent.lasts(now, reported, period) > self._every - 2 * period:
                token = running.listener.request.token
                if token is not None and running.is_awaited:
                    silent.broken(now, partial(self._report, running, token))

    def _report(self, running: RunningRequest, token: RequestId) -> asyncio.Task[None]:
        return self._runner.spawn(running.still_runs(token))


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
