"""What only the store in a file promises: it comes back, is bounded, and says what is wrong."""

import asyncio
import os
import sqlite3
import stat
import threading
import time
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mcp_sessions.core.log import Draft
from mcp_sessions.core.request_keys import Begun, key_cost
from mcp_sessions.core.states import Mode
from mcp_sessions.errors import ConfigurationError, Refusal, StoreUnavailable
from mcp_sessions.ids import (
    GET_STREAM,
    ConnectionId,
    FencingEpoch,
    RequestKey,
    SessionId,
    StreamName,
)
from mcp_sessions.policy import SessionPolicy
from mcp_sessions.principal import ANONYMOUS, Principal
from mcp_sessions.stores.records import Admitted, CurrentSession, KeyUse, Peer
from mcp_sessions.stores.sqlite import cache as sqlite_hot
from mcp_sessions.stores.sqlite import recovery as sqlite_start
from mcp_sessions.stores.sqlite import schema as sqlite_schema
from mcp_sessions.stores.sqlite import served_file
from mcp_sessions.stores.sqlite.commit_budget import AT_ONCE
from mcp_sessions.stores.sqlite.keys import keys_of
from mcp_sessions.stores.sqlite.schema import MIGRATIONS, VERSION, Durability, statements
from mcp_sessions.stores.sqlite.store import SQLiteStore
from mcp_sessions.stores.sqlite.transaction import KeyCounts
from mcp_sessions.stores.sqlite.writer import ROWS
from mcp_sessions.stores.urls import open_store
from mcp_sessions.testing import STORE_CHECKS, Check
from tests.stores import every_store

pytestmark = pytest.mark.anyio

NOW = 1_800_000_000.0
POLICY = SessionPolicy(idle_timeout=100, max_lifetime=1_000)
HERE = ConnectionId("here")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "sessions.db"


@asynccontextmanager
async def opened(
    path: Path, durability: Durability = "normal", policy: SessionPolicy = POLICY
) -> AsyncGenerator[SQLiteStore]:
    """The store in a file, open."""
    store = SQLiteStore(path, durability)
    await store.open(policy)
    try:
        yield store
    finally:
        await store.close()


async def new(
    store: SQLiteStore, mode: Mode = Mode.PROTOCOL, principal: Principal = ANONYMOUS
) -> SessionId:
    return (await store.create(mode, principal, peer=None, now=NOW)).session_id


async def sql(store: SQLiteStore, statement: str) -> Any:
    """The first row that a statement gives, inside the store's own transaction."""
    writer = store._writer  # pyright: ignore[reportPrivateUsage]
    return await writer.call(lambda tx: tx.execute(statement).fetchone())


# --- coming back ---------------------------------------------------------------------------


async def test_everything_of_a_session_comes_back(path: Path) -> None:
    """Also what JSON can say and SQLite's text or orjson cannot."""
    principal = Principal("client", "https://issuer", "älice\ud800", frozenset({"b", "a"}), 5.5)
    peer = Peer("2025-11-25", {"capabilities": {"x": 2**70}}, modern=False)
    async with opened(path) as store:
        made = await store.create(Mode.TRANSPORT, principal, peer=peer, now=NOW)
        of = made.session_id
        await store.attach(of, ConnectionId(of), now=NOW)
        await store.set_current(of, CurrentSession(SessionId("other"), FencingEpoch(7)))
        await store.mark_stream_opened(of)
        await store.subscribe(of, "note://\ud800")
        await store.change_state(of, {"big": 2**80, "lone": "\ud800", "list": [1, None]}, ())
        assert await store.replace_data(of, {"deep": {"n": 2**64}}, expected_version=0)
        head = await store.open_stream(of, GET_STREAM)
        assert head is not None
        await store.carry(of, SessionId("other"), FencingEpoch(7), head)
        await store.set_waits_from(of, head.event_id())
        await store.set_filter(of, frozenset({"note://\ud800", "b:1"}), frozenset({"tools"}))
        for key in ("a", None, "a\ud800"):
            await store.append(of, Draft(b"{}", key=key, origin=of), now=NOW, stream=GET_STREAM)
        before = await store.load(of, now=NOW)
        events = await store.read(of, head.event_id(), now=NOW, stream=GET_STREAM)
        data = await store.load_data(of)
    async with opened(path) as store:
        assert await store.load(of, now=NOW) == before
        assert await store.all_sessions(principal) == [before]
        assert await store.read(of, head.event_id(), now=NOW, stream=GET_STREAM) == events
        assert await store.load_data(of) == data
        assert await store.subscribers("note://\ud800") == [of]
        assert await store.relay(
            of, SessionId("other"), FencingEpoch(7), events[0][0], now=NOW
        ) == await_relayed(4)


def await_relayed(number: int) -> Any:
    """Equal to a ``Relayed`` whose event has that number."""

    class Same:
        def __eq__(self, other: object) -> bool:
            event = getattr(other, "event", None)
            return event is not None and event.number == number

    return Same()


async def test_only_connections_that_can_come_back_are_attached_after_a_start(path: Path) -> None:
    """A transport-mode session is in the file, its client comes back to it; a WebSocket, a
    pipe or a listen stream of the process before is gone, and must not keep others away.
    """
    async with opened(path) as store:
        connection = await new(store, Mode.TRANSPORT)
        on_http, on_pipe = await new(store), await new(store)
        await store.attach(on_http, ConnectionId(connection), now=NOW)
        await store.attach(on_pipe, ConnectionId("stdio-x"), now=NOW)
    async with opened(path) as store:
        kept, freed = [await store.load(each, now=NOW) for each in (on_http, on_pipe)]
        assert kept is not None and kept.attachment is not None
        assert kept.attachment.connection_id == connection
        assert freed is not None and (freed.attachment, freed.fencing_epoch) == (None, 1)
        assert await store.attach(on_pipe, HERE, now=NOW, only_if_free=True) is not None


async def test_what_ran_at_the_end_is_never_run_again_and_its_key_is_not_kept_for_ever(
    path: Path,
) -> None:
    """KEY3: its runner is gone, so nobody can know how it ended."""
    policy = SessionPolicy(request_key_lifetime=50, request_key_bytes=200)
    use = KeyUse(RequestKey("key"), b"digest", "process-1")
    async with opened(path, policy=policy) as store:
        of = await new(store)
        admitted = await store.admit(of, ANONYMOUS, mode=Mode.PROTOCOL, now=NOW, key=use)
        assert admitted is not None and admitted.key is Begun.FIRST
    async with opened(path, policy=policy) as store:
        for now, begun in ((NOW + 50, Begun.DROPPED), (NOW + 51, Begun.FIRST)):
            admitted = await store.admit(of, ANONYMOUS, mode=Mode.PROTOCOL, now=now, key=use)
            assert admitted is not None and admitted.key is begun
        assert not await store.finish_request(of, RequestKey("other"), b"x", now=NOW)


async def test_many_sessions_are_listed_in_pages_that_let_others_through(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each once; also where pages end exactly with the last one, or the owner's are few."""
    monkeypatch.setattr("mcp_sessions.stores.sqlite.store._PAGE", 3)
    alice = Principal("client", "https://issuer", "alice")
    async with opened(path) as store:
        made = [await new(store, principal=(ANONYMOUS, alice)[n % 2]) for n in range(12)]
        for count in (12, 11, 10):
            listed = [record.session_id for record in await store.all_sessions()]
            assert listed == made[:count]
            of_alice = [record.session_id for record in await store.all_sessions(alice)]
            assert of_alice == made[1:count:2]
            await store.end(made[count - 1])
        many = asyncio.ensure_future(store.all_sessions())
        await store.head(made[0])
        assert not many.done(), "who comes later waits for one page, not for all"
        await many


# --- deadlines in memory -------------------------------------------------------------------


async def test_a_deadline_is_written_when_it_moved_by_a_hundredth_and_at_the_end(
    path: Path,
) -> None:
    """``SessionPolicy.idle_timeout``: "a store is not written for every request's end"."""

    async def written(store: SQLiteStore) -> float:
        (deadline,) = await sql(store, "SELECT expires_at FROM sessions")
        return deadline

    async with opened(path) as store:
        of = await new(store)
        for seconds, in_file in ((0.5, 100), (0.9, 100), (1, 101), (1.9, 101), (7, 107)):
            await store.admit(of, ANONYMOUS, mode=Mode.PROTOCOL, now=NOW + seconds)
            record = await store.load(of, now=NOW)
            assert record is not None and record.expires_at == NOW + seconds + 100
            assert await written(store) == NOW + in_file
        await store.touch([of], now=NOW + 7.5)
        assert not await store.expire(now=NOW + 107.4, held=(), limit=9)
        assert await written(store) == NOW + 107.5
        await store.touch([of], now=NOW + 8)
    async with opened(path) as store:
        assert await written(store) == NOW + 108


async def test_a_deadline_is_not_forgotten_with_its_record(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Records in memory are bounded in number; one that goes leaves its deadline."""
    monkeypatch.setattr(sqlite_hot, "MAX_HOT", 1)
    async with opened(path) as store:
        of = await new(store)
        await store.admit(of, ANONYMOUS, mode=Mode.PROTOCOL, now=NOW + 0.5)
        await new(store)
        record = await store.load(of, now=NOW)
        assert record is not None and record.expires_at == NOW + 100.5


@pytest.mark.parametrize("check", STORE_CHECKS, ids=lambda check: check.__name__)
async def test_the_contract_holds_with_nothing_in_memory(
    check: Check, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A record in memory saves time, and changes nothing."""
    monkeypatch.setattr(sqlite_hot, "MAX_HOT", 0)
    await check(every_store.sqlite_store)


# --- commits -------------------------------------------------------------------------------


@asynccontextmanager
async def spoken_of(store: SQLiteStore) -> AsyncGenerator[list[tuple[str, int]]]:
    """What SQLite is told, and by which thread."""
    spoken: list[tuple[str, int]] = []
    writer = store._writer  # pyright: ignore[reportPrivateUsage]
    connection = await writer.call(lambda tx: tx.connection)
    connection.set_trace_callback(lambda said: spoken.append((said, threading.get_ident())))
    try:
        yield spoken
    finally:
        connection.set_trace_callback(None)


async def test_callers_at_once_share_a_commit(path: Path) -> None:
    """Rule 2 of the writer."""
    async with opened(path) as store:
        of = await new(store)
        async with spoken_of(store) as spoken:
            await asyncio.gather(*[store.append(of, Draft(b"{}"), now=NOW) for _ in range(200)])
        said = [each for each, _ in spoken]
        assert sum(each.startswith("INSERT INTO events") for each in said) == 200
        assert said.count("COMMIT") <= AT_ONCE + 10


async def test_who_comes_with_little_is_served_where_he_stands(path: Path) -> None:
    """Rule 5 of the writer: the answer is there, and in the file, before anybody else's turn."""
    async with opened(path) as store:
        of = await new(store)
        async with spoken_of(store) as spoken:
            appending = store.append(of, Draft(b"{}"), now=NOW)
            with pytest.raises(StopIteration) as returned:
                appending.send(None)
            assert returned.value.value.event.number == 1
            assert spoken[-1] == ("COMMIT", threading.get_ident())
        other = sqlite3.connect(path)
        assert other.execute("SELECT count(*) FROM events").fetchone() == (1,)
        other.close()


async def test_in_full_durability_the_event_loop_waits_for_no_disk(path: Path) -> None:
    """Rule 5 of the writer: what syncs is the thread's."""
    async with opened(path, durability="full") as store:
        of = await new(store)
        async with spoken_of(store) as spoken:
            await store.append(of, Draft(b"{}"), now=NOW)
        assert "COMMIT" in {said for said, _ in spoken}
        assert threading.get_ident() not in {thread for _, thread in spoken}


@pytest.mark.parametrize("what", ["an event", "an answer"])
async def test_what_is_large_is_written_by_the_thread(path: Path, what: str) -> None:
    """Rule 5 of the writer."""
    large = b"x" * 100_000
    use = KeyUse(RequestKey("key"), b"digest", "process-1")
    async with opened(path) as store:
        of = await new(store)
        assert await store.admit(of, ANONYMOUS, mode=Mode.PROTOCOL, now=NOW, key=use)
        async with spoken_of(store) as spoken:
            if what == "an event":
                assert await store.append(of, Draft(large), now=NOW)
            else:
                assert await store.finish_request(of, use.key, large, now=NOW)
        assert threading.get_ident() not in {thread for _, thread in spoken}


@pytest.mark.parametrize("what", ["events", "keys"])
async def test_much_that_expired_at_once_is_taken_out_by_the_thread(path: Path, what: str) -> None:
    """Rule 5 of the writer: who comes first after an hour does not do it in the event loop."""
    policy = SessionPolicy(max_age=100, request_key_lifetime=100)
    many = 3 * ROWS

    async def work(number: int, now: float) -> None:
        use = KeyUse(RequestKey(f"key-{number}"), b"digest", "process-1")
        if what == "events":
            assert await store.append(of, Draft(b"{}"), now=now)
        else:
            assert await store.admit(of, ANONYMOUS, mode=Mode.PROTOCOL, now=now, key=use)
            assert await store.finish_request(of, use.key, b"{}", now=now)

    async with opened(path, policy=policy) as store:
        of = await new(store)
        for number in range(many):
            await work(number, NOW)
        async with spoken_of(store) as spoken:
            await work(many, NOW + 101)
        gone = [thread for said, thread in spoken if said.startswith(f"DELETE FROM {what}")]
        here = threading.get_ident()
        assert len([thread for thread in gone if thread != here]) == many
        # What the event loop had begun is undone.
        assert len(gone) <= many + ROWS and ("ROLLBACK", here) in spoken
        assert await sql(store, f"SELECT count(*) FROM {what}") == (1,)


async def test_the_log_is_copied_and_begun_anew_by_the_thread(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rule 5 of the writer: that waits for the disk. The log stays as small as it is to be,
    with callers who never come to the thread.
    """
    monkeypatch.setattr(sqlite_schema, "LOG_SIZE", 500_000)
    monkeypatch.setattr("mcp_sessions.stores.sqlite.commit_budget.AT_ONCE", 10_000)
    monkeypatch.setattr("mcp_sessions.stores.sqlite.commit_budget.SHARE", 60.0)
    monkeypatch.setattr("mcp_sessions.stores.sqlite.writer.IDLE", 60.0)
    here, log = threading.get_ident(), path.with_name(path.name + "-wal")
    sizes: list[int] = []
    async with opened(path) as store:
        of = await new(store)
        async with spoken_of(store) as spoken:
            for _ in range(300):
                assert await store.append(of, Draft(b"x" * 3_000), now=NOW)
                sizes.append(log.stat().st_size)
        copied = [thread for said, thread in spoken if "wal_checkpoint" in said]
        assert len(copied) >= 3 and here not in copied
        # Right after it the thread writes, so that it is who begins the log anew.
        said = [each for each, _ in spoken]
        for index, each in enumerate(said):
            if "wal_checkpoint" in each:
                assert said[index + 1 : index + 4] == [
                    "BEGIN IMMEDIATE",
                    "UPDATE meta SET value = value WHERE name = 'sessions'",
                    "COMMIT",
                ]
        assert sum(thread == here for each, thread in spoken if each == "COMMIT") > 200
        assert max(sizes) < 1_500_000
        assert sizes[-1] <= 1_000_000


async def test_who_comes_with_what_cannot_be_stored_fails_alone(path: Path) -> None:
    """Rule 3 of the writer: the others of the same commit do not pay for it."""
    async with opened(path) as store:
        of = await new(store)
        numbers = await asyncio.gather(
            *[store.append(of, Draft(b"{}"), now=NOW) for _ in range(3)],
            store.set_current(of, CurrentSession(of, FencingEpoch(2**70))),
            *[store.append(of, Draft(b"{}"), now=NOW) for _ in range(3)],
            return_exceptions=True,
        )
        assert isinstance(numbers.pop(3), OverflowError)
        assert [each.event.number for each in numbers] == [1, 2, 3, 4, 5, 6]  # type: ignore[union-attr]


async def test_what_was_undone_is_not_remembered(path: Path) -> None:
    """Rule 3 of the writer: sums over rows are those of the rows that are in the file."""
    async with opened(path, durability="full") as store:
        of = await new(store)

        async def begin(name: str) -> Admitted | None:
            use = KeyUse(RequestKey(name), b"digest", "process-1")
            return await store.admit(of, ANONYMOUS, mode=Mode.PROTOCOL, now=NOW, key=use)

        async def counts() -> KeyCounts:
            found = await writer.call(lambda tx: keys_of(tx, of, POLICY))
            assert found is not None
            return found.counts

        writer = store._writer  # pyright: ignore[reportPrivateUsage]
        await begin("first")
        # One transaction, undone for the sake of one that cannot be stored; then one by one.
        done = await asyncio.gather(
            begin("second"),
            store.set_current(of, CurrentSession(of, FencingEpoch(2**70))),
            return_exceptions=True,
        )
        assert isinstance(done[1], OverflowError)
        known = await counts()
        await writer.call(lambda tx: tx.learn(of, None))
        assert known == await counts()
        assert known.bytes == key_cost(RequestKey("first")) + key_cost(RequestKey("second"))


async def test_who_comes_while_his_session_ends_leaves_no_row(path: Path) -> None:
    """END2: in the same transaction, after the end."""
    async with opened(path, durability="full") as store:
        of = await new(store)
        use = KeyUse(RequestKey("first"), b"digest", "process-1")
        assert await store.admit(of, ANONYMOUS, mode=Mode.PROTOCOL, now=NOW, key=use)
        _, late, kept = await asyncio.gather(
            store.end(of),
            store.admit(
                of, ANONYMOUS, mode=Mode.PROTOCOL, now=NOW, key=replace(use, key=RequestKey("late"))
            ),
            store.finish_request(of, use.key, b"{}", now=NOW),
        )
        assert late is None and not kept
        assert await sql(store, "SELECT count(*) FROM keys") == (0,)


async def test_who_is_cancelled_while_waiting_takes_nobody_along(path: Path) -> None:
    async with opened(path, durability="full") as store:
        of = await new(store)
        first = asyncio.ensure_future(store.append(of, Draft(b"{}"), now=NOW))
        await asyncio.sleep(0)
        first.cancel()
        second = await store.append(of, Draft(b"{}"), now=NOW)
        assert second is not None
        with pytest.raises(asyncio.CancelledError):
            await first


@pytest.mark.parametrize(("durability", "level"), [("normal", 1), ("full", 2)])
async def test_the_durability_is_what_sqlite_is_asked_for(
    path: Path, durability: Durability, level: int
) -> None:
    """E7. 1: synced at checkpoints; 2: at every commit (SQLite, "PRAGMA synchronous")."""
    async with opened(path, durability) as store:
        assert await sql(store, "PRAGMA synchronous") == (level,)
        assert await sql(store, "PRAGMA journal_mode") == ("wal",)
    with pytest.raises(ConfigurationError, match="'normal' or 'full', not 'most'"):
        SQLiteStore(path, "most")  # type: ignore[arg-type]


# --- a power loss --------------------------------------------------------------------------


def killed(_: sqlite3.Connection, seen: object) -> None:
    """Instead of ``shut_down``: nothing was said at the end."""


@pytest.mark.parametrize(
    ("durability", "closed", "boots", "refusal"),
    [
        ("normal", False, ("one", "two"), Refusal.LOG_REPLACED),
        ("normal", False, ("one", "one"), None),
        ("normal", True, ("one", "two"), None),
        ("full", False, ("one", "two"), None),
        ("normal", False, (None, None), None),
    ],
)
async def test_a_power_loss_that_may_have_cost_events_is_noticed(
    path: Path,
    monkeypatch: pytest.MonkeyPatch,
    durability: Durability,
    closed: bool,
    boots: tuple[str | None, str | None],
    refusal: Refusal | None,
) -> None:
    """CUP13: an id that a client has seen is never given to another event."""
    monkeypatch.setattr(sqlite_start, "boot_id", lambda: boots[0])
    if not closed:
        monkeypatch.setattr(served_file, "shut_down", killed)
    async with opened(path, durability) as store:
        of = await new(store)
        head = await store.head(of)
        appended = await store.append(of, Draft(b"{}"), now=NOW)
        assert head is not None and appended is not None
    monkeypatch.setattr(sqlite_start, "boot_id", lambda: boots[1])
    async with opened(path, durability) as store:
        events, found = await store.read(of, head.event_id(), now=NOW)
        assert (len(events), found) == ((0, refusal) if refusal else (1, None))
        again = await store.append(of, Draft(b"{}"), now=NOW)
        assert again is not None and again.event.event_id > appended.event.event_id


# --- bounds --------------------------------------------------------------------------------


async def test_what_expired_leaves_the_file(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bounded size: not only the rows go, the space does."""
    monkeypatch.setattr("mcp_sessions.stores.sqlite.writer.IDLE", 0.01)
    async with opened(path) as store:
        for _ in range(20):
            of = await new(store)
            await asyncio.gather(
                *[store.append(of, Draft(b"x" * 20_000), now=NOW) for _ in range(20)]
            )
        assert len(await store.expire(now=NOW + 100, held=(), limit=99)) == 20
        async with asyncio.timeout(20):
            # Another thread's work, which it does by itself.
            while (await sql(store, "PRAGMA page_count"))[0] > 200:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
    assert path.stat().st_size < 1_000_000
    assert {each.name for each in path.parent.iterdir()} == {
        path.name,
        f"{path.name}-lock",
        f"{path.name}-seen",
    }


async def test_what_ended_cannot_be_read_out_of_the_file(path: Path) -> None:
    """Free space is overwritten."""
    async with opened(path) as store:
        of = await new(store)
        await store.append(of, Draft(b"the-secret-of-a-session"), now=NOW)
        await store.end(of)
    assert b"the-secret" not in path.read_bytes()
    assert of.encode() not in path.read_bytes()


async def test_only_its_owner_can_read_the_file(path: Path) -> None:
    """Session ids are in it: credentials, where there is no other."""
    before = os.umask(0)
    try:
        async with opened(path) as store:
            await new(store)
            for each in path.parent.iterdir():
                assert stat.S_IMODE(each.stat().st_mode) == 0o600, each.name
    finally:
        os.umask(before)


# --- what is wrong with a file -------------------------------------------------------------


async def refusal_of(path: Path) -> str:
    with pytest.raises((ConfigurationError, StoreUnavailable)) as refused:
        await SQLiteStore(path).open(POLICY)
    return str(refused.value)


async def test_a_file_of_the_version_before_is_migrated(path: Path) -> None:
    """And what is in it is there."""
    connection = sqlite3.connect(path, isolation_level=None)
    for migration in MIGRATIONS[:-1]:
        for statement in statements(migration):
            connection.execute(statement)
    connection.execute(f"PRAGMA application_id = {sqlite_schema.APPLICATION_ID}")
    connection.execute(f"PRAGMA user_version = {VERSION - 1}")
    row = (b"[null,null,null]", b"[]", None, NOW, NOW + 9, NOW + 99, b'{"n":1}')
    connection.execute(
        "INSERT INTO sessions VALUES (1, 'kept', 'protocol', ?, ?, ?, ?, ?, ?, 3, NULL, NULL,"
        " NULL, 0, NULL, NULL, 1, 0, 0, NULL, ?)",
        row,
    )
    connection.execute("UPDATE meta SET value = 1")
    connection.close()
    async with opened(path) as store:
        record = await store.load(SessionId("kept"), now=NOW)
        assert record is not None and (record.fencing_epoch, record.state) == (3, {"n": 1})
        assert await sql(store, "PRAGMA user_version") == (VERSION,)


async def test_a_migration_that_fails_changes_nothing(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with opened(path) as store:
        of = await new(store)
    broken = [*MIGRATIONS, "CREATE TABLE half (n);\nINSERT INTO nowhere VALUES (1);\n"]
    monkeypatch.setattr(sqlite_schema, "MIGRATIONS", broken)
    monkeypatch.setattr(sqlite_schema, "VERSION", VERSION + 1)
    assert "nowhere" in await refusal_of(path)
    monkeypatch.undo()
    async with opened(path) as store:
        assert await store.load(of, now=NOW) is not None
        assert await sql(store, "SELECT count(*) FROM sqlite_schema WHERE name = 'half'") == (0,)


async def test_a_newer_file_is_refused_and_left_alone(path: Path) -> None:
    async with opened(path) as store:
        await new(store)
        await sql(store, f"PRAGMA user_version = {VERSION + 1}")
    before = path.read_bytes()
    said = await refusal_of(path)
    assert f"schema version {VERSION + 1}, newer than this mcp-sessions" in said
    assert path.read_bytes() == before


async def test_a_file_that_is_none_of_ours_is_refused_and_left_alone(path: Path) -> None:
    other = sqlite3.connect(path)
    other.execute("CREATE TABLE theirs (n)")
    other.close()
    before = path.read_bytes()
    assert "another program" in await refusal_of(path)
    assert path.read_bytes() == before
    text = path.with_name("text")
    text.write_text("no database, but long enough to be read as one " * 9)
    assert "is not a SQLite file" in await refusal_of(text)
    assert "cannot be opened" in await refusal_of(path.parent / "nowhere" / "sessions.db")
    assert await refusal_of(path.parent) == f"{path.parent} is a directory, not a file"
    assert not path.parent.with_name(f"{path.parent.name}-lock").exists()


async def test_a_damaged_file_is_said_to_be(path: Path) -> None:
    """Never an empty session instead."""
    async with opened(path) as store:
        of = await new(store)
        for _ in range(50):
            await store.append(of, Draft(b"x" * 2_000), now=NOW)
    pages = bytearray(path.read_bytes())
    pages[4096 * 4 :] = b"\xa5" * (len(pages) - 4096 * 4)
    path.write_bytes(pages)
    said = list[str]()
    try:
        async with opened(path) as store:
            for call in (store.all_sessions(), store.head(of), new(store)):
                try:
                    await call
                except StoreUnavailable as refused:
                    said.append(str(refused))
    except (ConfigurationError, StoreUnavailable) as refused:
        said.append(str(refused))
    assert said and all("damaged" in each for each in said)


async def test_a_session_that_cannot_be_read_stops_no_round_for_the_others(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A newer version's, or a row that something else wrote. It is over all the same."""
    async with opened(path) as store:
        first, bad, last = [await new(store) for _ in range(3)]
    other = sqlite3.connect(path)
    other.execute("UPDATE sessions SET mode = 'newer' WHERE session_id = ?", (bad,))
    other.commit()
    other.close()
    async with opened(path) as store:
        over = await store.expire(now=NOW + 1_000, held=(), limit=9)

        assert {each.session_id for each in over} == {first, last}
        assert await sql(store, "SELECT count(*) FROM sessions") == (0,)
        assert "could not be read" in caplog.text and bad not in caplog.text


def copied(path: Path) -> bytes:
    """The file as a backup has it that is made beside who serves."""
    source, target = sqlite3.connect(path), sqlite3.connect(":memory:")
    try:
        source.backup(target)
        return target.serialize()
    finally:
        source.close()
        target.close()


def restore(path: Path, copy: bytes) -> None:
    """Put a copy in the file's place, as an operator does: SQLite's own files go."""
    for own in ("-wal", "-shm"):
        path.with_name(path.name + own).unlink(missing_ok=True)
    path.write_bytes(copy)


async def counted(store: SQLiteStore) -> None:
    """Until what is beside the file says all that was written; that is looked after twice a
    second.
    """
    seen = store._seen  # pyright: ignore[reportPrivateUsage]
    async with asyncio.timeout(10):
        before = seen.path.read_bytes()
        # Nothing says when: this is a bounded wait on the condition itself.
        while seen.path.read_bytes() == before:  # noqa: ASYNC110
            await asyncio.sleep(0.05)


@pytest.mark.parametrize("how", ["stopped", "killed"])
async def test_a_file_restored_from_a_copy_gives_no_event_id_out_again(
    path: Path, how: str, caplog: pytest.LogCaptureFixture
) -> None:
    """A client that saw more than the copy has is refused, and reads again what it follows."""
    async with opened(path) as store:
        of = await new(store)
        await store.append(of, Draft(b"1"), now=NOW)
        copy = copied(path)
        seen = await store.append(of, Draft(b"2"), now=NOW)
        assert seen is not None
        await counted(store)
        killed = {each: each.read_bytes() for each in path.parent.iterdir()}
    if how == "killed":
        for each, content in killed.items():
            each.write_bytes(content)
    restore(path, copy)
    async with opened(path) as store:
        assert "is a copy" in caplog.text
        await store.append(of, Draft(b"another"), now=NOW)
        for position in (seen.event.event_id, f"{seen.event.event_id[:-1]}1"):
            assert await store.read(of, position, now=NOW) == ((), Refusal.LOG_REPLACED)
        head = await store.head(of)
        caplog.clear()
    # Once: from here on it is the file that was seen.
    async with opened(path) as store:
        assert await store.head(of) == head
        assert not caplog.text


@pytest.mark.parametrize(
    ("what", "is_kept"),
    [
        ("closed and opened", True),
        ("killed", True),
        ("killed before it was said", True),
        ("moved with what is beside it", True),
        ("of an older version", True),
        ("moved alone", False),
        ("what is beside it is not ours", False),
        ("a copy of an older version", False),
    ],
)
async def test_positions_are_refused_where_a_file_may_be_a_copy_and_nowhere_else(
    path: Path, tmp_path: Path, what: str, is_kept: bool
) -> None:
    """What was written is there, and what a client saw has no other meaning now."""
    beside = path.with_name(path.name + "-seen")
    async with opened(path) as store:
        of = await new(store)
        appended = await store.append(of, Draft(b"1"), now=NOW)
        assert appended is not None
        before = beside.read_bytes()
        await counted(store)
        killed = {each: each.read_bytes() for each in path.parent.iterdir()}
    if what.startswith("killed"):
        for each, content in killed.items():
            each.write_bytes(content)
    if what == "killed before it was said":
        beside.write_bytes(before)
    elif what.startswith("moved"):
        place = tmp_path / "elsewhere" / "other.db"
        place.parent.mkdir()
        path.rename(place)
        if what != "moved alone":
            beside.rename(place.with_name("other.db-seen"))
        path = place
    elif what == "what is beside it is not ours":
        beside.write_text("something")
    elif "older version" in what:
        other = sqlite3.connect(path)
        other.execute("DELETE FROM meta WHERE name IN ('file', 'count')")
        other.commit()
        other.close()
        if what == "of an older version":
            beside.unlink()
    async with opened(path) as store:
        _, refusal = await store.read(of, appended.event.event_id, now=NOW)
        assert refusal is (None if is_kept else Refusal.LOG_REPLACED)
        assert (await store.load(of, now=NOW)) is not None


async def test_response_streams_of_the_process_before_give_back_their_room(path: Path) -> None:
    """Nobody is left who drops them, and their session may go on for days."""
    stock = "SELECT count(*), total(length(payload)) FROM events"
    policy = SessionPolicy(idle_timeout=100, max_lifetime=1_000, max_age=50)
    async with opened(path, policy=policy) as store:
        of = await new(store, Mode.TRANSPORT)
        for name in ("events", "get", "post-1", "post-2"):
            await store.append(of, Draft(b"x" * 100), now=NOW, stream=StreamName(name))
    later = NOW + 49
    async with opened(path, policy=policy) as store:
        await store.append(of, Draft(b"y"), now=later, stream=StreamName("post-3"))
        assert await sql(store, stock) == (5, 401)
        await store.append(of, Draft(b"y"), now=later + 2, stream=StreamName("post-4"))
        # The events of the session and its GET stream are looked at when they are used.
        assert await sql(store, stock) == (4, 202)
        old = "SELECT events, bytes, head, floor FROM logs WHERE stream = 'post-1'"
        assert await sql(store, old) == (0, 0, 1, 1)


async def test_a_full_disk_stores_nothing_half_and_is_over_when_there_is_room(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An error for who calls, and counted; what was there is served on."""
    counted: list[tuple[str, int]] = []

    def count(store: str, calls: int) -> None:
        counted.append((store, calls))

    monkeypatch.setattr("mcp_sessions.metrics.store_failed", count)
    async with opened(path) as store:
        of = await new(store)
        head = await store.head(of)
        assert head is not None
        (pages,) = await sql(store, "PRAGMA page_count")
        await sql(store, f"PRAGMA max_page_count = {pages + 2}")
        stored, refused = 0, list[str]()
        for _ in range(10):
            try:
                await store.append(of, Draft(b"x" * 4_000), now=NOW)
                stored += 1
            except StoreUnavailable as failed:
                refused.append(str(failed))
        assert refused and all("no space left" in each for each in refused)
        assert counted == [("sqlite", 1)] * len(refused)
        assert await store.admit(of, ANONYMOUS, mode=Mode.PROTOCOL, now=NOW) is not None
        events, _ = await store.read(of, head.event_id(), now=NOW)
        assert [event.number for event in events] == list(range(1, stored + 1))
        await sql(store, "PRAGMA max_page_count = 1073741823")
        appended = await store.append(of, Draft(b"x" * 4_000), now=NOW)
        assert appended is not None and appended.event.number == stored + 1


async def test_a_file_locked_by_another_program_is_an_error_and_comes_back(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sqlite_schema, "BUSY_TIMEOUT", 0.05)
    async with opened(path) as store:
        of = await new(store)
        other = sqlite3.connect(path, isolation_level=None)
        other.execute("BEGIN IMMEDIATE")
        with pytest.raises(StoreUnavailable, match="locked by another program"):
            await store.append(of, Draft(b"{}"), now=NOW)
        # Who asks for nothing new is served.
        assert await store.admit(of, ANONYMOUS, mode=Mode.PROTOCOL, now=NOW) is not None
        other.execute("ROLLBACK")
        assert await store.append(of, Draft(b"{}"), now=NOW) is not None
        other.close()


async def test_a_file_that_is_locked_for_a_moment_is_waited_for_by_the_thread(path: Path) -> None:
    """Rule 5 of the writer: meanwhile the event loop goes on, and nothing is lost."""
    async with opened(path) as store:
        of = await new(store)
        other = sqlite3.connect(path, isolation_level=None)
        other.execute("BEGIN IMMEDIATE")
        before = time.monotonic()
        appending = [
            asyncio.ensure_future(store.append(of, Draft(b"{}"), now=NOW)) for _ in range(3)
        ]
        await asyncio.sleep(0)
        # Here is the event loop, and they wait.
        assert time.monotonic() - before < sqlite_schema.BUSY_TIMEOUT / 2
        assert not any(each.done() for each in appending)
        other.execute("ROLLBACK")
        other.close()
        done = await asyncio.wait_for(asyncio.gather(*appending), 10)
        assert [each.event.number for each in done if each is not None] == [1, 2, 3]


async def test_a_file_that_is_locked_while_it_is_closed_is_waited_for(path: Path) -> None:
    """Also where the event loop, which waits for nobody, wrote last: a file that was not closed
    in order looks like a power loss after the machine's next start.
    """
    other = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
    release = threading.Timer(0.2, lambda: other.execute("ROLLBACK"))
    async with opened(path) as store:
        of = await new(store)
        assert await store.append(of, Draft(b"{}"), now=NOW) is not None
        other.execute("BEGIN IMMEDIATE")
        release.start()
    release.join()
    assert other.execute("SELECT count(*) FROM meta WHERE name = 'boot'").fetchone() == (0,)
    other.close()


async def test_who_gives_up_while_the_file_is_opened_leaves_it_to_the_next(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The lock goes after the thread: two never serve from one file."""
    begin, go_on = threading.Event(), threading.Event()
    start_up = served_file.start_up

    def slow(*arguments: Any) -> None:
        begin.set()
        assert go_on.wait(10)
        start_up(*arguments)

    monkeypatch.setattr(served_file, "start_up", slow)
    store = SQLiteStore(path)
    opening = asyncio.ensure_future(store.open(POLICY))
    assert await asyncio.to_thread(begin.wait, 10)
    opening.cancel()
    await asyncio.sleep(0)
    assert f"in use by process {os.getpid()}" in await refusal_of(path)
    go_on.set()
    with pytest.raises(asyncio.CancelledError):
        await opening
    threads = {thread.name for thread in threading.enumerate()}
    assert "mcp-sessions-sqlite" not in threads
    monkeypatch.undo()
    async with opened(path) as after:
        assert await new(after)


async def test_who_comes_too_late_is_told(path: Path) -> None:
    """By the future, as for every other failure: also who comes while an answer is given."""
    store = SQLiteStore(path)
    await store.open(POLICY)
    writer = store._writer  # pyright: ignore[reportPrivateUsage]
    await store.close()
    late = writer.call(lambda tx: tx.execute("SELECT 1"))
    with pytest.raises(StoreUnavailable, match="not open"):
        await late


async def test_an_operators_command_copies_no_log(path: Path) -> None:
    """Rule 5 of the writer: the next commit would sync, wherever it is made."""
    async with opened(path):
        beside = sqlite_schema.open_beside(path)
        assert beside.execute("PRAGMA wal_autocheckpoint").fetchone() == (0,)
        beside.close()


async def test_a_path_may_be_no_utf_8(tmp_path: Path) -> None:
    path = tmp_path / os.fsdecode(b"caf\xe9.db")
    async with opened(path) as store:
        of = await new(store)
        assert await store.append(of, Draft(b"{}"), now=NOW) is not None
    assert path.exists()


async def test_an_old_sqlite_is_said_to_be_too_old(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sqlite_schema, "LEAST_SQLITE", (99, 0, 0))
    assert "99.0.0 is needed" in await refusal_of(path)
    assert not path.exists()


async def test_what_fails_by_the_way_fails_nobody(
    path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The thread that everybody waits for goes on, whatever its chores come to."""

    def broken(_: object) -> None:
        raise ValueError("a chore that is broken")

    monkeypatch.setattr("mcp_sessions.stores.sqlite.writer.IDLE", 0.0)
    monkeypatch.setattr("mcp_sessions.stores.sqlite.writer.give_back_space", broken)
    async with opened(path) as store:
        of = await new(store)
        assert await store.append(of, Draft(b"{}"), now=NOW) is not None
    assert "a chore that is broken" in caplog.text


@pytest.mark.fails_in_background("writing to the file")
async def test_a_defect_in_the_thread_ends_neither_it_nor_a_callers_wait(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with opened(path, "full") as store:
        writer: Any = store._writer  # pyright: ignore[reportPrivateUsage]

        def broken(connection: sqlite3.Connection, waits: bool) -> None:
            raise KeyError("a defect")

        monkeypatch.setattr(writer, "_wait_for_others", broken)
        with pytest.raises(StoreUnavailable):
            async with asyncio.timeout(10):
                await new(store)
        monkeypatch.undo()
        async with asyncio.timeout(10):
            await new(store)


async def test_one_process_serves_from_a_file_once(path: Path) -> None:
    """The same answer to a second store of this process, which its lock would let in."""
    async with opened(path) as store:
        assert f"in use by process {os.getpid()}" in await refusal_of(path)
        assert await new(store)
    async with opened(path):
        pass


async def test_a_store_that_is_not_open_says_so(path: Path) -> None:
    with pytest.raises(StoreUnavailable, match="not open"):
        await SQLiteStore(path).head(SessionId("x"))
    async with opened(path) as store:
        pass
    with pytest.raises(StoreUnavailable, match="not open"):
        await store.append(SessionId("x"), Draft(b"{}"), now=NOW, stream=StreamName("s"))


# --- URLs ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("url", "path", "durability"),
    [
        ("sqlite:///notes.db", "notes.db", "normal"),
        ("sqlite:///data/a%20b.db?durability=full", "data/a b.db", "full"),
        ("sqlite:////var/lib/notes.db?durability=normal", "/var/lib/notes.db", "normal"),
    ],
)
async def test_a_url_names_a_file(url: str, path: str, durability: str) -> None:
    store = open_store(url)
    assert isinstance(store, SQLiteStore)
    assert (store.path, store.durability) == (Path(path), durability)


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("sqlite://notes.db", "sqlite:///relative.db or sqlite:////absolute.db"),
        ("sqlite://", "names a file"),
        ("sqlite:///", "names a file"),
        ("sqlite:////var/lib/", "names a file"),
        ("sqlite:///a.db?durability=most", "not durability=most"),
        ("sqlite:///a.db?mode=ro", "not mode=ro"),
    ],
)
async def test_a_url_that_names_none_is_refused(url: str, said: str) -> None:
    with pytest.raises(ConfigurationError, match=said.replace("?", r"\?")):
        open_store(url)
