from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import anyio
from anyio.lowlevel import checkpoint

from mcp_sessions.core.log import Draft, LoggedEvent
from mcp_sessions.core.messages import EventTemplate, notification_message, plain_draft
from mcp_sessions.core.request_keys import Begun, KeyUse
from mcp_sessions.core.states import Mode
from mcp_sessions.errors import LimitReached, Refusal
from mcp_sessions.ids import (
    EVENTS,
    GET_STREAM,
    IN_NO_LOG,
    ConnectionId,
    FencingEpoch,
    Position,
    RequestKey,
    SessionEventId,
    SessionId,
    StreamName,
    parse_position,
)
from mcp_sessions.policy import SessionPolicy
from mcp_sessions.principal import Principal
from mcp_sessions.stores.contract import SessionStore
from mcp_sessions.stores.exchange import Exchange
from mcp_sessions.stores.record_changes import (
    RenewEvents,
    SetCurrent,
    SetFilter,
    SetLogLevel,
    SetStreamOpened,
    SetWaitsFrom,
)
from mcp_sessions.stores.records import (
    Admitted,
    Appended,
    Attached,
    Attachment,
    CurrentSession,
    ServerChange,
    SessionRecord,
)

T = TypeVar("T")

MakeStore = Callable[[], SessionStore]
"""A new store that is not open yet, is empty, and shares nothing with those made before."""

MakeTwoStores = Callable[[], tuple[SessionStore, SessionStore]]
"""Two stores that are not open yet, as two processes would make them: they share everything
with each other, and nothing with those made before. Both have an ``exchange``.
"""

Check = Callable[[MakeStore], Awaitable[None]]
"""One rule: returns if the store keeps it, raises ``AssertionError`` if not."""

NOW = 1_800_000_000.0
IDLE = 100.0
LIFETIME = 1_000.0

ALICE = Principal("client", "https://issuer.example", "alice")
BOB = Principal("client", "https://issuer.example", "bob")
HERE, THERE = ConnectionId("here"), ConnectionId("there")
POST_STREAM = StreamName("post")
MESSAGE = Draft(b"{}")
MCP_MODES = (Mode.PROTOCOL, Mode.TRANSPORT)
KEY = KeyUse(RequestKey("key"), b"digest", "process-1")
RESULT = b'"result":{}'
NO_STREAM: tuple[list[int], Refusal | None] = ([], Refusal.UNKNOWN_POSITION)
"""The answer of a missing stream to every read."""


@dataclass(frozen=True)
class SessionOf:
    store: SessionStore
    id: SessionId

    async def record(self, *, now: float = NOW) -> SessionRecord:
        record = await self.store.load(self.id, now=now)
        assert record is not None
        return record

    async def deadline(self, *, now: float = NOW) -> float:
        return (await self.record(now=now)).life.expires_at

    async def admit(
        self,
        key: KeyUse | None = None,
        *,
        principal: Principal = ALICE,
        mode: Mode = Mode.PROTOCOL,
        now: float = NOW,
        held: bool = False,
        fencing_epoch: FencingEpoch | None = None,
    ) -> Admitted | None:
        return await self.store.admit(
            self.id,
            principal,
            mode=mode,
            now=now,
            held=held,
            fencing_epoch=fencing_epoch,
            key=key,
        )

    async def begin(self, key: KeyUse, *, now: float = NOW) -> tuple[Begun | None, bytes | None]:
        admitted = await self.admit(key, now=now)
        assert admitted is not None
        return admitted.key, admitted.outcome

    async def attach(
        self, connection_id: ConnectionId | None, position: str | None = None, *, now: float = NOW
    ) -> Attached:
        after = None if position is None else parse_position(position) or IN_NO_LOG
        attached = await self.store.attach(self.id, connection_id, now=now, position=after)
        assert attached is not None
        return attached

    async def append(
        self, draft: Draft = MESSAGE, *, stream: StreamName = EVENTS, now: float = NOW
    ) -> Appended:
        appended = await self.store.append(self.id, draft, now=now, stream=stream)
        assert appended is not None
        return appended

    async def head(self, stream: StreamName = EVENTS) -> SessionEventId:
        head = await self.store.head(self.id, stream=stream)
        assert head is not None
        return head.event_id()

    async def position(self, number: int, stream: StreamName = EVENTS) -> SessionEventId:
        head = await self.store.head(self.id, stream=stream)
        assert head is not None
        return Position(head.log_epoch, number).event_id()

    async def read(
        self, position: str | None, *, stream: StreamName = EVENTS, now: float = NOW
    ) -> tuple[list[int], Refusal | None]:
        events, refusal = await self.store.read(self.id, position, now=now, stream=stream)
        return numbers_of(events), refusal

    async def missed(self, seen: int) -> list[int]:
        numbers, refusal = await self.read(await self.position(seen))
        assert refusal is None
        return numbers

    async def kept(self, stream: StreamName = EVENTS) -> list[int]:
        for number in range(number_of(await self.head(stream)) + 1):
            position = await self.position(number, stream)
            numbers, refusal = await self.read(position, stream=stream)
            if refusal is None:
                return numbers
        raise AssertionError("the head is always a valid position")

    async def check_gone(self) -> None:
        """No call finds the session, and none brings it back."""
        store = self.store
        await store.touch([self.id], now=NOW)
        assert await store.load(self.id, now=NOW) is None
        for mode in Mode:
            assert await self.admit(KEY, mode=mode, held=True) is None
        for stream in (EVENTS, GET_STREAM):
            assert await store.append(self.id, MESSAGE, now=NOW, stream=stream) is None
            assert await store.open_stream(self.id, stream) is None
            assert await store.head(self.id, stream=stream) is None
            assert await self.read(None, stream=stream) == NO_STREAM
            await store.drop_origin(self.id, self.id, stream=stream)
        await store.drop_stream(self.id, GET_STREAM)
        assert await store.attach(self.id, HERE, now=NOW) is None
        assert not await store.detach(self.id, FencingEpoch(1))
        assert not await store.change(self.id, SetCurrent(CurrentSession(self.id, FencingEpoch(1))))
        assert not await store.change(self.id, SetStreamOpened())
        assert not await store.subscribe(self.id, "note://1")
        assert not await store.unsubscribe(self.id, "note://1")
        assert not await store.change(self.id, SetFilter(frozenset({"note://1"}), frozenset()))
        assert self.id not in await subscribers_of(store, "note://1")
        assert not await store.change(self.id, SetWaitsFrom(None))
        assert not await store.change(self.id, SetLogLevel("info"))
        assert not await store.change(self.id, RenewEvents())
        assert await store.change_state(self.id, {"n": 1}, ()) is None
        assert not await store.finish_request(self.id, KEY.key, RESULT, now=NOW)
        assert await store.load_data(self.id) is None
        assert not await store.replace_data(self.id, {}, expected_version=0)
        assert self.id not in await ids_of(store)
        assert await store.end(self.id) is None


@asynccontextmanager
async def opened(make: MakeStore, **limits: Any) -> AsyncGenerator[SessionStore, None]:
    durations: dict[str, Any] = {"idle_timeout": IDLE, "max_lifetime": LIFETIME}
    store = make()
    await store.open(SessionPolicy(**(durations | limits)))
    try:
        yield store
    finally:
        await store.close()


async def new_session(
    store: SessionStore,
    principal: Principal = ALICE,
    *,
    mode: Mode = Mode.PROTOCOL,
    now: float = NOW,
) -> SessionOf:
    return SessionOf(store, (await store.create(mode, principal, peer=None, now=now)).session_id)


async def ids_of(store: SessionStore, principal: Principal | None = None) -> set[SessionId]:
    return {record.session_id for record in await store.all_sessions(principal)}


async def limit_of(call: Callable[[], Awaitable[Any]]) -> str:
    try:
        await call()
    except LimitReached as reached:
        return reached.limit
    raise AssertionError("a limit was exceeded")


async def at_once(call: Callable[[int], Coroutine[Any, Any, None]], *, times: int = 20) -> None:
    async def start(number: int) -> None:
        await checkpoint()
        await call(number)

    async with anyio.create_task_group() as tasks:
        for number in range(times):
            tasks.start_soon(start, number)


def numbers_of(events: Sequence[LoggedEvent]) -> list[int]:
    return [event.number for event in events]


def number_of(event_id: str) -> int:
    position = parse_position(event_id)
    assert position is not None
    return position.number


class ReceivedItems(Generic[T]):
    def __init__(self) -> None:
        self.received: list[T] = []
        self._grew = anyio.Event()

    def add(self, item: T) -> None:
        self.received.append(item)
        self._grew.set()

    async def until(self, count: int) -> None:
        with anyio.fail_after(20):
            while len(self.received) < count:
                self._grew = anyio.Event()
                await self._grew.wait()


@dataclass
class Process:
    name: str
    store: SessionStore
    exchange: Exchange
    messages: ReceivedItems[bytes]
    events: ReceivedItems[tuple[SessionId, StreamName, LoggedEvent, Attachment | None]]
    gaps: int = 0

    def on_message(self, message: bytes) -> None:
        self.messages.add(message)

    def on_event(
        self,
        session_id: SessionId,
        stream: StreamName,
        event: LoggedEvent,
        attachment: Attachment | None,
    ) -> None:
        self.events.add((session_id, stream, event, attachment))

    def on_gap(self) -> None:
        self.gaps += 1


@asynccontextmanager
async def two_processes(
    make_two: MakeTwoStores,
) -> AsyncGenerator[tuple[Process, Process], None]:
    async with AsyncExitStack() as opened:
        processes: list[Process] = []
        for name, store in zip(("process-1", "process-2"), make_two(), strict=True):
            await store.open(SessionPolicy(idle_timeout=IDLE, max_lifetime=LIFETIME))
            opened.push_async_callback(store.close)
            assert store.exchange is not None
            process = Process(name, store, store.exchange, ReceivedItems(), ReceivedItems())
            await store.exchange.join(name, process)
            processes.append(process)
        yield processes[0], processes[1]
        assert not processes[0].gaps and not processes[1].gaps, "nothing was lost"


def change_of(uri: str | None = None, listed: str | None = None) -> ServerChange:
    method = "notifications/resources/updated" if uri is not None else f"notifications/{listed}/x"
    params = {"uri": uri} if uri is not None else None
    key = method if uri is None else f"{method} {uri}"
    return ServerChange(
        "process.1",
        NOW,
        uri,
        listed,
        EventTemplate(method, params, key),
        plain_draft(notification_message(method, params), key),
    )


async def audience_of(store: SessionStore, change: ServerChange) -> set[SessionId]:
    found: set[SessionId] = set()
    cursor: str | None = None
    while True:
        page = await store.audience(change, cursor)
        found.update(page.session_ids)
        cursor = page.following
        if cursor is None:
            return found


async def subscribers_of(store: SessionStore, uri: str) -> list[SessionId]:
    """The sessions that subscribed to a resource, in order, as who sends its update finds them."""
    found: list[SessionId] = []
    for session_id in sorted(await audience_of(store, change_of(uri))):
        record = await store.load(session_id, now=0)
        if record is not None and uri in record.client.subscriptions:
            found.append(session_id)
    return found
