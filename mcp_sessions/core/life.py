"""Whether a session lives: when it expires, and whether a request may use it until then.

Seconds everywhere, on the clock that the caller passes in. The times of an agent's session are
infinite.

The order of the questions about a request is a rule of its own (SES10): a stranger learns nothing
of a session, and nothing of it changes before its owner is known.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

from mcp_sessions.core.states import Mode
from mcp_sessions.ids import FencingEpoch
from mcp_sessions.policy import SessionPolicy
from mcp_sessions.principal import Principal


@dataclass(slots=True)
class Life:
    """The times of a session, in seconds since 1970."""

    created_at: float
    expires_at: float
    """When it expires if nothing more happens: the earlier of idle and absolute."""

    ends_at: float
    """The end of its absolute lifetime. An agent's, like its ``expires_at``, is infinite."""


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
    return forget if sleeps or mode is Mode.CONVERSATION else None


def asleep_by(now: float, policy: SessionPolicy) -> float:
    """The latest idle deadline of a session that sleeps: nobody used it for ``idle_timeout``, and
    it lives. Minus infinity: none sleeps.
    """
    longer = _longer(Mode.TRANSPORT, policy)
    return -math.inf if longer is None else now - policy.idle_timeout + longer


def end_of_life(mode: Mode, *, now: float, max_lifetime: float) -> float:
    """When a session that is made now ends, however busy it is (SES15)."""
    return math.inf if mode in (Mode.AGENT, Mode.CONNECTION) else now + max_lifetime


def idle_deadline(*, now: float, idle_timeout: float, ends_at: float) -> float:
    """When a session that was used now ends, if nobody uses it again (SES13)."""
    return ends_at if ends_at == math.inf else min(now + idle_timeout, ends_at)


def has_expired(*, now: float, expires_at: float, ends_at: float, held: bool) -> bool:
    """Whether its time has come.

    Args:
        held: One of its requests runs, so it cannot be idle (SES14).
    """
    return now >= (ends_at if held else expires_at)


class Admission(Enum):
    REFUSED = "refused"
    """The session has ended, or is another principal's or protocol's. One answer for all."""

    OTHER_MODE = "other_mode"
    """The caller's own, of the mode that was not asked for (SES11, SES12)."""

    DISPLACED = "displaced"
    """Another connection took it since the caller last looked."""

    ADMITTED = "admitted"


class SessionFacts(Protocol):
    principal: Principal
    mode: Mode
    life: Life
    fencing_epoch: FencingEpoch


def admission(
    session: SessionFacts,
    principal: Principal,
    *,
    mode: Mode,
    now: float,
    held: bool,
    fencing_epoch: FencingEpoch | None,
) -> Admission:
    """Whether a request of ``principal`` may use the session. Only ``ADMITTED`` changes anything:
    it moves the idle deadline, and may record a request key.

    Args:
        mode: The mode that the caller takes the session for.
        now: Seconds since 1970.
        held: See :func:`has_expired`.
        fencing_epoch: The session's as the caller knows it; None: whichever it is.
    """
    # One and the same, mostly: of nobody who authenticates.
    if session.principal is not principal and session.principal != principal:
        return Admission.REFUSED
    if has_expired(
        now=now, expires_at=session.life.expires_at, ends_at=session.life.ends_at, held=held
    ):
        return Admission.REFUSED
    if session.mode is not mode:
        # Only these two are named on the wire; of the others a client knows nothing.
        is_known = {mode, session.mode} == {Mode.PROTOCOL, Mode.TRANSPORT}
        return Admission.OTHER_MODE if is_known else Admission.REFUSED
    if fencing_epoch is not None and fencing_epoch != session.fencing_epoch:
        return Admission.DISPLACED
    return Admission.ADMITTED
