"""Whether a request may use the session that it names.

The order of the questions is a rule of its own (SES10): a stranger learns nothing of a session,
and nothing of it changes before its owner is known.
"""

from __future__ import annotations

from enum import Enum
from typing import Protocol

from mcp_sessions.core.expiry import Life, has_expired
from mcp_sessions.core.states import Mode
from mcp_sessions.ids import FencingEpoch
from mcp_sessions.principal import Principal


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
        held: See :func:`~mcp_sessions.core.expiry.has_expired`.
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
