"""``mcp_sessions.core.attachment``: each event goes on a stream once and in order."""

from hypothesis import given
from hypothesis import strategies as st

from mcp_sessions.core.attachment import Carry, RelayStep, carry, may_drop, relay
from mcp_sessions.ids import FencingEpoch, LogEpoch, Position

EPOCHS = st.integers(1, 3).map(FencingEpoch)
OLD, NEW = LogEpoch("1"), LogEpoch("2")


@given(st.none() | EPOCHS, EPOCHS)
def test_a_newer_attachment_is_never_replaced_by_an_older_one(
    carried: FencingEpoch | None, epoch: FencingEpoch
) -> None:
    """TKO1: neither what the stream carries, nor what is taken off it."""
    assert (carry(carried, epoch) is Carry.REFUSED) == (carried is not None and carried > epoch)
    assert may_drop(carried, epoch) == (carry(carried, epoch) is not Carry.REFUSED)
    assert may_drop(carried, None)


def test_an_attachment_that_is_carried_already_continues_where_it_is() -> None:
    assert carry(FencingEpoch(2), FencingEpoch(2)) is Carry.CONTINUES
    assert carry(FencingEpoch(1), FencingEpoch(2)) is carry(None, FencingEpoch(2)) is Carry.BEGINS


@given(st.lists(st.tuples(st.integers(1, 6), EPOCHS, st.booleans()), max_size=30))
def test_whoever_relays_the_events_go_in_order_and_once(
    steps: list[tuple[int, FencingEpoch, bool]],
) -> None:
    """ATT6. ``skips`` is said by who knows that nothing is left in between."""
    last, carried = 0, FencingEpoch(2)
    for number, epoch, skips in steps:
        before, event = Position(OLD, last), Position(OLD, number)
        found, _ = relay(carried, before, event, fencing_epoch=epoch, skips=skips)
        if epoch != carried or number <= last:
            assert found is RelayStep.SKIPPED
        elif number == last + 1 or skips:
            assert found is RelayStep.STORED
            last = number
        else:
            assert found is RelayStep.TOO_EARLY


def test_an_event_that_was_relayed_is_not_relayed_again() -> None:
    """ATT6: nor does it wait for anything."""
    epoch = FencingEpoch(1)
    for number in (2, 3):
        event, last = Position(OLD, number), Position(OLD, 3)
        assert relay(epoch, last, event, fencing_epoch=epoch, skips=False)[0] is RelayStep.SKIPPED


def test_a_stream_that_carries_nothing_takes_nothing() -> None:
    epoch = FencingEpoch(1)
    start, event = Position(OLD, 0), Position(OLD, 1)
    found, _ = relay(None, start, event, fencing_epoch=epoch, skips=True)
    assert found is RelayStep.SKIPPED


def test_of_a_log_that_was_made_anew_nothing_is_there_yet() -> None:
    """CUP8: a number of the old log says nothing of the new one, and the old one has ended."""

    def became(last: Position, event: Position) -> tuple[RelayStep, Position]:
        return relay(epoch, last, event, fencing_epoch=epoch, skips=False)

    epoch = FencingEpoch(1)
    assert became(Position(OLD, 7), Position(NEW, 1)) == (RelayStep.STORED, Position(NEW, 0))
    assert became(Position(OLD, 7), Position(NEW, 2)) == (RelayStep.TOO_EARLY, Position(NEW, 0))
    assert became(Position(NEW, 1), Position(OLD, 8)) == (RelayStep.SKIPPED, Position(NEW, 1))
