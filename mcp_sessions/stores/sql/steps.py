"""The steps of a session, for a store that keeps its sessions in the rows of a database.

Each step is done by the store in memory (:class:`Working`), so the rules are the same everywhere.
What a step reads first is in its :class:`Wanted`.
"""

from __future__ import annotations

import heapq
from collections.abc import Awaitable, Callable, Collection, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from functools import wraps
from typing import Any, Concatenate, ParamSpec, TypeVar, cast

from mcp_sessions.core.life import SLEEPERS, asleep_by, unused_by
from mcp_sessions.core.log import Draft, LoggedEvent, Window
from mcp_sessions.core.request_keys import KeyUse
from mcp_sessions.core.states import Mode
from mcp_sessions.core.story import Entry
from mcp_sessions.ids import (
    EVENTS,
    GET_STREAM,
    FencingEpoch,
    Position,
    RequestKey,
    SessionId,
    StreamName,
    parse_position,
)
from mcp_sessions.policy import SessionPolicy
from mcp_sessions.principal import ANONYMOUS, Principal
from mcp_sessions.stores.memory.memory_store import MemoryStore
from mcp_sessions.stores.memory.tables import MemorySession, Owner
from mcp_sessions.stores.record_changes import RecordChange, Tell
from mcp_sessions.stores.records import SessionRecord
from mcp_sessions.stores.shared_clock import SharedClock
from mcp_sessions.stores.sql.session_rows import KNOWN_EVENTS, Wanted, owner_of

T = TypeVar("T")
P = ParamSpec("P")

Wants = Callable[..., Wanted]
_Method = Callable[Concatenate[Any, P], T]

NOTHING = Wanted()

CANDIDATES = 1_024
"""Sessions that are looked at when room has to be made."""


class Working(MemoryStore):
    """The store in memory, with the sessions of one step in it."""

    def __init__(self, served: MemoryStore | None = None) -> None:
        """Begin with no session.

        Args:
            served: Serve within the limits of that one.
        """
        super().__init__()
        if served is not None:
            self._policy, self._idle_times = served._policy, served._idle_times
            self._window = served._window

    @property
    def window(self) -> Window:
        return self._window

    def slept(self, by: float) -> None:
        """Sessions were made to sleep up to that deadline."""
        self._slept_by = by

    def hold(self, session: MemorySession, carried: Mapping[SessionId, Position]) -> None:
        """Take a session.

        Args:
            carried: The sessions whose events its GET stream takes, and the last one of each.
        """
        session_id, principal = session.record.session_id, session.record.principal
        self._sessions[session_id] = session
        owner = self._by_principal.setdefault(principal, Owner(principal))
        owner.sessions += 1
        if carried:
            self._relayed[session_id] = dict(carried)
        heapq.heappush(self._deadlines, (session.record.life.expires_at, session_id))

    def session(self, session_id: SessionId) -> MemorySession | None:
        return self._sessions.get(session_id)

    def carried(self, session_id: SessionId) -> Mapping[SessionId, Position]:
        return self._relayed.get(session_id, {})


@dataclass(frozen=True, slots=True)
class Due:
    """The sessions whose time has come."""

    by: float


@dataclass(frozen=True, slots=True)
class Unused:
    """Sessions that may go to make room. Whose lifetime ends first is none of them."""

    latest: Mapping[Mode, float]
    """The latest idle deadline, for each mode."""

    owner: bytes | None = None
    """None: each."""


def _wants_nothing(*_: Any, **__: Any) -> Wanted:
    return NOTHING


def _step_of(
    method: _Method[P, T], wants: Wants = _wants_nothing, *, reads: bool = False
) -> _Method[P, T]:
    """Return a method of :class:`Steps` that does this one of the store in memory.

    Args:
        wants: The rows that it needs. It gets all arguments but the session's id.
        reads: It changes nothing.
    """
    do: Callable[..., Awaitable[Any]] = cast(Any, method)

    @wraps(method)
    async def step(self: Any, session_id: SessionId, *others: Any, **named: Any) -> Any:
        if self._clock is not None and "now" in named:
            named["now"] = await self._now(named["now"])
        if "entry" in named:
            named["entry"] = await self._dated(named["entry"])

        def work(working: Working) -> Awaitable[Any]:
            return do(working, session_id, *others, **named)

        wanted = wants(*others, **named)
        if reads:
            return await self._look(session_id, work, wanted=wanted)
        return await self._step(session_id, work, wanted=wanted, now=named.get("now", 0.0))

    return cast("_Method[P, T]", step)


def _stream_wants(*, stream: StreamName = EVENTS) -> Wanted:
    return Wanted(stream=stream)


def _data_wants(*_: Any, **__: Any) -> Wanted:
    return Wanted(data=True)


def _admit_wants(*_: Any, key: KeyUse | None = None, **__: Any) -> Wanted:
    return Wanted(request_key=key.key) if key is not None else NOTHING


def _key_wants(key: RequestKey, *_: Any, **__: Any) -> Wanted:
    return Wanted(request_key=key)


def _origin_wants(origin: SessionId, *_: Any, stream: StreamName = GET_STREAM, **__: Any) -> Wanted:
    return Wanted(stream=stream, origin=origin)


def append_wants(draft: Draft, *, stream: StreamName = EVENTS, **_: Any) -> Wanted:
    key = (draft.origin, draft.key) if draft.key is not None else None
    name = draft.name if draft.since is not None else None
    return Wanted(stream=stream, log=True, key=key, name=name, oldest=KNOWN_EVENTS)


def _read_wants(
    after: str | None, *, stream: StreamName = EVENTS, limit: int | None = None, **_: Any
) -> Wanted:
    position = parse_position(after) if after is not None else None
    number = position.number if position is not None else None
    return Wanted(stream=stream, log=True, after=number, limit=limit)


def _relay_wants(origin: SessionId, _: FencingEpoch, event: LoggedEvent, **__: Any) -> Wanted:
    key = (origin, event.key[1]) if event.key is not None else None
    return Wanted(stream=GET_STREAM, log=True, key=key)


def _attach_wants(*_: Any, position: Position | None = None, **__: Any) -> Wanted:
    after = position.number if position is not None else None
    return Wanted(stream=EVENTS, log=True, after=after)


class Steps:
    """The methods of a :class:`~mcp_sessions.stores.contract.SessionStore` that are about one
    session, and those that end some by time, or to make room.
    """

    _policy = SessionPolicy()

    _clock: SharedClock | None = None
    """The clock that counts, if it is not this process's."""

    async def _now(self, now: float) -> float:
        return now if self._clock is None else await self._clock.at(now)

    async def _step(
        self,
        session_id: SessionId,
        work: Callable[[Working], Awaitable[T]],
        *,
        wanted: Wanted = NOTHING,
        now: float = 0.0,
    ) -> T:
        """Do a step of one session. ``now`` is by the clock that counts."""
        raise NotImplementedError

    async def _look(
        self,
        session_id: SessionId,
        work: Callable[[Working], Awaitable[T]],
        *,
        wanted: Wanted = NOTHING,
    ) -> T:
        """Do a step that only reads."""
        raise NotImplementedError

    async def _on_many(
        self,
        which: Sequence[Due | Unused],
        work: Callable[[Working, int], Coroutine[Any, Any, Sequence[SessionRecord]]],
        *,
        now: float,
        limit: int,
        more: int,
    ) -> list[SessionRecord]:
        """Do a step of many sessions, of which it ends some: the records of those, as they were.

        Args:
            which: Those whose deadline is earliest are found first.
            work: The step. It ends so many.
            limit: How many it ends.
            more: How many it looks at besides, and may leave.
        """
        raise NotImplementedError

    async def expire(
        self, *, now: float, held: Collection[SessionId], limit: int
    ) -> Sequence[SessionRecord]:
        now, spared = await self._now(now), frozenset(held)
        return await self._on_many(
            [Due(now)],
            lambda working, left: working.expire(now=now, held=spared, limit=left),
            now=now, limit=limit, more=len(spared),
        )  # fmt: skip

    async def evict(
        self,
        *,
        now: float,
        unused_for: float,
        held: Collection[SessionId],
        limit: int,
        opened: bool,
    ) -> Sequence[SessionRecord]:
        now, spared = await self._now(now), frozenset(held)
        asleep = Unused(dict.fromkeys(SLEEPERS, asleep_by(now, self._policy)))
        latest = unused_by(Mode.TRANSPORT, now, unused_for, self._policy)
        return await self._on_many(
            [asleep, Unused({Mode.TRANSPORT: latest}, owner_of(ANONYMOUS))],
            lambda working, left: working.evict(
                now=now, unused_for=unused_for, held=spared, limit=left, opened=opened
            ),
            now=now, limit=limit, more=CANDIDATES + len(spared),
        )  # fmt: skip

    async def evict_own(
        self,
        principal: Principal,
        *,
        now: float,
        unused_for: float,
        held: Collection[SessionId],
        limit: int,
    ) -> Sequence[SessionRecord]:
        now, spared = await self._now(now), frozenset(held)
        latest = dict.fromkeys(SLEEPERS, asleep_by(now, self._policy))
        for mode in (Mode.CONVERSATION, Mode.KEYS):
            latest[mode] = unused_by(Mode.CONVERSATION, now, unused_for, self._policy)
        return await self._on_many(
            [Unused(latest, owner_of(principal))],
            lambda working, left: working.evict_own(
                principal, now=now, unused_for=unused_for, held=spared, limit=left
            ),
            now=now, limit=limit, more=CANDIDATES + len(spared),
        )  # fmt: skip

    load = _step_of(MemoryStore.load, reads=True)
    read = _step_of(MemoryStore.read, _read_wants, reads=True)
    head = _step_of(MemoryStore.head, _stream_wants, reads=True)
    load_data = _step_of(MemoryStore.load_data, _data_wants, reads=True)

    admit = _step_of(MemoryStore.admit, _admit_wants)
    append = _step_of(MemoryStore.append, append_wants)
    open_stream = _step_of(MemoryStore.open_stream)
    drop_stream = _step_of(MemoryStore.drop_stream)
    drop_origin = _step_of(MemoryStore.drop_origin, _origin_wants)
    carry = _step_of(MemoryStore.carry, _origin_wants)
    relay = _step_of(MemoryStore.relay, _relay_wants)
    attach = _step_of(MemoryStore.attach, _attach_wants)
    subscribe = _step_of(MemoryStore.subscribe)
    unsubscribe = _step_of(MemoryStore.unsubscribe)
    change_state = _step_of(MemoryStore.change_state)
    finish_request = _step_of(MemoryStore.finish_request, _key_wants)
    replace_data = _step_of(MemoryStore.replace_data, _data_wants)

    async def detach(
        self, session_id: SessionId, fencing_epoch: FencingEpoch, entry: Entry | None = None
    ) -> bool:
        entry = await self._dated(entry)
        return await self._step(
            session_id, lambda working: working.detach(session_id, fencing_epoch, entry)
        )

    async def _dated(self, entry: Entry | None) -> Entry | None:
        return Entry(await self._now(entry.at), entry.text) if entry is not None else None

    async def change(self, session_id: SessionId, change: RecordChange) -> bool:
        if isinstance(change, Tell):
            change = Tell([Entry(await self._now(at), text) for at, text in change.entries])
        return await self._step(session_id, lambda working: working.change(session_id, change))
