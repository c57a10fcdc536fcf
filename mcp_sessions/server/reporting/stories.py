"""Collect what happened to sessions outside of a step of the store, and write it to their stories.

A request only notes it. The rounds of the process write: what is new of a session at once, and what
follows within a minute then. So a flood of refusals costs one write a minute, and leaves the rest
of the story there. Equal entries are counted.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from mcp_sessions import method_names
from mcp_sessions.core.story import Entry
from mcp_sessions.errors import StoreUnavailable
from mcp_sessions.ids import SessionId
from mcp_sessions.server.reporting.loggable import loggable_method
from mcp_sessions.stores.contract import SessionStore
from mcp_sessions.stores.record_changes import Tell

_MOST_SESSIONS = 10_000
"""Sessions of which something waits. Of any more nothing is noted."""

_MOST_ENTRIES = 8
"""Different entries that wait for one session."""

_AT_ONCE = 256
"""Sessions that one round writes."""

_PAUSE = 60.0
"""Seconds between two writes of one session."""


def word_of(method: str) -> str:
    """Return the name of a method as a story has it."""
    is_known = method in method_names.QUESTIONS or loggable_method(method) == method
    return method if is_known else "unknown"


@dataclass(slots=True)
class _News:
    due_at: float
    entries: dict[str, tuple[float, int | None]] = field(
        default_factory=dict[str, tuple[float, int | None]]
    )
    """Text → when it came first, and how often. None: it is not counted."""


@dataclass(slots=True, eq=False, repr=False)
class Stories:
    """What the store does not have yet.

    Args:
        replica: Names this process in stories.
        clock: Seconds since 1970.
    """

    _store: SessionStore
    replica: str
    _clock: Callable[[], float]
    _news: dict[SessionId, _News] = field(init=False, default_factory=dict[SessionId, _News])

    def note(self, session_id: SessionId, text: str) -> None:
        self._add(session_id, text, None)

    def count(self, session_id: SessionId, text: str) -> None:
        """Note what may happen often. The entry ends with its number."""
        self._add(session_id, text, 1)

    def _add(self, session_id: SessionId, text: str, times: int | None) -> None:
        now, news = self._clock(), self._news.get(session_id)
        if news is None:
            if len(self._news) >= _MOST_SESSIONS:
                return
            news = self._news[session_id] = _News(now)
        at, before = news.entries.get(text, (now, None))
        if before is not None or text in news.entries or len(news.entries) < _MOST_ENTRIES:
            news.entries[text] = at, None if times is None else (before or 0) + times

    def take(self, session_id: SessionId) -> list[Entry]:
        """Return what waits for a session. It waits no longer."""
        news = self._news.get(session_id)
        if news is None:
            return []
        waiting, news.entries = news.entries, {}
        return _entries(waiting)

    def forget(self, session_id: SessionId) -> list[Entry]:
        """Return what waits for a session that ended."""
        entries = self.take(session_id)
        self._news.pop(session_id, None)
        return entries

    async def write(self, *, is_last: bool = False) -> None:
        """Write what is due.

        Args:
            is_last: The process stops: write all.

        Raises:
            StoreUnavailable: It is not known whether the entries of one session are written. They
                wait for the next round, as do those that were not tried.
        """
        now = self._clock()
        due = [each for each, news in self._news.items() if is_last or now >= news.due_at]
        for session_id in due if is_last else due[:_AT_ONCE]:
            news = self._news.get(session_id)
            if news is None:
                continue
            if not news.entries:
                del self._news[session_id]
                continue
            waiting, news.entries = news.entries, {}
            try:
                await self._store.change(session_id, Tell(_entries(waiting)))
            except StoreUnavailable:
                news.entries = waiting | news.entries
                raise
            news.due_at = now + _PAUSE


def _entries(waiting: Mapping[str, tuple[float, int | None]]) -> list[Entry]:
    return [
        Entry(at, text if times is None else f"{text} {times}")
        for text, (at, times) in sorted(waiting.items(), key=lambda each: each[1][0])
    ]
