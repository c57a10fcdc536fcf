"""A store as an operator sees it, from a process that does not serve from it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from mcp_sessions.errors import ConfigurationError
from mcp_sessions.ids import SessionId
from mcp_sessions.policy import SessionPolicy
from mcp_sessions.stores.base import SessionRecord, SessionStore
from mcp_sessions.stores.urls import open_store, sqlite_place


class Beside(Protocol):
    """Reads a store, and ends sessions in it. Each method may raise ``StoreUnavailable``."""

    async def all_sessions(self) -> Sequence[SessionRecord]:
        """Every session; some may have expired and wait to be ended."""
        ...

    async def end(self, session_id: SessionId) -> bool:
        """End a session; False if it is not there.

        When this returns, the process that serves it answers that it is not there, if it
        does not answer so at once.
        """
        ...

    async def close(self) -> None:
        """Let go of every resource."""
        ...


async def open_beside(url: str) -> Beside:
    """The store that ``url`` names, beside whoever serves from it.

    Raises:
        ConfigurationError: No store has such a URL, or there is nothing at it.
        StoreUnavailable: It cannot be reached.
    """
    store = open_store(url)
    if store.name == "sqlite":
        from mcp_sessions.stores.sqlite_beside import SQLiteBeside

        return SQLiteBeside(sqlite_place(url)[0])
    if not store.survives_process:
        raise ConfigurationError(
            f"{store.name}:// is the memory of the process that serves: nobody else sees it"
        )
    await store.open(SessionPolicy())
    return SharedStore(store)


class SharedStore:
    """A store that any process may open."""

    def __init__(self, store: SessionStore) -> None:
        self._store = store

    async def all_sessions(self) -> Sequence[SessionRecord]:
        """See :class:`Beside`."""
        return await self._store.all_sessions()

    async def end(self, session_id: SessionId) -> bool:
        """See :class:`Beside`."""
        return await self._store.end(session_id) is not None

    async def close(self) -> None:
        """See :class:`Beside`."""
        await self._store.close()
