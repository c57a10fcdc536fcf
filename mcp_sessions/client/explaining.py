"""The sentences that a request ends with when the server does not answer it.

Each names the tool or method, the address, the cause and the next step. An address is written
without its credentials and its query.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

from mcp_sessions import method_names
from mcp_sessions.client.dialer import Failure, Json
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
