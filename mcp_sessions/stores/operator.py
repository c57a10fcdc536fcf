from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from mcp_sessions.core.ends import SessionEnd, StoreMade
from mcp_sessions.errors import ConfigurationError, StoreUnavailable
from mcp_sessions.ids import SessionId
from mcp_sessions.policy import SessionPolicy
from mcp_sessions.stores.contract import SessionStore
from mcp_sessions.stores.encrypted import Sealable
from mcp_sessions.stores.ends_contract import end_by_operator
from mcp_sessions.stores.probe import Described, EngineFacts, Made, StoreSize, measure, probe
from mcp_sessions.stores.records import SessionPage, SessionRecord
from mcp_sessions.stores.urls import open_store, sqlite_file
from mcp_sessions.stores.whole_sessions import WholeSession

OnEnded = Callable[[SessionStore, SessionRecord], Awaitable[None]]
"""Tells the processes that serve from a store that a session has ended."""


class OperatorStore(Protocol):
    """Reads a store, and ends sessions in it. Each method may raise ``StoreUnavailable``."""

    async def all_sessions(self) -> Sequence[SessionRecord]:
        """Every session; some may have expired and wait to be ended."""
        ...

    async def some_sessions(self, after: str | None, limit: int) -> SessionPage:
        """See :meth:`~mcp_sessions.stores.contract.SessionStore.some_sessions`."""
        ...

    async def size(self) -> StoreSize | None:
        """See :class:`~mcp_sessions.stores.probe.Sized`."""
        ...

    async def whole(self, session_id: SessionId) -> WholeSession | None:
        """All of a session; None if it is not there."""
        ...

    async def end(self, session_id: SessionId) -> bool:
        """End a session; False if it is not there.

        When this returns, the process that serves it answers that it is not there, if it
        does not answer so at once.
        """
        ...

    async def ends(self) -> Sequence[SessionEnd]:
        """How sessions ended, as far as it is remembered, oldest first."""
        ...

    async def made(self) -> StoreMade | None:
        """When the store was made; None: no server has opened it."""
        ...

    async def close(self) -> None: ...


async def open_for_operator(url: str, ended: OnEnded) -> OperatorStore:
    """Open the store that ``url`` names, while other processes may serve from it.

    Args:
        ended: Called when a session was ended in a store that several processes share.

    Raises:
        ConfigurationError: No store has such a URL, or there is nothing at it.
        StoreUnavailable: It cannot be reached.
    """
    store = open_store(url)
    if store.name == "sqlite":
        from mcp_sessions.stores.sqlite.sqlite_operator import SQLiteOperatorStore

        return SQLiteOperatorStore(sqlite_file(url)[0])
    if not store.survives_process:
        raise ConfigurationError(
            f"{store.name}:// is the memory of the process that serves: nobody else sees it"
        )
    await open_made(store)
    return SharedStore(store, ended)


async def open_made(store: SessionStore) -> None:
    """Open a store that a server has made. Make nothing.

    Raises:
        ConfigurationError: No server has.
        StoreUnavailable: It cannot be reached.
    """
    if not isinstance(store, Made):
        await store.open(SessionPolicy())
    elif not await store.open_if_made(SessionPolicy()):
        await store.close()
        raise ConfigurationError(
            f"no server has made a {store.name} store there yet: look at the URL"
        )


@dataclass(frozen=True, slots=True)
class StoreReport:
    state: str
    facts: EngineFacts | None = None
    round_trip: float | None = None
    """Seconds of one command, there and back."""

    sealed_by: frozenset[str] = frozenset()
    """See :class:`~mcp_sessions.stores.encrypted.Sealable`."""


async def look(store: SessionStore, policy: SessionPolicy) -> StoreReport:
    """Report the state of a store that is not open, as a server would find it.

    Raises:
        ConfigurationError: A server cannot serve from it.
        StoreUnavailable: It cannot be reached, or refuses.
    """
    if store.name == "sqlite":
        from mcp_sessions.stores.sqlite.sqlite_operator import facts_of, look_at
        from mcp_sessions.stores.sqlite.sqlite_store import SQLiteStore

        if not isinstance(store, SQLiteStore):
            raise AssertionError("no other store has that name")
        state, round_trip, sealed_by = await asyncio.to_thread(look_at, store.path)
        return StoreReport(state, facts_of(store.durability), round_trip, sealed_by)
    if not store.survives_process:
        return StoreReport("in the memory of the process")
    state = "reached, and takes writes"
    trip: Callable[[], Awaitable[object]] = partial(probe, store, now=time.time())
    if not isinstance(store, Made):
        await store.open(policy)
    elif not await store.open_if_made(policy):
        # Nothing can be written before.
        state, trip = "reached; the first start makes its tables", store.describe
    try:
        # The first one may connect or prepare a statement.
        await trip()
        loop = asyncio.get_running_loop()
        began = loop.time()
        await trip()
        round_trip = loop.time() - began
        facts = await store.describe() if isinstance(store, Described) else None
        sealed_by = await store.sealing_keys() if isinstance(store, Sealable) else frozenset[str]()
    finally:
        await store.close()
    return StoreReport(state, facts, round_trip, sealed_by)


class SharedStore:
    def __init__(self, store: SessionStore, ended: OnEnded) -> None:
        self._store = self.store = store
        self._ended = ended

    async def all_sessions(self) -> Sequence[SessionRecord]:
        return await self._store.all_sessions()

    async def some_sessions(self, after: str | None, limit: int) -> SessionPage:
        return await self._store.some_sessions(after, limit)

    async def size(self) -> StoreSize | None:
        return await measure(self._store)

    async def whole(self, session_id: SessionId) -> WholeSession | None:
        return await self._store.whole(session_id)

    async def end(self, session_id: SessionId) -> bool:
        record = await self._store.end(session_id)
        if record is None:
            return False
        try:
            now = time.time()
            await self._store.remember_ends([end_by_operator(record, now)], now=now, outside=True)
            await self._ended(self._store, record)
        except StoreUnavailable as failed:
            raise StoreUnavailable(
                f"the session ended, and the servers notice it in their next round: {failed}"
            ) from failed
        return True

    async def ends(self) -> Sequence[SessionEnd]:
        return await self._store.ends(now=time.time())

    async def made(self) -> StoreMade | None:
        return await self._store.made(now=None)

    async def close(self) -> None:
        await self._store.close()
