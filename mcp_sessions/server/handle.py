"""What a handler sees of its session: ``current_session()`` and the handle it returns."""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager
from contextvars import ContextVar
from typing import Any, TypeVar, overload

from mcp_sessions.errors import DataConflict, SessionNotFound, SessionRequired
from mcp_sessions.ids import SessionId
from mcp_sessions.principal import Principal
from mcp_sessions.server.hub import Hub
from mcp_sessions.stores.base import SessionRecord, SessionStore

Default = TypeVar("Default")


class SessionData:
    """The place for what a session must remember: kept in the store, never sent."""

    def __init__(self, session_id: SessionId, store: SessionStore, lock: asyncio.Lock) -> None:
        self._session_id = session_id
        self._store = store
        self._lock = lock

    async def read(self) -> dict[str, Any]:
        """A copy of the data; changing it changes nothing.

        Raises:
            SessionNotFound: The session ended or expired meanwhile.
        """
        data = await self._store.load_data(self._session_id)
        if data is None:
            raise SessionNotFound(self._session_id)
        return data.value

    @asynccontextmanager
    async def edit(self) -> AsyncGenerator[dict[str, Any]]:
        """The data, to be changed in place; stored when the block ends without an error.

        Edits of one session in this process wait for each other.

        Raises:
            SessionNotFound: The session ended or expired meanwhile; nothing was stored.
            DataConflict: Another process changed it during the edit; nothing was stored.
        """
        async with self._lock:
            data = await self._store.load_data(self._session_id)
            if data is None:
                raise SessionNotFound(self._session_id)
            value = data.value
            yield value
            stored = await self._store.replace_data(
                self._session_id, value, expected_version=data.version
            )
            if not stored:
                if await self._store.load_data(self._session_id) is None:
                    raise SessionNotFound(self._session_id)
                raise DataConflict


class SessionHandle:
    """A protocol-mode session, from inside the server."""

    def __init__(self, record: SessionRecord, store: SessionStore, hub: Hub, locks: Locks) -> None:
        self._record = record
        self._store = store
        self._hub = hub
        self._locks = locks

    @property
    def id(self) -> SessionId:
        """The session's id. A credential where there is no other: do not log it."""
        return self._record.session_id

    @property
    def created_at(self) -> float:
        """When it was made, in seconds since 1970."""
        return self._record.created_at

    @property
    def expires_at(self) -> float:
        """When it expires if nothing more happens, in seconds since 1970."""
        return self._record.expires_at

    @property
    def principal(self) -> Principal:
        """Who made it."""
        return self._record.principal

    @property
    def data(self) -> SessionData:
        """What the session remembers."""
        return SessionData(self.id, self._store, self._locks.of(self.id))

    async def notify(self, method: str, params: Mapping[str, Any] | None = None) -> None:
        """Send the session's client a notification: a session event, replayed if missed.

        Args:
            method: Its method, such as ``notifications/resources/updated``.
            params: Its params; ``sessionEventId`` and the session's ``_meta`` are added.

        Raises:
            SessionNotFound: The session is over; nothing was stored.
            StoreUnavailable: Unknown whether it was stored.
        """
        if not await self._hub.publish(self.id, method, params, wait=True):
            raise SessionNotFound(self.id)


class Locks:
    """One lock per session in use, gone when nobody holds it."""

    def __init__(self) -> None:
        self._locks: weakref.WeakValueDictionary[SessionId, asyncio.Lock] = (
            weakref.WeakValueDictionary()
        )

    def of(self, session_id: SessionId) -> asyncio.Lock:
        """The session's lock."""
        lock = self._locks.get(session_id)
        if lock is None:
            lock = self._locks[session_id] = asyncio.Lock()
        return lock


_CURRENT: ContextVar[SessionHandle | None] = ContextVar("mcp_sessions_current", default=None)


class _Required:
    """Stands for "no default was given"."""


@overload
def current_session() -> SessionHandle: ...
@overload
def current_session(*, default: Default) -> SessionHandle | Default: ...
def current_session(*, default: object = _Required) -> object:
    """The protocol-mode session that the request being handled belongs to.

    Args:
        default: What to return outside of a session.

    Raises:
        SessionRequired: There is none, and no default was given.
    """
    handle = _CURRENT.get()
    if handle is not None:
        return handle
    if default is _Required:
        raise SessionRequired
    return default


def enter_session(handle: SessionHandle | None) -> None:
    """Make ``handle`` the current session of this task and of what it starts."""
    _CURRENT.set(handle)
