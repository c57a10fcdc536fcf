"""The event log: the recent past of one session or one stream, and who may read it.

Rules that must hold, and that the tests in ``tests/core/test_log.py`` own:

1. A replay is whole or refused. There is no partial replay.
2. A position is an epoch *and* a number. Neither means anything alone.
3. A newer event replaces the older one with its coalescing key; the survivor keeps its
   newer id, and the replaced event's id stays a valid position. Only eviction raises the
   floor.
4. No bound is ever exceeded, but that the newest event is always kept.
5. Nothing here reads a clock: every call that depends on time takes ``now``.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice
from typing import NamedTuple

from mcp_sessions.errors import Refusal
from mcp_sessions.ids import (
    NUMBER_WIDTH,
    LogEpoch,
    Position,
    SessionEventId,
    SessionId,
    parse_position,
)
from mcp_sessions.policy import SessionPolicy

_LAST_NUMBER = 10**NUMBER_WIDTH - 1

PAGE_BYTES = 1_048_576
"""A page ends with the event that makes its payloads as many bytes, however few they are."""


@dataclass(frozen=True, slots=True)
class Window:
    """How much of the past a log keeps; None: without bound."""

    max_events: int | None
    max_bytes: int | None
    max_age: float | None
    """Seconds."""

    def loses(self, at: float, events: int, size: int, now: float) -> Refusal | None:
        """Why the oldest event of a log goes: time took it (``EXPIRED``), or space does
        (``EVICTED``). None: it stays. The newest is always kept, however large.

        Args:
            at: When it was stored.
            events: How many there are with it.
            size: Bytes that they have.
            now: Seconds on the session clock.
        """
        if self.max_age is not None and at < now - self.max_age:
            return Refusal.EXPIRED
        if self.max_events is not None and events > self.max_events:
            return Refusal.EVICTED
        if self.max_bytes is not None and size > self.max_bytes and events > 1:
            return Refusal.EVICTED
        return None


UNBOUNDED = Window(None, None, None)


def window_of(policy: SessionPolicy) -> Window:
    return Window(policy.max_events, policy.max_bytes, policy.max_age)


@dataclass(slots=True)
class Draft:
    """An event before it has an id.

    The stored message is ``before + id + after``, so that one change for ten thousand
    sessions is encoded once. ``after is None``: the message holds no id and is ``before``.
    """

    before: bytes
    after: bytes | None = None
    key: str | None = None
    """Coalescing key; None: the event replaces nothing and is never replaced."""

    origin: SessionId | None = None
    """On a connection's stream: the session whose event this is."""

    name: str | None = None
    """Names it among all events of its log: visible ASCII. None: it is appended once at most."""

    since: float | None = None
    """When a call that ended in ``StoreUnavailable`` appended it first, in seconds since 1970: the
    log may have it. None: no call did."""

    def encode(self, event_id: SessionEventId) -> bytes:
        return self.before if self.after is None else self.before + event_id.encode() + self.after


class LoggedEvent(NamedTuple):
    event_id: SessionEventId
    number: int
    payload: bytes
    """The whole JSON-RPC message, encoded."""

    at: float
    """Seconds on the session clock."""

    key: tuple[SessionId | None, str] | None
    origin: SessionId | None

    @property
    def position(self) -> Position:
        return Position(LogEpoch(self.event_id.partition("-")[0]), self.number)


class LogCounts(NamedTuple):
    """What a log knows without its events."""

    log_epoch: LogEpoch
    head: int
    floor: int
    evicted: int
    """The newest number that space took."""

    kept: int
    """Events."""

    size: int
    """Their bytes."""


@dataclass(slots=True, eq=False, repr=False)
class EventLog:
    log_epoch: LogEpoch
    _window: Window
    _events: dict[int, LoggedEvent] = field(init=False, default_factory=dict[int, LoggedEvent])
    _by_key: dict[tuple[SessionId | None, str], int] | None = field(init=False, default=None)
    """None: no event had a key yet, as in most logs."""

    size: int = field(init=False, default=0)
    """Encoded bytes kept."""

    _count: int = field(init=False, default=0)
    """Of the events kept."""

    _head: int = field(init=False, default=0)
    _floor: int = field(init=False, default=0)
    _evicted: int = field(init=False, default=0)
    _oldest: int = field(init=False, default=1)
    _names: dict[int, str] | None = field(init=False, default=None)
    """Of the events that have one."""

    @classmethod
    def restored(
        cls,
        counts: LogCounts,
        window: Window,
        events: dict[int, LoggedEvent],
        names: dict[int, str],
    ) -> EventLog:
        """Return a log as a store kept it.

        Args:
            events: By number, in order. It may be a part of them that raises an error of its own
                for what it lacks.
            names: Those of the events that have one.
        """
        log = cls(counts.log_epoch, window)
        log._head, log._floor, log._evicted = counts.head, counts.floor, counts.evicted
        log._count, log.size, log._events = counts.kept, counts.size, events
        log._names = names or None
        log._by_key = {event.key: number for number, event in events.items() if event.key} or None
        # Of a part, the first one may be any after the floor.
        log._oldest = min(events, default=(counts.floor if counts.kept else counts.head) + 1)
        return log

    @property
    def window(self) -> Window:
        return self._window

    @property
    def counts(self) -> LogCounts:
        return LogCounts(
            self.log_epoch, self._head, self._floor, self._evicted, self._count, self.size
        )

    @property
    def events(self) -> Mapping[int, LoggedEvent]:
        """By number."""
        return self._events

    def name_of(self, number: int) -> str | None:
        return (self._names or {}).get(number)

    def __len__(self) -> int:
        return self._count

    @property
    def head(self) -> Position:
        """The position after the newest event."""
        return Position(self.log_epoch, self._head)

    @property
    def floor(self) -> Position:
        """The oldest position after which no event is missing."""
        return Position(self.log_epoch, self._floor)

    def would_replace(self, draft: Draft) -> bool:
        is_new = draft.since is None or self._stored(draft) is None
        return is_new and (draft.origin, draft.key) in (self._by_key or ())

    def _stored(self, draft: Draft) -> LoggedEvent | None:
        """Return the event that a call before made of a draft, if its answer was lost."""
        names = self._names or {}
        numbers = (number for number in reversed(names) if names[number] == draft.name)
        return next((self._events[number] for number in numbers), None)

    def append(self, draft: Draft, *, now: float) -> LoggedEvent:
        """Store ``draft`` as the newest event, unless the log has it (:attr:`Draft.since`), and
        return it.

        Raises:
            OverflowError: The log has issued 10**12 - 1 ids; ids would lose their order.
        """
        known = self._stored(draft) if draft.since is not None else None
        if known is not None:
            return known
        number = self._head + 1
        if number > _LAST_NUMBER:
            raise OverflowError("this event log has issued its last id")
        event_id = SessionEventId(f"{self.log_epoch}-{number:0{NUMBER_WIDTH}d}")
        payload = draft.encode(event_id)
        key = None if draft.key is None else (draft.origin, draft.key)
        event = LoggedEvent(event_id, number, payload, now, key, draft.origin)
        if key is not None:
            if self._by_key is None:
                self._by_key = {}
            replaced = self._by_key.get(key)
            if replaced is not None:
                self.size -= len(self._events.pop(replaced).payload)
                self._count -= 1
                if self._names is not None:
                    self._names.pop(replaced, None)
            self._by_key[key] = number
        if draft.name is not None:
            if self._names is None:
                self._names = {}
            self._names[number] = draft.name
        self._events[number] = event
        self.size += len(payload)
        self._count += 1
        self._head = number
        self._evict(now)
        return event

    def since_id(
        self, event_id: str | None, *, now: float, limit: int | None = None
    ) -> tuple[tuple[LoggedEvent, ...], Refusal | None]:
        """Return the replay that ``lastSessionEventId`` asks for, or nothing and the reason.

        Args:
            event_id: The position, as it was sent.
            now: See :meth:`replay`.
            limit: See :meth:`replay`.
        """
        position = parse_position(event_id) if event_id is not None else None
        if position is None and event_id is not None:
            return (), Refusal.UNKNOWN_POSITION
        return self.replay(position, now=now, limit=limit)

    def replay(
        self, position: Position | None, *, now: float, limit: int | None = None
    ) -> tuple[tuple[LoggedEvent, ...], Refusal | None]:
        """Return the events after ``position``, oldest first: all of them, or nothing and the
        reason.

        A replay of zero events is a success, with reason None: the client is up to date.

        Args:
            position: The last event the client is known to have processed.
            now: Seconds on the session clock; events older than the window's age are
                evicted first.
            limit: Read a page of at most this many, and of about `PAGE_BYTES`; go on from
                the last one's position, until a page is empty.

        Returns:
            The reason is ``LOG_REPLACED`` if the log was made anew since, ``AHEAD`` if the
            client names an event this log never had; if at least one event it needs is
            gone, ``EVICTED`` if space took one of them, ``EXPIRED`` if only time did.
        """
        if position is None:
            return (), Refusal.NO_POSITION
        self._evict(now)
        refusal = refusal_of(
            position,
            log_epoch=self.log_epoch,
            head=self._head,
            floor=self._floor,
            evicted=self._evicted,
        )
        if refusal is not None:
            return (), refusal
        if limit is not None:
            return page_of(self._after(position.number), limit), None
        missed: list[LoggedEvent] = []
        for event in reversed(self._events.values()):
            if event.number <= position.number:
                break
            missed.append(event)
        missed.reverse()
        return tuple(missed), None

    def empty(self) -> None:
        """Remove every event, as if space had taken it."""
        if self._count:
            self._evicted = self._floor = self._head
            self._events, self._by_key, self._names = {}, None, None
            self.size = self._count = 0
            self._oldest = self._head + 1

    def drop_origin(self, origin: SessionId) -> int:
        """Remove the events of one session from a connection's stream. Return their number.

        They are not lost: they stand in their own session's log. The floor stays.
        """
        gone = [number for number, event in self._events.items() if event.origin == origin]
        for number in gone:
            self._forget(number)
        return len(gone)

    def _after(self, number: int) -> Iterator[LoggedEvent]:
        # A page deep in a long log must not walk everything before it: when most of the
        # numbers are there, stepping through them is cheaper than through the dictionary.
        if self._count * 4 > self._head - number:
            events = self._events
            return (events[n] for n in range(number + 1, self._head + 1) if n in events)
        return (event for event in self._events.values() if event.number > number)

    def _evict(self, now: float) -> None:
        if self._window is UNBOUNDED:
            return
        events, number = self._events, self._oldest
        while self._count:
            # Skips replaced numbers. Asking the dictionary for its first entry would
            # walk over all that was removed before it.
            while number not in events:
                number += 1
            lost = self._window.loses(events[number].at, self._count, self.size, now)
            if lost is None:
                break
            if lost is Refusal.EVICTED:
                self._evicted = number
            self._floor = number
            self._forget(number)
        self._oldest = number

    def _forget(self, number: int) -> None:
        event = self._events.pop(number)
        self.size -= len(event.payload)
        self._count -= 1
        if self._names is not None:
            self._names.pop(number, None)
        by_key = self._by_key
        if by_key is not None and event.key is not None and by_key.get(event.key) == number:
            del by_key[event.key]


def refusal_of(
    position: Position, *, log_epoch: LogEpoch, head: int, floor: int, evicted: int
) -> Refusal | None:
    """Why what comes after a position cannot be replayed whole (CUP5); None: it can.

    Args:
        position: The last event that the client has.
        log_epoch: Of the log.
        head: The number of its newest event.
        floor: The oldest number after which everything is still there.
        evicted: The newest number that space took.
    """
    # Epoch before number. A log made anew soon grows past the old one, and then a dead
    # position looks valid: the client silently loses everything up to it (CUP8).
    if position.log_epoch != log_epoch:
        # A newer epoch than ours was never ours to issue.
        newer = position.log_epoch > log_epoch
        return Refusal.UNKNOWN_POSITION if newer else Refusal.LOG_REPLACED
    if position.number > head:
        return Refusal.AHEAD  # CUP8
    if position.number < floor:
        return Refusal.EVICTED if position.number < evicted else Refusal.EXPIRED  # CUP8
    return None


def page_of(events: Iterable[LoggedEvent], limit: int) -> tuple[LoggedEvent, ...]:
    """The first events: ``limit`` at the most, and no more once they have `PAGE_BYTES`."""
    page: list[LoggedEvent] = []
    size = 0
    for event in islice(events, limit):
        page.append(event)
        size += len(event.payload)
        if size >= PAGE_BYTES:
            break
    return tuple(page)
