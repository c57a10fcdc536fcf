"""The records that are in memory, and the deadlines that the file has later."""

from pathlib import Path

import pytest

from mcp_sessions.core.states import Mode
from mcp_sessions.principal import ANONYMOUS
from mcp_sessions.stores.sqlite import sqlite_store
from mcp_sessions.stores.sqlite.sqlite_store import SQLiteStore
from mcp_sessions.testing import check_session_store
from tests.stores import every_store
from tests.stores.sqlite.file_store import NOW, new, opened, sql


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
            assert record is not None and record.life.expires_at == NOW + seconds + 100
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
    monkeypatch.setattr(sqlite_store, "MAX_BYTES", 1)
    async with opened(path) as store:
        of = await new(store)
        await store.admit(of, ANONYMOUS, mode=Mode.PROTOCOL, now=NOW + 0.5)
        await new(store)
        record = await store.load(of, now=NOW)
        assert record is not None and record.life.expires_at == NOW + 100.5


@pytest.mark.timeout(120)
async def test_the_contract_holds_with_nothing_in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """A record in memory saves time, and changes nothing."""
    monkeypatch.setattr(sqlite_store, "MAX_BYTES", 0)
    await check_session_store(every_store.sqlite_store)
