from __future__ import annotations

import asyncio
import copy
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, MutableMapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from mcp_sessions.core.messages import encode
from mcp_sessions.core.visibility import STATE_KEY
from mcp_sessions.errors import DataConflict, SessionNotFound
from mcp_sessions.ids import SessionId
from mcp_sessions.server.upstream.port import noted
from mcp_sessions.stores.contract import SessionStore
from mcp_sessions.stores.records import Data


@dataclass(slots=True, eq=False, repr=False)
class SessionData:
    """Holds what a session must remember: kept in the store, never sent."""

    _session_id: SessionId
    _store: SessionStore
    _lock: asyncio.Lock

    async def read(self) -> dict[str, Any]:
        """A copy of the data; changing it changes nothing.

        Raises:
            SessionNotFound: The session ended or expired meanwhile.
        """
        return (await self._load()).value

    async def _load(self) -> Data:
        data = await noted(self._store.load_data(self._session_id))
        if data is None:
            raise SessionNotFound(self._session_id)
        return data

    @asynccontextmanager
    async def edit(self) -> AsyncGenerator[dict[str, Any]]:
        """The data, to be changed in place; stored when the block ends without an error.

        Edits of one session in this process wait for each other.

        Raises:
            SessionNotFound: The session ended or expired meanwhile; nothing was stored.
            DataConflict: Another process changed it during the edit; nothing was stored.
            LimitReached: It is more than ``max_data_bytes``; nothing was stored.
            StoreUnavailable: The store failed. A handler that does not catch it is answered
                ``-32603``, or ``-31012`` if the request has a key (HTP5).
        """
        async with self._lock:
            data = await self._load()
            value = data.value
            yield value
            replacing = self._store.replace_data(
                self._session_id, value, expected_version=data.version
            )
            if not await noted(replacing):
                await self._load()
                raise DataConflict


class SessionState(MutableMapping[str, Any]):
    """Maps keys to JSON values: this request's view of ``session.state``.

    The request's changes, also inside values, are applied to the newest state key by key when its
    handler returns a result. A handler that raises changes nothing.
    """

    def __init__(
        self, stored: Mapping[str, Any], check: Callable[[Mapping[str, Any]], None]
    ) -> None:
        # The layer's own values are hidden here, and cannot be changed.
        own = {key: value for key, value in stored.items() if key != STATE_KEY}
        self._stored = {key: encode(value) for key, value in own.items()}
        self._values = copy.deepcopy(own)
        self._check = check
        self._closed = False

    def __getitem__(self, key: str) -> Any:
        return self._values[key]

    def __setitem__(self, key: str, value: Any) -> None:
        """Set a value.

        Raises:
            TypeError: The key is no string, or the value cannot be JSON.
            ValueError: The key is the layer's own.
            StateTooLarge: The token that the client keeps would be too large.
            LimitReached: The client keeps no token, and the state would be more than
                ``max_state_bytes``.
            RuntimeError: The request has ended; nothing would be stored.
        """
        if not isinstance(key, str):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise TypeError(f"a key of session.state must be a string, not {type(key).__name__}")
        if key == STATE_KEY:
            raise ValueError(f"{STATE_KEY} is a key of the layer itself: choose another one")
        self._open()
        encode(value)
        self._check({**self._values, key: value})
        self._values[key] = value

    def __delitem__(self, key: str) -> None:
        self._open()
        del self._values[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def close(self) -> tuple[dict[str, Any], frozenset[str]]:
        self._closed = True
        changed = {
            key: value
            for key, value in self._values.items()
            if self._stored.get(key) != encode(value)
        }
        if changed:
            self._check(self._values)
        return changed, frozenset(self._stored.keys() - self._values.keys())

    def _open(self) -> None:
        if self._closed:
            raise RuntimeError(
                "the request of this session.state is complete: change the state in its handler"
            )
