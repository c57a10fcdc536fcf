"""Define the changes of a session's record: one class for each, and one method for all of them.

:meth:`~mcp_sessions.stores.contract.SessionStore.change` applies them. Changes with a condition or
a result of their own (attach, detach, subscribe, the state, the data) have methods of their own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mcp_sessions.core.story import Entry, told
from mcp_sessions.ids import SessionEventId
from mcp_sessions.stores.records import CurrentSession, SessionRecord


@dataclass(frozen=True, slots=True)
class SetCurrent:
    current: CurrentSession | None

    def edit(self, record: SessionRecord) -> None:
        record.client.current = self.current


@dataclass(frozen=True, slots=True)
class SetStreamOpened:
    """Remember that the GET stream was open. False if this was known."""

    def edit(self, record: SessionRecord) -> None:
        record.client.stream_opened = True


@dataclass(frozen=True, slots=True)
class SetFilter:
    """Replace the session's subscriptions by a listen stream's filter."""

    uris: frozenset[str]
    lists: frozenset[str]

    def edit(self, record: SessionRecord) -> None:
        record.client.subscriptions, record.client.lists = self.uris, self.lists


@dataclass(frozen=True, slots=True)
class SetWaitsFrom:
    """Remember where the session's next listen stream starts. None: at the head."""

    event_id: SessionEventId | None

    def edit(self, record: SessionRecord) -> None:
        record.client.waits_from = self.event_id


@dataclass(frozen=True, slots=True)
class SetLogLevel:
    level: str

    def edit(self, record: SessionRecord) -> None:
        record.client.log_level = self.level


@dataclass(frozen=True, slots=True)
class RenewEvents:
    """Empty a protocol-mode session's event log, and give it another epoch.

    Every position from before is refused. This is for a log that misses an event. A session of
    another mode is not changed.
    """


@dataclass(frozen=True, slots=True)
class Tell:
    """Add entries to the session's story. Entries that a step of its own takes are added there."""

    entries: Sequence[Entry]

    def edit(self, record: SessionRecord) -> None:
        for at, text in self.entries:
            record.story = told(record.story, at, text)


RecordChange = (
    SetCurrent | SetStreamOpened | SetFilter | SetWaitsFrom | SetLogLevel | RenewEvents | Tell
)
