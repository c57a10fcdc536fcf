"""Streams of a session in the store, as bindings read and write them: a response's messages,
which its client may come back for, whichever process serves it then.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from mcp_sessions.core.log import Draft, LoggedEvent
from mcp_sessions.errors import Refusal
from mcp_sessions.ids import Position, SessionId, StreamName
from mcp_sessions.stores.contract import SessionStore
from mcp_sessions.stores.records import Appended


@dataclass(slots=True, eq=False, repr=False)
class StreamLog:
    """One stream of one session. Every method may raise ``StoreUnavailable``."""

    _store: SessionStore
    _clock: Callable[[], float]
    session_id: SessionId
    name: StreamName

    async def open(self) -> Position | None:
        return await self._store.open_stream(self.session_id, self.name)

    async def append(self, draft: Draft) -> Appended | None:
        return await self._store.append(self.session_id, draft, now=self._clock(), stream=self.name)

    async def read(self, after: str) -> tuple[Sequence[LoggedEvent], Refusal | None]:
        return await self._store.read(self.session_id, after, now=self._clock(), stream=self.name)

    async def drop(self) -> None:
        await self._store.drop_stream(self.session_id, self.name)


Streams = Callable[[SessionId, StreamName], StreamLog]
"""The streams of every session."""
