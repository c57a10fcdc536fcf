"""Compute the times at which a session expires. A conversation's are infinite.

Seconds everywhere, on the clock that the caller passes in.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from mcp_sessions.core.states import Mode
from mcp_sessions.policy import SessionPolicy


@dataclass(slots=True)
class Life:
    """The times of a session, in seconds since 1970."""

    created_at: float
    expires_at: float
    """When it expires if nothing more happens: the earlier of idle and absolute."""

    ends_at: float
    """The end of its absolute lifetime. A conversation's, like its ``expires_at``, is infinite."""


def idle_time(mode: Mode, policy: SessionPolicy) -> float:
    """How long a session of a mode lives after it was used last (SES13)."""
    longer = _longer(mode, policy)
    return policy.idle_timeout if longer is None else longer


def longest_life(mode: Mode, policy: SessionPolicy) -> float:
    """How long a session of a mode can live. If the idle time is longer than the lifetime, it is
    added: a client that comes back in it finds its session.
    """
    return policy.max_lifetime + (_longer(mode, policy) or 0)


SLEEPERS: tuple[Mode, ...] = (Mode.PROTOCOL, Mode.TRANSPORT)
"""The modes whose sessions sleep when they are idle, if they may live longer than that."""


def _longer(mode: Mode, policy: SessionPolicy) -> float | None:
    forget = policy.forget_after
    sleeps = mode in SLEEPERS and forget is not None and forget > policy.idle_timeout
    return forget if sleeps or mode is Mode.BOUND else None


def asleep_by(now: float, policy: SessionPolicy) -> float:
    """The latest idle deadline of a session that sleeps: nobody used it for ``idle_timeout``, and
    it lives. Minus infinity: none sleeps.
    """
    longer = _longer(Mode.TRANSPORT, policy)
    return -math.inf if longer is None else now - policy.idle_timeout + longer


def end_of_life(mode: Mode, *, now: float, max_lifetime: float) -> float:
    """When a session that is made now ends, however busy it is (SES15)."""
    return math.inf if mode is Mode.CONVERSATION else now + max_lifetime


def idle_deadline(*, now: float, idle_timeout: float, ends_at: float) -> float:
    """When a session that was used now ends, if nobody uses it again (SES13)."""
    return ends_at if ends_at == math.inf else min(now + idle_timeout, ends_at)


def has_expired(*, now: float, expires_at: float, ends_at: float, held: bool) -> bool:
    """Whether its time has come.

    Args:
        held: One of its requests runs, so it cannot be idle (SES14).
    """
    return now >= (ends_at if held else expires_at)
