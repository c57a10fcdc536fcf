"""Decide which events of a session go on the GET stream of a connection that carries it.

Each event goes once, in the order of the session's own log (ATT6), and only under the newest
attachment (TKO1).
"""

from __future__ import annotations

from enum import Enum

from mcp_sessions.ids import FencingEpoch, Position


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
        # The log was made anew: none of its events is there (CUP13).
        last = Position(event.log_epoch, 0)
    if carried != fencing_epoch or event.log_epoch != last.log_epoch or event.number <= last.number:
        return RelayStep.SKIPPED, last
    follows = skips or event.number == last.number + 1
    return RelayStep.STORED if follows else RelayStep.TOO_EARLY, last
