"""Attach a session to a connection: to one at most (ATT1), the newest one (TKO1).

The table of ``states.py`` says which state follows.
"""

from __future__ import annotations

from typing import NamedTuple

from mcp_sessions.core.states import TRANSITIONS, Change, State
from mcp_sessions.ids import ConnectionId, FencingEpoch, SessionEventId


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
