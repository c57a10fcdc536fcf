"""Two processes change the same rows at once: whoever comes second reads again, and decides anew.

The race is made: before one statement of the one store, the other store does its step.
"""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest

from mcp_sessions.core.log import Draft, LoggedEvent
from mcp_sessions.core.states import Mode
from mcp_sessions.ids import EVENTS, Position, SessionId, StreamName
from mcp_sessions.policy import SessionPolicy
from mcp_sessions.principal import ANONYMOUS
from mcp_sessions.stores.contract import SessionStore, StateConflict
from mcp_sessions.stores.memory import MemoryStore
from mcp_sessions.stores.postgres import PostgresStore
from mcp_sessions.stores.record_changes import SetLogLevel
from mcp_sessions.stores.records import Attachment
from mcp_sessions.stores.sql.session_rows import text_bytes
from mcp_sessions.testing.parts import change_of
from tests.stores.opening import NOW, new, opened
from tests.support.postgres_server import postgres_store, two_postgres_stores

pytestmark = pytest.mark.postgres

IDLE = 100.0
POLICY = SessionPolicy(idle_timeout=IDLE, forget_after=500.0, max_lifetime=10_000)

Ends = Callable[[PostgresStore, float, int], Awaitable[Sequence[Any]]]


@asynccontextmanager
async def two() -> AsyncGenerator[tuple[PostgresStore, PostgresStore]]:
    first, second = two_postgres_stores()
    async with opened(first, POLICY), opened(second, POLICY):
        yield first, second


def before(store: PostgresStore, statement: str, step: Callable[[], Awaitable[object]]) -> None:
    """Do that step just before the store's next statement of that name."""
    engine = store._engine  # pyright: ignore[reportPrivateUsage]
    sends = getattr(engine, statement)

    async def late(*args: Any) -> Any:
        setattr(engine, statement, sends)
        await step()
        return await sends(*args)

    setattr(engine, statement, late)


async def events_of(store: PostgresStore) -> int:
    """The number of events of all sessions."""
    ((count,),) = await store._link.fetch("SELECT count(*) FROM events")  # pyright: ignore[reportPrivateUsage]
    return count


ENDS: dict[str, Ends] = {
    "expire": lambda store, now, limit: store.expire(now=now + 500, held=(), limit=limit),
    "evict": lambda store, now, limit: store.evict(
        now=now, unused_for=60, held=(), limit=limit, opened=False
    ),
    "evict_own": lambda store, now, limit: store.evict_own(
        ANONYMOUS, now=now, unused_for=60, held=(), limit=limit
    ),
    "evict_heavy": lambda store, now, limit: store.evict_heavy(
        now=now, most=0, held=(), limit=limit
    ),
}


@pytest.mark.parametrize("ends", ENDS.values(), ids=ENDS)
async def test_a_session_that_is_written_while_it_ends_is_looked_at_again(ends: Ends) -> None:
    """SES20. What was written did not use it."""
    async with two() as (here, there):
        session_id = await new(here, Mode.TRANSPORT)
        before(here, "remove", lambda: there.change(session_id, SetLogLevel("debug")))
        gone = await ends(here, NOW + IDLE, 9)
        assert [record.session_id for record in gone] == [session_id]
        assert gone[0].client.log_level == "debug"
        assert await there.all_sessions() == []


@pytest.mark.parametrize("ends", ENDS.values(), ids=ENDS)
async def test_a_session_that_is_used_while_it_ends_stays_and_another_goes(ends: Ends) -> None:
    """SES20."""
    async with two() as (here, there):
        first = await new(here, Mode.TRANSPORT)
        record = await here.create(Mode.TRANSPORT, ANONYMOUS, peer=None, now=NOW + 1)
        before(here, "remove", lambda: there.touch([first], now=NOW + IDLE + 500))
        gone = await ends(here, NOW + IDLE + 1, 1)
        assert [record.session_id for record in gone] == [record.session_id]
        assert [record.session_id for record in await there.all_sessions()] == [first]


async def test_a_session_is_used_also_if_somebody_changes_it_meanwhile() -> None:
    """SES14. An event that comes uses no session: its deadline would stay where it was."""
    async with two() as (here, there):
        session_id = await new(here)
        before(here, "_write", lambda: there.append(session_id, Draft(b"{}"), now=NOW))
        await here.touch([session_id], now=NOW + 50)
        record = await here.load(session_id, now=NOW + 50)
        assert record is not None and record.life.expires_at == NOW + 50 + 500


async def test_an_event_whose_number_is_there_is_stored_under_the_next_reading() -> None:
    """Whose row it was, and where it went: the step begins anew."""
    async with two() as (here, there):
        session_id = await new(here)
        link = there._link  # pyright: ignore[reportPrivateUsage]

        async def is_there() -> None:
            await link.fetch(
                "INSERT INTO events (sid, stream, number, at, size, payload)"
                " VALUES ($1, $2, 1, 0, 0, '')",
                session_id,
                text_bytes(EVENTS),
            )
            before(here, "read", lambda: link.fetch("DELETE FROM events"))

        before(here, "_write", is_there)
        appended = await here.append(session_id, Draft(b"{}"), now=NOW)
        assert appended is not None and appended.event.number == 1


async def test_a_session_that_is_made_anew_under_its_id_gets_nothing_of_the_one_before() -> None:
    """Of both, the row changed once."""
    session_id = SessionId("conversation" + "x" * 31)
    async with two() as (here, there):

        async def made(store: PostgresStore, state: str) -> None:
            await store.create(
                Mode.CONVERSATION, ANONYMOUS, peer=None, now=NOW, session_id=session_id
            )
            await store.change_state(session_id, {state: 1}, ())

        async def anew() -> None:
            await there.end(session_id)
            await made(there, "new")

        await made(here, "old")
        before(here, "_write", anew)
        record = await here.change_state(session_id, {"later": 1}, ())
        assert record is not None and set(record.state.values) == {"new", "later"}


class Deaf:
    """Hears nothing."""

    def on_message(self, message: bytes) -> None: ...

    def on_event(
        self,
        session_id: SessionId,
        stream: StreamName,
        event: LoggedEvent,
        attachment: Attachment | None,
    ) -> None: ...

    def on_gap(self) -> None: ...


async def test_an_event_is_stored_also_if_who_watches_leaves_just_now() -> None:
    """The letter would be for a process that is gone (a rolling restart)."""
    async with two() as (here, there):
        session_id = await new(here)
        assert there.exchange is not None
        await there.exchange.join("leaving", Deaf())
        await there.exchange.watch(session_id, EVENTS)
        link = there._link  # pyright: ignore[reportPrivateUsage]
        leaves = await link.connect()
        try:
            async with leaves.transaction():
                await leaves.execute("DELETE FROM processes WHERE process = 'leaving'")
                appending = asyncio.create_task(here.append(session_id, Draft(b"{}"), now=NOW))
                async with asyncio.timeout(30):
                    while not await link.fetch(
                        "SELECT 1 FROM pg_locks WHERE NOT granted"
                        " AND $1 = ANY(pg_blocking_pids(pid))",
                        leaves.get_server_pid(),
                    ):
                        assert not appending.done()
            appended = await appending
        finally:
            await leaves.close()
        assert appended is not None and appended.event.number == 1


async def test_a_session_falls_asleep_also_if_somebody_changes_it_meanwhile() -> None:
    """Nobody would look at it again: its events would stay until it ends."""
    async with two() as (here, there):
        session_id = await new(here)
        await here.append(session_id, Draft(b"{}"), now=NOW)
        before(here, "_write", lambda: there.change(session_id, SetLogLevel("debug")))
        await here.sleep(now=NOW + IDLE)
        assert await events_of(there) == 0


async def test_what_another_program_wrote_to_a_row_stops_no_other_session(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Steps of many sessions go on with the others, and the log says so."""
    async with two() as (here, there):
        broken, whole = await new(here), await new(here)
        await there._link.fetch(  # pyright: ignore[reportPrivateUsage]
            "UPDATE sessions SET body = 'x'::bytea WHERE sid = $1", broken
        )
        ids: list[SessionId] = [broken, whole]
        await here.touch(ids, now=NOW + 50)
        record = await here.load(whole, now=NOW + 50)
        assert record is not None and record.life.expires_at == NOW + 50 + 500
        assert "a session could not be read: " in caplog.text
        changed = change_of(listed="tools")
        appended = await here.append_change(ids, changed, now=NOW + 50)
        assert caplog.text.count("a change is not in a session's log: ") == 1
        assert [each.session_id for each in appended] == [whole]
        assert await events_of(there) == 1
        await here.sleep(now=NOW + 50 + IDLE)
        assert await events_of(there) == 0


async def test_of_two_that_add_a_whole_session_the_second_may_add_it() -> None:
    """The second takes away the row of the first, which is not whole yet."""
    async with two() as (here, there):
        session_id = await new(here)
        whole = await here.whole(session_id)
        assert whole is not None
        await here.end(session_id)
        before(here, "read", lambda: there.add_whole(whole))
        assert not await here.add_whole(whole)
        assert await there.session_ids() == [session_id]


async def test_a_whole_session_whose_row_somebody_took_away_is_added_again() -> None:
    async with two() as (here, there):
        session_id = await new(here)
        whole = await here.whole(session_id)
        assert whole is not None
        await here.end(session_id)
        before(here, "read", lambda: there.end(session_id))
        assert await here.add_whole(whole)
        assert await there.session_ids() == [session_id]


def statements(store: PostgresStore) -> list[str]:
    """What the store sends from now on, one after the other: its first word."""
    link = store._link  # pyright: ignore[reportPrivateUsage]
    sent: list[str] = []
    fetch = link.fetch

    async def counted(sql: str, *values: Any) -> Any:
        sent.append(sql.split()[0])
        return await fetch(sql, *values)

    link.fetch = counted  # pyright: ignore[reportAttributeAccessIssue]
    return sent


async def test_a_step_is_two_statements_and_one_for_who_wrote_the_session_last() -> None:
    """Of one that needs its row alone. If another process wrote it since, nothing is lost."""
    async with two() as (here, there):
        session_id = await new(here)

        async def tells(store: PostgresStore, name: str) -> int:
            sent = statements(store)
            assert await store.change_state(session_id, {name: 1}, ()) is not None
            return len(sent)

        assert [await tells(here, "a"), await tells(here, "b")] == [2, 1]
        assert [await tells(there, "c"), await tells(there, "d")] == [2, 1]
        # Its first statement writes nothing, and brings the row.
        assert [await tells(here, "e"), await tells(here, "f")] == [2, 1]
        record = await there.load(session_id, now=NOW)
        assert record is not None and set(record.state.values) == set("abcdef")


@pytest.mark.parametrize("key", [None, "key"])
async def test_an_event_is_one_statement_for_who_wrote_the_log_last(key: str | None) -> None:
    """EVT7. If another process wrote it since, no number is used twice."""
    async with two() as (here, there):
        session_id = await new(here)
        assert await there.load(session_id, now=NOW) is not None

        async def appends(store: PostgresStore, number: int) -> int:
            sent = statements(store)
            appended = await store.append(session_id, Draft(b"{}", key=key), now=NOW)
            assert appended is not None and appended.event.number == number
            assert appended.replaced is (key is not None and number > 1)
            return len(sent)

        assert [await appends(here, 1), await appends(here, 2)] == [2, 1]
        assert [await appends(there, 3), await appends(there, 4)] == [2, 1]
        # Its first statement writes nothing. The row that it brings does not have the events.
        assert [await appends(here, 5), await appends(here, 6)] == [3, 1]
        assert await events_of(here) == (1 if key is not None else 6)
        # A step of many sessions wrote it: what was known before is old.
        await here.touch([session_id], now=NOW + 1)
        assert [await appends(here, 7), await appends(here, 8)] == [2, 1]


@pytest.mark.parametrize(
    "policy",
    [
        SessionPolicy(max_events=40),
        SessionPolicy(max_events=3),
        SessionPolicy(max_bytes=60),
        SessionPolicy(max_age=7),
    ],
    ids=["many", "few", "small", "short"],
)
async def test_a_log_that_is_known_in_part_loses_what_a_whole_one_does(
    policy: SessionPolicy,
) -> None:
    """CUP8. The same events are appended to a log in memory. In between, other
    steps write the session.
    """
    memory, store = MemoryStore(), postgres_store()
    async with opened(memory, policy), opened(store, policy):
        ids = [await new(each) for each in (memory, store)]

        async def kept(each: SessionStore, session_id: SessionId, after: int) -> object:
            head = await each.head(session_id)
            assert head is not None
            position = Position(head.log_epoch, after).event_id()
            events, refusal = await each.read(session_id, position, now=NOW + after)
            return [(event.number, event.payload, event.at) for event in events], refusal

        sent = statements(store)
        for number in range(1, 101):
            draft = Draft(b"%d" % number, key=f"k{number % 11}" if number % 4 == 0 else None)
            for each, session_id in zip((memory, store), ids, strict=True):
                if number % 5 == 0:
                    await each.change_state(session_id, {"a": number}, ())
                assert await each.append(session_id, draft, now=NOW + number) is not None
        assert len(sent) < 180
        for after in range(101):
            here, there = [
                await kept(each, session_id, after)
                for each, session_id in zip((memory, store), ids, strict=True)
            ]
            assert here == there


async def test_what_a_step_does_not_write_is_decided_from_a_row_that_was_read() -> None:
    """Another process changed it, and this one knows the row before."""
    async with two() as (here, there):
        session_id = await new(here)
        for store, value in ((here, 1), (there, 2)):
            assert await store.change_state(session_id, {"a": value}, ()) is not None
        with pytest.raises(StateConflict) as conflict:
            await here.change_state(session_id, {"a": 3}, (), expected_version=1)
        assert conflict.value.newest.state.values == {"a": 2}
        assert await here.change_state(session_id, {"a": 3}, (), expected_version=2) is not None
        await there.end(session_id)
        assert await here.change_state(session_id, {"a": 4}, ()) is None


async def test_a_row_of_another_line_is_not_written_over() -> None:
    """CUP8. After a failover its version may be that of a row that was lost."""
    async with two() as (here, there):
        session_id = await new(here)
        assert await here.change_state(session_id, {"here": 1}, ()) is not None
        known = here._known[session_id]  # pyright: ignore[reportPrivateUsage]
        assert await there.change_state(session_id, {"there": 1}, ()) is not None
        row = known.row
        known.row = row._replace(line="0" + row.line, version=row.version + 1)
        record = await here.change_state(session_id, {"later": 1}, ())
        assert record is not None and set(record.state.values) == {"here", "there", "later"}
