"""``mcp_sessions.core.attachment``: a session has one connection, the newest."""

import pytest

from mcp_sessions.core.attachment import attach, detaches
from mcp_sessions.core.states import State
from mcp_sessions.ids import ConnectionId, FencingEpoch, SessionEventId

HERE = ConnectionId("here")
POSITION = SessionEventId("place")


@pytest.mark.parametrize("connection", [HERE, None])
@pytest.mark.parametrize("state", [State.DETACHED, State.ATTACHED])
def test_each_attach_raises_the_epoch_and_the_newest_has_the_session(
    state: State, connection: ConnectionId | None
) -> None:
    """RES3, TKO1; with no connection it is taken from whoever receives it."""
    attached = attach(
        state, connection, fencing_epoch=FencingEpoch(7), waits_from=None, only_if_free=False
    )

    assert attached is not None
    assert (attached.connection_id, attached.fencing_epoch) == (connection, 8)


@pytest.mark.parametrize(("connection", "takes"), [(HERE, True), (None, False)])
def test_a_connection_takes_the_position_to_listen_from_and_nobody_leaves_it(
    connection: ConnectionId | None, takes: bool
) -> None:
    attached = attach(
        State.DETACHED,
        connection,
        fencing_epoch=FencingEpoch(0),
        waits_from=POSITION,
        only_if_free=False,
    )

    assert attached is not None
    expected = (POSITION, None) if takes else (None, POSITION)
    assert (attached.listens_from, attached.waits_from) == expected


@pytest.mark.parametrize("connection", [HERE, None])
@pytest.mark.parametrize("state", State)
def test_what_has_ended_is_attached_to_nothing_and_who_wants_it_free_displaces_nobody(
    state: State, connection: ConnectionId | None
) -> None:
    """SES18, ATT3."""
    attached = attach(
        state, connection, fencing_epoch=FencingEpoch(1), waits_from=None, only_if_free=True
    )

    assert (attached is not None) == (state is State.DETACHED)


@pytest.mark.parametrize("state", State)
@pytest.mark.parametrize("epoch", [1, 2, 3])
def test_only_the_newest_attachment_can_release(state: State, epoch: int) -> None:
    """TKO9: the late end of a displaced connection harms nobody."""
    lets_go = detaches(state, fencing_epoch=FencingEpoch(2), attached_with=FencingEpoch(epoch))

    assert lets_go == (state is State.ATTACHED and epoch == 2)
