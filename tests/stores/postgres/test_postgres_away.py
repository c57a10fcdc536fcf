"""A Postgres that stops, dies, stands still and comes back (HTP5, CUP8, ATT10)."""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any, TypeVar

import asyncpg
import pytest

from mcp_sessions.core.log import Draft, LoggedEvent
from mcp_sessions.core.request_keys import Begun, KeyUse
from mcp_sessions.core.states import Mode
from mcp_sessions.errors import ConfigurationError, Refusal, StoreRefused, StoreUnavailable
from mcp_sessions.ids import (
    EVENTS,
    LogEpoch,
    Position,
    RequestKey,
    SessionId,
    StreamName,
    parse_position,
)
from mcp_sessions.principal import ANONYMOUS
from mcp_sessions.stores.postgres import PostgresStore
from mcp_sessions.stores.postgres.postgres_link import PostgresLink
from mcp_sessions.stores.records import Attachment
from tests.stores.opening import NOW, POLICY, new, opened
from tests.support.postgres_server import PostgresServer, postgres_server, postgres_store, schema

pytestmark = [pytest.mark.anyio, pytest.mark.postgres]

TIMEOUT = 1.0
"""Seconds, where an answer does not come."""

T = TypeVar("T")

KEY = KeyUse(RequestKey("key"), b"digest", "process-1")


@asynccontextmanager
async def used() -> AsyncGenerator[tuple[PostgresServer, PostgresStore, SessionId]]:
    """A server of its own, a store on it, and a session in that."""
    with postgres_server() as server:
        async with opened(PostgresStore(server.url, timeout=TIMEOUT)) as store:
            yield server, store, await new(store)


async def back(call: Callable[[], Awaitable[T]]) -> T:
    """Ask until it is there again; bounded."""
    async with asyncio.timeout(30):
        while True:
            try:
                return await call()
            except StoreUnavailable:
                await asyncio.sleep(0.05)


def away(server: PostgresServer, how: str) -> Callable[[], None]:
    """Take a server away. What brings it back."""
    if how == "suspended":
        server.suspend()
        return server.resume
    (server.kill if how == "killed" else server.stop)()
    return server.start


@pytest.mark.parametrize("how", ["killed", "stopped", "suspended"])
async def test_every_call_fails_in_time_and_goes_on_afterwards(
    how: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The log has lines of ours alone: the driver wrote a traceback for each of its attempts."""
    async with used() as (server, store, session_id):
        stored = await store.append(session_id, Draft(b"{}"), now=NOW)
        assert stored is not None
        returns = away(server, how)
        calls: dict[str, Callable[[], Awaitable[Any]]] = {
            "load": lambda: store.load(session_id, now=NOW),
            "admit": lambda: store.admit(session_id, ANONYMOUS, mode=Mode.PROTOCOL, now=NOW),
            "append": lambda: store.append(session_id, Draft(b"{}"), now=NOW),
            "create": lambda: new(store),
        }
        for name, call in calls.items():
            async with asyncio.timeout(TIMEOUT * 5):
                with pytest.raises(StoreUnavailable, match="Postgres at 127"):
                    await call()
                    raise AssertionError(name)
        returns()
        admitted = await back(
            lambda: store.admit(session_id, ANONYMOUS, mode=Mode.PROTOCOL, now=NOW, key=KEY)
        )
        assert admitted is not None and admitted.key in (Begun.FIRST, Begun.RUNNING)
        head = await back(lambda: store.head(session_id))
        assert head is not None
        events, refusal = await store.read(session_id, stored.event.event_id, now=NOW)
        assert refusal is None
        # What was sent before it stood still may have been done: it is there once, in order.
        assert [event.number for event in events] == list(range(2, head.number + 1))
    assert [record.name for record in caplog.records if record.name.startswith("asyncpg")] == []


async def test_a_call_that_is_given_up_ends_at_once() -> None:
    """The server stands still. The pool waited for its answer, to take the connection back."""
    with postgres_server() as server:
        async with opened(PostgresStore(server.url, timeout=300.0)) as store:
            session_id = await new(store)
            server.suspend()
            try:
                call = asyncio.create_task(store.load(session_id, now=NOW))
                for _ in range(100):
                    await asyncio.sleep(0)
                call.cancel()
                await asyncio.wait({call}, timeout=30)
                assert call.cancelled()
            finally:
                server.resume()
            assert await back(lambda: store.load(session_id, now=NOW))


class Listener:
    def __init__(self) -> None:
        self.messages: list[bytes] = []
        self.events: list[LoggedEvent] = []
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
        self.events.append(event)
        self.changed.set()

    def on_gap(self) -> None:
        self.gaps += 1
        self.changed.set()

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(30):
            while not condition():
                self.changed.clear()
                await self.changed.wait()


@pytest.mark.parametrize("how", ["killed", "stopped", "suspended"])
async def test_a_process_hears_the_others_again(how: str) -> None:
    """Whoever watches is told of the gap, or has heard everything."""
    async with used() as (server, here, session_id):
        async with opened(PostgresStore(server.url, timeout=TIMEOUT)) as there:
            listener = Listener()
            exchange = there.exchange
            assert here.exchange is not None and exchange is not None
            await here.exchange.join("here", listener)
            await exchange.join("there", Listener())
            await here.exchange.watch(session_id, EVENTS)
            returns = away(server, how)
            with pytest.raises(StoreUnavailable):
                await there.append(session_id, Draft(b"{}"), now=NOW)
            returns()
            await back(lambda: there.load(session_id, now=NOW))
            if how != "suspended":
                await listener.until(lambda: bool(listener.gaps))
            last = await back(lambda: there.append(session_id, Draft(b"{}"), now=NOW))
            assert last is not None
            await listener.until(
                lambda: bool(listener.events) and listener.events[-1] == last.event
            )
            assert await back(lambda: exchange.is_alive("here"))
            await back(lambda: exchange.send(b"hello", to="here"))
            await listener.until(lambda: b"hello" in listener.messages)


async def test_a_connection_that_is_terminated_loses_nothing() -> None:
    """An operator ends each of its connections (``pg_terminate_backend``)."""
    async with used() as (server, here, session_id):
        async with opened(PostgresStore(server.url, timeout=TIMEOUT)) as there:
            listener = Listener()
            assert here.exchange is not None
            await here.exchange.join("here", listener)
            await here.exchange.watch(session_id, EVENTS)
            for _ in range(5):
                await back(
                    lambda: there._link.fetch(  # pyright: ignore[reportPrivateUsage]
                        "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
                        " WHERE pid <> pg_backend_pid() AND backend_type = 'client backend'"
                    )
                )
                await back(lambda: there.append(session_id, Draft(b"{}"), now=NOW))
            head = await back(lambda: here.head(session_id))
            assert head is not None
            position = parse_position(f"{head.log_epoch}-{0:012d}")
            assert position is not None
            events, refusal = await back(
                lambda: here.read(session_id, position.event_id(), now=NOW)
            )
            assert refusal is None and [each.number for each in events][-1] == head.number
            await listener.until(
                lambda: (
                    bool(listener.gaps)
                    or [each.number for each in listener.events] == list(range(1, head.number + 1))
                )
            )


async def test_a_connection_that_broke_is_no_answer_of_the_server() -> None:
    """The driver has a code for it, which an operator looked for in the log of the server."""
    link = PostgresLink("postgresql://somebody@127.0.0.1:5432/sessions", "sessions", TIMEOUT)
    said = str(link.explained(asyncpg.ConnectionDoesNotExistError("closed")))
    assert said.startswith("the connection to Postgres at 127.0.0.1:5432 failed: ")


async def test_tables_of_a_newer_release_are_not_touched() -> None:
    own = schema()
    async with opened(postgres_store(own=own)) as store:
        await store._link.fetch("INSERT INTO versions VALUES (99)")  # pyright: ignore[reportPrivateUsage]
    newer = postgres_store(own=own)
    with pytest.raises(ConfigurationError, match="newer release"):
        await newer.open(POLICY)
    await newer.close()


async def test_a_row_of_another_program_is_refused_and_named() -> None:
    async with opened(postgres_store()) as store:
        session_id = await new(store)
        await store._link.fetch("UPDATE sessions SET body = 'x'::bytea")  # pyright: ignore[reportPrivateUsage]
        with pytest.raises(StoreRefused, match="cannot be read"):
            await store.load(session_id, now=NOW)


async def test_after_a_failover_no_event_id_is_used_again() -> None:
    """CUP8. The standby may lack the last events, which clients have. It has another timeline."""
    async with opened(postgres_store()) as store:
        session_id, other, third = await new(store), await new(store), await new(store)
        for each in (session_id, session_id, third):
            await store.append(each, Draft(b"{}"), now=NOW)
        stored = await store.append(session_id, Draft(b"{}"), now=NOW)
        assert stored is not None
        await store._link.fetch(  # pyright: ignore[reportPrivateUsage]
            "UPDATE sessions SET body = convert_to(replace(convert_from(body, 'utf8'),"
            " '\"line\":\"', '\"line\":\"0'), 'utf8')"
        )
        # A step that stores an event may be the first one.
        first = await store.append(third, Draft(b"{}"), now=NOW)
        assert first is not None and first.event.number == 1
        ((head,), (of_other,)) = [
            [each.position for each in await store.heads([(sid, EVENTS)])]
            for sid in (session_id, other)
        ]
        assert head is not None and of_other is not None
        assert head.log_epoch > stored.event.position.log_epoch and head.number == 0
        assert await store.head(session_id) == head and await store.head(other) == of_other
        assert await store.read(session_id, stored.event.event_id, now=NOW) == (
            (),
            Refusal.LOG_REPLACED,
        )
        appended = await store.append(session_id, Draft(b"{}"), now=NOW)
        assert appended is not None
        assert appended.event.position == Position(head.log_epoch, 1)
        assert await store.read(session_id, head.event_id(), now=NOW) == (
            (appended.event,),
            None,
        )


async def test_after_a_failover_an_agents_log_is_whole_and_has_new_ids() -> None:
    """CUP8. No other copy of it exists. The clock of the one that wrote it was ahead."""
    async with opened(postgres_store()) as store:
        session_id = await new(store, Mode.AGENT)
        for text in (b'"a"', b'"b"'):
            await store.append(session_id, Draft(text), now=NOW)
        ahead = LogEpoch("9" * 18 + "0")
        await store._link.fetch(  # pyright: ignore[reportPrivateUsage]
            "UPDATE sessions SET body = convert_to(regexp_replace(replace("
            "convert_from(body, 'utf8'), '\"line\":\"', '\"line\":\"0'),"
            " '\"events\":\\[\"[0-9]+\"', $1), 'utf8')",
            f'"events":["{ahead}"',
        )
        old = Position(ahead, 0).event_id()
        assert await store.read(session_id, old, now=NOW) == ((), Refusal.LOG_REPLACED)
        head = await store.head(session_id)
        assert head is not None and head.log_epoch > ahead
        begin = Position(head.log_epoch, 0).event_id()
        await store.append(session_id, Draft(b'"c"'), now=NOW)
        found, refusal = await store.read(session_id, begin, now=NOW)
        assert refusal is None
        assert [each.payload for each in found] == [b'"a"', b'"b"', b'"c"']
        assert [each.position for each in found] == [Position(head.log_epoch, n) for n in (1, 2, 3)]
