"""The phases of a client, and what changes them: the table, over every pair."""

from itertools import product
from typing import Any, cast

import pytest

from mcp_sessions.client.known_server import KnownServer
from mcp_sessions.client.reconnect_policy import ReconnectPolicy
from mcp_sessions.client.server_addresses import Addresses
from mcp_sessions.client.state import TRANSITIONS, ClientState, LinkChange, Phase, Runtime

WAYS_TO = {
    Phase.FRESH: (),
    Phase.BUSY: (LinkChange.OPEN,),
    Phase.OPEN: (LinkChange.OPEN, LinkChange.OPENED),
    Phase.READY: (LinkChange.OPEN, LinkChange.READY),
    Phase.CUT_OFF: (LinkChange.OPEN, LinkChange.GIVE_UP),
    Phase.ENDED: (LinkChange.END,),
}
CONCLUSIONS = {
    LinkChange.OPENED,
    LinkChange.NOT_OPENED,
    LinkChange.STAY,
    LinkChange.READY,
    LinkChange.GIVE_UP,
}


def client_in(phase: Phase) -> ClientState:
    addresses = Addresses([], base=1, cap=1, longest_rest=1)
    runtime = Runtime(ReconnectPolicy(), cast(Any, None))
    state = ClientState(runtime, KnownServer("an-instance"), addresses)
    for change in WAYS_TO[phase]:
        state.apply(change)
    assert state.phase is phase
    return state


@pytest.mark.parametrize(("phase", "change"), list(product(Phase, LinkChange)))
def test_what_is_not_in_the_table_cannot_happen(phase: Phase, change: LinkChange) -> None:
    state = client_in(phase)
    origins, then = TRANSITIONS[change]
    if phase in origins and then is not None:
        state.apply(change)
        assert state.phase is then
    elif phase in origins or (phase is Phase.ENDED and change in CONCLUSIONS):
        # Where the application is done meanwhile, what was under way comes to nothing.
        state.apply(change)
        assert state.phase is (Phase.FRESH if phase is Phase.BUSY else Phase.ENDED)
    else:
        with pytest.raises(AssertionError, match="cannot happen"):
            state.apply(change)


@pytest.mark.parametrize("phase", [phase for phase in Phase if phase is not Phase.BUSY])
def test_a_session_that_cannot_be_moved_stays_where_it_was(phase: Phase) -> None:
    state = client_in(phase)
    state.apply(LinkChange.MOVE)
    assert state.phase is Phase.BUSY
    state.apply(LinkChange.STAY)
    assert state.phase is phase
