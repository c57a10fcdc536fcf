"""Attach a session to a connection: to one at most (RES3), the newest one (TKO1).

The table of ``states.py`` says which state follows.

The second half decides which events of a session go on the GET stream of a connection that
carries it. Each event goes once, in the order of the session's own log (ATT6), and only under the
newest attachment (TKO1).
"""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple

from mcp_sessions.core.states import TRANSITIONS, Change, State
from mcp_sessions.ids import ConnectionId, FencingEpoch, Position, SessionEventId


class Attach(NamedTuple):
    connection_id: ConnectionId | None
    """The connection that gets the session's events from now on; None: no connection."""

    fencing_epoch: FencingEpoch
    """The session's from now on: a higher one, so that whoever was attached can tell."""

    listens_from: SessionEventId | None
    """The position where the new connection's listen stream starts; None: at the head."""

    waits_from: SessionEventId | None
    """The position where the session's next listen stream starts."""


def state_of(*, is_attached: bool) -> State:
    return State.ATTACHED if is_attached else State.DETACHED


def attach(
    state: State,
    connection_id: ConnectionId | None,
    *,
    fencing_epoch: FencingEpoch,
    waits_from: SessionEventId | None,
    only_if_free: bool,
) -> Attach | None:
    """Attach a session to a connection, or take it from whoever receives it (None).

    Args:
        state: Where the session is now.
        connection_id: One that can be pushed to; None: there is none.
        fencing_epoch: The session's now.
        waits_from: The position where its next listen stream was to start. A connection takes that
            with it; else it stays.
        only_if_free: Displace nobody.

    Returns:
        None if the session has ended (SES18), or is not free and has to be.
    """
    change = Change.DISPLACE if connection_id is None else Change.ATTACH
    follows = TRANSITIONS.get((state, change))
    if follows is None or (only_if_free and state is State.ATTACHED):
        return None
    epoch = FencingEpoch(fencing_epoch + 1)
    if follows is State.ATTACHED:
        return Attach(connection_id, epoch, waits_from, None)
    return Attach(None, epoch, None, waits_from)


def detaches(state: State, *, fencing_epoch: FencingEpoch, attached_with: FencingEpoch) -> bool:
    """Whether the end of an attachment detaches the session. It does not if a newer attachment has
    the session (TKO9).

    Args:
        state: Where the session is now.
        fencing_epoch: The session's now, which is that of its newest attachment.
        attached_with: The epoch of the attachment that ends.
    """
    follows = TRANSITIONS.get((state, Change.DETACH))
    return follows is not None and follows is not state and attached_with == fencing_epoch


class Carry(Enum):
    REFUSED = "refused"
    """The stream carries that session by a newer attachment."""

    CONTINUES = "continues"
    """The stream carries it by this very attachment: it goes on where it is."""

    BEGINS = "begins"
    """The stream first removes its entries of that session by an older attachment."""


def carry(carried: FencingEpoch | None, fencing_epoch: FencingEpoch) -> Carry:
    """Whether a stream carries a session by that attachment from now on.

    Args:
        carried: By which attachment it carries that session now; None: not at all.
        fencing_epoch: Names the attachment.
    """
    if carried is None or carried < fencing_epoch:
        return Carry.BEGINS
    return Carry.CONTINUES if carried == fencing_epoch else Carry.REFUSED


def may_drop(carried: FencingEpoch | None, fencing_epoch: FencingEpoch | None) -> bool:
    """Whether the process that displaced an attachment may remove its events from the stream.
    Events of a newer attachment stay. None for the epoch: whatever there is.
    """
    return fencing_epoch is None or carried is None or carried <= fencing_epoch


class RelayStep(Enum):
    SKIPPED = "skipped"
    """It is there already, or the stream carries that session by another attachment."""

    TOO_EARLY = "too_early"
    """One before it has to go first."""

    STORED = "stored"


def relay(
    carried: FencingEpoch | None,
    last: Position,
    event: Position,
    *,
    fencing_epoch: FencingEpoch,
    skips: bool,
) -> tuple[RelayStep, Position]:
    """Whether an event goes on a stream now; and after which one of its log, if none is missing.

    Args:
        carried: As in :func:`carry`.
        last: The last event of that session that went there, or was there when it began.
        event: Its position in the session's log.
        fencing_epoch: Of the attachment that the event is for.
        skips: The numbers in between were replaced by newer events.
    """
    if event.log_epoch > last.log_epoch:
        # The log was made anew: none of its events is there (CUP8).
        last = Position(event.log_epoch, 0)
    if carried != fencing_epoch or event.log_epoch != last.log_epoch or event.number <= last.number:
        return RelayStep.SKIPPED, last
    follows = skips or event.number == last.number + 1
    return RelayStep.STORED if follows else RelayStep.TOO_EARLY, last
