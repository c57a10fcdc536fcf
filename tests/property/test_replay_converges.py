"""Replay from any valid position ends in the same state as having seen everything (COA4).

A client is what it has done with the events it saw: a keyed event sets what its key stands
for, any other event is one more entry in a list, and none of those may be missing, doubled
or out of order. It drops off at random places and comes back with its position.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from hypothesis import given
from hypothesis import strategies as st

from mcp_sessions.core.log import UNBOUNDED, Draft, EventLog, LoggedEvent, Window
from mcp_sessions.ids import Position, parse_position
from tests.support.log_epochs import log_epoch

EPOCH = log_epoch(1_800_000_000_000, 0)


@dataclass
class Client:
    """Applies events in the order in which they come."""

    position: Position
    latest: dict[str, bytes] = field(default_factory=dict[str, bytes])
    received: list[bytes] = field(default_factory=list[bytes])

    def take(self, event: LoggedEvent) -> None:
        """Apply one event; its id is the new position (CUP2)."""
        position = parse_position(event.event_id)
        assert position is not None
        assert position.number > self.position.number, "seen already, or out of order"
        self.position = position
        if event.key is None:
            self.received.append(event.payload)
        else:
            self.latest[event.key[1]] = event.payload


KEYS = st.sampled_from([None, "note://1", "note://2", "note://3", "tools"])
WINDOWS = st.sampled_from([UNBOUNDED, Window(3, None, None), Window(None, 12, None)])
STORIES = st.lists(st.tuples(KEYS, st.sampled_from(["live", "live", "away", "back"])), max_size=60)


@given(STORIES, WINDOWS)
def test_a_client_that_comes_and_goes_ends_like_one_that_saw_everything(
    story: Sequence[tuple[str | None, str]], window: Window
) -> None:
    """ATT6, CUP2, COA4: whenever it is not refused; a refused one starts anew from the head."""
    log = EventLog(EPOCH, window)
    everything, client, is_here = Client(log.head), Client(log.head), True
    for number, (key, event_is) in enumerate(story):
        match event_is:
            case "away":
                is_here = False
            case "back" if not is_here:
                client, is_here = resumed(client, log, everything), True
                assert_same(client, everything)
            case _:
                pass
        event = log.append(Draft(b"%d" % number, key=key), now=0.0)
        everything.take(event)
        if is_here:
            # Handed over as it is, also where a newer event replaces it in the log at once.
            client.take(event)
    assert_same(resumed(client, log, everything), everything)


@given(st.lists(KEYS, max_size=40), WINDOWS, st.data())
def test_from_every_valid_position_the_end_is_the_same(
    keys: Sequence[str | None], window: Window, data: st.DataObject
) -> None:
    """COA4, for every position that is not refused, replaced ones among them."""
    log, issued = EventLog(EPOCH, window), list[LoggedEvent]()
    for number, key in enumerate(keys):
        issued.append(log.append(Draft(b"%d" % number, key=key), now=0.0))
    everything = Client(Position(EPOCH, 0))
    for event in issued:
        everything.take(event)
    seen = data.draw(st.integers(log.floor.number, log.head.number), label="seen")
    client = Client(Position(EPOCH, 0))
    for event in issued[:seen]:
        client.take(event)

    for event in whole_replay(log, Position(EPOCH, seen)):
        client.take(event)

    assert_same(client, everything)


@given(st.lists(KEYS, max_size=40), WINDOWS, st.data())
def test_a_replay_that_is_cut_short_continues_where_it_was_cut(
    keys: Sequence[str | None], window: Window, data: st.DataObject
) -> None:
    """CUP2: the position moves with each replayed event, so a second resume has only the rest."""
    log = EventLog(EPOCH, window)
    everything = Client(Position(EPOCH, 0))
    for number, key in enumerate(keys):
        everything.take(log.append(Draft(b"%d" % number, key=key), now=0.0))
    client = Client(log.floor)
    whole = Client(log.floor)
    for event in whole_replay(log, log.floor):
        whole.take(event)

    while missed := whole_replay(log, client.position):
        for event in missed[: data.draw(st.integers(1, len(missed)), label="arrived")]:
            client.take(event)

    assert_same(client, whole)
    assert client.position == log.head or not len(log)


def whole_replay(log: EventLog, position: Position) -> tuple[LoggedEvent, ...]:
    events, refusal = log.replay(position, now=0.0)
    assert refusal is None
    return events


def resumed(client: Client, log: EventLog, everything: Client) -> Client:
    """The client after a resume: caught up, or asked to read everything anew."""
    missed, refusal = log.replay(client.position, now=0.0)
    if refusal is not None:
        return Client(log.head, dict(everything.latest), list(everything.received))
    for event in missed:
        client.take(event)
    return client


def assert_same(client: Client, other: Client) -> None:
    assert (client.latest, client.received) == (other.latest, other.received)
