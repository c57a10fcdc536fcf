"""Whether a session lives: when it expires, and whether a request may use it until then.

Seconds everywhere, on the clock that the caller passes in. The times of an agent's and of a
connection's session are infinite.

Every deadline is computed here, and every store in Python compares it by :func:`has_come`. Redis
compares in its atomic step, by the function of that name in ``lua/session.lua``: the request of
another replica may have moved the deadline since this process read it.

The order of the questions about a request is a rule of its own (SES8): a stranger learns nothing
of a session, and nothing of it changes before its owner is known.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Protocol, TypeVar

from mcp_sessions.core.states import UNNAMED, Mode
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


T = TypeVar("T")


def new_life(mode: Mode, *, now: float, policy: SessionPolicy) -> Life:
    """The times of a session that is made now. It ends at its ``ends_at``, however busy it is
    (SES15).
    """
    ends_at = now + longest_life(mode, policy)
    idle_timeout = idle_time(mode, policy)
    return Life(now, idle_deadline(now=now, idle_timeout=idle_timeout, ends_at=ends_at), ends_at)


def idle_time(mode: Mode, policy: SessionPolicy) -> float:
    """How long a session of a mode lives after it was used last (SES13)."""
    longer = _longer(mode, policy)
    return policy.idle_timeout if longer is None else longer


def idle_times(policy: SessionPolicy) -> dict[Mode, float]:
    return {mode: idle_time(mode, policy) for mode in Mode}


def longest_life(mode: Mode, policy: SessionPolicy) -> float:
    """How long a session of a mode can live. If the idle time is longer than the lifetime, it is
    added: a client that comes back in it finds its session. A key that is known when its session
    ends would run again: such a session ends only if nobody uses it.
    """
    if mode is Mode.KEYS:
        return math.inf
    return policy.max_lifetime + (_longer(mode, policy) or 0)


SLEEPERS: tuple[Mode, ...] = (Mode.PROTOCOL, Mode.TRANSPORT)
"""The modes whose sessions sleep when they are idle, if they may live longer than that."""


def _longer(mode: Mode, policy: SessionPolicy) -> float | None:
    if mode in (Mode.AGENT, Mode.CONNECTION):
        return math.inf
    forget = policy.forget_after
    if mode is Mode.KEYS:
        # It is of use until its last key is forgotten, and unused from then on.
        return (forget or policy.idle_timeout) + policy.request_key_lifetime
    sleeps = mode in SLEEPERS and forget is not None and forget > policy.idle_timeout
    return forget if sleeps or mode in UNNAMED else None


def asleep_by(now: float, policy: SessionPolicy) -> float:
    """The latest idle deadline of a session that sleeps: nobody used it for ``idle_timeout``, and
    it lives. Minus infinity: none sleeps.
    """
    longer = _longer(Mode.TRANSPORT, policy)
    return -math.inf if longer is None else now - policy.idle_timeout + longer


def unused_by(mode: Mode, now: float, unused_for: float, policy: SessionPolicy) -> float:
    """The latest idle deadline of a session that nobody used for ``unused_for`` seconds."""
    return now - unused_for + idle_time(mode, policy)


def is_unused(life: Life, by: float) -> bool:
    """Whether nobody used a session: its idle deadline is ``by`` or earlier, see :func:`unused_by`.

    If its lifetime ends first, nobody knows when it was used.
    """
    return has_come(life.expires_at, by) and not lifetime_ends_first(life)


def lifetime_ends_first(life: Life) -> bool:
    return has_come(life.ends_at, life.expires_at)


def idle_deadline(*, now: float, idle_timeout: float, ends_at: float = math.inf) -> float:
    """When a session that was used now ends, if nobody uses it again (SES13).

    Args:
        ends_at: The end of its lifetime, which comes first if it is earlier. The store in Redis
            leaves it out: only its scripts know it, and they take the earlier one.
    """
    expires_at = now + idle_timeout
    # As min(), without a call: every request comes by here.
    return expires_at if expires_at < ends_at else ends_at


def deadline_of(expires_at: T, ends_at: T, *, held: bool) -> T:
    """The deadline that counts now, out of the two of a session, or out of their names.

    For an event, a resume and a touch ``ends_at`` counts: something runs, or did until now.

    Args:
        held: One of its requests runs, so it cannot be idle (SES14).
    """
    return ends_at if held else expires_at


has_come: Callable[[float, float], bool] = operator.le
"""Whether a deadline is at a moment, or before it. Every request comes by here."""


class Admission(Enum):
    REFUSED = "refused"
    """The session has ended, or is another principal's or protocol's. One answer for all."""

    OTHER_MODE = "other_mode"
    """The caller's own, of the mode that was not asked for (SES11)."""

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
        held: See :func:`deadline_of`.
        fencing_epoch: The session's as the caller knows it; None: whichever it is.
    """
    # One and the same, mostly: of nobody who authenticates.
    if session.principal is not principal and session.principal != principal:
        return Admission.REFUSED
    life = session.life
    if has_come(deadline_of(life.expires_at, life.ends_at, held=held), now):
        return Admission.REFUSED
    if session.mode is not mode:
        # Only these two are named on the wire; of the others a client knows nothing.
        is_known = {mode, session.mode} == {Mode.PROTOCOL, Mode.TRANSPORT}
        return Admission.OTHER_MODE if is_known else Admission.REFUSED
    if fencing_epoch is not None and fencing_epoch != session.fencing_epoch:
        return Admission.DISPLACED
    return Admission.ADMITTED
