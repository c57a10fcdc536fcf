"""Several replicas in one event loop: layers that share a store, and what can go wrong there.

    async with cluster(3) as c:
        client = await c[0].connected()
        same = c.at(1, client)
        stream = same.get()

By default they share one `MemoryStore` as processes share a Redis: every call suspends before
and after its step, in an order that the seed decides, and takes and returns copies, so that
nothing can be known of another's doings but through the store and through messages. A test
may lose messages, cut a replica off, and kill one: it then does nothing more, and never says
so.

While `share` holds they share a real store, in real time; then none of that can be done
to them.
"""

import asyncio
import copy
import inspect
import itertools
import random
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from contextvars import copy_context
from dataclasses import dataclass, field
from typing import Any, cast

from mcp.server.auth.middleware.bearer_auth import AuthenticatedUser
from mcp.server.auth.provider import AccessToken

from mcp_sessions.core.log import LoggedEvent
from mcp_sessions.errors import StoreUnavailable
from mcp_sessions.ids import EVENTS, GET_STREAM, SessionId, StreamName
from mcp_sessions.policy import SessionPolicy
from mcp_sessions.stores.contract import SessionStore
from mcp_sessions.stores.exchange import LIVENESS, ExchangeListener
from mcp_sessions.stores.memory import MemoryStore
from mcp_sessions.stores.records import Appended, AppendedChange, Attachment, Relayed, ServerChange
from tests.support.copied import copied
from tests.support.postgres_server import postgres_store
from tests.support.raw import Json, RawClient, Reply
from tests.support.redis_server import namespace, redis_store
from tests.support.world import Clock, Toolbox, World, world

_Key = tuple[SessionId, StreamName]

_PUBLISHING = ("open", "close", "append", "relay", "tell")
"""The methods of the memory behind it that are more here."""


class Backplane:
    """What the replicas share: the store, and the messages between them."""

    def __init__(self, seed: int = 0) -> None:
        self.memory = MemoryStore()
        self.chance = random.Random(seed)
        self.members: dict[str, Member] = {}
        self.sent: deque[bytes] = deque(maxlen=1_000)
        """The newest messages between two replicas, lost or not."""

        self.loses: Callable[[bytes], bool] = _nothing_is_lost
        """Whether a message is lost; of an event its payload is asked."""

        self.way = 0.0
        """Seconds that a message takes. 0: some steps."""

        self.is_away = False
        """The store answers nobody."""

        self.held: dict[SessionId, str] = {}
        """Who has what a session keeps in one process."""

        """Change → who has it."""

        self._is_open = False

    def store(self) -> "SharedStore":
        return SharedStore(self)

    async def open(self, policy: SessionPolicy) -> None:
        """Once, by whoever comes first."""
        if not self._is_open:
            self._is_open = True
            await self.memory.open(policy)

    def publish(self, key: _Key, event: LoggedEvent | None, attachment: Attachment | None) -> None:
        """Tell who watches a stream; in the step in which the event was stored."""
        if event is None or self.loses(event.payload):
            return
        for member in self.members.values():
            if key in member.watched:
                member.put(lambda received, k=key: received.on_event(*k, event, attachment))


class Member:
    """One process's end of the messages; an :class:`~mcp_sessions.stores.exchange.Exchange`."""

    def __init__(self, backplane: Backplane) -> None:
        self._backplane = backplane
        self.process = ""
        self.watched: set[_Key] = set()
        self.died_at: float | None = None
        self.silent_since: float | None = None
        """The process stands still, and gives no sign of life."""

        self.is_cut_off = False
        self.is_deaf = False
        """It connects anew: who sends it something learns that nobody listens."""

        self._listener: ExchangeListener | None = None
        self._context = copy_context()
        """Of the process: what it is handed runs as a part of it, and not of the sender."""

        self._waiting: list[Callable[[ExchangeListener], None]] = []
        self._delivering = False

    def put(self, message: Callable[[ExchangeListener], None]) -> None:
        """Deliver it, some steps from now, after what was put before."""
        if self.died_at is not None or self.is_cut_off or self.is_deaf:
            return
        self._waiting.append(message)
        if self._backplane.way:
            loop = asyncio.get_running_loop()
            loop.call_later(self._backplane.way, self._deliver_first, context=self._context)
        elif not self._delivering:
            self._delivering = True
            self._soon(self._backplane.chance.randrange(4))

    def _soon(self, left: int) -> None:
        asyncio.get_running_loop().call_soon(self._step, left, context=self._context)

    def _deliver_first(self) -> None:
        if self._waiting:
            self._deliver(self._waiting.pop(0))

    def _step(self, left: int) -> None:
        if left > 0:
            self._soon(left - 1)
            return
        waiting, self._waiting = self._waiting, []
        self._delivering = False
        for message in waiting:
            self._deliver(message)

    def _deliver(self, message: Callable[[ExchangeListener], None]) -> None:
        if self._listener is not None and self.died_at is None:
            message(self._listener)

    def cut_off(self) -> None:
        """It receives nothing, and does not know."""
        self.is_cut_off = True

    def mend(self) -> None:
        """It receives again, and knows that it may have missed something."""
        self.is_cut_off = False
        self.put(lambda received: received.on_gap())

    async def _suspend(self) -> None:
        for _ in range(self._backplane.chance.randrange(3)):
            await asyncio.sleep(0)
        if self._backplane.is_away:
            raise StoreUnavailable("away")

    async def join(self, process: str, listener: ExchangeListener) -> None:
        await self._suspend()
        self.process, self._listener, self._context = process, listener, copy_context()
        self._backplane.members[process] = self

    async def leave(self) -> None:
        await self._suspend()
        self._backplane.members.pop(self.process, None)
        self.watched.clear()
        self._listener = None

    async def send(self, message: bytes, *, to: str | None = None) -> bool:
        """See `Exchange`: who died does not listen, and who is cut off seems to."""
        await self._suspend()
        self._backplane.sent.append(message)
        others = [
            member
            for process, member in self._backplane.members.items()
            if process == to or (to is None and member is not self)
        ]
        if not self._backplane.loses(message):
            for member in others:
                member.put(lambda received: received.on_message(message))
        return any(member.died_at is None and not member.is_deaf for member in others)

    async def watch(self, session_id: SessionId, stream: StreamName) -> None:
        await self._suspend()
        self.watched.add((session_id, stream))
        await self._suspend()

    async def unwatch(self, session_id: SessionId, stream: StreamName) -> None:
        await self._suspend()
        self.watched.discard((session_id, stream))

    async def claim(
        self, session_id: SessionId, holder: str | None, *, instead_of: str | None = None
    ) -> str | None:
        await self._suspend()
        held = self._backplane.held
        if await self._backplane.memory.load(session_id, now=0) is None:
            held.pop(session_id, None)
        elif holder is not None and held.get(session_id) in (None, instead_of):
            held[session_id] = holder
        found = held.get(session_id)
        await self._suspend()
        return found

    async def is_alive(self, process: str) -> bool:
        """See `Exchange`: a death is noticed late."""
        await self._suspend()
        member = self._backplane.members.get(process)
        if member is None:
            return False
        ends = [at for at in (member.died_at, member.silent_since) if at is not None]
        return not ends or _now() < min(ends) + LIVENESS


class SharedStore:
    """A `SessionStore`: any method of the one behind it."""

    name = "shared"
    survives_process = True
    remembers = True

    def __init__(self, backplane: Backplane) -> None:
        self.backplane = backplane
        self.exchange = Member(backplane)
        self.calls: deque[str] = deque(maxlen=1_000)
        """The newest methods that were called, in order."""

        self._grave = asyncio.Event()
        for name, method in inspect.getmembers(backplane.memory, inspect.iscoroutinefunction):
            if not name.startswith("_") and name not in _PUBLISHING:
                setattr(self, name, self._other_replicas(name, method))
        self.append = self._other_replicas("append", self._append)
        self.relay = self._other_replicas("relay", self._relay)
        self.append_change = self._other_replicas("append_change", self._append_change)

    def __getattr__(self, name: str) -> Any:
        # The tables behind it, for tests that look whether anything is left there.
        return getattr(self.backplane.memory, name)

    async def open(self, policy: SessionPolicy) -> None:
        await self.backplane.open(policy)

    async def close(self) -> None:
        """See `SessionStore`: the others go on."""

    def die(self) -> None:
        """The process does nothing more, from its next step on."""
        self.exchange.died_at = _now()

    def bury(self) -> None:
        """What the process still waits for fails now, so that the test can end."""
        self._grave.set()

    def _other_replicas(
        self, name: str, method: Callable[..., Awaitable[Any]]
    ) -> Callable[..., Awaitable[Any]]:
        async def call(*args: Any, **kwargs: Any) -> Any:
            self.calls.append(name)
            await self._suspend()
            result = await method(*copied(args), **copied(kwargs))
            result = copied(result)
            await self._suspend()
            return result

        return call

    async def _suspend(self) -> None:
        for _ in range(self.backplane.chance.randrange(3)):
            await asyncio.sleep(0)
        if self.exchange.died_at is not None:
            await self._grave.wait()
            raise StoreUnavailable("this process is dead")
        if self.backplane.is_away:
            raise StoreUnavailable("away")

    async def _append(
        self, session_id: SessionId, draft: Any, *, now: float, stream: StreamName = EVENTS
    ) -> Appended | None:
        appended = await self.backplane.memory.append(session_id, draft, now=now, stream=stream)
        if appended is not None:
            self.backplane.publish((session_id, stream), appended.event, appended.attachment)
        return appended

    async def _append_change(
        self, session_ids: Sequence[SessionId], change: ServerChange, *, now: float, again: bool
    ) -> list[AppendedChange]:
        changes = await self.backplane.memory.append_change(
            session_ids, change, now=now, again=again
        )
        for each in changes:
            self.backplane.publish((each.session_id, each.stream), each.event, each.attachment)
        return list(changes)

    async def _relay(self, connection: SessionId, *args: Any, **kwargs: Any) -> Relayed:
        relayed = await self.backplane.memory.relay(connection, *args, **kwargs)
        self.backplane.publish((connection, GET_STREAM), relayed.event, None)
        return relayed


class RoundRobin:
    """A `Carrier` in front of several: each request goes to the next one that lives."""

    def __init__(self, replicas: "Cluster") -> None:
        self._replicas = replicas
        self._turns = itertools.count()

    def send(self, method: str, path: str, headers: list[tuple[str, str]], body: bytes) -> Reply:
        worlds = [w for i, w in enumerate(self._replicas.worlds) if i not in self._replicas.dead]
        carrier = worlds[next(self._turns) % len(worlds)].carrier
        return carrier.send(method, path, headers, body)


@dataclass
class Cluster:
    backplane: Backplane
    worlds: list[World]
    stores: list[SharedStore]
    clock: Clock
    dead: set[int] = field(default_factory=set[int])

    def __getitem__(self, number: int) -> World:
        return self.worlds[number]

    def at(self, number: int, client: RawClient) -> RawClient:
        """The same client, whose requests a proxy sends to that replica."""
        same = copy.copy(client)
        same.carrier = self.worlds[number].carrier
        return same

    def spread(self, client: RawClient) -> RawClient:
        """The same client, whose requests a proxy sends to one replica after the other."""
        same = copy.copy(client)
        same.carrier = RoundRobin(self)
        return same

    def kill(self, number: int) -> None:
        """``kill -9``."""
        self.dead.add(number)
        self.stores[number].die()

    def notified(self, kind: str) -> int:
        """How many messages of that kind went from one replica to others."""
        return sum(f'"kind":"{kind}"'.encode() in message for message in self.backplane.sent)


def _as_it_is(_: int, store: Any) -> Any:
    return store


@asynccontextmanager
async def cluster(
    count: int = 2,
    *,
    seed: int = 0,
    server: Callable[[], tuple[Toolbox, object]] | None = None,
    store_of: Callable[[int, Any], Any] = _as_it_is,
    **limits: Any,
) -> AsyncGenerator[Cluster]:
    """That many replicas, running.

    Args:
        count: How many.
        seed: Decides in which order everything happens.
        server: Makes each one's tools, and what is wrapped; a `Toolbox` and its server.
        store_of: What a replica of that number has instead of the store that it shares.
        limits: Of the policy.
    """
    backplane, clock = Backplane(seed), Clock()
    own = namespace()
    async with AsyncExitStack() as stack:
        worlds: list[World] = []
        stores: list[SharedStore] = []
        for number in range(count):
            make = _Shared.make
            shared = None if make is not None else backplane.store()
            store = make(own=own) if make is not None else shared
            if shared is not None:
                stores.append(shared)
            box, wrapped = server() if server is not None else (Toolbox(), None)
            opened = world(
                store=cast("SessionStore", store_of(number, store)),
                box=box,
                server=wrapped,
                clock=clock,
                **limits,
            )
            worlds.append(await stack.enter_async_context(opened))
        try:
            yield Cluster(backplane, worlds, stores, clock)
        finally:
            backplane.is_away = False
            for store in stores:
                store.bury()


class _Shared:
    make: Callable[..., SessionStore] | None = None


REAL: Mapping[str, Callable[..., SessionStore]] = {
    "redis": redis_store,
    "postgres": postgres_store,
}
"""Name → a store on a real server, on which several can share a name of their ``own``."""


@contextmanager
def share(name: str) -> Generator[None]:
    """Until the block ends, what `cluster` makes shares a real store."""
    _Shared.make = REAL[name]
    try:
        yield
    finally:
        _Shared.make = None


def two_shared_stores() -> tuple[SessionStore, SessionStore]:
    """Two that share everything, not open yet."""
    backplane = Backplane()
    return cast("SessionStore", backplane.store()), cast("SessionStore", backplane.store())


def lost(*kinds: str) -> Callable[[bytes], bool]:
    """Of the messages between replicas, those kinds are lost."""
    return lambda message: any(f'"kind":"{kind}"'.encode() in message for kind in kinds)


def events_are_lost(message: bytes) -> bool:
    """Everything that is published with an event is lost."""
    return b'"kind":' not in message


def user(name: str, *scopes: str) -> AuthenticatedUser:
    """What the SDK's authentication leaves in the scope of that user's requests."""
    claims = {"iss": "https://issuer.example"}
    token = AccessToken(
        token=name, client_id="client", scopes=list(scopes), subject=name, claims=claims
    )
    return AuthenticatedUser(token)


def numbers(messages: list[Json]) -> list[int]:
    return [m["params"]["n"] for m in messages]


def _nothing_is_lost(_: bytes) -> bool:
    return False


def _now() -> float:
    return asyncio.get_running_loop().time()
