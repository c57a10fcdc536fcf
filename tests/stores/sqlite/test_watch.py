"""The files of a store are deleted, moved or replaced while it is served (HTP5)."""

import asyncio
import logging
import os
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from mcp_sessions.core.log import Draft
from mcp_sessions.core.states import Mode
from mcp_sessions.errors import StoreRefused
from mcp_sessions.principal import ANONYMOUS
from mcp_sessions.stores.sqlite.sqlite_store import SQLiteStore
from tests.stores.sqlite.file_store import NOW, POLICY, new, opened
from tests.support.raw import RawClient
from tests.support.world import world


def deleted(path: Path) -> None:
    path.unlink()


def moved(path: Path) -> None:
    path.rename(path.with_name("elsewhere"))


def replaced(path: Path) -> None:
    other = path.with_name("other")
    other.write_bytes(path.read_bytes())
    other.replace(path)


HOW = (deleted, moved, replaced)


def emptied(path: Path) -> None:
    os.truncate(path, 0)


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 4_096)


WITHOUT_REPLACING = (emptied, cut)


async def until(is_so: Callable[[], bool]) -> None:
    """Nothing says when: this is a bounded wait on the condition itself."""
    async with asyncio.timeout(10):
        while not is_so():  # noqa: ASYNC110
            await asyncio.sleep(0.02)


async def refused(caplog: pytest.LogCaptureFixture) -> str:
    """What is logged as an error when the store notices, which it does by itself."""
    await until(lambda: bool(errors(caplog)))
    [said] = errors(caplog)
    return said


def errors(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [each.getMessage() for each in caplog.records if each.levelno >= logging.ERROR]


@pytest.mark.parametrize("suffix", ["", "-wal", "-shm", "-lock"])
@pytest.mark.parametrize("how", HOW)
async def test_a_file_that_is_gone_is_served_no_more(
    how: Callable[[Path], None], suffix: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Nor what is in memory of it. One line says so, also if nobody asks."""
    path = tmp_path / "sessions.db"
    async with opened(path) as store:
        session_id = await new(store)
        how(tmp_path / f"sessions.db{suffix}")
        assert f"sessions.db{suffix} was" in await refused(caplog)
        for call in (
            store.load(session_id, now=NOW),
            store.admit(session_id, ANONYMOUS, mode=Mode.PROTOCOL, now=NOW),
            store.append(session_id, Draft(b"{}"), now=NOW),
            store.create(Mode.PROTOCOL, ANONYMOUS, peer=None, now=NOW),
            store.all_sessions(),
            store.probe(),
        ):
            with pytest.raises(StoreRefused, match="Restore it, or restart"):
                await call
        assert len(errors(caplog)) == 1


@pytest.mark.parametrize("how", WITHOUT_REPLACING)
async def test_a_file_that_is_shortened_in_place_is_served_no_more(
    how: Callable[[Path], None], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It has the same inode, so it looks as if it was there. It is served again when it is back."""
    path = tmp_path / "sessions.db"
    async with opened(path) as store:
        await new(store)
    async with opened(path) as store:
        session_id = await new(store)
        whole = path.read_bytes()
        how(path)
        assert "sessions.db was" in await refused(caplog)
        for call in (
            store.load(session_id, now=NOW),
            store.append(session_id, Draft(b"{}"), now=NOW),
            store.probe(),
        ):
            with pytest.raises(StoreRefused, match="overwritten") as failed:
                await call
            assert failed.value.client_text == "the session store refuses requests (lost)"
        with path.open("r+b") as file:
            file.write(whole)
        await until(lambda: "is back" in caplog.text)
        assert await store.append(session_id, Draft(b"{}"), now=NOW) is not None


async def test_another_program_that_reads_the_file_ends_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The watch keeps SQLite's locks, so another program's close does not delete the log."""
    path = tmp_path / "sessions.db"
    async with opened(path) as store:
        session_id = await new(store)
        program = (
            "import sqlite3, sys; c = sqlite3.connect(sys.argv[1]); "
            "c.execute('SELECT count(*) FROM keys').fetchall(); c.close()"
        )
        for _ in range(3):
            await store.append(session_id, Draft(b"{}"), now=NOW)
            await asyncio.to_thread(
                subprocess.run, [sys.executable, "-c", program, str(path)], check=True, timeout=20
            )
            await store.probe()
        assert not errors(caplog)


async def test_a_file_that_is_shortened_by_a_vacuum_is_served_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if another program does it."""
    monkeypatch.setattr("mcp_sessions.stores.sqlite.writer.IDLE", 0.02)
    path = tmp_path / "sessions.db"
    async with opened(path) as store:
        session_id = await new(store)
        for _ in range(100):
            await store.append(session_id, Draft(b"x" * 20_000), now=NOW)
    for by_us in (True, False):
        async with opened(path) as store:
            before = path.stat().st_size
            other = sqlite3.connect(path, isolation_level=None)
            if by_us:
                other.execute("DELETE FROM events WHERE number % 2")
            else:
                other.execute("DELETE FROM events")
                other.execute("VACUUM")
                other.execute("PRAGMA wal_checkpoint(TRUNCATE)")
            other.close()
            await until(lambda before=before: path.stat().st_size < before)
            async with asyncio.timeout(10):
                while True:
                    try:
                        await store.probe()
                        break
                    except StoreRefused:
                        # For as long as the thread has not seen that another program did it.
                        assert not by_us
                        await asyncio.sleep(0.02)
            assert await store.load(session_id, now=NOW) is not None
        assert not by_us or not errors(caplog)


async def test_a_file_that_is_put_back_is_served_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "sessions.db"
    async with opened(path) as store:
        session_id = await new(store)
        moved(path)
        await refused(caplog)
        path.with_name("elsewhere").rename(path)
        await until(lambda: len(caplog.records) >= 2)
        assert await store.load(session_id, now=NOW) is not None
        assert await store.append(session_id, Draft(b"{}"), now=NOW) is not None


async def test_who_closes_it_writes_nothing_next_to_the_file_of_another(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A second process may serve a new file at the same path by then."""
    path = tmp_path / "sessions.db"
    store = SQLiteStore(path)
    await store.open(POLICY)
    await new(store)
    for each in list(tmp_path.iterdir()):
        each.unlink()
    other = sqlite3.connect(path)
    other.execute("PRAGMA journal_mode = WAL")
    other.execute("CREATE TABLE theirs (value)")
    other.commit()
    seen = tmp_path / "sessions.db-seen"
    seen.write_text("theirs")
    await refused(caplog)
    await store.close()
    assert seen.read_text() == "theirs"
    assert (tmp_path / "sessions.db-wal").exists()
    assert other.execute("SELECT count(*) FROM theirs").fetchone() == (0,)
    other.close()


async def test_a_lock_that_was_deleted_while_it_was_asked_for_is_none(tmp_path: Path) -> None:
    """Two processes would have it: one the file that is gone, one the new one."""
    from mcp_sessions.stores.sqlite import file_lock

    lock = file_lock.FileLock(tmp_path / "lock")
    opens = os.open

    def opened_late(*args: object) -> int:
        descriptor = opens(*args)  # pyright: ignore[reportArgumentType, reportCallIssue]
        os.unlink(tmp_path / "lock")
        return descriptor

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(file_lock.os, "open", opened_late)
        with pytest.raises(file_lock.Locked):
            lock.acquire()
    lock.acquire()
    lock.release()


async def test_clients_and_load_balancers_are_notified(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """HTP5: 503 with ``Retry-After`` instead of answers that nothing keeps."""
    path = tmp_path / "sessions.db"
    store = SQLiteStore(path)
    async with world(store=store) as w:
        client: RawClient = await w.connected()
        await client.start()
        deleted(path)
        await refused(caplog)
        for method in ("tools/list", "ping", "session/start"):
            reply = await client.send(method, {}).reply.done()
            assert reply.status == 503
            assert "retry-after" in dict(reply.headers)
