"""The record of one conversation: every update its client was to see, in order, for ever.

Rules that must hold, and that ``tests/acp/test_prompts.py`` owns:

1. An entry is stored whole or not at all, also if it is several updates: a user's message is
   one entry, however many parts it has.
2. Nothing is merged, replaced or left out.
3. Reading takes memory for one page, however long the conversation is.

An entry is one update per line; each line is the ``params`` of its ``session/update`` but
for ``sessionId``, which is the same in all and would be one more copy of a credential.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from typing import Any

from mcp_sessions.acp.acp_errors import session_not_found
from mcp_sessions.core.log import Draft, LoggedEvent
from mcp_sessions.core.messages import decode, encode
from mcp_sessions.errors import StoreUnavailable
from mcp_sessions.ids import Position, SessionId
from mcp_sessions.stores.contract import SessionStore
from mcp_sessions.stores.records import Appended

PAGE = 1_024
"""Entries of a page at the most; the store ends it earlier if they are large."""


class Record:
    def __init__(
        self, store: SessionStore, session_id: SessionId, clock: Callable[[], float]
    ) -> None:
        self._store = store
        self._session_id = session_id
        self._clock = clock
        self._opening = (
            b'{"jsonrpc":"2.0","method":"session/update","params":{"sessionId":'
            + encode(session_id)
            + b","
        )

    async def append(self, updates: Iterable[dict[str, Any]]) -> Appended:
        """Store one entry: it is durable when this returns.

        Args:
            updates: The ``params`` of each ``session/update``, without ``sessionId``.

        Raises:
            StoreUnavailable: Unknown whether it was stored.
            RequestError: The conversation was deleted.
        """
        draft = Draft(b"\n".join(encode(update) for update in updates))
        appended = await self._store.append(self._session_id, draft, now=self._clock())
        if appended is None:
            raise session_not_found(self._session_id)
        return appended

    async def head(self) -> Position:
        """The position after the newest entry.

        Raises:
            StoreUnavailable: The store did not answer.
            RequestError: The conversation was deleted.
        """
        position = await self._store.head(self._session_id)
        if position is None:
            raise session_not_found(self._session_id)
        return position

    async def pages(
        self, after: Position | None = None
    ) -> AsyncGenerator[Sequence[LoggedEvent], None]:
        """The entries, oldest first, in pages that are not empty.

        Args:
            after: Where to begin; None: with the first.

        Raises:
            StoreUnavailable: The store did not answer, or has lost a part of it.
            RequestError: The conversation was deleted.
        """
        if after is None:
            after = Position((await self.head()).log_epoch, 0)
        position = after.event_id()
        while True:
            page, refusal = await self._store.read(
                self._session_id, position, now=self._clock(), limit=PAGE
            )
            if refusal is not None:
                raise StoreUnavailable(f"a conversation cannot be read completely: {refusal.value}")
            if not page:
                return
            position = page[-1].event_id
            yield page

    def wire(self, events: Iterable[LoggedEvent]) -> bytes:
        opening = self._opening
        return b"".join(
            [opening + line[1:] + b"}\n" for event in events for line in event.payload.split(b"\n")]
        )

    @staticmethod
    def updates(events: Iterable[LoggedEvent]) -> list[dict[str, Any]]:
        return [decode(line) for event in events for line in event.payload.split(b"\n")]
