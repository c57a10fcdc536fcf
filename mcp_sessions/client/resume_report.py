from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class ConnectionLost:
    """A connection that was in use is lost. The transport tries to get another one."""

    reason: str
    """The cause, for people and logs. It names the address and holds no credential."""

    address: str
    """The URL or command, without credentials."""


@dataclass(frozen=True, slots=True)
class ResumeOutcome:
    """How it went after a connection was lost, moved, or left at the last run."""

    recovered: bool
    """Nothing was missed: every event came or is on its way. False: read again what you
    depend on; the lists' ``list_changed`` notifications are sent to you in any case."""

    is_new_session: bool = False
    """The old session is gone; this is another one, with nothing of the old."""

    reason: str | None = None
    """Why not: the server's ``reason``, ``session_lost``, ``taken_over``, ``gave_up``,
    ``refused``, or ``too_large``: a message of more than ``ReconnectPolicy.max_message`` bytes
    was skipped."""

    replayed: int = 0
    """Missed events that are being replayed, if the server said how many."""

    connected_to: str = ""
    """The URL or command, without credentials."""

    has_ended: bool = False
    """The transport stopped and does not come back by itself (``taken_over``)."""


@dataclass(frozen=True, slots=True)
class KnownSession:
    """A session as its client knows it. It may be logged: its text has no credential in it."""

    session_id: str = field(repr=False)
    """A credential where there is no other: do not log it."""

    digest: str
    """Names the session in logs, on either side; of no use to who reads it there."""

    expires_at: str | None
    """ISO 8601; None: the server did not say."""

    last_event_id: str | int | None
    """The last event that the application was given, or where its events begin."""

    is_resumable: bool
    """It survives its connection. False: it is only named in each request."""


OnResume = Callable[[ResumeOutcome], Awaitable[None] | None]
OnLost = Callable[[ConnectionLost], Awaitable[None] | None]
