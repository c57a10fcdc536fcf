"""How sessions ended, in a file."""

from pathlib import Path

from mcp_sessions.core.ends import EndReason, SessionEnd
from tests.stores.sqlite.file_store import NOW, opened


async def test_an_end_outlives_the_process_and_so_does_the_time_of_the_file(path: Path) -> None:
    end = SessionEnd("a" * 12, EndReason.CLIENT, NOW)
    async with opened(path) as store:
        made = await store.made(now=NOW)
        await store.remember_ends([end], now=NOW)
    async with opened(path) as store:
        assert list(await store.ends(now=NOW + 1)) == [end]
        again = await store.made(now=NOW + 1)
        assert made is not None and again is not None
        assert (again.name, again.at, again.is_new) == (made.name, NOW, False)
