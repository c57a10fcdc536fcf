"""Define the part of the contract about ended sessions: a store remembers how they ended, for a
time.

It remembers a digest, a reason, times, names and the story
(:class:`~mcp_sessions.core.ends.SessionEnd`), and nothing of the session's contents (END2).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import NamedTuple, Protocol

from mcp_sessions.core.ends import (
    MOST_ENDS,
    REMEMBERED_FOR,
    EndReason,
    SessionEnd,
    StoreMade,
)
from mcp_sessions.core.life import lifetime_ends_first
from mcp_sessions.core.messages import members_of
from mcp_sessions.core.states import Mode
from mcp_sessions.ids import digest
from mcp_sessions.principal import Principal
from mcp_sessions.stores.records import Peer, SessionRecord


class EndedOutside(NamedTuple):
    """A session that ended, though no server ended it."""

    end: SessionEnd
    record: SessionRecord | None = None
    """As it was. None: no server has anything of it, or each server learned it otherwise."""


def end_by_operator(record: SessionRecord, now: float) -> SessionEnd:
    age = max(0.0, now - record.life.created_at)
    return end_of(record, EndReason.OPERATOR, now, age=age)


@dataclass(frozen=True, slots=True)
class IdleTimes:
    """The times of the servers, in seconds. With others the last use is not known."""

    idle_timeout: float
    forget_after: float

    def used_at(self, record: SessionRecord) -> float | None:
        """When a session was used last. None: it has no idle deadline, as a conversation."""
        life = record.life
        if not math.isfinite(life.expires_at):
            return None
        used_at = life.expires_at - self.forget_after
        if used_at < life.created_at and record.mode is not Mode.CONVERSATION:
            # It was not used before it was made: sleep is switched off.
            used_at = life.expires_at - self.idle_timeout
        # Without the options of the server the deadline says too much.
        return max(used_at, life.created_at)

    def end_of_expired(self, record: SessionRecord) -> SessionEnd:
        """Return the end of a session whose time has passed, and that no server has ended yet."""
        at, used_at = record.life.expires_at, self.used_at(record)
        why = EndReason.LIFETIME if lifetime_ends_first(record.life) else EndReason.IDLE
        idle = at - used_at if used_at is not None else None
        return end_of(record, why, at, age=at - record.life.created_at, idle=idle)


def why_unknown(ends: Sequence[SessionEnd], made: StoreMade | None, *, now: float) -> str:
    """Say of a session that is not there, and of which no end is remembered, what that can mean.

    Args:
        ends: All that the store remembers.
        made: When the store was made; None: no server has opened it.
    """
    days, known = round(REMEMBERED_FOR / 86_400), now - REMEMBERED_FOR
    why = f"Ends are remembered for {days} days"
    if len(ends) >= MOST_ENDS:
        known = max(known, min(end.at for end in ends))
        why = f"The newest {MOST_ENDS} ends are remembered"
    if made is not None and made.at >= known:
        known, why = made.at, "The store is new since then: what was before is gone"
    return (
        f"none is there, and none has ended since {moment(known)}. {why}. Or it never was in this "
        "store: compare --store with the server's. A server notes an end some seconds after it"
    )


def moment(seconds: float) -> str | None:
    """``2026-11-27T10:12:43Z``; None: never."""
    if not math.isfinite(seconds):
        return None
    return datetime.fromtimestamp(int(seconds), UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


_NAME = 100
"""Characters of a name that an end keeps, at most."""


def end_of(
    record: SessionRecord,
    reason: EndReason,
    now: float,
    *,
    age: float | None,
    idle: float | None = None,
    limit: str | None = None,
) -> SessionEnd:
    """Return the end of a session, with what stays known of it."""
    principal, client = principal_name(record.principal), client_name(record.client.peer)
    return SessionEnd(
        digest(record.session_id), reason, now, record.mode, age, idle, limit,
        client=client[:_NAME] if client is not None else None,
        principal=principal[:_NAME] if principal is not None else None,
        story=record.story,
    )  # fmt: skip


def principal_name(principal: Principal) -> str | None:
    """Return what people call a principal; None: it is nobody."""
    return principal.subject or principal.client_id or principal.issuer or None


def client_name(peer: Peer | None) -> str | None:
    """Return name and version of a client, as it said them."""
    info = members_of((peer.initialize_params or {}).get("clientInfo")) if peer else {}
    return " ".join(str(info[each]) for each in ("name", "version") if info.get(each)) or None


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
