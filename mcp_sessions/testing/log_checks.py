"""The log: ids, replay, the window, coalescing, streams. Attachment: one connection receives a
session, the newest.
"""

from __future__ import annotations

from dataclasses import replace

from anyio.lowlevel import checkpoint

from mcp_sessions.core.log import Draft
from mcp_sessions.core.states import Mode
from mcp_sessions.errors import Refusal
from mcp_sessions.ids import (
    EVENTS,
    GET_STREAM,
    ConnectionId,
    FencingEpoch,
    LogEpoch,
    Position,
    SessionId,
)
from mcp_sessions.stores.record_changes import RenewEvents
from mcp_sessions.stores.records import Appended, Attached, Attachment, Relayed, StreamHead
from mcp_sessions.testing.parts import (
    HERE,
    NO_STREAM,
    NOW,
    POST_STREAM,
    THERE,
    MakeStore,
    at_once,
    new_session,
    number_of,
    numbers_of,
    opened,
)


async def events_get_their_ids_from_the_store_in_order_of_issue(make: MakeStore) -> None:
    """EVT7, EVT8: whole ids, fit for a header, whose byte order is their order."""
    async with opened(make) as store:
        session = await new_session(store)
        ids: list[str] = []
        for number in range(1, 12):
            event = (await session.append(Draft(b'{"id":"', b'"}'), now=NOW + number)).event
            assert (event.number, event.at) == (number, NOW + number)
            assert event.payload == b'{"id":"%s"}' % event.event_id.encode()
            assert event.event_id == await session.head() == await session.position(number)
            assert all("\x21" <= character <= "\x7e" for character in event.event_id)
            ids.append(event.event_id)
        assert ids == sorted(set(ids))


async def two_writers_neither_repeat_nor_skip_an_id(make: MakeStore) -> None:
    """EVT7: 2,000 events."""
    async with opened(make, max_events=20_000, max_bytes=10_000_000) as store:
        session = await new_session(store)
        issued: list[list[int]] = [[], []]

        async def write(writer: int) -> None:
            for _ in range(1_000):
                issued[writer].append((await session.append()).event.number)
                await checkpoint()

        await at_once(write, times=2)
        assert await session.kept() == sorted(issued[0] + issued[1]) == list(range(1, 2_001))
        assert all(numbers == sorted(numbers) for numbers in issued)


async def a_replay_is_whole_or_refused_with_its_reason(make: MakeStore) -> None:
    """CUP8 to A4, A9: a position is an epoch and a number; zero events is a success."""
    async with opened(make, max_events=3) as store:
        session = await new_session(store)
        assert await session.missed(0) == []
        for _ in range(5):
            await session.append()
        for seen, missed in ((2, [3, 4, 5]), (4, [5]), (5, [])):
            assert await session.missed(seen) == missed
        at_four = await session.position(4)
        older = Position(LogEpoch("0" * at_four.index("-")), 4).event_id()
        for position, reason in (
            (None, Refusal.NO_POSITION),
            ("", Refusal.UNKNOWN_POSITION),
            ("se_305", Refusal.UNKNOWN_POSITION),
            (f"{at_four}\n", Refusal.UNKNOWN_POSITION),
            (older, Refusal.LOG_REPLACED),
            (await session.position(6), Refusal.AHEAD),
            (await session.position(1), Refusal.EVICTED),
            (await session.position(0), Refusal.EVICTED),
        ):
            assert await session.read(position) == ([], reason)
            attached = await session.attach(HERE, position)
            assert (list(attached.replay), attached.refusal) == ([], reason)


async def the_window_is_bounded_in_events_bytes_and_age(make: MakeStore) -> None:
    """ATT7. The newest event is kept, however large; what is too old is not.

    A store may keep some bytes more with each event, and count them.
    """
    async with opened(make, max_events=4, max_bytes=10_000, max_age=50) as store:
        session = await new_session(store)
        for _ in range(6):
            await session.append()
        assert await session.kept() == [3, 4, 5, 6]
        await session.append(Draft(b"x" * 9_999), now=NOW + 10)
        assert await session.kept() == [7]
        await session.append(Draft(b"x" * 50_000), now=NOW + 10)
        assert await session.kept() == [8]
        at_seven, head = await session.position(7), await session.head()
        assert await session.read(await session.position(6)) == ([], Refusal.EVICTED)
        assert await session.read(at_seven, now=NOW + 60) == ([8], None)
        attached = await session.attach(HERE, at_seven, now=NOW + 61)
        assert (list(attached.replay), attached.refusal) == ([], Refusal.EXPIRED)
        assert await session.read(at_seven, now=NOW + 61) == ([], Refusal.EXPIRED)
        assert await session.read(head, now=NOW + 61) == ([], None)


async def a_newer_event_replaces_the_older_one_of_its_key(make: MakeStore) -> None:
    """COA4: the survivor keeps its newer id, the replaced id stays a position."""
    async with opened(make) as store:
        session = await new_session(store)
        replaced = [
            (await session.append(Draft(b"{}", key=key))).replaced
            for key in ("a", None, "b", "a", None, "b")
        ]
        assert replaced == [False, False, False, True, False, True]
        for seen, missed in ((0, [2, 4, 5, 6]), (1, [2, 4, 5, 6]), (3, [4, 5, 6]), (4, [5, 6])):
            assert await session.missed(seen) == missed
        # If several sessions share a connection's stream, each has keys of its own.
        for origin in (SessionId("one"), SessionId("two"), None, SessionId("one")):
            await session.append(Draft(b"{}", key="a", origin=origin), stream=GET_STREAM)
        assert await session.kept(GET_STREAM) == [2, 3, 4]


async def an_event_whose_answer_was_lost_is_stored_once(make: MakeStore) -> None:
    """The writer repeats it under its name. Other events may have been stored meanwhile."""
    async with opened(make) as store:
        session, other = await new_session(store), await new_session(store)
        for stream in (EVENTS, POST_STREAM):
            first = await session.append(Draft(b'{"id":"', b'"}', "key", name="w.1"), stream=stream)
            for name in ("w.2", None, "w.11"):
                await session.append(Draft(b"{}", name=name), stream=stream)
            again = Draft(b'{"id":"', b'"}', "key", name="w.1", since=NOW)
            repeated = await session.append(again, now=NOW + 9, stream=stream)
            assert (repeated.event.event_id, repeated.event.payload) == (
                first.event.event_id,
                first.event.payload,
            )
            assert not repeated.replaced
            assert await session.kept(stream) == [1, 2, 3, 4]
            # The first call had no effect.
            late = await session.append(Draft(b"{}", name="w.3", since=NOW), stream=stream)
            assert late.event.number == 5
        assert (await other.append(Draft(b"{}", name="w.1", since=NOW))).event.number == 1
        # It says who is attached now.
        attached = await session.attach(HERE)
        repeated = await session.append(Draft(b"{}", name="w.3", since=NOW))
        assert repeated.attachment == Attachment(HERE, attached.fencing_epoch)
        assert (await session.append(Draft(b"{}", name="w.3"))).event.number == 6


async def streams_and_sessions_never_cross(make: MakeStore) -> None:
    """SEC7. A stream that is not there knows no position and has no head."""
    async with opened(make) as store:
        session, other = await new_session(store), await new_session(store)
        assert await session.read(None, stream=POST_STREAM) == NO_STREAM
        assert await store.head(session.id, stream=POST_STREAM) is None
        start = await store.open_stream(session.id, POST_STREAM)
        assert start is not None and start.number == 0
        for stream in (EVENTS, GET_STREAM, POST_STREAM):
            await session.append(stream=stream)
        again = await store.open_stream(session.id, POST_STREAM)
        assert again is not None and again.number == 1
        for stream in (EVENTS, GET_STREAM, POST_STREAM):
            assert await session.kept(stream) == [1]
        assert await store.heads(
            [
                (other.id, EVENTS),
                (session.id, POST_STREAM),
                (other.id, POST_STREAM),
                (SessionId("unknown"), EVENTS),
            ]
        ) == [
            StreamHead(True, await store.head(other.id), carries=False),
            StreamHead(True, again, carries=False),
            StreamHead(True, None, carries=False),
            StreamHead(False, None, carries=False),
        ]
        assert await other.kept() == []
        assert await other.read(start.event_id(), stream=POST_STREAM) == NO_STREAM


async def a_stream_made_anew_refuses_the_positions_of_the_old_one(make: MakeStore) -> None:
    """CUP8: a new log has a new epoch, whatever its numbers."""
    async with opened(make) as store:
        session = await new_session(store)
        await store.drop_stream(session.id, POST_STREAM)
        old = (await session.append(stream=POST_STREAM)).event.event_id
        await store.drop_stream(session.id, POST_STREAM)
        assert await store.head(session.id, stream=POST_STREAM) is None
        for _ in range(3):
            await session.append(stream=POST_STREAM)
        events, refusal = await session.read(old, stream=POST_STREAM)
        assert not events
        assert refusal in {Refusal.LOG_REPLACED, Refusal.UNKNOWN_POSITION}


async def one_sessions_events_can_be_taken_off_a_connections_stream(make: MakeStore) -> None:
    """They stand in their own log; what is left stays whole, and no position is lost."""
    one, two = SessionId("one"), SessionId("two")
    async with opened(make) as store:
        session = await new_session(store, mode=Mode.TRANSPORT)
        await store.drop_origin(session.id, one)
        for origin in (one, two, None, one):
            await session.append(Draft(b"{}", origin=origin), stream=GET_STREAM)
        await store.drop_origin(session.id, one)
        assert await session.kept(GET_STREAM) == [2, 3]
        at_four = await session.position(4, GET_STREAM)
        assert (await session.append(stream=GET_STREAM)).event.number == 5
        assert await session.read(at_four, stream=GET_STREAM) == ([5], None)


async def events_are_relayed_once_and_in_the_order_of_their_own_log(make: MakeStore) -> None:
    """This holds for every process that stored them, or that relays them first (ATT6)."""
    async with opened(make) as store:
        stream = await new_session(store, mode=Mode.TRANSPORT)
        session = await new_session(store)
        events = [(await session.append(Draft(b"{}", key=key))).event for key in "abcdb"]
        start = replace(events[0].position, number=0)

        async def relay(number: int, epoch: int = 1, *, skips: bool = False) -> Relayed:
            event = events[number - 1]
            return await store.relay(
                stream.id, session.id, FencingEpoch(epoch), event, now=NOW, skips=skips
            )

        async def origins() -> list[tuple[int, str | None]]:
            after = await stream.position(0, GET_STREAM)
            kept, _ = await store.read(stream.id, after, now=NOW, stream=GET_STREAM)
            return [(event.number, event.origin) for event in kept]

        assert await relay(1) == Relayed()
        assert await store.carry(stream.id, session.id, FencingEpoch(1), start)
        assert (await stream.record()).client.carried == {session.id: 1}
        carries = await store.heads([(stream.id, GET_STREAM), (session.id, EVENTS)])
        assert [head.carries for head in carries] == [True, False]
        early = await relay(2)
        assert early == Relayed(missing_after=start)
        first = (await relay(1)).event
        assert first is not None
        assert (first.number, first.payload, first.origin) == (1, events[0].payload, session.id)
        assert await relay(1) == Relayed()
        assert (await relay(3)).missing_after == replace(start, number=1)
        # Event 2 was replaced by event 5 in its log.
        assert (await relay(3, skips=True)).event is not None
        assert await relay(2) == Relayed()
        assert (await relay(4)).event is not None
        assert await relay(5, 2) == Relayed()
        assert await origins() == [(1, session.id), (2, session.id), (3, session.id)]

        # A new attachment takes over, and what was meant for the old one comes late.
        assert await store.carry(stream.id, session.id, FencingEpoch(3), start)
        assert not await store.carry(stream.id, session.id, FencingEpoch(2), start)
        assert await origins() == []
        assert await relay(5, 1, skips=True) == Relayed()
        assert (await relay(5, 3, skips=True)).event is not None
        # The new attachment removes the entries of the old one, and no others.
        await store.drop_origin(stream.id, session.id, fencing_epoch=FencingEpoch(2))
        assert (await stream.record()).client.carried == {session.id: 3}
        assert await origins() == [(4, session.id)]
        # A second call changes nothing.
        assert await store.carry(stream.id, session.id, FencingEpoch(3), start)
        assert await relay(5, 3, skips=True) == Relayed()
        assert await origins() == [(4, session.id)]
        await store.drop_origin(stream.id, session.id, fencing_epoch=FencingEpoch(3))
        assert await relay(5, 3, skips=True) == Relayed()
        assert not (await stream.record()).client.carried
        assert await origins() == []
        assert not await store.carry(SessionId("unknown"), session.id, FencingEpoch(4), start)


async def a_log_made_anew_is_relayed_from_its_beginning(make: MakeStore) -> None:
    """A number means nothing without the log that it is of (CUP8)."""
    async with opened(make) as store:
        stream, session = await new_session(store, mode=Mode.TRANSPORT), await new_session(store)
        epoch, before = FencingEpoch(1), (await session.append()).event
        assert await store.carry(stream.id, session.id, epoch, before.position)
        await store.change(session.id, RenewEvents())
        one, two = [(await session.append()).event for _ in range(2)]

        early = await store.relay(stream.id, session.id, epoch, two, now=NOW)
        assert early == Relayed(missing_after=replace(one.position, number=0))
        for event in (one, two):
            assert (await store.relay(stream.id, session.id, epoch, event, now=NOW)).event
        for late in (before, one, two):
            assert await store.relay(stream.id, session.id, epoch, late, now=NOW) == Relayed()


async def the_newest_attachment_is_the_only_one(make: MakeStore) -> None:
    """RES3, HTL8: each attach has a higher fencing epoch and names whom it displaced."""
    async with opened(make) as store:
        session = await new_session(store)
        assert (await session.append()).attachment is None
        before, newest = None, 0
        for connection in (HERE, HERE, THERE, None, HERE):
            attached = await session.attach(connection)
            assert attached.previous == before
            assert attached.fencing_epoch > newest
            newest = attached.fencing_epoch
            before = Attachment(connection, FencingEpoch(newest)) if connection else None
            assert (await session.append()).attachment == before
            record = await session.record()
            assert (record.attachment, record.fencing_epoch) == (before, newest)


async def an_attach_that_wants_a_free_session_displaces_nobody(make: MakeStore) -> None:
    """Rule 1: a request attaches its session only if it is attached nowhere."""
    async with opened(make) as store:
        session = await new_session(store)
        first = await store.attach(session.id, HERE, now=NOW, only_if_free=True)
        assert first is not None
        assert await store.attach(session.id, THERE, now=NOW, only_if_free=True) is None
        assert (await session.record()).attachment == Attachment(HERE, first.fencing_epoch)
        assert await store.detach(session.id, first.fencing_epoch)
        assert await store.attach(session.id, THERE, now=NOW, only_if_free=True) is not None


async def a_late_close_of_a_displaced_connection_changes_nothing(make: MakeStore) -> None:
    """TKO9, also where the session came back to the same connection."""
    async with opened(make) as store:
        session = await new_session(store)
        first, second, third = [
            (await session.attach(connection)).fencing_epoch for connection in (HERE, THERE, HERE)
        ]
        for late in (first, second, FencingEpoch(0), FencingEpoch(third + 1)):
            assert not await store.detach(session.id, late)
            assert (await session.record()).attachment == Attachment(HERE, third)
        assert await store.detach(session.id, third)
        assert (await session.record()).attachment is None
        assert not await store.detach(session.id, third)
        assert (await session.attach(THERE)).fencing_epoch > third


async def many_attaches_at_once_leave_one_owner(make: MakeStore) -> None:
    """RES3: a chain of takeovers, none lost and none with two successors."""
    async with opened(make) as store:
        session = await new_session(store)
        owners: dict[int, ConnectionId] = {}
        displaced: dict[int, Attachment | None] = {}

        async def come(number: int) -> None:
            connection = ConnectionId(f"connection-{number}")
            attached = await session.attach(connection)
            owners[attached.fencing_epoch] = connection
            displaced[attached.fencing_epoch] = attached.previous

        await at_once(come)
        assert len(owners) == 20
        before = None
        for epoch in sorted(owners):
            assert displaced[epoch] == before
            before = Attachment(owners[epoch], FencingEpoch(epoch))
        assert (await session.record()).attachment == before


async def what_is_stored_during_a_takeover_arrives_once_and_in_order(make: MakeStore) -> None:
    """ATT6, EVT10: each event is in the replay or after the head, never in both."""
    async with opened(make) as store:
        session = await new_session(store)
        stored: list[Appended] = []
        taken: list[tuple[int, Attached]] = []

        async def work(part: int) -> None:
            await (write, take_over)[part]()

        async def write() -> None:
            for _ in range(300):
                stored.append(await session.append())
                await checkpoint()

        async def take_over() -> None:
            for number in range(40):
                seen = stored[-1].event.number if stored else 0
                position = await session.position(seen)
                await checkpoint()
                taken.append((seen, await session.attach(ConnectionId(f"{number}"), position)))
                for _ in range(number % 5):
                    await checkpoint()

        await at_once(work, times=2)
        heads = [number_of(attached.head) for _, attached in taken]
        for (seen, attached), head, end in zip(taken, heads, [*heads[1:], 300], strict=True):
            live = [
                event.number
                for event, receiver in ((each.event, each.attachment) for each in stored)
                if receiver is not None and receiver.fencing_epoch == attached.fencing_epoch
            ]
            assert attached.refusal is None
            assert numbers_of(attached.replay) == list(range(seen + 1, head + 1))
            assert sorted(live) == list(range(head + 1, end + 1))
