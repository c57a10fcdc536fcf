"""One connection to Redis that all tasks of a process share; of a cluster, one to each node.

redis-py connects, authenticates and parses; here commands are written as they come and their
answers are handed out in order, so that a hundred tasks need one connection and no task waits
for another one's round trip. Rules:

1. A command is sent once. When its answer does not come, it is unknown whether it was
   executed, and only its caller knows what that means: :class:`StoreUnavailable`.
2. Nothing waits longer than the timeout: no answer for that long, and the connection is given up.
   Time in which this process did not run, since it was stopped or busy, does not count: what came
   meanwhile is read first.
3. A connection that was lost is made anew by the next call; after an attempt that failed all
   calls fail at once for ``REST`` seconds. Nothing goes round by itself.
4. A command is written whole, also if its caller is cancelled meanwhile: half of one would be the
   end of the connection, and of what all others wait for on it.
"""

from __future__ import annotations

import asyncio
import itertools
import math
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Protocol, cast
from urllib.parse import parse_qsl, urlencode, urlsplit, urlunsplit

from redis.asyncio import ConnectionPool
from redis.crc import key_slot
from redis.exceptions import (
    AskError,
    InvalidResponse,
    MovedError,
    ReadOnlyError,
    RedisError,
    ResponseError,
    TryAgainError,
)

from mcp_sessions.background import watched
from mcp_sessions.errors import ConfigurationError, StoreUnavailable
from mcp_sessions.stores.redis.refusals import unavailable
from mcp_sessions.stores.redis.sentinel import SUFFIX, sentinel_pool

TIMEOUT = 3.0
"""Seconds that an answer, or a connection, may take if nothing else is said."""

REST = 0.5
"""Seconds between two attempts to connect."""

LATE = 0.05
"""Seconds after a timeout in which what has arrived already is still read."""

_AT_ONCE = 65_536
"""Bytes that a connection takes without anybody having to wait for its peer: as many as asyncio
lets wait to be sent, at the least."""

Node = tuple[str, int]
"""Host and port."""

_SCRIPTS = frozenset({"EVALSHA", "EVAL"})
"""Commands whose first key is their third argument. Others have it as their first."""

_OF_NO_KEY = frozenset({"INFO", "PUBLISH", "SCRIPT", "KEYS", "PING", "ECHO"})
"""Commands that any node takes."""

_ELSEWHERE = frozenset({"MOVED", "ASK", "TRYAGAIN"})
"""A server's own words for what another node has."""

Value = bytes | str | int | float


class Connection(Protocol):
    @property
    def is_connected(self) -> bool: ...

    async def connect(self) -> None: ...

    async def disconnect(self, nowait: bool = False) -> None: ...

    def pack_command(self, *args: Value) -> list[bytes]: ...

    async def send_packed_command(
        self, command: list[bytes], check_health: bool = True
    ) -> None: ...

    async def read_response(self, disable_decoding: bool = False) -> Any: ...


MakeConnection = Callable[[], Connection]


def connections_to(url: str, timeout: float = TIMEOUT) -> MakeConnection:
    """Return a function that makes connections to the Redis that ``url`` names.

    Args:
        url: ``redis://``, ``rediss://``, ``valkey://``, ``valkeys://`` or ``unix://``, with the
            options of redis-py in its query; or all but the last with ``+sentinel``.
        timeout: Seconds in which a connection is made.

    Raises:
        ConfigurationError: It names none, or an option is unknown. The text holds nothing of
            the URL but its scheme and the names of its options: there may be a password in it.
    """
    parts = urlsplit(url)
    scheme = parts.scheme.replace("valkey", "redis", 1)
    # The timeouts are ours: a shared connection always has a reader that waits.
    query = urlencode([pair for pair in parse_qsl(parts.query) if "timeout" not in pair[0]])
    plain = urlunsplit((scheme, parts.netloc, parts.path, query, ""))
    from_url = getattr(ConnectionPool, "from_url")  # noqa: B009 - its types are partly unknown
    options = {
        "socket_timeout": None,
        "socket_connect_timeout": TIMEOUT,
        "protocol": 2,
        "client_name": "mcp-sessions",
    }
    try:
        if scheme.endswith(SUFFIX):
            pool = sentinel_pool(plain, timeout, **options)
        else:
            pool = from_url(plain, **options)
        pool.make_connection()
    except (ValueError, TypeError, RedisError) as failed:
        # redis-py says which one in words of its own, between which there may be a value.
        names = [name for name, _ in parse_qsl(parts.query) if f"'{name}'" in str(failed)]
        reason = f": it has an unknown option, or a wrong value of it: {names[0]}" if names else ""
        raise ConfigurationError(
            f"this {parts.scheme}:// URL cannot be a store{reason}"
        ) from failed
    return cast(MakeConnection, pool.make_connection)


class Subscriber(Protocol):
    """Receives what the channels bring that its connection subscribed to."""

    def on_published(self, channel: bytes, body: bytes) -> None: ...

    def on_lost(self) -> None:
        """The connection is given up, and with it its subscriptions."""
        ...


class RedisLink:
    """One shared connection. Every method belongs to one event loop.

    Args:
        timeout: Seconds that an answer, or a connection, may take.
        listener: Of a connection that subscribes. Each of its commands names one channel.
    """

    counts_listeners = True
    """Whether a server says how many receive what is published. A node of a cluster knows of its
    own only.
    """

    def __init__(
        self, make: MakeConnection, timeout: float, *, listener: Subscriber | None = None
    ) -> None:
        self.timeout = timeout
        self._listener = listener
        self.server: Connection | None = None
        """The connection that was made last, which knows where the server is."""

        self._failed: StoreUnavailable | None = None
        """Why there is no connection."""

        self._make = make
        self._connection: Connection | None = None
        self._reader: asyncio.Task[None] | None = None
        self._waiting: deque[tuple[asyncio.Future[Any], float, int]] = deque()
        """The answer, when it is due, and the bytes of the command."""

        self._unanswered = 0
        """Bytes of the commands that wait for an answer."""

        self._writes: set[asyncio.Task[None]] = set()
        """Commands that have to wait for the peer to take them. They go on when nobody waits for
        them any more."""

        self._published_at = -math.inf
        """When the listener got the last message."""

        self._spared: asyncio.Future[Any] | None = None
        """The call that was due when its answer may have been there, unread."""

        self._connecting = asyncio.Lock()
        self._rests_until = 0.0
        self._watch: asyncio.TimerHandle | None = None
        self._is_closed = False

    async def call(self, *args: Value) -> Any:
        """Send one command; its answer, as bytes.

        Raises:
            ResponseError: The server refused the command.
            StoreUnavailable: No connection, or no answer in time.
        """
        connection = self._connection
        if connection is None or not connection.is_connected:
            connection = await self._connected()
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[Any] = loop.create_future()
        packed = connection.pack_command(*args)
        size = sum(map(len, packed))
        # From here to the write nothing waits: answers come in the order of the commands.
        self._waiting.append((answer, loop.time() + self.timeout, size))
        self._unanswered += size
        if self._watch is None:
            self._watch = loop.call_later(self.timeout, self._look)
        if self._unanswered > _AT_ONCE or self._writes:
            # The peer may take its time, and the caller may be cancelled meanwhile (rule 4).
            writing = loop.create_task(_written(connection, packed))
            self._writes.add(writing)
            writing.add_done_callback(lambda done: self._written(connection, done))
        else:
            # The unanswered commands fit into the buffer: this does not wait.
            try:
                await connection.send_packed_command(packed, False)
            except Exception as failed:
                # As `_read` does. An event loop may raise a RuntimeError here: it closed the
                # connection, and the reader has had no turn since.
                self._give_up(connection, failed)
            except BaseException:
                answer.cancel()
                raise
        return await answer

    @property
    def is_connected(self) -> bool:
        return self._connection is not None and self._connection.is_connected

    async def nodes(self) -> Sequence[RedisLink]:
        return [self]

    def lose(self, failed: Exception) -> None:
        """Give the connection up; calls that wait fail."""
        if self._connection is not None:
            self._give_up(self._connection, failed)

    async def close(self) -> None:
        """Close the connection; calls that wait fail."""
        self._is_closed = True
        self.lose(ConnectionError())
        if self._reader is not None:
            await asyncio.gather(self._reader, return_exceptions=True)

    async def _connected(self) -> Connection:
        async with self._connecting:
            # Another task may have connected while this one waited.
            if self._connection is not None and self._connection.is_connected:
                return self._connection
            loop = asyncio.get_running_loop()
            if self._failed is not None and loop.time() < self._rests_until:
                raise type(self._failed)(*self._failed.args)
            self.lose(ConnectionError())
            self.server = connection = self._make()
            try:
                if not self._is_closed:
                    async with asyncio.timeout(self.timeout):
                        await connection.connect()
                if self._is_closed:
                    # Nobody would close what was made meanwhile.
                    raise StoreUnavailable("the connection to Redis is closed")
            except Exception as failed:
                self._rests_until = loop.time() + REST
                if isinstance(failed, StoreUnavailable):
                    self._failed = failed
                    raise
                # For what is no answer the client library raises whatever its parsing does.
                self._failed = unavailable(failed, connection, connecting=True)
                raise self._failed from failed
            else:
                self._connection = connection
            finally:
                if self._connection is not connection:
                    await connection.disconnect(nowait=True)
            self._reader = loop.create_task(self._read(connection))
            watched("reading what Redis answers", self._reader)
            return connection

    async def _read(self, connection: Connection) -> None:
        clock = asyncio.get_running_loop().time
        try:
            while True:
                is_refused = False
                try:
                    answer: Any = await connection.read_response(disable_decoding=True)
                except ResponseError as refused:
                    answer, is_refused = refused, True
                if connection is not self._connection:
                    return
                if self._listener is not None and not is_refused and answer[0] == b"message":
                    self._published_at = clock()
                    self._listener.on_published(*answer[1:])
                    continue
                if not self._waiting:
                    raise InvalidResponse("an answer to nothing")
                waiting, _, size = self._waiting.popleft()
                self._unanswered -= size
                if waiting.done():
                    # The caller was cancelled.
                    pass
                elif is_refused:
                    waiting.set_exception(answer)
                else:
                    waiting.set_result(answer)
                if isinstance(answer, ReadOnlyError):
                    # It is a replica now. Its name may lead to another server already.
                    raise answer
        except Exception as failed:
            # Nobody reads any more: whoever waits must not wait for the timeout. The client library
            # raises many things for what is no answer, and none of them is about this program.
            self._give_up(connection, failed)
        finally:
            await connection.disconnect(nowait=True)

    def _look(self) -> None:
        # One timer for all: the oldest call has waited longest.
        self._watch = None
        if not self._waiting:
            return
        loop = asyncio.get_running_loop()
        oldest, due, _ = self._waiting[0]
        now = loop.time()
        # What is published comes before answers that were given later.
        due = max(due, self._published_at + self.timeout)
        if due > now:
            self._watch = loop.call_at(due, self._look)
        elif self._spared is not oldest:
            # This comes before the reader's turn: its answer may be there already. A process
            # that was stopped, or busy, gets the time back in which it read nothing.
            self._spared = oldest
            late = min(max(now - due, LATE), self.timeout)
            self._watch = loop.call_later(late, self._look)
        elif self._connection is not None:
            self._failed = unavailable(TimeoutError(), self._connection)
            self._rests_until = now + REST
            self._give_up(self._connection, TimeoutError())

    def _written(self, connection: Connection, done: asyncio.Task[None]) -> None:
        self._writes.discard(done)
        failed = done.exception() if not done.cancelled() else None
        if failed is not None:
            self._give_up(connection, failed)

    def _give_up(self, connection: Connection, failed: BaseException) -> None:
        if connection is not self._connection:
            return
        self._connection = None
        if self._watch is not None:
            self._watch.cancel()
            self._watch = None
        waiting, self._waiting = self._waiting, deque()
        self._unanswered = 0
        for writing in self._writes:
            writing.cancel()
        for answer, _, _ in waiting:
            if not answer.done():
                answer.set_exception(unavailable(failed, connection))
        if self._reader is not None and self._reader is not asyncio.current_task():
            # It closes the connection on its way out.
            self._reader.cancel()
        if self._listener is not None:
            self._listener.on_lost()


def _is_elsewhere(refused: ResponseError) -> bool:
    """Whether another node of a cluster has what a command is about."""
    # Older releases of redis-py (5.2.0) have no classes for these.
    word = str(refused).partition(" ")[0]
    return isinstance(refused, MovedError | AskError | TryAgainError) or word in _ELSEWHERE


async def _written(connection: Connection, packed: list[bytes]) -> None:
    await connection.send_packed_command(packed, False)


class ClusterLink:
    """A Redis Cluster as one link: each command goes to the node that has its key. Every method
    belongs to one event loop.

    Nobody calls it with keys of two slots. A command that reached the wrong node was not executed
    there, so it is sent once more, by a new map. While a slot moves, a part of a session may be at
    either node: then the command fails. Messages may be published at any node: a cluster tells all
    of them.

    Args:
        seed: The link to the node that was named; it learns the others from it.
        make_for: Makes connections to a node, by host and port.
    """

    counts_listeners = False

    def __init__(self, seed: RedisLink, make_for: Callable[[str, int], MakeConnection]) -> None:
        self.timeout = seed.timeout
        self._seed = self._asked_first = seed
        self._make_for = make_for
        self._links: dict[Node, RedisLink] = {}
        self._starts: list[int] = []
        self._owners: list[Node] = []
        self._is_stale = True
        self._learning = asyncio.Lock()
        self._turns = itertools.count()

    async def call(self, *args: Value) -> Any:
        name = args[0]
        if name in _OF_NO_KEY or len(args) < 2:
            slot = 0
        else:
            slot = key_slot(str(args[3 if name in _SCRIPTS else 1]).encode())
        for _ in range(2):
            if self._is_stale:
                await self.learn()
            link = self._link(self._owners[bisect_right(self._starts, slot) - 1])
            try:
                return await link.call(*args)
            except ResponseError as refused:
                if not _is_elsewhere(refused):
                    raise
                # The map is old, and this node has a newer one; or the slot is on its way.
                self._is_stale, self._asked_first = True, link
            except StoreUnavailable:
                # It may be another one's by now.
                self._is_stale = True
                raise
        raise StoreUnavailable("slots of the Redis Cluster are being moved")

    def make(self) -> Connection:
        """Connect to one of the nodes, to another one each time: one may be away."""
        nodes = list(dict.fromkeys(self._owners))
        return self._make_for(*nodes[next(self._turns) % len(nodes)])()

    @property
    def server(self) -> Connection | None:
        return self._seed.server

    async def nodes(self) -> Sequence[RedisLink]:
        if self._is_stale:
            await self.learn()
        return [self._link(node) for node in dict.fromkeys(self._owners)]

    async def close(self) -> None:
        """Close the connections; calls that wait fail."""
        for link in (self._seed, *self._links.values()):
            await link.close()

    def _link(self, node: Node) -> RedisLink:
        link = self._links.get(node)
        if link is None:
            link = self._links[node] = RedisLink(self._make_for(*node), self.timeout)
        return link

    async def learn(self) -> None:
        async with self._learning:
            if not self._is_stale:
                return
            failed: Exception = StoreUnavailable("Redis is away")
            for link in (self._asked_first, self._seed, *self._links.values()):
                try:
                    answer = await link.call("CLUSTER", "SLOTS")
                    break
                except ResponseError as refused:
                    failed = unavailable(refused, link.server)
                except StoreUnavailable as away:
                    failed = away
            else:
                raise failed
            ranges = sorted((first, owner) for first, _, owner, *_ in answer)
            if not ranges:
                raise StoreUnavailable("the Redis Cluster has no slots")
            self._starts = [first for first, _ in ranges]
            # A node that does not know its own name is called as it was called by us.
            self._owners = [((host or b"").decode(), port) for _, (host, port, *_) in ranges]
            self._is_stale = False
            for node in self._links.keys() - set(self._owners):
                await self._links.pop(node).close()
