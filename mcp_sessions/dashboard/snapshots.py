"""Take snapshots of a store: one for all pages that are open, and none if none is open.

A snapshot reads the sessions page by page. It keeps a short row of each and nothing that an
application or a client stored. The time until the next snapshot depends on the time that the last
one took. So snapshots take a small part of the store's time, however many sessions it has.
"""

from __future__ import annotations

import asyncio
import math
from collections import Counter, deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Protocol

from mcp_sessions.background import watched
from mcp_sessions.core.ends import SessionEnd, StoreMade
from mcp_sessions.core.life import has_come
from mcp_sessions.core.states import Mode
from mcp_sessions.core.story import troubles
from mcp_sessions.errors import StoreUnavailable
from mcp_sessions.ids import SessionId, digest, process_of, replica_name
from mcp_sessions.policy import FORGET_AFTER, SessionPolicy
from mcp_sessions.server.cluster.replica_messages import Instruct
from mcp_sessions.stores.ends_contract import IdleTimes, client_name, principal_name
from mcp_sessions.stores.operator import OperatorStore
from mcp_sessions.stores.probe import StoreSize
from mcp_sessions.stores.records import SessionRecord

EVERY = 2.0
"""Seconds between two snapshots, at least."""

_SHARE = 5
"""Times as long as a snapshot took, the next one waits."""

_ENDS_EVERY = 10.0
"""Seconds between two readings of how sessions ended, at least. :data:`EVERY` while somebody looks
for one that is not there yet."""

_SHARE_OF_ENDS = 20
"""Times as long as it took to read the ends, the next time waits: with their stories, ten thousand
are long, and a store may answer nobody else meanwhile."""

_PAGE = 100
"""Sessions that the store is asked for at once, while a page waits for the first ones."""

_SMALL_PAGE = 20
"""The same, later: no call waits for longer than these take."""

_GAP = 2
"""Times as long as a page took, calls have their turn."""

MOST_ROWS = 50_000
"""Sessions that a snapshot keeps. The page says if there are more."""

_FRESH = 1.0
"""Seconds for which a snapshot is good for another request."""

_PATIENCE = 0.8
"""Seconds that a page waits for a snapshot. Replicas have a part of them for their answers."""

_FIRST = 500
"""Sessions that a snapshot has read when a page does not wait any more, if there are others."""

_NOTICED = 0.5
"""Seconds after which a page that is open notices that the process leaves."""

HOUR = 3_600.0
"""Seconds for which the first view looks back."""

_MINUTE = 60.0

_MOST_SILENT = 50
"""Processes that do not answer, and of which the store is asked whether they live."""

_HISTORY = 150
"""Snapshots whose numbers are kept, for the lines of the first view."""

_NAME = 60
"""Characters of a name, at most."""

ANONYMOUS = "anonymous"
NOWHERE = "none"
_KINDS = ("websocket", "stdio", "listen")


@dataclass(slots=True)
class Row:
    """What a snapshot keeps of a session."""

    session_id: SessionId = field(repr=False)
    digest: str
    mode: str
    connection_id: str | None = field(repr=False)

    client: str
    principal: str
    created_at: float
    used_at: float | None
    """None: unknown. A conversation has no idle time."""

    expires_at: float
    attachments: int
    """How often it was attached."""

    subscriptions: int
    troubles: Mapping[str, int]
    """What went wrong in the last hour (:func:`~mcp_sessions.core.story.troubles`)."""

    transport: str = field(default=NOWHERE, compare=False)
    """Follows from the connection, as soon as the other rows are known."""

    @property
    def process(self) -> str | None:
        """The process that has its connection. None: none, or any, as over HTTP."""
        return process_of(self.connection_id) if self.connection_id is not None else None

    @property
    def replica(self) -> str:
        return replica_name(self.process) if self.process is not None else ""

    @property
    def is_attached(self) -> bool:
        return self.transport != NOWHERE


@dataclass(frozen=True, slots=True)
class Sums:
    """Made row by row: all of them at once would hold up calls."""

    modes: Counter[str] = field(default_factory=Counter[str])
    clients: Counter[str] = field(default_factory=Counter[str])
    principals: Counter[str] = field(default_factory=Counter[str])
    transports: Counter[str] = field(default_factory=Counter[str])
    """Of those that are attached."""

    troubled: list[Row] = field(default_factory=list[Row])
    processes: Counter[str] = field(default_factory=Counter[str])
    """Process → sessions that are attached to its connections."""

    used_at: dict[str, float] = field(default_factory=dict[str, float])
    """Process → when one of them was used last."""

    def add(self, row: Row) -> None:
        self.modes[row.mode] += 1
        self.clients[row.client] += 1
        self.principals[row.principal] += 1
        if row.is_attached:
            self.transports[row.transport] += 1
        if row.troubles:
            self.troubled.append(row)
        if (process := row.process) is not None:
            self.processes[process] += 1
            self.used_at[process] = max(self.used_at.get(process, 0.0), row.used_at or 0.0)


class Numbers(NamedTuple):
    at: float
    sessions: int
    attached: int
    calls: int


@dataclass(frozen=True, slots=True)
class Snapshot:
    """What the store had at one time, and what the replicas said."""

    number: int
    at: float
    """Seconds since 1970."""

    rows: Sequence[Row] = ()
    sums: Sums = field(default_factory=Sums)
    is_cut: bool = False
    """There were more sessions."""

    is_begun: bool = False
    """The first snapshot has not read all sessions yet."""

    tasks: Sequence[tuple[float, SessionId]] = field(default=(), repr=False)
    """When each task was made, and its id. Newest first."""

    ends: Sequence[SessionEnd] = ()
    """Oldest first. Those that no server has noted are the last ones, without their stories."""

    expired: Mapping[str, SessionId] = field(default_factory=dict[str, SessionId], repr=False)
    """Sessions whose time has passed, and that no server has ended yet. By digest."""

    made: StoreMade | None = None
    replicas: Sequence[Mapping[str, Any]] = ()
    """What each replica that answered said of itself."""

    alive: Mapping[str, bool | None] = field(default_factory=dict[str, "bool | None"])
    """Of the processes that did not answer, and that sessions are attached to. None: unknown."""

    size: StoreSize | None = None
    """With tasks, and sessions that expired. None: unknown."""

    took: float = 0.0
    """Seconds that the store took."""

    round_trip: float = 0.0
    """Seconds of the quickest call of the store."""

    counts: Mapping[str, int] = field(default_factory=dict[str, int])
    """What all replicas counted since somebody looks."""

    rates: Mapping[str, float] = field(default_factory=dict[str, float])
    """The same, for a minute. Empty: there was no snapshot before."""

    calls_of_store: int = 0
    history: Sequence[Numbers] = ()
    failure: str = ""
    """Why there is nothing newer: the store is away."""

    by_digest: Mapping[str, Row] = field(default_factory=dict[str, Row])


class Fleet(Protocol):
    """The running servers behind a store, as far as they can be asked."""

    hint: str
    """What it cannot say, in one line; empty: nothing."""

    def hold(self, task: asyncio.Task[Any]) -> None:
        """Cancel a task when this process leaves them."""
        ...

    async def look(self) -> Sequence[Mapping[str, Any]]:
        """What each replica says of itself."""
        ...

    async def latest_method(self, session_id: SessionId) -> str | None:
        """The method of the newest request of a session; None: no replica knows one."""
        ...

    async def is_alive(self, process: str) -> bool | None:
        """Whether a process lives; None: nobody knows."""
        ...

    async def instruct(self, process: str, message: Instruct) -> bool:
        """Let a replica do something; False if nobody heard it."""
        ...


class NoFleet:
    """Servers that cannot be asked: the store has no way to them."""

    hint = (
        "Only the store is read here. Running calls, processes and memory are in the server: "
        "start it with serve --dashboard PATH to see them."
    )

    def hold(self, task: asyncio.Task[Any]) -> None:
        """Do nothing: the task ends with its process, which has the page alone."""

    async def look(self) -> Sequence[Mapping[str, Any]]:
        return ()

    async def latest_method(self, session_id: SessionId) -> str | None:
        return None

    async def is_alive(self, process: str) -> bool | None:
        return None

    async def instruct(self, process: str, message: Instruct) -> bool:
        return False


class Snapshots:
    """Share snapshots among pages.

    Args:
        policy: The times that tell when a session was used.
        clock: Seconds since 1970.
        is_leaving: Says whether the process is about to stop. No page is kept up to date then.
    """

    def __init__(
        self,
        store: OperatorStore,
        fleet: Fleet,
        *,
        policy: SessionPolicy,
        clock: Callable[[], float],
        is_leaving: Callable[[], bool],
    ) -> None:
        self.store, self.fleet, self.clock = store, fleet, clock
        self.times = IdleTimes(policy.idle_timeout, policy.forget_after or FORGET_AFTER)
        self._is_leaving = is_leaving
        self._last: Snapshot | None = None
        self._pending: asyncio.Task[Snapshot] | None = None
        self._is_long: asyncio.Future[None]
        """Done when the snapshot that runs has read many sessions, and there are others."""

        self._size: StoreSize | None = None
        self._ends: Sequence[SessionEnd] = ()
        self._ends_pending: asyncio.Task[Sequence[SessionEnd]] | None = None
        self._ends_at = -math.inf
        self._ends_every, self._ends_took = _ENDS_EVERY, 0.0
        self._history: deque[Numbers] = deque(maxlen=_HISTORY)
        self._counted: deque[tuple[float, Mapping[str, int]]] = deque()
        """What was counted by the snapshots of the last minute, and by one before."""

        self._so_far: dict[str, Row] = {}
        self._sums = Sums()
        """What the snapshot that runs has by now."""

        self._watchers = 0
        self._calls = 0
        self._quickest = math.inf
        self._took = 0.0

    @property
    def watchers(self) -> int:
        """Pages that wait for changes."""
        return self._watchers

    async def now(self) -> Snapshot:
        """A snapshot that is not older than a second, or as the store allows.

        A store that is away does not raise: :attr:`Snapshot.failure` says so.
        """
        last = self._last
        if last is not None and self.clock() - last.at < self._pause(last, _FRESH):
            return last
        # A page comes soon, with what is known: a snapshot of many sessions takes a while.
        snapshot = self._shared()
        await asyncio.wait(
            {snapshot, self._is_long}, timeout=_PATIENCE, return_when=asyncio.FIRST_COMPLETED
        )
        if self._last is not None:
            return self._last
        rows = dict(self._so_far)
        return Snapshot(
            0, self.clock(), list(rows.values()), self._sums,
            is_begun=True, size=self._size, by_digest=rows,
        )  # fmt: skip

    async def whole(self) -> Snapshot:
        """A snapshot of all sessions, as new as :meth:`now` gives it."""
        snapshot = await self.now()
        return await asyncio.shield(self._shared()) if snapshot.is_begun else snapshot

    async def newest_ends(self) -> Sequence[SessionEnd]:
        """How sessions ended, as the store says now. All who ask meanwhile share the answer.

        Raises:
            StoreUnavailable: The store does not say it.
        """
        if self._ends_pending is None or self._ends_pending.done():
            self._ends_pending = asyncio.create_task(self._read_ends())
        return await asyncio.shield(self._ends_pending)

    async def _read_ends(self) -> Sequence[SessionEnd]:
        began = asyncio.get_running_loop().time()
        self._ends_every, self._ends_at = _ENDS_EVERY, self.clock()
        self._ends = await self.store.ends()
        self._ends_took = asyncio.get_running_loop().time() - began
        return self._ends

    def want_ends(self) -> None:
        """Let the next snapshot read how sessions ended: somebody looks for an end."""
        self._ends_every = EVERY

    async def changes(self, *, often: bool = False) -> AsyncGenerator[Snapshot]:
        """Each snapshot from now on, while somebody reads this and the process does not leave.

        Args:
            often: Also the one before again, every two seconds: the reader shows one session.
        """
        self._watchers += 1
        try:
            snapshot = await self.now()
            yield snapshot
            while True:
                if snapshot.is_begun:
                    snapshot = await self.whole()
                    yield snapshot
                if not await self._has_passed(EVERY if often else self._pause(snapshot, EVERY)):
                    return
                newest = await self.now()
                if often or newest.number != snapshot.number:
                    yield newest
                snapshot = newest
        finally:
            self._watchers -= 1

    async def _has_passed(self, seconds: float) -> bool:
        """Wait; False as soon as the process leaves: it waits for whoever still reads."""
        loop = asyncio.get_running_loop()
        until = loop.time() + seconds
        while not self._is_leaving():
            left = until - loop.time()
            if left <= 0:
                return True
            await asyncio.sleep(min(left, _NOTICED))
        return False

    @staticmethod
    def _pause(snapshot: Snapshot, least: float) -> float:
        return max(least, snapshot.took * _SHARE)

    def _shared(self) -> asyncio.Task[Snapshot]:
        if self._pending is None or self._pending.done():
            self._is_long = asyncio.get_running_loop().create_future()
            self._pending = asyncio.create_task(self._take())
            watched("a snapshot of the store", self._pending)
            self.fleet.hold(self._pending)
        return self._pending

    async def _take(self) -> Snapshot:
        last = self._last or Snapshot(0, self.clock())
        try:
            snapshot = await self._read(last)
        except StoreUnavailable as failed:
            snapshot = replace(
                last, number=last.number + 1, at=self.clock(), failure=str(failed) or "it is away"
            )
        self._last = snapshot
        return snapshot

    async def _asked(self, call: Awaitable[Any]) -> Any:
        loop = asyncio.get_running_loop()
        began = loop.time()
        answer = await call
        self._calls += 1
        took = loop.time() - began
        self._took += took
        self._quickest = min(self._quickest, took)
        return answer

    async def _read(self, last: Snapshot) -> Snapshot:
        now, self._calls, self._took, self._quickest = self.clock(), 0, 0.0, math.inf
        loop = asyncio.get_running_loop()
        rows: dict[str, Row] = {}
        self._so_far, self._sums = rows, Sums()
        sums = self._sums
        self._size = await self._asked(self.store.size())
        expired: dict[str, SessionId] = {}
        not_noted: list[SessionEnd] = []
        tasks: dict[SessionId, float] = {}
        connected: list[Row] = []
        after: str | None = None
        is_cut, count = False, 0
        while not is_cut:
            size = _PAGE if count < _FIRST else _SMALL_PAGE
            began = loop.time()
            page = await self._asked(self.store.some_sessions(after, size))
            for record in page.records:
                name = digest(record.session_id)
                is_over = has_come(record.life.expires_at, now)
                if record.mode is Mode.TASK:
                    if not is_over:
                        tasks[record.session_id] = record.life.created_at
                elif record.mode is Mode.KEYS:
                    continue
                elif is_over:
                    expired[name] = record.session_id
                    not_noted.append(replace(self.times.end_of_expired(record), story=""))
                else:
                    row = self._row(record, name)
                    follows = row.connection_id is not None and not row.is_attached
                    known = last.by_digest.get(name)
                    if known is not None and row == known:
                        # The collector of garbage looks at what is new, and calls wait for it.
                        row = known
                    rows[name] = row
                    sums.add(row)
                    # A row that is kept says http: that connection may have ended since.
                    if follows and row.transport in (NOWHERE, "http"):
                        connected.append(row)
            after = page.following
            if after is None:
                break
            is_cut = len(rows) >= MOST_ROWS
            count += len(page.records)
            if count < _FIRST:
                continue
            if not self._is_long.done():
                self._is_long.set_result(None)
            await asyncio.sleep(min(0.05, (loop.time() - began) * _GAP))
        for row in connected:
            sums.transports[row.transport] -= row.is_attached
            row.transport = _transport(row, rows)
            sums.transports[row.transport] += row.is_attached
        made = last.made
        if now - self._ends_at >= max(self._ends_every, self._ends_took * _SHARE_OF_ENDS):
            await self._asked(self.newest_ends())
            made = await self._asked(self.store.made())
        known = {each.session for each in self._ends}
        ends = [*self._ends, *(each for each in not_noted if each.session not in known)]
        replicas = await self.fleet.look()
        silent = sums.processes.keys() - {each["process"] for each in replicas}
        newest_first = sorted(silent, key=lambda each: -sums.used_at[each])
        alive = {each: await self.fleet.is_alive(each) for each in newest_first[:_MOST_SILENT]}
        listed = list(rows.values())
        counts = Counter[str]()
        for each in replicas:
            counts.update(each.get("counts", {}))
        newest = sorted(((at, each) for each, at in tasks.items()), reverse=True)
        self._history.append(
            Numbers(
                now,
                len(listed),
                sums.transports.total(),
                sum(int(each.get("running", 0)) for each in replicas),
            )
        )
        return Snapshot(
            last.number + 1, now, listed, sums, is_cut, False, newest, ends, expired, made,
            replicas, alive, self._size, self._took, self._quickest, counts,
            self._rates(now, counts), self._calls, list(self._history), by_digest=rows,
        )  # fmt: skip

    def _rates(self, now: float, counts: Mapping[str, int]) -> Mapping[str, float]:
        while len(self._counted) > 1 and self._counted[1][0] <= now - _MINUTE:
            self._counted.popleft()
        self._counted.append((now, counts))
        at, before = self._counted[0]
        if now <= at:
            return {}
        minutes = (now - at) / _MINUTE
        # A replica that is gone takes what it counted with it.
        return {each: max(0, counts[each] - before.get(each, 0)) / minutes for each in counts}

    def newer(self, record: SessionRecord, row: Row) -> Row:
        """A row of the last snapshot, as its session is now."""
        newest = self._row(record, row.digest)
        if newest.connection_id is not None:
            newest.transport = _kind(newest.connection_id) or "http"
        return newest

    def _row(self, record: SessionRecord, name: str) -> Row:
        attachment = record.attachment
        return Row(
            record.session_id,
            name,
            record.mode.value,
            attachment.connection_id if attachment is not None else None,
            (client_name(record.client.peer) or "")[:_NAME],
            (principal_name(record.principal) or ANONYMOUS)[:_NAME],
            record.life.created_at,
            self.times.used_at(record),
            record.life.expires_at,
            record.fencing_epoch,
            len(record.client.subscriptions),
            troubles(record.story, self.clock() - HOUR),
            "http" if record.mode is Mode.TRANSPORT else NOWHERE,
        )


def _kind(connection_id: str) -> str | None:
    return next((each for each in _KINDS if connection_id.startswith(f"{each}-")), None)


def _transport(row: Row, rows: Mapping[str, Row]) -> str:
    connection_id = row.connection_id or ""
    # An HTTP connection has the id of its own session.
    return _kind(connection_id) or ("http" if digest(connection_id) in rows else NOWHERE)
