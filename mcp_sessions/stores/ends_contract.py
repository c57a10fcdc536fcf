"""Define the part of the contract about ended sessions: a store remembers how they ended, for a
time.

It remembers a digest, a reason and times (:class:`~mcp_sessions.core.ends.SessionEnd`), and nothing
of the session's contents (END2).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from mcp_sessions.core.ends import EndReason, SessionEnd, StoreMade
from mcp_sessions.ids import digest
from mcp_sessions.stores.records import SessionRecord


class EndedOutside(NamedTuple):
    """A session that ended, though no server ended it."""

    end: SessionEnd
    record: SessionRecord | None = None
    """As it was. None: no server has anything of it, or each server learned it otherwise."""


def end_by_operator(record: SessionRecord, now: float) -> SessionEnd:
    age = max(0.0, now - record.life.created_at)
    return SessionEnd(digest(record.session_id), EndReason.OPERATOR, now, record.mode, age=age)


class Ends(Protocol):
    async def remember_ends(
        self, ends: Sequence[SessionEnd], *, now: float, outside: bool = False
    ) -> Sequence[SessionEnd]:
        """Remember these ends: the newest ``MOST_ENDS``, each for ``REMEMBERED_FOR`` seconds.

        Args:
            outside: No server wrote it to its log yet: :meth:`ended_outside` hands it out.

        Returns:
            Those that were not remembered before.
        """
        ...

    async def ended_outside(self, *, now: float) -> Sequence[EndedOutside]:
        """Sessions that no server ended: an operator did, or their records are lost. Each is
        handed out once, to one of the processes that share the store.
        """
        ...

    async def ends(self, *, now: float) -> Sequence[SessionEnd]:
        """The ends that are remembered, oldest first."""
        ...

    async def made(self, *, now: float | None) -> StoreMade | None:
        """When this store was made. A store that was emptied is made again by the next call.

        Args:
            now: None: do not make it, and answer None if it is not made.
        """
        ...
