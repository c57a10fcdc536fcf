"""How a process listens to others over Redis, over a connection of this process."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any, cast

import pytest
from redis.exceptions import ConnectionError as ConnectionBroke
from redis.exceptions import NoPermissionError

from mcp_sessions.errors import StoreRefused, StoreUnavailable
from mcp_sessions.ids import EVENTS, SessionId
from mcp_sessions.stores.exchange import BEAT, LIVENESS
from mcp_sessions.stores.records import Attachment
from mcp_sessions.stores.redis.pubsub import RedisExchange
from mcp_sessions.stores.redis.redis_connection import Connection, RedisLink
from tests.support.virtual_time import VIRTUAL, Backend

SESSION = SessionId("session")


@pytest.fixture
def anyio_backend() -> Backend:
    return VIRTUAL


class FakeConnection:
    """Answers every command, unless its peer takes nothing."""

    def __init__(self) -> None:
        self.takes = True
        self.waits: list[Any] = []
        """Commands that are answered when its peer takes them."""

        self.channels = set[bytes]()
        """Those that were subscribed to."""

        self.comes: asyncio.Queue[Any] = asyncio.Queue()
        self.is_connected = False

    async def connect(self) -> None:
        self.is_connected = True

    async def disconnect(self, nowait: bool = False) -> None:
        self.is_connected = False
        self.comes.put_nowait(ConnectionBroke())

    def pack_command(self, *args: Any) -> list[Any]:
        return list(args)

    async def send_packed_command(self, command: list[Any], check_health: bool = True) -> None:
        """Answer it, if it is taken."""
        if command[0] == "SUBSCRIBE":
            self.channels.update(command[1:])
        self.waits.append([command[0].lower().encode(), *command[1:], 1])
        if self.takes:
            self.take()

    def take(self) -> None:
        """Answer what waits."""
        self.takes = True
        for answer in self.waits:
            self.comes.put_nowait(answer)
        self.waits.clear()

    async def read_response(self, disable_decoding: bool = False) -> Any:
        """The next answer, or what goes wrong."""
        answer = await self.comes.get()
        if isinstance(answer, Exception):
            raise answer
        return answer


class FakeLink:
    """Every command succeeds. What is published arrives where it is listened to."""

    timeout = 3.0
    counts_listeners = True
    server = None

    def __init__(self, connections: list[FakeConnection]) -> None:
        self.connections = connections
        self.listening = 1
        """How many listen at the primary."""

        self.asked: list[object] = []
        """The names of the commands."""

    async def call(self, *args: object) -> Any:
        self.asked.append(args[0])
        if args[0] != "PUBLISH":
            return 1
        _, channel, message = args
        self.connections[-1].comes.put_nowait([b"message", str(channel).encode(), message])
        return self.listening


class Deaf:
    """An `ExchangeListener` that minds nothing."""

    def on_event(
        self, session_id: SessionId, stream: str, event: object, attachment: Attachment | None
    ) -> None: ...

    def on_message(self, message: bytes) -> None: ...

    def on_gap(self) -> None: ...


@asynccontextmanager
async def joined(
    link: FakeLink | None = None,
) -> AsyncGenerator[tuple[RedisExchange, list[FakeConnection]]]:
    link = link or FakeLink([])
    connections = link.connections

    def make() -> Connection:
        connections.append(FakeConnection())
        return cast(Connection, connections[-1])

    async def claim(*asked: object) -> str | None:
        raise AssertionError("nothing is claimed here")

    exchange = RedisExchange(make, cast(RedisLink, link), "namespace", str, claim)
    await exchange.join("process", cast(Any, Deaf()))
    yield exchange, connections
    await exchange.close()


async def test_who_listens_at_a_replica_listens_at_the_primary_soon() -> None:
    """The primary became a replica, and the connection to it stayed. What is published there still
    arrives, but the new primary says that nobody listens: others would send it for ever.
    """
    link = FakeLink([])
    async with joined(link) as (_, connections):
        await asyncio.sleep(20 * BEAT + 1)
        assert len(connections) == 1, "all is well"
        link.listening = 0
        await asyncio.sleep(BEAT)
        link.listening = 1
        assert len(connections) == 2
        assert [each.is_connected for each in connections] == [False, True]


@pytest.mark.parametrize("what", ["watch", "unwatch"])
async def test_what_waits_when_the_connection_breaks_finds_the_store_away(
    what: str,
) -> None:
    """Nobody cancelled who asked: a request would end without any answer."""
    async with joined() as (exchange, connections):
        if what == "unwatch":
            await exchange.watch(SESSION, EVENTS)
        connection = connections[-1]
        connection.takes = False
        asking = asyncio.create_task(getattr(exchange, what)(SESSION, EVENTS))
        await asyncio.sleep(0.1)
        connection.comes.put_nowait(ConnectionBroke())
        await asyncio.wait({asking}, timeout=10)
        assert not asking.cancelled()
        with pytest.raises(StoreUnavailable):
            await asking


async def test_who_gives_up_does_not_take_anybody_elses_answer() -> None:
    """The connection stays, on which all others receive."""
    async with joined() as (exchange, connections):
        connection = connections[-1]
        connection.takes = False
        asking = asyncio.create_task(exchange.watch(SESSION, EVENTS))
        await asyncio.sleep(0.1)
        asking.cancel()
        await asyncio.wait({asking}, timeout=10)
        assert asking.cancelled()
        connection.take()
        await asyncio.sleep(0.1)
        await exchange.watch(SESSION, EVENTS)
        assert len(connections) == 1


async def test_a_watch_that_failed_is_not_made_good_later() -> None:
    """Nobody takes what it would bring, and nobody would end it."""
    async with joined() as (exchange, connections):
        await exchange.watch(SessionId("another"), EVENTS)
        connection = connections[-1]
        connection.takes = False
        asking = asyncio.create_task(exchange.watch(SESSION, EVENTS))
        await asyncio.sleep(0.1)
        connection.comes.put_nowait(ConnectionBroke())
        with pytest.raises(StoreUnavailable):
            await asking
        await asyncio.sleep(BEAT)
        assert len(connections) == 2
        watched = {each for each in connections[-1].channels if b":w:" in each}
        assert watched == {b"another:w:events"}


async def test_who_may_not_listen_learns_so() -> None:
    """Not that the store is away: a user of Redis may be without its channels (ACL)."""
    async with joined() as (exchange, connections):
        connection = connections[-1]
        connection.takes = False
        asking = asyncio.create_task(exchange.watch(SESSION, EVENTS))
        await asyncio.sleep(0.1)
        connection.comes.put_nowait(NoPermissionError("no permissions to access a channel"))
        with pytest.raises(StoreRefused, match="ACL"):
            await asking
        assert connection.is_connected


async def test_answers_behind_many_messages_do_not_end_the_connection() -> None:
    """Redis answers in order, and messages that come are a sign of life: all streams would be read
    again, just when there is most to do.
    """
    link = FakeLink([])
    async with joined(link) as (exchange, connections):
        connection = connections[-1]
        connection.takes = False
        asking = asyncio.create_task(exchange.watch(SESSION, EVENTS))
        link.asked.clear()
        for _ in range(20):
            await asyncio.sleep(1)
            connection.comes.put_nowait([b"message", b"namespace:to-all", b"another\nmessage"])
        connection.take()
        await asking
        assert len(connections) == 1 and connection.is_connected
        assert link.asked.count("SET") >= 20 // LIVENESS + 1, "others take it for dead"
