"""What sleeps is measured page by page, and ends in several transactions."""

from pathlib import Path
from typing import Any

from mcp_sessions.errors import StoreUnavailable
from mcp_sessions.ids import SessionId
from mcp_sessions.policy import SessionPolicy
from mcp_sessions.stores.records import SessionRecord
from mcp_sessions.stores.sqlite.sqlite_store import SQLiteStore
from tests.stores.sqlite.file_store import NOW, new, opened

POLICY = SessionPolicy(idle_timeout=100, max_lifetime=1_000, forget_after=500)
LATER = NOW + 100


async def filled(store: SQLiteStore, count: int) -> list[SessionId]:
    """Sessions of 1,000 bytes and a few, the least recently used first."""
    made = [await new(store) for _ in range(count)]
    for each in made:
        assert await store.change_state(each, {"a": "x" * 1_000}, ()) is not None
    return made


async def test_those_that_have_room_are_the_ones_used_last(path: Path) -> None:
    """More than one page of them, and more than one transaction's worth of the others."""
    async with opened(path, policy=POLICY) as store:
        made = await filled(store, 900)
        assert await store.evict_heavy(now=LATER, most=2_000_000, held=(), limit=9_000) == []
        gone = await store.evict_heavy(now=LATER, most=300_000, held=made[:2], limit=9_000)
        left = [record.session_id for record in await store.all_sessions()]
        assert len(gone) + len(left) == 900
        assert left[:2] == made[:2] and left[2:] == made[-len(left) + 2 :]
        assert 280 <= len(left) - 2 <= 300


class AwayForTheSecond(SQLiteStore):
    """The second transaction that ends sessions fails."""

    done = 0

    async def _on_some(self, *arguments: Any, **named: Any) -> list[SessionRecord]:
        self.done += 1
        if self.done == 2:
            raise StoreUnavailable("the disk is full")
        return await super()._on_some(*arguments, **named)


async def test_those_that_ended_are_named_though_the_next_could_not_end(path: Path) -> None:
    """Nobody is notified of them a second time."""
    store = AwayForTheSecond(path)
    await store.open(POLICY)
    try:
        made = await filled(store, 300)
        gone = await store.evict_heavy(now=LATER, most=1_000, held=(), limit=9_000)
        assert [record.session_id for record in gone] == made[:256]
        gone = await store.evict_heavy(now=LATER, most=1_000, held=(), limit=9_000)
        assert [record.session_id for record in gone] == made[256:]
    finally:
        await store.close()
