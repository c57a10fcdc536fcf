"""A Postgres that stops, dies, stands still and comes back (HTP5, CUP8, ATT10)."""

import asyncio
import os
import tempfile
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, TypeVar

import asyncpg
import pytest

from mcp_sessions.core.log import Draft, LoggedEvent
from mcp_sessions.core.request_keys import Begun, KeyUse
from mcp_sessions.core.states import Mode
from mcp_sessions.errors import ConfigurationError, Refusal, StoreRefused, StoreUnavailable
from mcp_sessions.ids import (
    EVENTS,
    ConnectionId,
    LogEpoch,
    Position,
    RequestKey,
    SessionId,
    StreamName,
    parse_position,
)
from mcp_sessions.policy import SessionPolicy
from mcp_sessions.principal import ANONYMOUS
from mcp_sessions.stores.postgres import PostgresStore
from mcp_sessions.stores.postgres.postgres_link import PostgresLink
from mcp_sessions.stores.records import Attachment
from tests.stores.opening import NOW, POLICY, new, opened
from tests.support.disks import full, mounted, unmount
from tests.support.postgres_server import (
    PostgresServer,
    postgres_server,
    postgres_store,
    schema,
    shared_postgres,
    two_postgres_stores,
)

pytestmark = pytest.mark.postgres

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


async def test_a_connection_that_is_cancelled_while_it_begins_is_closed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A store that is closed at once left one open, as the garbage collector found."""
    made: asyncio.Future[asyncpg.Connection[Any]] = asyncio.get_running_loop().create_future()

    async def hang(connection: "asyncpg.Connection[Any]") -> None:
        made.set_result(connection)
        await asyncio.Event().wait()

    async with opened(postgres_store()) as store:
        link = store._link  # pyright: ignore[reportPrivateUsage]
        monkeypatch.setattr(link, "_begin", hang)
        connecting = asyncio.create_task(link.connect())
        connection = await made
        connecting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await connecting
        assert connection.is_closed()
        monkeypatch.undo()


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
        other = await new(store)
        with pytest.raises(StoreRefused, match="cannot be read"):
            await store.load(session_id, now=NOW)
        assert [each.session_id for each in await store.all_sessions()] == [other]


async def test_after_a_failover_no_event_id_is_used_again() -> None:
    """CUP8. The standby may lack the last events, which clients have. It has another timeline."""
    async with opened(postgres_store()) as store:
        session_id, other, third = await new(store), await new(store), await new(store)
        for each in (session_id, session_id, third):
            await store.append(each, Draft(b"{}"), now=NOW)
        stored = await store.append(session_id, Draft(b"{}"), now=NOW)
        assert stored is not None
        await store._link.fetch(  # pyright: ignore[reportPrivateUsage]
            "UPDATE sessions SET version = version + 99, body = convert_to(replace("
            "convert_from(body, 'utf8'), '\"line\":\"', '\"line\":\"0'), 'utf8')"
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


async def test_after_a_failover_no_fencing_epoch_is_given_again() -> None:
    """TKO9. The standby lacks the last attachment, whose process lives and will let go of it."""
    async with opened(postgres_store()) as store:
        session_id = await new(store)
        link = store._link  # pyright: ignore[reportPrivateUsage]
        ((before,),) = await link.fetch("SELECT body FROM sessions")
        lost = await store.attach(session_id, ConnectionId("lost"), now=NOW)
        assert lost is not None
        await link.fetch(
            "UPDATE sessions SET version = version + 99, body = $1",
            before.replace(b'"line":"', b'"line":"0'),
        )
        assert await store.head(session_id) is not None
        attached = await store.attach(session_id, ConnectionId("next"), now=NOW)
        assert attached is not None and attached.fencing_epoch > lost.fencing_epoch
        assert not await store.detach(session_id, lost.fencing_epoch)
        again = await store.attach(session_id, ConnectionId("last"), now=NOW)
        assert again is not None and again.fencing_epoch == attached.fencing_epoch + 1


async def test_after_two_failovers_no_fencing_epoch_is_given_again() -> None:
    """TKO9. The second standby lacks the attachment that the first failover was for."""
    async with opened(postgres_store()) as store:
        session_id = await new(store)
        link = store._link  # pyright: ignore[reportPrivateUsage]
        epochs: list[int] = []
        ((body,),) = await link.fetch("SELECT body FROM sessions")
        for _ in range(3):
            await link.fetch(
                "UPDATE sessions SET version = version + 99, body = $1",
                body.replace(b'"line":"', b'"line":"0'),
            )
            assert await store.head(session_id) is not None
            ((body,),) = await link.fetch("SELECT body FROM sessions")
            attached = await store.attach(session_id, ConnectionId("next"), now=NOW)
            assert attached is not None
            epochs.append(attached.fencing_epoch)
        assert epochs == sorted(set(epochs))


async def test_mail_that_was_taken_and_did_not_arrive_is_a_gap() -> None:
    """The connection that listens lives on. The answer to another one was lost."""
    here, there = two_postgres_stores()
    async with opened(here), opened(there):
        session_id = await new(here)
        listener, exchange = Listener(), here.exchange
        assert exchange is not None
        await exchange.join("here", listener)
        await exchange.watch(session_id, EVENTS)
        link = here._link  # pyright: ignore[reportPrivateUsage]
        fetch, taken = link.fetch, list[int]()

        async def loses(sql: str, *values: Any) -> Any:
            rows = await fetch(sql, *values)
            if sql.startswith("DELETE FROM mail") and rows and not taken:
                taken.append(len(rows))
                raise StoreUnavailable("no answer")
            return rows

        link.fetch = loses  # pyright: ignore[reportAttributeAccessIssue]
        await there.append(session_id, Draft(b"{}"), now=NOW)
        await listener.until(lambda: bool(listener.gaps))
        assert taken == [1] and listener.events == []


@pytest.mark.parametrize("ahead", [-7_200.0, 7_200.0])
async def test_a_session_sleeps_by_the_clock_of_the_server(ahead: float) -> None:
    """SES13. The clock of the process that looks is wrong."""
    policy = SessionPolicy(idle_timeout=100, forget_after=1_000, max_lifetime=10_000)
    own = schema()
    url = shared_postgres().url
    store = PostgresStore(url, schema=own, clock=lambda: time.time() + ahead)
    async with opened(store, policy):
        now = time.time() + ahead
        asleep, used = [
            (await store.create(Mode.PROTOCOL, ANONYMOUS, peer=None, now=now)).session_id
            for _ in range(2)
        ]
        for each in (asleep, used):
            await store.append(each, Draft(b"{}"), now=now)
        await store._link.fetch(  # pyright: ignore[reportPrivateUsage]
            "UPDATE sessions SET expires_at = expires_at - 500, due_at = due_at - 500"
            " WHERE sid = $1",
            asleep,
        )
        await store.sleep(now=now)
        rows = await store._link.fetch("SELECT sid FROM events")  # pyright: ignore[reportPrivateUsage]
        assert [row["sid"] for row in rows] == [used]


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


# --- what a server refuses ---------------------------------------------------------------------


async def is_refused(
    store: PostgresStore, session_id: SessionId, error: type[StoreUnavailable], text: str
) -> None:
    """A step fails with one line, and nothing of it is done."""
    before = await store.head(session_id)
    with pytest.raises(error, match=text) as refused:
        await store.append(session_id, Draft(b"{}"), now=NOW)
    assert "\n" not in str(refused.value)
    assert await store.head(session_id) == before


async def works(store: PostgresStore, session_id: SessionId) -> None:
    """A step is done once, and has the next number."""
    before = await store.head(session_id)
    appended = await store.append(session_id, Draft(b"{}"), now=NOW)
    assert before is not None and appended is not None
    assert appended.event.number == before.number + 1


@pytest.mark.parametrize(
    ("code", "error", "text"),
    [
        ("53100", StoreRefused, "has a full disk: it refuses writes. Make room"),
        ("53200", StoreRefused, "is out of memory"),
        ("57014", StoreUnavailable, "cancelled a statement"),
        ("57P01", StoreUnavailable, "is shutting down"),
        ("XX001", StoreUnavailable, "answered with the error XX001"),
    ],
)
async def test_what_a_server_refuses_is_one_line_and_is_done_to_no_part(
    code: str, error: type[StoreUnavailable], text: str
) -> None:
    """The event is the last row that the statement writes."""
    async with opened(postgres_store()) as store:
        session_id = await new(store)
        await works(store, session_id)
        link = store._link  # pyright: ignore[reportPrivateUsage]
        await link.run(
            "CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS"
            f" $$ BEGIN RAISE EXCEPTION 'no' USING ERRCODE = '{code}'; END $$;"
            "CREATE TRIGGER refuses AFTER INSERT ON events EXECUTE FUNCTION refuse();"
        )
        await is_refused(store, session_id, error, text)
        await link.run("DROP TRIGGER refuses ON events")
        await works(store, session_id)


async def test_a_server_whose_disk_is_full_refuses_writes_until_there_is_room() -> None:
    """A disk of its own, if this user may mount one; else the trigger of the test above is all."""
    with tempfile.TemporaryDirectory(prefix="mcp-sessions-postgres-") as folder:
        # Not a folder of pytest: each run of it closes those of others.
        Path(folder).chmod(0o711)
        own = Path(folder) / "server"
        if not mounted(own, 256):
            assert os.geteuid() != 0, "root may mount a disk"
            return
        server = PostgresServer(own)
        try:
            server.start()
            async with opened(PostgresStore(server.url, timeout=TIMEOUT)) as store:
                session_id = await new(store)
                large = Draft(b'"' + b"x" * 60_000 + b'"')
                with full(own), pytest.raises(StoreRefused, match="has a full disk"):
                    for _ in range(200):
                        await store.append(session_id, large, now=NOW)
                await back(lambda: works(store, session_id))
        finally:
            server.kill()
            unmount(own)


async def test_limits_of_time_that_are_meant_for_other_programs_do_not_count() -> None:
    """An operator sets them for a whole server. Its connection of the other program ends."""
    options = ("statement_timeout=1", "lock_timeout=1", "idle_in_transaction_session_timeout=50")
    options += ("idle_session_timeout=50",)
    with postgres_server(*(each for one in options for each in ("-c", one))) as server:
        async with opened(PostgresStore(server.url, timeout=TIMEOUT)) as store:
            listener, ended = Listener(), asyncio.Event()
            assert store.exchange is not None
            await store.exchange.join("here", listener)
            other = await asyncpg.connect(server.url)
            other.add_termination_listener(lambda _: ended.set())
            session_id = await new(store)
            async with asyncio.timeout(30):
                await ended.wait()
            await works(store, session_id)
            assert not listener.gaps


async def test_a_row_that_somebody_locks_is_waited_for_until_the_timeout() -> None:
    """Then the server gives the statement up as well: nothing of it is done later."""
    async with used() as (server, store, session_id):
        other = await asyncpg.connect(server.url)
        async with other.transaction():
            await other.execute("LOCK TABLE mcp_sessions.events IN ACCESS EXCLUSIVE MODE")
            with pytest.raises(StoreUnavailable, match="did not answer|cancelled a statement"):
                await store.append(session_id, Draft(b"{}"), now=NOW)
            waiting = "SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock'"
            async with asyncio.timeout(30):
                while await other.fetchval(waiting):  # noqa: ASYNC110
                    await asyncio.sleep(0.02)
        await other.close()
        head = await store.head(session_id)
        assert head is not None and head.number == 0
        await works(store, session_id)


async def test_a_server_without_room_for_a_connection_says_so() -> None:
    """And the next step has one."""
    limits = ("-c", "max_connections=5", "-c", "superuser_reserved_connections=0")
    with postgres_server(*limits) as server:
        async with opened(PostgresStore(server.url, timeout=TIMEOUT)) as store:
            session_id = await new(store)
            others: list[Any] = []
            with pytest.raises(asyncpg.TooManyConnectionsError):
                while True:
                    others.append(await asyncpg.connect(server.url))
            calls = [store.load(session_id, now=NOW) for _ in range(3)]
            answers = await asyncio.gather(*calls, return_exceptions=True)
            refused = [each for each in answers if isinstance(each, BaseException)]
            assert refused and all(isinstance(each, StoreRefused) for each in refused)
            assert all("has too many connections (max_connections)" in str(e) for e in refused)
            for each in others:
                await each.close()
            await back(lambda: works(store, session_id))


# --- failover ----------------------------------------------------------------------------------


async def test_a_store_with_all_servers_in_its_url_follows_the_primary() -> None:
    """CUP8. The standby has all that the primary answered; what it logs has other ids. Processes
    hear each other again: what they have for that was lost.
    """
    with postgres_server() as primary, postgres_server() as standby:
        url = f"postgresql://sessions@127.0.0.1:{primary.port},127.0.0.1:{standby.port}/postgres"
        standby.stop()
        standby.follow(primary)
        alone = PostgresStore(standby.url, timeout=TIMEOUT)
        with pytest.raises(StoreRefused, match="is a standby|is read-only"):
            await alone.open(POLICY)
        await alone.close()
        async with (
            opened(PostgresStore(url, timeout=TIMEOUT)) as store,
            opened(PostgresStore(url, timeout=TIMEOUT)) as other,
        ):
            session_id = await new(store)
            listener = Listener()
            exchange = other.exchange
            assert store.exchange is not None and exchange is not None
            await store.exchange.join("here", listener)
            await exchange.join("there", Listener())
            await store.exchange.watch(session_id, EVENTS)
            stored = await store.append(session_id, Draft(b"{}"), now=NOW)
            assert stored is not None
            assert await store.admit(session_id, ANONYMOUS, mode=Mode.PROTOCOL, now=NOW, key=KEY)
            primary.wait_until_followed()
            primary.kill()
            with pytest.raises(StoreUnavailable):
                await store.append(session_id, Draft(b"{}"), now=NOW)
            standby.promote()
            record = await back(lambda: store.load(session_id, now=NOW))
            assert record is not None
            head = await store.head(session_id)
            assert head is not None and head.log_epoch > stored.event.position.log_epoch
            admitted = await store.admit(
                session_id, ANONYMOUS, mode=Mode.PROTOCOL, now=NOW, key=KEY
            )
            assert admitted is not None and admitted.key is Begun.RUNNING
            await listener.until(lambda: bool(listener.gaps))
            last = await other.append(session_id, Draft(b"{}"), now=NOW)
            assert last is not None and last.event.number == 1
            await listener.until(lambda: last.event in listener.events)
            await back(lambda: exchange.send(b"hello", to="here"))
            await listener.until(lambda: b"hello" in listener.messages)
