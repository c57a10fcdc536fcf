"""What the application is told: what became of a connection and its session, and why a request
has no answer from the server.

A sentence names the tool or method, the address, the cause and the next step. An address is
written without its credentials and its query.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import cast

from mcp_sessions import method_names
from mcp_sessions.client.dialer import Failure
from mcp_sessions.core.messages import Json
from mcp_sessions.core.named import name_in

_LONGEST = 80
"""Characters of a name that the application chose."""

SEE = 'See "Outcome unknown" in docs/clients.md of mcp-sessions.'
"""The page that explains a call that may have run."""

RESTARTED = "the server does not know how it ended. It may have restarted during the call"
SESSION_GONE = "its session ended during the call, as it does if the server lost what it stored"
FORGETFUL = "the server does not know its own sessions. Ask who runs it"

_HINTS = {
    401: " Check the credential.",
    403: " Check the credential.",
    404: " Check the address.",
    405: " Check the address.",
}


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


# --- the sentences ---------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Loss:
    cause: str
    """In words, with the address."""

    since: float
    """Seconds, on the client's clock."""

    def lasted(self, now: float) -> str:
        seconds = now - self.since
        return self.cause if seconds < 1 else f"{self.cause} (for {seconds:.0f} s)"


def cause_of(failure: Failure, address: str) -> str:
    said = failure.explanation
    return said if address in said else f"{address}: {said}"


def what(message: Json) -> str:
    """The name of a request that its author knows: of the tool, or of the method."""
    method = cast(str, message.get("method", "a request"))
    name = name_in(method, message.get("params"))
    if name is None or not name.isprintable():
        return method
    name = name if len(name) <= _LONGEST else f"{name[:_LONGEST]}…"
    return name if method == method_names.CALL_TOOL else f"{method} {name}"


def not_sent(message: Json, cause: str) -> str:
    return f"{what(message)} was not sent: {cause}. It is safe to send it again."


def may_have_run(message: Json, cause: str) -> str:
    return f"Outcome unknown: {what(message)} may have run: {cause}. {SEE}"


def failed(message: Json, failure: Failure, *, ran: bool) -> str:
    """For a request that a server without sessions, or what stands before it, did not answer.

    Args:
        ran: It may have run.
    """
    status = failure.status
    if status is None and not ran:
        return not_sent(message, failure.explanation)
    hint = " It may have run." if ran else ""
    hint = hint if status is None else _HINTS.get(status, hint)
    return f"{what(message)} failed: {failure.explanation}.{hint}"


def taken_over(address: str) -> str:
    return f"{address}: another client has the session now. Open a new transport to go on"
