"""A Redis that stops, dies, comes back, or comes back with less (HTP5, CUP8, ATT10)."""

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Callable, Generator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager

import pytest

from mcp_sessions.core.log import Draft, LoggedEvent
from mcp_sessions.core.request_keys import KeyUse
from mcp_sessions.core.states import Mode
from mcp_sessions.errors import Refusal, StoreUnavailable
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
from mcp_sessions.principal import ANONYMOUS
from mcp_sessions.stores.record_changes import (
    SetCurrent,
    SetFilter,
    SetLogLevel,
    SetStreamOpened,
    SetWaitsFrom,
)
from mcp_sessions.stores.records import Attachment
from mcp_sessions.stores.redis.pubsub import RedisExchange
from mcp_sessions.stores.redis.redis_store import RedisStore
from mcp_sessions.testing.parts import subscribers_of
from tests.stores import opening
from tests.stores.opening import NOW, new
from tests.support.proxy import Side, TcpProxy
from tests.support.redis_server import RedisServer, asked, link_of, redis_server, sent_by

pytestmark = pytest.mark.redis

POLICY = SessionPolicy(idle_timeout=100, max_lifetime=1_000, max_data_bytes=2**25)
HERE, THERE = ConnectionId("here"), ConnectionId("there")
TIMEOUT = 1.5
"""Seconds, where an answer does not come."""

KEPT = ("--appendonly", "yes", "--appendfsync", "always")


def opened(
    server: RedisServer, timeout: float = 10, url: str | None = None
) -> AbstractAsyncContextManager[RedisStore]:
    return opening.opened(RedisStore(url or server.url, timeout=timeout), POLICY)


@asynccontextmanager
async def used(
    *options: str, timeout: float = 10, mode: Mode = Mode.PROTOCOL
) -> AsyncGenerator[tuple[RedisServer, RedisStore, SessionId]]:
    """A server with these options, a store on it, and a session in that."""
    with redis_server(*options) as server:
        async with opened(server, timeout) as store:
            yield server, store, await new(store, mode)


@asynccontextmanager
async def through_a_proxy(
    server: RedisServer, timeout: float = 10
) -> AsyncGenerator[tuple[TcpProxy, RedisStore]]:
    async with TcpProxy("127.0.0.1", server.port) as proxy:
        async with opened(server, timeout, f"redis://{proxy.host}:{proxy.port}") as store:
            yield proxy, store


async def append(store: RedisStore, session_id: SessionId, stream: StreamName = EVENTS) -> str:
    appended = await store.append(session_id, Draft(b"{}"), now=NOW, stream=stream)
    assert appended is not None
    return appended.event.event_id


async def read(
    store: RedisStore, session_id: SessionId, after: str, stream: StreamName = EVENTS
) -> tuple[list[int], Refusal | None]:
    events, refusal = await store.read(session_id, after, now=NOW, stream=stream)
    return [event.number for event in events], refusal


async def until(is_so: Callable[[], bool]) -> None:
    """A bounded wait for what nothing tells of."""
    async with asyncio.timeout(10):
        while not is_so():  # noqa: ASYNC110
            await asyncio.sleep(0.01)


@contextmanager
def suspended(server: RedisServer) -> Generator[None]:
    server.suspend()
    try:
        yield
    finally:
        server.resume()


def is_awaited(store: RedisStore) -> bool:
    assert isinstance(store.exchange, RedisExchange)
    return store.exchange._listening.is_connected  # pyright: ignore[reportPrivateUsage]


async def back(store: RedisStore, session_id: SessionId) -> None:
    """Wait until the store answers again; bounded."""
    async with asyncio.timeout(10):
        while True:
            try:
                await store.load(session_id, now=NOW)
            except StoreUnavailable:
                # Nothing tells when it is back; the store itself does not go round.
                await asyncio.sleep(0.05)
            else:
                return


class Received:
    def __init__(self) -> None:
        self.numbers: list[int] = []
        self.gaps = 0
        self.grew = asyncio.Event()

    def on_message(self, message: bytes) -> None:
        raise AssertionError("nobody sent one")

    def on_event(
        self,
        session_id: SessionId,
        stream: StreamName,
        event: LoggedEvent,
        attachment: Attachment | None,
    ) -> None:
        self.numbers.append(event.number)
        self.grew.set()

    def on_gap(self) -> None:
        self.gaps += 1
        self.grew.set()

    async def until(self, *, numbers: int = 0, gaps: int = 0) -> None:
        async with asyncio.timeout(15):
            while len(self.numbers) < numbers or self.gaps < gaps:
                self.grew.clear()
                await self.grew.wait()


# --- away --------------------------------------------------------------------------------


async def test_a_redis_that_answers_nothing_is_an_error_in_time() -> None:
    """HTP5: for every call that waits, and then at once for those that come later."""
    async with used(timeout=TIMEOUT) as (server, store, session_id):
        with suspended(server):
            begun = time.monotonic()
            waiting = [append(store, session_id) for _ in range(20)]
            outcomes = await asyncio.gather(*waiting, return_exceptions=True)
            assert all(isinstance(outcome, StoreUnavailable) for outcome in outcomes)
            assert time.monotonic() - begun < 5 * TIMEOUT

            begun = time.monotonic()
            for _ in range(100):
                with pytest.raises(StoreUnavailable):
                    await store.load(session_id, now=NOW)
            assert time.monotonic() - begun < 5 * TIMEOUT

        await back(store, session_id)
        await append(store, session_id)


async def test_every_method_says_that_it_is_away_and_none_falls_back() -> None:
    """HTP5: never to memory; and no answer is made up."""
    async with used() as (server, store, session_id):
        event = (await store.append(session_id, Draft(b"{}"), now=NOW)) or pytest.fail()
        position, epoch = Position(parse(event.event.event_id).log_epoch, 0), FencingEpoch(1)
        key = KeyUse(RequestKey("key"), b"digest", "process")
        server.kill()
        exchange = store.exchange
        assert exchange is not None
        for call in (
            store.create(Mode.PROTOCOL, ANONYMOUS, peer=None, now=NOW),
            store.load(session_id, now=NOW),
            store.admit(session_id, ANONYMOUS, mode=Mode.PROTOCOL, now=NOW, key=key),
            store.touch([session_id], now=NOW),
            store.end(session_id),
            store.expire(now=NOW, held=(), limit=1),
            store.append(session_id, Draft(b"{}"), now=NOW),
            store.read(session_id, None, now=NOW),
            store.head(session_id),
            store.open_stream(session_id, GET_STREAM),
            store.drop_stream(session_id, GET_STREAM),
            store.drop_origin(session_id, session_id),
            store.carry(session_id, session_id, epoch, position),
            store.relay(session_id, session_id, epoch, event.event, now=NOW),
            store.attach(session_id, HERE, now=NOW),
            store.detach(session_id, epoch),
            store.change(session_id, SetCurrent(None)),
            store.change(session_id, SetStreamOpened()),
            store.subscribe(session_id, "note://1"),
            store.unsubscribe(session_id, "note://1"),
            subscribers_of(store, "note://1"),
            store.all_sessions(),
            store.change(session_id, SetFilter(frozenset({"note://1"}), frozenset())),
            store.change(session_id, SetWaitsFrom(None)),
            store.change(session_id, SetLogLevel("info")),
            store.change_state(session_id, {"a": 1}, ()),
            store.finish_request(session_id, key.key, b"{}", now=NOW),
            store.load_data(session_id),
            store.replace_data(session_id, {}, expected_version=0),
            exchange.send(b""),
            exchange.is_alive("process"),
            exchange.watch(session_id, EVENTS),
            exchange.join("process", Received()),
        ):
            with pytest.raises(StoreUnavailable):
                await call


def parse(event_id: str) -> Position:
    position = parse_position(event_id)
    assert position is not None
    return position


async def test_it_is_asked_no_faster_than_it_can_come_back() -> None:
    """HTP5: no busy loop, also where an exchange listens."""
    async with used() as (server, store, session_id):
        assert store.exchange is not None
        await store.exchange.join("process", Received())
        server.kill()
        attempts = 0
        link = link_of(store)
        make = link._make  # pyright: ignore[reportPrivateUsage]

        def counted() -> object:
            nonlocal attempts
            attempts += 1
            return make()

        link._make = counted  # pyright: ignore[reportPrivateUsage, reportAttributeAccessIssue]
        begun = time.monotonic()
        while time.monotonic() - begun < 1.2:
            with pytest.raises(StoreUnavailable):
                await store.load(session_id, now=NOW)
            await asyncio.sleep(0)
        assert 2 <= attempts <= 4


async def test_a_redis_that_was_killed_and_comes_back_is_used_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """HTP5: by itself; what was written to its disk is there. Only what failed is counted."""
    failed: list[str] = []

    def counted(store: str, _: object) -> None:
        failed.append(store)

    monkeypatch.setattr("mcp_sessions.metrics.store_failed", counted)
    async with used(*KEPT) as (server, store, session_id):
        await store.change_state(session_id, {"a": 1}, ())
        assert not failed
        server.kill()
        with pytest.raises(StoreUnavailable):
            await append(store, session_id)
        assert failed == ["redis"]
        server.start()
        await back(store, session_id)
        record = await store.load(session_id, now=NOW)
        assert record is not None and record.state.values == {"a": 1}
        await append(store, session_id)


async def test_a_call_that_is_cancelled_takes_nobody_elses_answer() -> None:
    async with used() as (_, store, session_id):
        for _ in range(20):
            calls = [asyncio.create_task(asked(store, "ECHO", str(n))) for n in range(20)]
            await asyncio.sleep(0)
            for call in calls[::3]:
                call.cancel()
            answers = await asyncio.gather(*calls, return_exceptions=True)
            for number, answer in enumerate(answers):
                cancelled = isinstance(answer, asyncio.CancelledError)
                assert answer == str(number).encode() or (cancelled and number % 3 == 0)
        await append(store, session_id)


async def test_a_large_write_that_is_cancelled_half_way_breaks_nobody_elses_call() -> None:
    """They share a connection, and it may be slow: what was begun is written to its end."""
    with redis_server() as server:
        async with through_a_proxy(server) as (proxy, store):
            session_id = await new(store)
            # The server knows the script now: it is sent once.
            assert await store.replace_data(session_id, {}, expected_version=0)
            before = await store.load_data(session_id)
            assert before is not None
            (connection,) = proxy.connections
            connection.stall(Side.CLIENT)
            large = {"large": "x" * 20_000_000}
            writing = asyncio.create_task(
                store.replace_data(session_id, large, expected_version=before.version)
            )
            others = [asyncio.create_task(asked(store, "ECHO", str(n))) for n in range(20)]
            late = asyncio.create_task(asked(store, "ECHO", "late"))
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            writing.cancel()
            late.cancel()
            for cancelled in (writing, late):
                with pytest.raises(asyncio.CancelledError):
                    await cancelled
            connection.unstall(Side.CLIENT)

            assert await asyncio.gather(*others) == [str(n).encode() for n in range(20)]
            assert proxy.accepted == 1 and connection.is_open
            data = await store.load_data(session_id)
            assert data is not None and len(data.value["large"]) == 20_000_000


async def test_a_large_write_that_nobody_takes_is_an_error_in_time() -> None:
    """For who wrote it as for who comes after; and then the connection is another one."""
    with redis_server() as server:
        async with through_a_proxy(server, TIMEOUT) as (proxy, store):
            session_id = await new(store)
            (connection,) = proxy.connections
            connection.stall(Side.CLIENT)
            large = {"large": "x" * 20_000_000}
            async with asyncio.timeout(TIMEOUT + 3):
                outcomes = await asyncio.gather(
                    store.replace_data(session_id, large, expected_version=0),
                    asked(store, "ECHO", "x"),
                    return_exceptions=True,
                )
            assert [type(outcome) for outcome in outcomes] == [StoreUnavailable] * 2
            await back(store, session_id)


async def test_an_answer_that_waits_is_read_before_anybody_says_that_there_is_none() -> None:
    """A process that was stopped, or busy, for longer than the timeout goes on where it was."""
    with redis_server() as server:
        async with opened(server, timeout=0.2) as store:
            await asked(store, "SET", "large", "x" * 300_000)
            calls = [asyncio.create_task(asked(store, "GET", "large")) for _ in range(3)]
            await asyncio.sleep(0)
            # As SIGSTOP and SIGCONT: nothing of this process runs, and Redis answers.
            time.sleep(0.5)  # noqa: ASYNC251 - it is to block
            answers = await asyncio.gather(*calls)
            assert [len(answer) for answer in answers] == [300_000] * 3


async def test_a_connection_that_the_server_closed_is_made_again() -> None:
    """An idle one, as servers and proxies close them: the next call does not fail."""
    async with used() as (server, store, session_id):
        link = link_of(store)
        server.ask("CLIENT KILL TYPE normal SKIPME yes")
        await until(lambda: link._connection is None)  # pyright: ignore[reportPrivateUsage]
        assert await append(store, session_id)


# --- lost writes -----------------------------------------------------------------------------


async def test_a_redis_that_started_again_has_new_logs() -> None:
    """CUP8: what it acknowledged last may be lost, and then a number would be issued twice."""
    with redis_server(*KEPT) as server:
        async with opened(server) as store:
            session_id, connection = await new(store), await new(store, Mode.TRANSPORT)
            attached = await store.attach(session_id, HERE, now=NOW)
            ids = [await append(store, session_id) for _ in range(3)]
            stream_ids = [await append(store, connection, GET_STREAM) for _ in range(3)]
            server.stop()
            server.start()
            await back(store, session_id)

            for after in ids:
                assert await read(store, session_id, after) == ([], Refusal.LOG_REPLACED)
            assert await read(store, connection, stream_ids[1], GET_STREAM) == (
                [],
                Refusal.LOG_REPLACED,
            )
            assert attached is not None
            again = await store.attach(session_id, THERE, now=NOW, position=parse(ids[1]))
            assert again is not None and again.refusal is Refusal.LOG_REPLACED
            first = await append(store, session_id)
            assert parse(first).number == 1 and first > ids[-1]
            assert await read(store, session_id, again.head) == ([1], None)
            head = await store.head(session_id)
            assert head is not None and head.event_id() == first


async def test_a_failover_that_lost_writes_is_no_silent_hole() -> None:
    """CUP8: a replica that missed the last events is promoted; nobody is sent it has them all."""
    with redis_server("--repl-diskless-sync-delay", "0") as master, redis_server() as replica:
        replica.ask(f"REPLICAOF 127.0.0.1 {master.port}")
        replica.wait_for("INFO replication", "master_link_status:up")
        async with opened(master) as before:
            session_id = await new(before)
            early = await before.attach(session_id, HERE, now=NOW)
            seen = [await append(before, session_id) for _ in range(3)]
            await asked(before, "WAIT", 1, 5_000)
            replica.suspend()
            seen += [await append(before, session_id) for _ in range(2)]
            late = await before.attach(session_id, THERE, now=NOW)
            master.kill()
        replica.resume()
        replica.ask("REPLICAOF NO ONE")
        async with opened(replica) as after:
            issued = [await append(after, session_id) for _ in range(6)]

            assert not set(issued) & set(seen)
            assert issued == sorted(issued) and issued[0] > seen[-1]
            for position in seen:
                assert await read(after, session_id, position) == ([], Refusal.LOG_REPLACED)
            # An attachment that was lost has an epoch that nobody else is given.
            assert early is not None and late is not None
            newest = await after.attach(session_id, HERE, now=NOW)
            assert newest is not None and newest.fencing_epoch > late.fencing_epoch + 1


async def test_after_two_losses_no_fencing_epoch_is_given_again() -> None:
    """TKO9. The second one takes the attachment that came after the first."""
    async with used(*KEPT) as (server, store, session_id):
        key = store._key(session_id)  # pyright: ignore[reportPrivateUsage]
        epochs: list[int] = []
        for _ in range(3):
            server.stop()
            server.start()
            await back(store, session_id)
            await append(store, session_id)
            fence, lost = await asked(store, "HMGET", key, "fence", "lost")
            attached = await store.attach(session_id, HERE, now=NOW)
            assert attached is not None
            epochs.append(attached.fencing_epoch)
            await asked(store, "HSET", key, "fence", fence, "lost", lost)
        assert epochs == sorted(set(epochs))


async def test_an_agents_session_keeps_what_is_left_and_issues_no_number_twice() -> None:
    """Its log is all there is of it: it is not emptied."""
    async with used(*KEPT, mode=Mode.AGENT) as (server, store, session_id):
        ids = [await append(store, session_id) for _ in range(3)]
        server.stop()
        server.start()
        await back(store, session_id)

        newest = await append(store, session_id)

        assert parse(newest).log_epoch == parse(ids[0]).log_epoch
        assert parse(newest).number > 1_000
        start = Position(parse(ids[0]).log_epoch, 0).event_id()
        assert await read(store, session_id, start) == ([1, 2, 3, parse(newest).number], None)


async def test_a_stream_takes_the_events_of_a_log_that_began_anew() -> None:
    """Their numbers are small again, and they are newer than all that went before."""
    with redis_server(*KEPT) as server:
        async with opened(server) as store:
            session_id, connection = await new(store), await new(store, Mode.TRANSPORT)
            ids = [await append(store, session_id) for _ in range(3)]
            await store.carry(connection, session_id, FencingEpoch(1), parse(ids[-1]))
            server.stop()
            server.start()
            await back(store, session_id)
            events = [
                (await store.append(session_id, Draft(b"{}"), now=NOW)) or pytest.fail()
                for _ in range(2)
            ]

            early = await store.relay(
                connection, session_id, FencingEpoch(1), events[1].event, now=NOW
            )
            assert early.missing_after == Position(parse(events[0].event.event_id).log_epoch, 0)
            for number in range(2):
                relayed = await store.relay(
                    connection, session_id, FencingEpoch(1), events[number].event, now=NOW
                )
                assert relayed.event is not None and relayed.event.number == number + 1


# --- the exchange ----------------------------------------------------------------------------


async def test_what_was_lost_while_nothing_was_received_is_reported_as_a_gap() -> None:
    """ATT10: notified after everything is received again, so that reading then misses nothing."""
    with redis_server() as server:
        async with opened(server) as store, opened(server) as other:
            session_id, received = await new(store), Received()
            assert store.exchange is not None
            await store.exchange.join("process", received)
            await store.exchange.watch(session_id, EVENTS)
            await append(other, session_id)
            await received.until(numbers=1)
            for gaps in range(1, 4):
                server.ask("CLIENT KILL TYPE pubsub")
                await received.until(gaps=gaps)
                await append(other, session_id)
                await received.until(numbers=gaps + 1)
            assert received.numbers == [1, 2, 3, 4]


async def test_a_listener_that_gets_nothing_finds_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """The other end is gone without a word: the connection looks idle, and is not."""
    monkeypatch.setattr("mcp_sessions.stores.exchange.BEAT", 0.1)
    with redis_server() as server:
        async with opened(server, TIMEOUT) as store:
            session_id, received = await new(store), Received()
            assert store.exchange is not None
            await store.exchange.join("process", received)
            await store.exchange.watch(session_id, EVENTS)
            sent = sent_by(store)
            with suspended(server):
                await until(lambda: not is_awaited(store))
            await received.until(gaps=1)
            await back(store, session_id)
            await append(store, session_id)
            await received.until(numbers=1)
            assert "SET" in sent


async def test_after_an_outage_nobody_is_taken_for_dead_at_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Its sign of life went with the server; it had no chance to renew it."""
    monkeypatch.setattr("mcp_sessions.stores.exchange.BEAT", 0.1)
    with caplog.at_level(logging.ERROR), redis_server() as server:
        async with opened(server) as store, opened(server) as other:
            session_id = await new(store)
            for each, name in ((store, "one"), (other, "two")):
                assert each.exchange is not None
                await each.exchange.join(name, Received())
            assert store.exchange is not None
            assert not await store.exchange.is_alive("three")
            server.kill()
            await until(lambda: not is_awaited(store))
            server.start()
            await back(store, session_id)
            assert await store.exchange.is_alive("two")
    assert not caplog.records
