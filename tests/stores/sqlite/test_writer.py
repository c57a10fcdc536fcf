"""Commits: who shares one, what the thread does, and what others do to the file meanwhile."""

import asyncio
import sqlite3
import threading
import time
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mcp_sessions.core.log import Draft
from mcp_sessions.core.request_keys import Begun, KeyUse
from mcp_sessions.core.states import Mode
from mcp_sessions.errors import ConfigurationError, StoreRefused, StoreUnavailable
from mcp_sessions.ids import (
    FencingEpoch,
    RequestKey,
    SessionId,
)
from mcp_sessions.policy import SessionPolicy
from mcp_sessions.principal import ANONYMOUS
from mcp_sessions.stores.record_changes import SetCurrent
from mcp_sessions.stores.records import Admitted, CurrentSession
from mcp_sessions.stores.sqlite import schema as sqlite_schema
from mcp_sessions.stores.sqlite import sqlite_store
from mcp_sessions.stores.sqlite.commit_budget import AT_ONCE
from mcp_sessions.stores.sqlite.schema import Durability, open_again
from mcp_sessions.stores.sqlite.sqlite_store import FEW, SQLiteStore
from mcp_sessions.stores.sqlite.writer import Write
from tests.stores.sqlite.file_store import (
    NOW,
    POLICY,
    new,
    opened,
    sql,
)


@asynccontextmanager
async def spoken_of(store: SQLiteStore) -> AsyncGenerator[list[tuple[str, int]]]:
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
async def test_much_that_expired_at_once_is_taken_out_by_the_thread(
    path: Path, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rule 5 of the writer: who comes first after an hour does not do it in the event loop."""
    # Else a busy machine leaves it to the thread from the beginning.
    monkeypatch.setattr("mcp_sessions.stores.sqlite.commit_budget.SHARE", 60.0)
    policy = SessionPolicy(max_age=100, request_key_lifetime=100)
    many = 3 * FEW

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
        assert len(gone) == many
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


async def test_nobody_waits_while_the_log_is_copied(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rule 5 of the writer; but the log grows by a quarter at the most."""
    monkeypatch.setattr(sqlite_schema, "LOG_SIZE", 500_000)
    monkeypatch.setattr("mcp_sessions.stores.sqlite.commit_budget.AT_ONCE", 10_000)
    monkeypatch.setattr("mcp_sessions.stores.sqlite.commit_budget.SHARE", 60.0)
    log = path.with_name(path.name + "-wal")
    copying, go_on = threading.Event(), threading.Event()

    def slowly(*arguments: Any) -> sqlite3.Connection:
        copying.set()
        assert go_on.wait(10)
        return open_again(*arguments)

    monkeypatch.setattr("mcp_sessions.stores.sqlite.served_file.open_again", slowly)
    async with opened(path) as store:
        of = await new(store)
        async with spoken_of(store) as spoken:
            while not copying.is_set():
                assert await store.append(of, Draft(b"x" * 3_000), now=NOW)
            spoken.clear()
            assert await store.append(of, Draft(b"x" * 3_000), now=NOW)
            assert spoken[-1] == ("COMMIT", threading.get_ident())

            async with asyncio.TaskGroup() as tasks:
                for _ in range(60):
                    tasks.create_task(store.append(of, Draft(b"x" * 3_000), now=NOW))
                    await asyncio.sleep(0)
                assert log.stat().st_size < 1_000_000
                go_on.set()
        assert await sql(store, "SELECT max(number) FROM events") == (
            (await store.append(of, Draft(b"{}"), now=NOW)).event.number - 1,  # type: ignore[union-attr]
        )
        assert log.stat().st_size <= 500_000


async def test_a_log_that_cannot_be_copied_is_said_and_tried_again(
    path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(sqlite_schema, "LOG_SIZE", 500_000)

    def cannot(*_: Any) -> sqlite3.Connection:
        raise sqlite3.OperationalError("disk I/O error")

    monkeypatch.setattr("mcp_sessions.stores.sqlite.served_file.open_again", cannot)
    async with opened(path) as store:
        of = await new(store)
        for _ in range(120):
            assert await store.append(of, Draft(b"x" * 3_000), now=NOW)
    said = [each.getMessage() for each in caplog.records if "disk I/O error" in each.message]
    assert len(said) >= 2 and said[0] == f"{path}: disk I/O error"


async def test_who_comes_with_what_cannot_be_stored_fails_alone(path: Path) -> None:
    """Rule 3 of the writer: the others of the same commit do not pay for it."""
    async with opened(path) as store:
        of = await new(store)
        numbers = await asyncio.gather(
            *[store.append(of, Draft(b"{}"), now=NOW) for _ in range(3)],
            store.change(of, SetCurrent(CurrentSession(of, FencingEpoch(2**70)))),
            *[store.append(of, Draft(b"{}"), now=NOW) for _ in range(3)],
            return_exceptions=True,
        )
        assert isinstance(numbers.pop(3), OverflowError)
        assert [each.event.number for each in numbers] == [1, 2, 3, 4, 5, 6]  # type: ignore[union-attr]


async def test_a_row_that_is_there_already_fails_its_own_session_alone(path: Path) -> None:
    """Rule 3 of the writer. Another program left an event in the log of one of them."""
    async with opened(path, durability="full") as store:
        of, other = await new(store), await new(store)
        await sql(
            store,
            "INSERT INTO events (log, number, at, payload) SELECT log, 1, 0, x'' FROM logs"
            f" JOIN sessions USING (sid) WHERE session_id = '{other}'",
        )
        refused, *appended = await asyncio.gather(
            *[store.append(each, Draft(b"{}"), now=NOW) for each in (other, of, of)],
            return_exceptions=True,
        )
        assert isinstance(refused, StoreRefused) and "damaged" in str(refused)
        assert [each.event.number for each in appended] == [1, 2]  # type: ignore[union-attr]


async def test_who_comes_while_his_session_expires_finds_it_gone(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SES18. It was not in memory. While the round wrote of another session, a step read it from
    the file: it went on in memory alone, and its event was left in the file.
    """
    monkeypatch.setattr(sqlite_store, "MAX_BYTES", 0)
    async with opened(path, durability="full") as store:
        of, held, _ = await new(store), await new(store), await new(store)
        call, appending = store._writer.call, list[asyncio.Task[Any]]()  # pyright: ignore[reportPrivateUsage]

        def and_appends(work: Any, **how: Any) -> asyncio.Future[Any]:
            if isinstance(work, Write) and not appending:
                append = store.append(of, Draft(b"{}"), now=NOW + 200)
                appending.append(asyncio.create_task(append))
            return call(work, **how)

        monkeypatch.setattr(store._writer, "call", and_appends)  # pyright: ignore[reportPrivateUsage]
        ended = await store.expire(now=NOW + 200, held=[held], limit=9)
        assert of in {record.session_id for record in ended}
        assert await appending[0] is None
        assert await sql(store, "SELECT count(*) FROM events") == (0,)


async def test_what_was_undone_is_not_remembered(path: Path) -> None:
    """Rule 4 of the writer: memory says what the file has, and nobody's answer builds on what the
    file lacks.
    """
    async with opened(path, durability="full") as store:
        of, other = await new(store), await new(store)
        head = await store.head(of)
        assert head is not None

        async def begin(session_id: SessionId, name: str) -> Admitted | None:
            use = KeyUse(RequestKey(name), b"digest", "process-1")
            return await store.admit(session_id, ANONYMOUS, mode=Mode.PROTOCOL, now=NOW, key=use)

        assert await begin(of, "first") is not None
        # One transaction, undone for the sake of one that cannot be stored; then one by one.
        done = await asyncio.gather(
            begin(of, "second"),
            store.append(of, Draft(b"1"), now=NOW),
            store.change(of, SetCurrent(CurrentSession(of, FencingEpoch(2**70)))),
            store.append(of, Draft(b"2"), now=NOW),
            store.head(of),
            begin(other, "third"),
            return_exceptions=True,
        )
        assert isinstance(done[2], OverflowError)
        # Both were decided by what is not in the file.
        assert isinstance(done[3], StoreUnavailable) and isinstance(done[4], StoreUnavailable)
        assert not any(isinstance(each, BaseException) for each in (*done[:2], done[5]))
        events, _ = await store.read(of, head.event_id(), now=NOW)
        assert [event.payload for event in events] == [b"1"]
        again = [await begin(of, name) for name in ("first", "second")]
        assert [each and each.key for each in again] == [Begun.RUNNING, Begun.RUNNING]
        record = await store.load(of, now=NOW)
        assert record is not None and record.client.current is None
        appended = await store.append(of, Draft(b"3"), now=NOW)
        assert appended is not None and appended.event.number == 2


async def test_nobody_hears_of_what_is_not_in_the_file_yet(path: Path) -> None:
    """Rule 1 of the writer: also who only reads waits for it, and gets its error."""
    async with opened(path, durability="full") as store:
        of = await new(store)
        (pages,) = await sql(store, "PRAGMA page_count")
        await sql(store, f"PRAGMA max_page_count = {pages}")
        done = await asyncio.gather(
            store.append(of, Draft(b"x" * 40_000), now=NOW),
            store.head(of),
            store.load(of, now=NOW),
            store.admit(of, ANONYMOUS, mode=Mode.PROTOCOL, now=NOW),
            return_exceptions=True,
        )
        assert all(isinstance(each, StoreUnavailable) for each in done)
        await sql(store, "PRAGMA max_page_count = 1073741823")
        head = await store.head(of)
        assert head is not None and head.number == 0


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


async def test_a_full_disk_stores_nothing_half_and_has_ended_when_there_is_room(
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


async def test_a_full_disk_is_not_ready_until_a_larger_write_fits(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """HTP5: a small write fits longer than what clients need."""
    disk = SimpleNamespace(f_bavail=10**6, f_blocks=10**7, f_frsize=4_096)

    def asked(_: Path) -> SimpleNamespace:
        return disk

    monkeypatch.setattr("mcp_sessions.stores.sqlite.served_file.os.statvfs", asked)
    async with opened(path) as store:
        of = await new(store)
        (pages,) = await sql(store, "PRAGMA page_count")
        await sql(store, f"PRAGMA max_page_count = {pages}")
        await store.probe()
        with pytest.raises(StoreRefused, match="no space left"):
            await store.append(of, Draft(b"x" * 40_000), now=NOW)
        for _ in range(2):
            with pytest.raises(StoreRefused, match="no space left") as refused:
                await store.probe()
            assert refused.value.client_text == "the session store refuses requests (full)"
        # The quota is gone, and the disk is full.
        await sql(store, "PRAGMA max_page_count = 1073741823")
        disk.f_bavail = 10
        with pytest.raises(StoreRefused, match="no space left"):
            await store.probe()
        disk.f_bavail = 10**6
        await store.probe()
        assert await sql(store, "SELECT 1 FROM meta WHERE name = 'probe'") is None
        # Nothing was refused yet, and little is free: a larger write says whether it fits.
        disk.f_bavail = 10
        await store.probe()
        (pages,) = await sql(store, "PRAGMA page_count")
        (free,) = await sql(store, "PRAGMA freelist_count")
        await sql(store, f"PRAGMA max_page_count = {pages}")
        await sql(store, f"INSERT INTO meta VALUES ('rest', zeroblob({free * 4_000}))")
        with pytest.raises(StoreRefused, match="no space left"):
            await store.probe()


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
    cleanly looks like a power loss after the machine's next start.
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


async def test_who_comes_too_late_is_notified(path: Path) -> None:
    """By the future, as for every other failure: also who comes while an answer is given."""
    store = SQLiteStore(path)
    await store.open(POLICY)
    writer = store._writer  # pyright: ignore[reportPrivateUsage]
    await store.close()
    late = writer.call(lambda tx: tx.execute("SELECT 1"))
    with pytest.raises(StoreUnavailable, match="not open"):
        await late


async def test_what_fails_by_the_way_fails_nobody(
    path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The thread that everybody waits for goes on. The log names each failure once, not twice a
    second: on a full disk the log would take the space that somebody makes.
    """
    attempts, enough = list[None](), threading.Event()

    def broken(*_: object) -> None:
        attempts.append(None)
        if len(attempts) == 7:
            enough.set()
        if len(attempts) != 4:
            raise ValueError("a chore that is broken")

    monkeypatch.setattr("mcp_sessions.stores.sqlite.writer.IDLE", 0.0)
    monkeypatch.setattr("mcp_sessions.stores.sqlite.writer.give_back_space", broken)
    async with opened(path) as store:
        of = await new(store)
        assert await store.append(of, Draft(b"{}"), now=NOW) is not None
        assert await asyncio.to_thread(enough.wait, 20)
    # The fourth attempt succeeded, so the fifth is another failure.
    assert caplog.text.count("a chore that is broken") == 2


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
