"""How a session ended: one value, from the store's row to the line in the log.

A session's digest stands for its id: an id is a credential, and the digest is not.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

from mcp_sessions.core.life import idle_time
from mcp_sessions.core.states import BEGINS, Change, Mode, after
from mcp_sessions.policy import SessionPolicy, how_to_raise

MOST_ENDS = 10_000
"""Ends that a store remembers. The oldest go first."""

REMEMBERED_FOR = 7 * 86_400.0
"""Seconds that a store remembers an end."""


class EndReason(Enum):
    """Why a session ended. The value is what logs, audit and ``sessions show`` say."""

    IDLE = "idle"
    """No request came for the idle time."""

    LIFETIME = "lifetime"
    """Its longest lifetime had passed."""

    CLIENT = "client"
    """Its client ended it, or left before it had the answer to ``initialize``."""

    OPERATOR = "operator"
    """``mcp-sessions sessions end``, or ``layer.sessions.end()``."""

    LIMIT = "limit"
    """It made room for another; :attr:`SessionEnd.limit` names the limit."""

    EMPTIED = "emptied"
    """The store was emptied or replaced."""

    LOST = "lost"
    """Its record was not in the store any more, or could not be read."""

    @property
    def change(self) -> Change:
        return Change.EXPIRE if self in _BY_TIME else Change.END

    @property
    def kind(self) -> str:
        """The word in the count of ends: the state that follows, if a request or time ended it."""
        follows = after(BEGINS, self.change)
        if follows is None:
            raise AssertionError("every session can end")
        return _KINDS.get(self, follows.value)


_BY_TIME = frozenset({EndReason.IDLE, EndReason.LIFETIME})

_KINDS = {EndReason.LIMIT: "evicted", EndReason.EMPTIED: "lost", EndReason.LOST: "lost"}


@dataclass(frozen=True, slots=True)
class SessionEnd:
    session: str
    """The digest of its id."""

    reason: EndReason
    at: float
    """Seconds since 1970."""

    mode: Mode | None = None
    age: float | None = None
    """Seconds from its start to its end."""

    idle: float | None = None
    """Seconds from its last use to its end."""

    limit: str | None = None
    """For ``LIMIT``: the field of :class:`~mcp_sessions.policy.SessionPolicy`."""

    client: str | None = None
    """Its client's name and version, as the client said them."""

    principal: str | None = None
    """Whose it was; None: nobody's, or unknown."""

    story: str = ""
    """What happened to it (:mod:`~mcp_sessions.core.story`)."""

    def __str__(self) -> str:
        idle, age = _for(self.idle), _for(self.age)
        match self.reason:
            case EndReason.IDLE:
                return f"it expired{idle} without a request"
            case EndReason.LIFETIME:
                return f"it expired{age}, its longest lifetime"
            case EndReason.CLIENT:
                return "its client ended it"
            case EndReason.OPERATOR:
                return "an operator ended it"
            case EndReason.LIMIT:
                return f"it made room for another ({self.limit}){idle} without a request"
            case EndReason.EMPTIED:
                return "the store was emptied or replaced"
            case EndReason.LOST:
                return "its record was lost in the store"

    @property
    def advice(self) -> str:
        """What an operator changes so that such a session stays."""
        match self.reason:
            case EndReason.IDLE:
                return "to keep sessions longer, raise --forget-after (in memory: --idle-timeout)"
            case EndReason.LIFETIME:
                return f"to keep sessions longer, raise {how_to_raise('max_lifetime')}"
            case EndReason.CLIENT:
                return "nothing: the client wanted it. If it did not, mend the client"
            case EndReason.OPERATOR:
                return "ask who runs `mcp-sessions sessions end` or calls layer.sessions.end()"
            case EndReason.LIMIT:
                return (
                    f"set {how_to_raise(self.limit or '')}; or find out who has so many sessions: "
                    "`mcp-sessions sessions list`"
                )
            case EndReason.EMPTIED:
                return "give the sessions a database of their own, which nobody empties"
            case EndReason.LOST:
                return "set maxmemory-policy noeviction in Redis, and let nobody delete its keys"

    def to_json(self) -> dict[str, Any]:
        members = {
            "session": self.session,
            "reason": self.reason.value,
            "at": self.at,
            "mode": self.mode.value if self.mode is not None else None,
            "age": self.age,
            "idle": self.idle,
            "limit": self.limit,
            "client": self.client,
            "principal": self.principal,
            "story": self.story or None,
        }
        return {name: value for name, value in members.items() if value is not None}

    @classmethod
    def from_json(cls, kept: Any) -> SessionEnd | None:
        """Read a stored end; None: a newer version wrote it, or another program."""
        if not isinstance(kept, Mapping):
            return None
        of: Mapping[Any, Any] = kept  # pyright: ignore[reportUnknownVariableType]
        try:
            return cls(
                str(of["session"]),
                EndReason(of["reason"]),
                float(of["at"]),
                Mode(of["mode"]) if "mode" in of else None,
                float(of["age"]) if "age" in of else None,
                float(of["idle"]) if "idle" in of else None,
                str(of["limit"]) if "limit" in of else None,
                str(of["client"]) if "client" in of else None,
                str(of["principal"]) if "principal" in of else None,
                str(of.get("story", "")),
            )
        except (KeyError, ValueError, TypeError):
            return None


@dataclass(frozen=True, slots=True)
class StoreMade:
    """When a store was made. A store that was emptied was made again."""

    name: str
    at: float
    """Seconds since 1970."""

    is_new: bool = False
    """This look found none, and made it: the store is new, or was emptied."""


def times_of(
    mode: Mode, *, created_at: float, expires_at: float, now: float, policy: SessionPolicy
) -> tuple[float, float | None]:
    """Age and idle time of a session that ends now, in seconds.

    A lifetime may end before the idle time does: then nobody knows when it was used last.
    """
    age = max(0.0, now - created_at)
    if not math.isfinite(expires_at):
        return age, None
    used_at = expires_at - idle_time(mode, policy)
    return age, max(0.0, now - used_at) if used_at >= created_at else None


def _for(seconds: float | None) -> str:
    return f" after {duration(round(seconds))}" if seconds is not None else ""


def duration(seconds: int) -> str:
    """``3d4h``, ``2h5m``, ``1m30s`` or ``9s``."""
    parts: list[str] = []
    for unit, length in (("d", 86_400), ("h", 3_600), ("m", 60), ("s", 1)):
        if seconds >= length or (unit == "s" and not parts):
            parts.append(f"{seconds // length}{unit}")
            seconds %= length
    return "".join(parts[:2])


def is_called(name: str, client: str | None) -> bool:
    """Whether a name is that of a client, with its version or without."""
    known, wanted = (client or "").lower(), name.lower()
    return wanted != "" and wanted in (known, known.rpartition(" ")[0])
