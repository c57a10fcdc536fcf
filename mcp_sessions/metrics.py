"""Count events for OpenTelemetry. Nothing is exported, or costs anything, until it is asked for.

The instruments are those of ``opentelemetry-api``, which the SDK brings along. They do nothing
until the application sets a meter provider, or ``serve`` does (``mcp_sessions.cli.telemetry``).
They are made with the first thing that is counted, so that a command that serves nothing does not
wait for the import.

================================ ========================================== ====================
counter                          counts                                     attributes
================================ ========================================== ====================
mcp_sessions.sessions            sessions made                              mode
mcp_sessions.ended               sessions over                              mode, reason
mcp_sessions.attaches            connections that joined a session          transport
mcp_sessions.replays             events sent again                          transport
mcp_sessions.refusals            positions from which nothing is replayed   reason
mcp_sessions.coalesced           events that replaced an older one
mcp_sessions.detached            sessions taken from their connection       reason
mcp_sessions.slow                connections cut since they took nothing
mcp_sessions.denials             requests without a good credential         reason
mcp_sessions.limited             requests that a limit refused              limit
mcp_sessions.store_errors        calls that the store failed                store
mcp_sessions.background_failures work that nobody awaits failed             work, error
mcp_sessions.children            processes, or sessions of a URL, that were outcome
                                 begun for the wrapped server
mcp_sessions.children_running    those that there are (up and down)
mcp_sessions.children_over       those that are no more                     reason
================================ ========================================== ====================

No attribute names a session, a principal or a resource: there is one time series for each
combination of them, for ever.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from opentelemetry.metrics import Counter, UpDownCounter

SCOPE = "mcp_sessions"
"""The name of the instrumentation scope."""


def session_made(mode: str) -> None:
    _counter("sessions").add(1, {"mode": mode})


def session_ended(mode: str, reason: str) -> None:
    """Count a session that ended: ``ended``, ``expired``, or ``evicted`` to make room."""
    _counter("ended").add(1, {"mode": mode, "reason": reason})


def attached(transport: str, replayed: int, refusal: str | None) -> None:
    """Count a connection that attached to a session.

    Args:
        replayed: Events that it is sent again.
        refusal: Why there are none; None: all that it missed are.
    """
    _counter("attaches").add(1, {"transport": transport})
    if replayed:
        _counter("replays").add(replayed, {"transport": transport})
    # A client that named no position was refused nothing.
    if refusal not in (None, "no_position"):
        _counter("refusals").add(1, {"reason": refusal})


def coalesced() -> None:
    _counter("coalesced").add(1)


def detached(reason: str) -> None:
    _counter("detached").add(1, {"reason": reason})


def too_slow() -> None:
    """Count a connection that was cut: its peer read nothing while its buffer was full."""
    _counter("slow").add(1)


def denied(reason: str) -> None:
    _counter("denials").add(1, {"reason": reason})


def limited(limit: str) -> None:
    _counter("limited").add(1, {"limit": limit})


def store_failed(store: str, calls: int = 1) -> None:
    """Count calls that the store answered with an error. Any thread may call this."""
    _counter("store_errors").add(calls, {"store": store})


def background_failed(work: str, error: str) -> None:
    """Count a failure of background work. A loop starts again; other work is lost.

    Args:
        work: Its name, one of a few.
        error: The exception's type.
    """
    _counter("background_failures").add(1, {"work": work, "error": error})


def child_begun(outcome: str) -> None:
    """Count a child of the wrapped server that ``started``, or ``failed`` to."""
    _counter("children").add(1, {"outcome": outcome})


def child_runs() -> None:
    _up_down("children_running").add(1)


def child_ended(reason: str) -> None:
    """Count a child that is gone: it ``died``, or was ``ended`` here."""
    _up_down("children_running").add(-1)
    _counter("children_over").add(1, {"reason": reason})


_DESCRIPTIONS = {
    "sessions": "Sessions made",
    "ended": "Sessions over",
    "attaches": "Connections that joined a session",
    "replays": "Events sent again",
    "refusals": "Positions from which nothing is replayed",
    "coalesced": "Events that replaced an older one",
    "detached": "Sessions taken from their connection",
    "denials": "Requests without a good credential",
    "limited": "Requests that a limit refused",
    "slow": "Connections cut since they took nothing",
    "store_errors": "Calls that the store failed",
    "background_failures": "Work that nobody awaits failed",
    "children": "Children of the wrapped server that were begun",
    "children_running": "Children of the wrapped server that there are",
    "children_over": "Children of the wrapped server that are no more",
}


@cache
def _counter(name: str) -> Counter:
    from opentelemetry.metrics import get_meter

    return get_meter(SCOPE).create_counter(f"{SCOPE}.{name}", description=_DESCRIPTIONS[name])


@cache
def _up_down(name: str) -> UpDownCounter:
    from opentelemetry.metrics import get_meter

    meter = get_meter(SCOPE)
    return meter.create_up_down_counter(f"{SCOPE}.{name}", description=_DESCRIPTIONS[name])
