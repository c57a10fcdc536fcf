"""A store in a file, open, for the tests of its parts."""

import asyncio
import sqlite3
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import pytest

from mcp_sessions.errors import ConfigurationError, StoreUnavailable
from mcp_sessions.policy import SessionPolicy
from mcp_sessions.stores.sqlite.schema import Durability
from mcp_sessions.stores.sqlite.sqlite_store import SQLiteStore
from tests.stores import opening
from tests.stores.opening import NOW, POLICY, new

__all__ = ["NOW", "POLICY", "new"]


def opened(
    path: Path, durability: Durability = "normal", policy: SessionPolicy = POLICY
) -> AbstractAsyncContextManager[SQLiteStore]:
    return opening.opened(SQLiteStore(path, durability), policy)


async def sql(store: SQLiteStore, statement: str) -> Any:
    """The first row that a statement gives, inside the store's own transaction."""
    writer = store._writer  # pyright: ignore[reportPrivateUsage]
    return await writer.call(lambda tx: tx.execute(statement).fetchone())


async def refusal_of(path: Path) -> str:
    with pytest.raises((ConfigurationError, StoreUnavailable)) as refused:
        await SQLiteStore(path).open(POLICY)
    return str(refused.value)


def copied(path: Path) -> bytes:
    """The file as a backup has it that is made next to who serves."""
    source, target = sqlite3.connect(path), sqlite3.connect(":memory:")
    try:
        source.backup(target)
        return target.serialize()
    finally:
        source.close()
        target.close()


async def counted(store: SQLiteStore) -> None:
    """Until what is next to the file says all that was written; that is looked after twice a
    second.
    """
    seen = store._seen  # pyright: ignore[reportPrivateUsage]
    async with asyncio.timeout(10):
        before = seen.path.read_bytes()
        # Nothing says when: this is a bounded wait on the condition itself.
        while seen.path.read_bytes() == before:  # noqa: ASYNC110
            await asyncio.sleep(0.05)
