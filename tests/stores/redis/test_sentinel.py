"""A Redis whose primary changes: Sentinels say which server it is (CUP8, ATT10, SEC2)."""

import asyncio
import re
from collections.abc import Awaitable, Callable, Generator
from contextlib import contextmanager
from typing import TypeVar

import pytest

from mcp_sessions.core.log import Draft, LoggedEvent
from mcp_sessions.errors import (
    ConfigurationError,
    Refusal,
    StoreRefused,
    StoreUnavailable,
)
from mcp_sessions.ids import EVENTS, Position, SessionId, StreamName, parse_position
from mcp_sessions.policy import SessionPolicy
from mcp_sessions.stores.records import Attachment
from mcp_sessions.stores.redis.redis_store import RedisStore
from mcp_sessions.stores.urls import open_store
from mcp_sessions.testing import check_exchange, check_session_store
from tests.stores.opening import NOW, new, opened
from tests.support.redis_server import RedisServer, asked, namespace, redis_server
from tests.support.sentinel_server import SERVICE, Sentinels, behind_sentinels

pytestmark = [pytest.mark.redis, pytest.mark.timeout(300)]

WITHIN = 120
"""Seconds. A Sentinel whose process waited for 2 s does nothing for 30 s."""

SECRET = "s3cret"

T = TypeVar("T")


@contextmanager
def three() -> Generator[Sentinels]:
    with behind_sentinels(sentinels=3, replicas=1) as servers:
        yield servers


async def back(call: Callable[[], Awaitable[T]]) -> T:
    """Ask until it is there again; bounded."""
    async with asyncio.timeout(WITHIN):
        while True:
            try:
                return await call()
            except StoreUnavailable:
                await asyncio.sleep(0.05)


class Listener:
    def __init__(self) -> None:
        self.messages: list[bytes] = []
        self.gaps = 0
        self.changed = asyncio.Event()

    def on_message(self, message: bytes) -> None:
        self.messages.append(message)
        self.changed.set()

    def on_event(
        self,
        session_id: SessionId,
        stream: StreamName,
        event: LoggedEvent,
        attachment: Attachment | None,
    ) -> None:
        self.changed.set()

    def on_gap(self) -> None:
        self.gaps += 1
        self.changed.set()

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(WITHIN):
            while not condition():
                self.changed.clear()
                await self.changed.wait()


def parse(event_id: str) -> Position:
    position = parse_position(event_id)
    assert position is not None
    return position


async def leads_to(store: RedisStore, server: RedisServer) -> None:
    """Wait until the store asks that server; bounded."""
    async with asyncio.timeout(WITHIN):
        while True:
            about = await back(lambda: asked(store, "INFO", "server"))
            if f"tcp_port:{server.port}\r".encode() in about:
                return
            await asyncio.sleep(0.05)


async def _commanded(servers: Sentinels) -> None:
    before = servers.primary
    assert "OK" in servers.sentinels[0].ask(f"SENTINEL FAILOVER {SERVICE}")
    await asyncio.to_thread(servers.until_primary_is_not, before)


async def _killed(servers: Sentinels) -> None:
    before = servers.primary
    before.kill()
    await asyncio.to_thread(servers.until_primary_is_not, before)


async def _stands_still(servers: Sentinels) -> None:
    before = servers.primary
    before.suspend()
    await asyncio.to_thread(servers.until_primary_is_not, before)
    before.resume()


FAILOVERS = {"commanded": _commanded, "killed": _killed, "stands still": _stands_still}


@pytest.mark.full
async def test_a_store_behind_sentinels_keeps_the_contract() -> None:
    """A replica of it, too: two stores hear each other."""
    with behind_sentinels(sentinels=1, replicas=0) as servers:

        def two() -> tuple[RedisStore, RedisStore]:
            own = namespace()
            return RedisStore(servers.url, namespace=own), RedisStore(servers.url, namespace=own)

        await check_session_store(lambda: two()[0])
        await check_exchange(two)


@pytest.mark.parametrize("how", FAILOVERS)
async def test_a_failover_under_load_does_nothing_twice_and_hides_no_loss(how: str) -> None:
    """Of the new log nothing is missing, and nothing is in it twice. A position of the one before
    is refused.
    """
    with three() as servers:
        async with opened(RedisStore(servers.url, timeout=3)) as store:
            session_ids = [await new(store) for _ in range(4)]
            issued: dict[SessionId, list[str]] = {each: [] for each in session_ids}
            is_over = False

            async def events(session_id: SessionId) -> None:
                """Each is sent until it is stored, as the layer does."""
                while not is_over:
                    number, since = len(issued[session_id]), None
                    while True:
                        draft = Draft(b"%d" % number, name=f"event-{number}", since=since)
                        try:
                            appended = await store.append(session_id, draft, now=NOW)
                        except StoreUnavailable:
                            since = NOW
                            await asyncio.sleep(0.01)
                        else:
                            break
                    assert appended is not None
                    issued[session_id].append(appended.event.event_id)

            load = [asyncio.create_task(events(each)) for each in session_ids]

            async def are_stored(more: int) -> None:
                before = {each: len(ids) for each, ids in issued.items()}
                async with asyncio.timeout(WITHIN):
                    while any(len(issued[each]) < before[each] + more for each in session_ids):
                        assert not any(task.done() for task in load)
                        await asyncio.sleep(0.01)

            await are_stored(5)
            early = {each: ids[0] for each, ids in issued.items()}
            await asked(store, "WAIT", 1, 10_000)
            await FAILOVERS[how](servers)
            await leads_to(store, servers.primary)
            await are_stored(20)
            is_over = True
            await asyncio.gather(*load)
            for session_id, ids in issued.items():
                assert len(ids) == len(set(ids)) and ids == sorted(ids)
                lost, refusal = await store.read(session_id, early[session_id], now=NOW)
                assert (lost, refusal) == ((), Refusal.LOG_REPLACED)
                begin = Position(parse(ids[-1]).log_epoch, 0).event_id()
                kept, refusal = await store.read(session_id, begin, now=NOW)
                numbers = [int(each.payload) for each in kept]
                assert refusal is None and len(numbers) >= 20
                assert numbers == list(range(numbers[0], len(ids)))
            assert len(await store.all_sessions()) == len(session_ids)


@pytest.mark.parametrize("how", FAILOVERS)
async def test_the_messages_of_replicas_follow_the_primary(how: str) -> None:
    """The connection that listens, too. Whoever watches is told of the gap."""
    with three() as servers:
        url = servers.url
        async with opened(RedisStore(url, timeout=1)) as here:
            async with opened(RedisStore(url, timeout=1)) as there:
                listener = Listener()
                assert here.exchange is not None and there.exchange is not None
                exchange = there.exchange
                await here.exchange.join("here", listener)
                await exchange.join("there", Listener())
                await here.exchange.watch(await new(here), EVENTS)
                await FAILOVERS[how](servers)
                await listener.until(lambda: bool(listener.gaps))
                async with asyncio.timeout(WITHIN):
                    # What is sent while somebody connects again is lost.
                    while b"hello" not in listener.messages:
                        await back(lambda: exchange.send(b"hello", to="here"))
                        await asyncio.sleep(0.05)
                assert await back(lambda: exchange.is_alive("here"))


async def test_a_primary_that_was_replaced_is_left_while_it_takes_writes(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """It does not know yet, and nobody closes its connections. What it takes is lost."""
    with behind_sentinels(replicas=0) as servers, redis_server() as other:
        async with opened(RedisStore(servers.url)) as store:
            listener = Listener()
            assert store.exchange is not None
            await store.exchange.join("here", listener)
            await new(store)
            sentinel = servers.sentinels[0]
            sentinel.ask(f"SENTINEL REMOVE {SERVICE}")
            sentinel.ask(f"SENTINEL MONITOR {SERVICE} 127.0.0.1 {other.port} 1")
            await leads_to(store, other)
            await listener.until(lambda: bool(listener.gaps))
        assert servers.servers[0].ask("ROLE").startswith("*3\r\n$6\r\nmaster")
    assert "name another primary of 'sessions'" in caplog.text


async def test_a_sentinel_that_knows_of_no_failover_yet_is_not_believed() -> None:
    """It names a server that may take writes, and loses them. If all say so, there was none."""
    newer = [f"sentinel config-epoch {SERVICE} 5"]
    with behind_sentinels(replicas=0) as late, behind_sentinels(replicas=0, lines=newer) as ahead:
        sentinel = ahead.sentinels[0]
        hosts = f"127.0.0.1:{sentinel.port},127.0.0.1:{late.sentinels[0].port}"
        async with opened(RedisStore(f"redis+sentinel://{hosts}/{SERVICE}")) as store:
            session_id = await new(store)
            sentinel.suspend()
            ahead.servers[0].ask("CLIENT KILL TYPE normal")
            said = ""
            async with asyncio.timeout(WITHIN):
                while "see no primary" not in said:
                    try:
                        assert await store.load(session_id, now=NOW) is not None
                    except StoreUnavailable as failed:
                        said = str(failed)
                    await asyncio.sleep(0.05)
            sentinel.resume()
            assert await back(lambda: store.load(session_id, now=NOW)) is not None
            sentinel.ask(f"SENTINEL REMOVE {SERVICE}")
            sentinel.ask(f"SENTINEL MONITOR {SERVICE} 127.0.0.1 {late.servers[0].port} 1")
            await leads_to(store, late.servers[0])


async def test_sentinels_that_are_away_or_stand_still_are_passed_over() -> None:
    """One that answers is enough, and there is time left for the primary."""
    with three() as servers:
        servers.sentinels[0].kill()
        servers.sentinels[1].suspend()
        try:
            async with opened(RedisStore(servers.url, timeout=10)) as store:
                assert await store.load(await new(store), now=NOW) is not None
        finally:
            servers.sentinels[1].resume()


async def test_a_server_that_is_no_primary_any_more_is_not_read_from() -> None:
    """The Sentinels do not know yet that it follows another one. A session that it does not have
    would be taken for one that ended.
    """
    with behind_sentinels(replicas=0) as servers:
        async with opened(RedisStore(servers.url)) as store:
            session_id = await new(store)
            servers.servers[0].ask("REPLICAOF 127.0.0.1 1")
            servers.servers[0].ask("CLIENT KILL TYPE normal")
            said = ""
            async with asyncio.timeout(WITHIN):
                while "no primary any more: a failover" not in said:
                    with pytest.raises(StoreUnavailable) as failed:
                        await store.load(session_id, now=NOW)
                    assert not isinstance(failed.value, StoreRefused)
                    said = str(failed.value)
                    await asyncio.sleep(0.05)


@pytest.mark.parametrize(
    ("hosts", "service", "said"),
    [
        ("{sentinel}", "session", "know no service 'session': look at its name in --store"),
        ("127.0.0.1:1,127.0.0.1:2", SERVICE, "no Sentinel answers.*127.0.0.1:1 is away: Conn"),
        ("{server}", SERVICE, "no Sentinel answers.*127.0.0.1:.* refused"),
        (f"{{sentinel}},127.0.0.1:1/{SERVICE}", "99", "refused.*Look at the database"),
    ],
    ids=["another name", "nobody", "a server", "a database that is not there"],
)
async def test_a_start_that_finds_no_primary_says_why(hosts: str, service: str, said: str) -> None:
    """In one line."""
    with behind_sentinels(replicas=0) as servers:
        named = hosts.format(
            sentinel=f"127.0.0.1:{servers.sentinels[0].port}",
            server=f"127.0.0.1:{servers.servers[0].port}",
        )
        store = open_store(f"redis+sentinel://{named}/{service}")
        with pytest.raises(StoreUnavailable) as failed:
            await store.open(SessionPolicy())
        await store.close()
        assert re.search(said, str(failed.value)) and "\n" not in str(failed.value)


async def test_the_server_and_the_sentinels_have_passwords_of_their_own() -> None:
    """And a database of another number."""
    with behind_sentinels(replicas=0) as servers:
        servers.servers[0].ask(f"CONFIG SET requirepass {SECRET}")
        servers.sentinels[0].ask(f"SENTINEL SET {SERVICE} auth-pass {SECRET}")
        servers.sentinels[0].ask(f"ACL SETUSER default resetpass >of-{SECRET}")
        sentinel = f"127.0.0.1:{servers.sentinels[0].port}"
        right = f"redis+sentinel://:{SECRET}@{sentinel}/{SERVICE}/2?sentinel_password=of-{SECRET}"
        for url, said in (
            (right.replace(f"=of-{SECRET}", f"=no-{SECRET}"), "See sentinel_password"),
            (right.replace(f":{SECRET}@", f":no-{SECRET}@"), "Look at both in the URL"),
        ):
            wrong = open_store(url)
            with pytest.raises(StoreRefused, match=said) as refused:
                await wrong.open(SessionPolicy())
            await wrong.close()
            assert SECRET not in str(refused.value) and refused.value.why == "credentials"
        async with opened(RedisStore(right)) as store:
            await new(store)
            assert b"db2:keys=" in await asked(store, "INFO", "keyspace")


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("redis+sentinel://localhost", "names Sentinels and the service"),
        ("redis+sentinel:///sessions", "names Sentinels and the service"),
        ("redis+sentinel://one,,two/sessions", "names Sentinels and the service"),
        ("redis+sentinel:/one/sessions", "names Sentinels and the service"),
        (f"redis+sentinel://:{SECRET}@one:port/sessions", "the port in a redis+sentinel:// URL"),
        ("redis+sentinel://one,two:99999/sessions", "the port in a redis+sentinel:// URL"),
        (f"redis+sentinel://one/sessions/{SECRET}", "the database in a redis+sentinel:// URL"),
        (
            f"redis+sentinel://one/sessions?client_nam={SECRET}",
            "an unknown option, or a wrong value of it: client_nam",
        ),
        ("redis+sentinel://one/sessions?namespace=a b", "a namespace has 1 to 64"),
        ("unix+sentinel://one/sessions", "unknown store 'unix+sentinel'"),
    ],
)
def test_what_is_wrong_with_a_url_of_sentinels_is_named(url: str, said: str) -> None:
    with pytest.raises(ConfigurationError) as refused:
        open_store(url)
    assert said in str(refused.value) and SECRET not in str(refused.value)


@pytest.mark.parametrize("scheme", ["redis", "rediss", "valkey", "valkeys"])
async def test_each_scheme_of_redis_takes_sentinels(scheme: str) -> None:
    """Without a port the usual one; an address of IPv6 has brackets."""
    store = open_store(
        f"{scheme}+sentinel://user:{SECRET}@[::1]:1,127.0.0.1:2/sessions?namespace=a"
    )
    assert isinstance(store, RedisStore)
    with pytest.raises(StoreUnavailable, match="no Sentinel answers.*::1:1"):
        await store.open(SessionPolicy())
    await store.close()
