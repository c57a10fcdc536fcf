"""The sessions that a conversation has with its MCP servers, kept with the conversation.

So that whoever loads the conversation, in whatever process, goes on in the same sessions.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import asdict
from typing import Any, TypeVar

import anyio.from_thread

from mcp_sessions.client.jar import OpenTask, SavedSession, open_task_of, saved_session_of
from mcp_sessions.core.messages import decode, encode, entries_of, members_of
from mcp_sessions.errors import StoreUnavailable
from mcp_sessions.ids import SessionId
from mcp_sessions.stores.contract import SessionStore

MEMBER = "mcpSessions"
"""The member of the conversation's data that holds them."""

TRIES = 10
"""How often a write is tried while others change the same data."""

T = TypeVar("T")


class StoreJar:
    def __init__(self, store: SessionStore, session_id: SessionId) -> None:
        self._store = store
        self._session_id = session_id

    def open(self, target: str, user: str) -> StoreSlot:
        """Open a slot in the store. ``user`` is the server's name in this conversation."""
        return StoreSlot(self, json.dumps([user, target]))

    async def read(self, name: str) -> Any:
        data = await self._store.load_data(self._session_id)
        return members_of(data.value.get(MEMBER)).get(name) if data is not None else None

    async def change(self, name: str, content: object) -> None:
        """Save one server's session, or its tasks; None or empty: there is none any more.

        Raises:
            StoreUnavailable: It was not saved.
        """
        for _ in range(TRIES):
            data = await self._store.load_data(self._session_id)
            if data is None:
                return  # the conversation was deleted, and needs nothing any more
            saved = data.value.setdefault(MEMBER, {})
            if content:
                saved[name] = content
            else:
                saved.pop(name, None)
            if await self._store.replace_data(
                self._session_id, data.value, expected_version=data.version
            ):
                return
        raise StoreUnavailable("the conversation's data is being changed too often")


class StoreSlot:
    """Keeps one server's session and its tasks. Its methods are called in threads, as a file's
    would be.
    """

    def __init__(self, jar: StoreJar, name: str) -> None:
        self._jar = jar
        self._name, self._tasks_name = name, f"tasks of {name}"

    def load(self) -> SavedSession | None:
        return saved_session_of(_in_the_loop(self._jar.read, self._name))

    def save(self, session: SavedSession | None) -> None:
        content = asdict(session) if session is not None else None
        # As each store gives it back: one in memory would keep the tuples.
        _in_the_loop(self._jar.change, self._name, decode(encode(content)))

    def load_tasks(self) -> Sequence[OpenTask]:
        saved = entries_of(_in_the_loop(self._jar.read, self._tasks_name))
        return [task for each in saved if (task := open_task_of(each))]

    def save_tasks(self, tasks: Sequence[OpenTask]) -> None:
        content = [asdict(task) for task in tasks]
        _in_the_loop(self._jar.change, self._tasks_name, content)

    def close(self) -> None:
        """Do nothing: the store stays open."""


def _in_the_loop(function: Callable[..., Coroutine[Any, Any, T]], *args: object) -> T:
    try:
        return anyio.from_thread.run(function, *args)
    except StoreUnavailable as error:
        raise OSError(str(error)) from error
