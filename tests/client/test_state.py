"""The phases of a client, and what changes them, over every pair."""

from itertools import product
from typing import Any, cast

import pytest

from mcp_sessions.client.reconnect_policy import ReconnectPolicy
from mcp_sessions.client.state import Addresses, ClientState, LinkChange, Phase, Runtime

WAYS_TO = {
    Phase.FRESH: (),
    Phase.BUSY: (LinkChange.OPEN,),
    Phase.OPEN: (LinkChange.OPEN, LinkChange.OPENED),
    Phase.READY: (LinkChange.OPEN, LinkChange.READY),
    Phase.CUT_OFF: (LinkChange.OPEN, LinkChange.GIVE_UP),
    Phase.ENDED: (LinkChange.END,),
}
# Written out, and not read from the table that is tested. None: it cannot happen.
# The columns:     FRESH    OPEN     BUSY     READY    CUT_OFF  ENDED
AFTER: dict[LinkChange, tuple[str | None, ...]] = {
    LinkChange.OPEN: ("busy", "busy", "busy", None, None, None),
    LinkChange.OPENED: (None, None, "open", None, None, "ended"),
    LinkChange.NOT_OPENED: (None, None, "fresh", None, None, "ended"),
    LinkChange.BEGIN: (None, "busy", None, "busy", "busy", None),
    LinkChange.MOVE: ("busy", "busy", None, "busy", "busy", "busy"),
    # Nothing was moved: it is as a client that has sent nothing.
    LinkChange.STAY: (None, None, "fresh", None, None, "ended"),
    LinkChange.READY: (None, None, "ready", None, None, "ended"),
    LinkChange.GIVE_UP: (None, None, "cut_off", None, None, "ended"),
    LinkChange.TAKEN_OVER: (None, None, None, "ended", None, None),
    LinkChange.END: ("ended", "ended", "ended", "ended", "ended", "ended"),
}
PHASES = (Phase.FRESH, Phase.OPEN, Phase.BUSY, Phase.READY, Phase.CUT_OFF, Phase.ENDED)


def client_in(phase: Phase) -> ClientState:
    addresses = Addresses([], base=1, cap=1, longest_rest=1)
    runtime = Runtime(ReconnectPolicy(), cast(Any, None))
    state = ClientState(runtime, addresses)
    for change in WAYS_TO[phase]:
        state.apply(change)
    assert state.phase is phase
    return state


@pytest.mark.parametrize(("phase", "change"), list(product(Phase, LinkChange)))
def test_each_change_leads_where_it_should_or_cannot_happen(
    phase: Phase, change: LinkChange
) -> None:
    state = client_in(phase)
    then = AFTER[change][PHASES.index(phase)]
    if then is None:
        with pytest.raises(AssertionError, match="cannot happen"):
            state.apply(change)
    else:
        state.apply(change)
        assert state.phase is Phase(then)


@pytest.mark.parametrize("phase", [phase for phase in Phase if phase is not Phase.BUSY])
def test_a_session_that_cannot_be_moved_stays_where_it_was(phase: Phase) -> None:
    state = client_in(phase)
    state.apply(LinkChange.MOVE)
    assert state.phase is Phase.BUSY
    state.apply(LinkChange.STAY)
    assert state.phase is phase
