"""The logs of sessions, as all that write to them use them: a session's events, a connection's GET
stream, the messages of a response, which its client may come back for.

An event is appended once, in the order in which it came, and handed over after that. While the
store is away it waits (:mod:`~mcp_sessions.server.delivery.pending_writes`). If the store's answer
was lost, the store looks for the event by its name before it appends it again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
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

    _store: SessionStore
    _clock: Callable[[], float]
    _pending: PendingWrites
    session_id: SessionId
    name: StreamName
    _turn: Callable[[], asyncio.Lock] | None = None

    async def open(self) -> Position | None:
        """May raise ``StoreUnavailable``."""
        return await self._store.open_stream(self.session_id, self.name)

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
        step = self.appending(draft, hand_over, unless)
        return await self.then(step, size=len(draft.before), lost=lost)

    def appending(
        self, draft: Draft, hand_over: HandOver, unless: Unless | None = None
    ) -> PendingWrite:
        """Return the step that appends an event, and hands it over."""
        return _Append(self, replace(draft, name=self._pending.new_name()), hand_over, unless)

    async def then(
        self, step: PendingWrite, *, size: int, lost: Instead, overlaps: bool = False
    ) -> bool:
        """Do something after the events that wait; see :meth:`append`.

        Args:
            step: What to do. It may be done again after it failed.
            size: Bytes that it holds.
            lost: See :meth:`append`.
            overlaps: If nothing waits, it is done at once, whose turn it may be.
        """
        return await self._pending.in_order(
            (self.session_id, self.name),
            step,
            owner=self.session_id,
            size=size,
            lost=lost,
            turn=self._turn,
            overlaps=overlaps,
        )

    def later(self, step: PendingWrite, *, lost: Instead) -> None:
        """Do something when the store is back: the caller has tried it."""
        self._pending.keep(
            (self.session_id, self.name),
            step,
            owner=self.session_id,
            size=0,
            lost=lost,
            turn=self._turn,
        )

    @property
    def waiting(self) -> list[Draft]:
        """The events that wait for the store."""
        steps = self._pending.steps((self.session_id, self.name))
        return [step.draft for step in steps if isinstance(step, _Append)]

    async def read(self, after: str) -> tuple[Sequence[LoggedEvent], Refusal | None]:
        """Read the stream, when all that waits is in it.

        Raises:
            StoreUnavailable: Not all of it is.
        """
        await self._pending.flush((self.session_id, self.name))
        return await self._store.read(self.session_id, after, now=self._clock(), stream=self.name)

    async def drop(self) -> None:
        """May raise ``StoreUnavailable``."""
        await self._store.drop_stream(self.session_id, self.name)

    async def store(self, draft: Draft) -> Appended | None:
        """Append an event now.

        Raises:
            StoreUnavailable: The next call asks whether it is there.
        """
        now = self._clock()
        try:
            return await self._store.append(self.session_id, draft, now=now, stream=self.name)
        except StoreUnavailable:
            if draft.since is None:
                draft.since = now
            raise


@dataclass(slots=True, eq=False)
class _Append:
    _log: StreamLog
    draft: Draft
    _hand_over: HandOver
    _unless: Unless | None
    _is_stored: bool = field(init=False, default=False)
    _stored: Appended | None = field(init=False, default=None)

    async def __call__(self) -> None:
        if not self._is_stored:
            if self._unless is not None and await self._unless():
                return
            self._stored = await self._log.store(self.draft)
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
