"""The logs of sessions, as all that write to them use them: a session's events, a connection's GET
stream, the messages of a response, which its client may come back for.

An event is appended once, in the order in which it came, and handed over after that. While the
store is away it waits (:mod:`~mcp_sessions.server.delivery.pending_writes`). If the store's answer
was lost, the store looks for the event by its name before it appends it again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from mcp_sessions.core.log import Draft, LoggedEvent
from mcp_sessions.errors import Refusal, StoreUnavailable
from mcp_sessions.ids import Position, SessionId, StreamName
from mcp_sessions.server.connection.connection import Unless
from mcp_sessions.server.delivery.pending_writes import Instead, PendingWrite, PendingWrites
from mcp_sessions.stores.contract import SessionStore
from mcp_sessions.stores.records import Appended

HandOver = Callable[[Appended | None], Awaitable[object]]
"""Takes what an event became; None: the session has ended. It may be called again if it raises
``StoreUnavailable``."""


@dataclass(slots=True, eq=False, repr=False)
class StreamLog:
    """One stream of one session.

    Args:
        turn: Held while an event is appended and handed over; None: nothing is.
    """

    store: SessionStore
    clock: Callable[[], float]
    pending: PendingWrites
    session_id: SessionId
    name: StreamName
    _turn: Callable[[], asyncio.Lock] | None = None

    async def open(self) -> Position | None:
        """May raise ``StoreUnavailable``."""
        return await self.store.open_stream(self.session_id, self.name)

    async def append(
        self, draft: Draft, hand_over: HandOver, *, lost: Instead, unless: Unless | None = None
    ) -> bool:
        """Append an event after those that wait, and hand it over.

        Args:
            draft: The event.
            hand_over: What follows.
            unless: Says in its turn that it is not to be appended.
            lost: See :data:`~mcp_sessions.server.delivery.pending_writes.Instead`.

        Returns:
            False if the event waits for the store.
        """
        return await self.pending.in_order(
            (self.session_id, self.name),
            LogAppend(self, draft, hand_over, unless),
            owner=self.session_id,
            holds=draft.before,
            lost=lost,
            turn=self._turn,
        )

    async def then(
        self, step: PendingWrite, *, holds: bytes, lost: Instead, overlaps: bool = False
    ) -> bool:
        """Do something after the events that wait; see :meth:`append`.

        Args:
            step: What to do. It may be done again after it failed.
            holds: What it keeps in memory.
            lost: See :meth:`append`.
            overlaps: If nothing waits, it is done at once, whose turn it may be.
        """
        return await self.pending.in_order(
            (self.session_id, self.name),
            step,
            owner=self.session_id,
            holds=holds,
            lost=lost,
            turn=self._turn,
            overlaps=overlaps,
        )

    def later(self, step: PendingWrite, *, lost: Instead) -> None:
        """Do something when the store is back: the caller has tried it."""
        self.pending.keep(
            (self.session_id, self.name),
            step,
            owner=self.session_id,
            holds=b"",
            lost=lost,
            turn=self._turn,
        )

    @property
    def waiting(self) -> list[Draft]:
        """The events that wait for the store."""
        steps = self.pending.steps((self.session_id, self.name))
        return [step.draft for step in steps if isinstance(step, LogAppend)]

    async def read(self, after: str) -> tuple[Sequence[LoggedEvent], Refusal | None]:
        """Read the stream, when all that waits is in it.

        Raises:
            StoreUnavailable: Not all of it is.
        """
        await self.pending.flush((self.session_id, self.name))
        return await self.store.read(self.session_id, after, now=self.clock(), stream=self.name)

    async def drop(self) -> None:
        """May raise ``StoreUnavailable``."""
        await self.store.drop_stream(self.session_id, self.name)


@dataclass(slots=True, eq=False, repr=False)
class LogAppend:
    """The step that appends an event to a log, and hands it over."""

    _log: StreamLog
    draft: Draft
    _hand_over: HandOver
    _unless: Unless | None = None
    _is_stored: bool = field(init=False, default=False)
    _stored: Appended | None = field(init=False, default=None)

    async def __call__(self) -> None:
        if not self._is_stored:
            if self._unless is not None and await self._unless():
                return
            log, draft = self._log, self.draft
            if draft.name is None:
                log.pending.number += 1
                draft.name = f"{log.pending.name}.{log.pending.number}"
            now = log.clock()
            try:
                self._stored = await log.store.append(
                    log.session_id, draft, now=now, stream=log.name
                )
            except StoreUnavailable:
                # The next call asks whether it is there.
                draft.since = now if draft.since is None else draft.since
                raise
            self._is_stored = True
        await self._hand_over(self._stored)


class Streams(Protocol):
    """The streams of every session."""

    def __call__(
        self,
        session_id: SessionId,
        name: StreamName,
        turn: Callable[[], asyncio.Lock] | None = None,
        /,
    ) -> StreamLog: ...
