"""The steps of a session, for a store that keeps its sessions in the rows of a database.

Each step is done by the store in memory (:class:`Working`), so the rules are the same everywhere.
What a step reads first is in its :class:`Wanted`.
"""

from __future__ import annotations

import heapq
from collections.abc import Awaitable, Callable, Collection, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from mcp_sessions.core.life import SLEEPERS, asleep_by, unused_by
from mcp_sessions.core.log import Draft, LoggedEvent, Window
from mcp_sessions.core.states import Mode
from mcp_sessions.core.story import Entry
from mcp_sessions.errors import Refusal
from mcp_sessions.ids import (
    EVENTS,
    GET_STREAM,
    ConnectionId,
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
from mcp_sessions.stores.records import Appended, Attached, Data, Relayed, SessionRecord
from mcp_sessions.stores.sql.session_rows import Wanted, owner_of

T = TypeVar("T")

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


class Steps:
    """The methods of a :class:`~mcp_sessions.stores.contract.SessionStore` that are about one
    session, and those that end some by time, or to make room.
    """

    _policy = SessionPolicy()

    async def _now(self, now: float) -> float:
        """``now`` by the clock that counts."""
        return now

    async def _step(
        self,
        session_id: SessionId,
        work: Callable[[Working], Awaitable[T]],
        *,
        wanted: Wanted = NOTHING,
        now: float = 0.0,
    ) -> T:
        """Do a step of one session."""
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

    async def append(
        self, session_id: SessionId, draft: Draft, *, now: float, stream: StreamName = EVENTS
    ) -> Appended | None:
        now = await self._now(now)
        key = (draft.origin, draft.key) if draft.key is not None else None
        name = draft.name if draft.since is not None else None
        return await self._step(
            session_id,
            lambda working: working.append(session_id, draft, now=now, stream=stream),
            wanted=Wanted(stream=stream, log=True, key=key, name=name),
            now=now,
        )

    async def read(
        self,
        session_id: SessionId,
        after: str | None,
        *,
        now: float,
        stream: StreamName = EVENTS,
        limit: int | None = None,
    ) -> tuple[Sequence[LoggedEvent], Refusal | None]:
        now = await self._now(now)
        position = parse_position(after) if after is not None else None
        number = position.number if position is not None else None
        return await self._look(
            session_id,
            lambda working: working.read(session_id, after, now=now, stream=stream, limit=limit),
            wanted=Wanted(stream=stream, log=True, after=number, limit=limit),
        )

    async def head(self, session_id: SessionId, *, stream: StreamName = EVENTS) -> Position | None:
        return await self._look(
            session_id,
            lambda working: working.head(session_id, stream=stream),
            wanted=Wanted(stream=stream),
        )

    async def open_stream(self, session_id: SessionId, stream: StreamName) -> Position | None:
        return await self._step(session_id, lambda working: working.open_stream(session_id, stream))

    async def drop_stream(self, session_id: SessionId, stream: StreamName) -> None:
        await self._step(session_id, lambda working: working.drop_stream(session_id, stream))

    async def drop_origin(
        self,
        session_id: SessionId,
        origin: SessionId,
        *,
        stream: StreamName = GET_STREAM,
        fencing_epoch: FencingEpoch | None = None,
    ) -> None:
        await self._step(
            session_id,
            lambda working: working.drop_origin(
                session_id, origin, stream=stream, fencing_epoch=fencing_epoch
            ),
            wanted=Wanted(stream=stream, origin=origin),
        )

    async def carry(
        self, connection: SessionId, origin: SessionId, fencing_epoch: FencingEpoch, after: Position
    ) -> bool:
        return await self._step(
            connection,
            lambda working: working.carry(connection, origin, fencing_epoch, after),
            wanted=Wanted(stream=GET_STREAM, origin=origin),
        )

    async def relay(
        self,
        connection: SessionId,
        origin: SessionId,
        fencing_epoch: FencingEpoch,
        event: LoggedEvent,
        *,
        now: float,
        skips: bool = False,
    ) -> Relayed:
        now = await self._now(now)
        key = (origin, event.key[1]) if event.key is not None else None
        return await self._step(
            connection,
            lambda working: working.relay(
                connection, origin, fencing_epoch, event, now=now, skips=skips
            ),
            wanted=Wanted(stream=GET_STREAM, log=True, key=key),
            now=now,
        )

    async def attach(
        self,
        session_id: SessionId,
        connection_id: ConnectionId | None,
        *,
        now: float,
        position: Position | None = None,
        only_if_free: bool = False,
        entry: Entry | None = None,
    ) -> Attached | None:
        now, entry = await self._now(now), await self._dated(entry)
        after = position.number if position is not None else None
        return await self._step(
            session_id,
            lambda working: working.attach(
                session_id,
                connection_id,
                now=now,
                position=position,
                only_if_free=only_if_free,
                entry=entry,
            ),  # fmt: skip
            wanted=Wanted(stream=EVENTS, log=True, after=after),
            now=now,
        )

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

    async def subscribe(self, session_id: SessionId, uri: str) -> bool:
        return await self._step(session_id, lambda working: working.subscribe(session_id, uri))

    async def unsubscribe(self, session_id: SessionId, uri: str) -> bool:
        return await self._step(session_id, lambda working: working.unsubscribe(session_id, uri))

    async def change_state(
        self,
        session_id: SessionId,
        changed: Mapping[str, Any],
        removed: Collection[str],
        *,
        expected_version: int | None = None,
    ) -> SessionRecord | None:
        return await self._step(
            session_id,
            lambda working: working.change_state(
                session_id, changed, removed, expected_version=expected_version
            ),
        )

    async def finish_request(
        self, session_id: SessionId, key: RequestKey, outcome: bytes | None, *, now: float
    ) -> bool:
        now = await self._now(now)
        return await self._step(
            session_id,
            lambda working: working.finish_request(session_id, key, outcome, now=now),
            wanted=Wanted(request_key=key),
            now=now,
        )

    async def load_data(self, session_id: SessionId) -> Data | None:
        return await self._look(
            session_id, lambda working: working.load_data(session_id), wanted=Wanted(data=True)
        )

    async def replace_data(
        self, session_id: SessionId, value: Mapping[str, Any], *, expected_version: int
    ) -> bool:
        return await self._step(
            session_id,
            lambda working: working.replace_data(
                session_id, value, expected_version=expected_version
            ),
            wanted=Wanted(data=True),
        )
