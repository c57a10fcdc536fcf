"""Server-wide changes: whom they may be for, and who gets them; what processes that share a store
learn of each other.
"""

from __future__ import annotations

from collections.abc import Sequence

import anyio
from anyio.lowlevel import checkpoint

from mcp_sessions.core.log import Draft
from mcp_sessions.core.states import Mode
from mcp_sessions.ids import (
    EVENTS,
    GET_STREAM,
    ConnectionId,
    FencingEpoch,
    Position,
    SessionId,
    parse_position,
)
from mcp_sessions.stores.contract import CHANGES_AT_ONCE, SessionStore
from mcp_sessions.stores.record_changes import RenewEvents, SetFilter
from mcp_sessions.stores.records import Appended, AppendedChange, Attachment, ServerChange
from mcp_sessions.testing.parts import (
    HERE,
    MESSAGE,
    NOW,
    POST_STREAM,
    MakeStore,
    MakeTwoStores,
    audience_of,
    change_of,
    new_session,
    opened,
    two_processes,
)


async def appended_by(
    store: SessionStore, session_ids: Sequence[SessionId], change: ServerChange
) -> list[AppendedChange]:
    return list(await store.append_change(session_ids, change, now=NOW))


async def who_is_entitled_to_a_change_is_reported(make: MakeStore) -> None:
    """EVT1, EVT11: and nobody else is, whoever asks for it."""
    async with opened(make) as store:
        subscribed, filtered, plain = [await new_session(store) for _ in range(3)]
        stream, carrying = [await new_session(store, mode=Mode.TRANSPORT) for _ in range(2)]
        agents = await new_session(store, mode=Mode.AGENT)
        ended = await new_session(store)
        for session in (subscribed, stream, carrying, ended):
            assert await store.subscribe(session.id, "note://1")
        assert await store.change(
            filtered.id, SetFilter(frozenset({"note://2"}), frozenset({"prompts"}))
        )
        start = Position((await _position(store, plain.id)).log_epoch, 0)
        assert await store.carry(carrying.id, plain.id, FencingEpoch(1), start)
        await store.end(ended.id)
        everyone = [
            each.id for each in (subscribed, filtered, plain, stream, carrying, agents, ended)
        ]

        for change, entitled in (
            (change_of("note://1"), {subscribed.id, stream.id, carrying.id}),
            (change_of("note://2"), {filtered.id}),
            (change_of("note://3"), set[SessionId]()),
            (change_of(listed="tools"), {subscribed.id, plain.id, stream.id}),
            (change_of(listed="prompts"), {subscribed.id, filtered.id, plain.id, stream.id}),
        ):
            assert await audience_of(store, change) >= entitled
            changes = await appended_by(store, everyone, change)
            assert [each.session_id for each in changes] == [s for s in everyone if s in entitled]
            for each in changes:
                of_stream = each.session_id in (stream.id, carrying.id)
                assert each.stream == (GET_STREAM if of_stream else EVENTS)
        # It is asked in the step that stores it: the list of who may be is older.
        assert await store.unsubscribe(subscribed.id, "note://1")
        assert not await appended_by(store, [subscribed.id], change_of("note://1"))


async def a_change_is_stored_as_any_event_is(make: MakeStore) -> None:
    """EVT6, EVT7: with its id, the session's own, under its key, and with who is attached."""
    async with opened(make) as store:
        sessions = [await new_session(store) for _ in range(CHANGES_AT_ONCE)]
        attached = await sessions[0].attach(HERE)
        change = change_of(listed="tools")
        for number in (1, 2):
            changes = await appended_by(store, [each.id for each in sessions], change)
            for session, each in zip(sessions, changes, strict=True):
                draft = change.event.draft(session.id)
                assert each.event.number == number
                assert each.event.event_id == await session.position(number)
                assert each.event.payload == draft.encode(each.event.event_id)
                assert each.event.key == (None, draft.key)
                assert each.replaced == (number == 2)
                events, _ = await store.read(session.id, await session.position(0), now=NOW)
                assert tuple(events) == (each.event,)
            assert changes[0].attachment == Attachment(HERE, attached.fencing_epoch)
            assert changes[1].attachment is None
        assert (await sessions[0].append()).event.number == 3


async def a_change_whose_answer_was_lost_is_stored_once(make: MakeStore) -> None:
    """A session that has it does not get it again. It is in the answer all the same."""
    async with opened(make) as store:
        sessions = [await new_session(store) for _ in range(2)]
        sessions.append(await new_session(store, mode=Mode.TRANSPORT))
        ids = [each.id for each in sessions]
        change = change_of(listed="tools")
        first = await store.append_change([ids[0], ids[2]], change, now=NOW)
        for session in sessions:
            stream = GET_STREAM if session.id == ids[2] else EVENTS
            await session.append(stream=stream)
        again = await store.append_change(ids, change, now=NOW + 1, again=True)
        assert [each.session_id for each in again] == ids
        assert [again[0].event.event_id, again[2].event.event_id] == [
            each.event.event_id for each in first
        ]
        assert await sessions[0].kept() == [1, 2] == await sessions[2].kept(GET_STREAM)
        assert await sessions[1].kept() == [1, 2]


async def a_large_audience_is_found_page_by_page(make: MakeStore) -> None:
    """A session that exists from the first page to the last is in one, whatever others do."""
    async with opened(make) as store:
        sessions = [await new_session(store) for _ in range(700)]
        for session in sessions:
            assert await store.subscribe(session.id, "note://1")
        for change in (change_of("note://1"), change_of(listed="tools")):
            found: set[SessionId] = set()
            cursor: str | None = None
            while True:
                page = await store.audience(change, cursor)
                found.update(page.session_ids)
                cursor = page.following
                if cursor is None:
                    break
                gone = sessions.pop()
                await store.end(gone.id)
                await new_session(store)
                await store.touch([sessions[0].id], now=NOW + 1)
            assert found >= {session.id for session in sessions}


async def events_made_anew_refuse_every_position(make: MakeStore) -> None:
    """RES: an event is missing, so whoever was there before must not be notified that it has
    all.
    """
    async with opened(make) as store:
        session, stream = await new_session(store), await new_session(store, mode=Mode.TRANSPORT)
        await session.append()
        await stream.append(stream=GET_STREAM)
        attached = await session.attach(HERE)
        before, of_stream = await session.head(), await stream.head(GET_STREAM)
        for each in (session, stream):
            assert await store.change(each.id, RenewEvents())
        numbers, refusal = await session.read(before)
        assert (numbers, refusal is None) == ([], False)
        assert await stream.read(of_stream, stream=GET_STREAM) == ([], None)
        appended = await session.append()
        assert appended.event.number == 1
        assert appended.attachment == Attachment(HERE, attached.fencing_epoch)
        assert await session.missed(0) == [1]
        await store.end(session.id)
        assert not await store.change(session.id, RenewEvents())
        assert await store.head(session.id) is None


async def _position(store: SessionStore, session_id: SessionId) -> Position:
    head = await store.head(session_id)
    assert head is not None
    return head


async def a_message_reaches_one_process_or_all_the_others(make_two: MakeTwoStores) -> None:
    """Whole, whatever its bytes; who sends to all is not among them."""
    async with two_processes(make_two) as (here, there):
        every_byte = bytes(range(256)) + b"\r\n"
        assert await here.exchange.send(every_byte, to=there.name), "somebody listens"
        await there.messages.until(1)
        await here.exchange.send(b"all")
        await there.messages.until(2)
        await here.exchange.send(b"myself", to=here.name)
        await there.exchange.send(b"")
        await here.messages.until(1)
        await here.exchange.send(b"nobody", to="nobody")
        assert there.messages.received == [every_byte, b"all"]
        # Whether a process receives what it sends to itself is left open.
        assert [message for message in here.messages.received if message != b"myself"] == [b""]


async def what_is_appended_to_a_watched_stream_is_received(make_two: MakeTwoStores) -> None:
    """By whoever appends, in any process that watches, in order and as it was stored."""
    async with two_processes(make_two) as (here, there):
        session = await new_session(here.store)
        for process in (here, there):
            await process.exchange.watch(session.id, EVENTS)
            await process.exchange.watch(session.id, EVENTS)
        stored: list[Appended] = []
        for number in range(10):
            if number % 3 == 1:
                connection = ConnectionId(f"connection {number}") if number % 2 else None
                await session.attach(connection)
            store = (here if number % 2 else there).store
            origin = SessionId("another") if number % 3 else None
            draft = Draft(b'{"id":"', b'"}', f"key {number % 4}" if number % 5 else None, origin)
            appended = await store.append(session.id, draft, now=NOW + number / 3)
            assert appended is not None
            stored.append(appended)
        for process in (here, there):
            await process.events.until(10)
            assert process.events.received == [
                (session.id, EVENTS, each.event, each.attachment) for each in stored
            ]
            assert len({each.attachment for each in stored}) > 2


async def what_nobody_watches_is_not_received(make_two: MakeTwoStores) -> None:
    """Streams and sessions never cross here either (SEC7), and an unwatch ends it."""
    async with two_processes(make_two) as (here, there):
        watched, other = await new_session(here.store), await new_session(here.store)
        await there.exchange.watch(watched.id, EVENTS)
        await there.exchange.watch(watched.id, POST_STREAM)
        await there.exchange.watch(other.id, GET_STREAM)
        await there.exchange.unwatch(watched.id, POST_STREAM)
        await there.exchange.unwatch(watched.id, POST_STREAM)
        await here.store.append(other.id, MESSAGE, now=NOW)
        for stream in (POST_STREAM, GET_STREAM, EVENTS):
            await here.store.append(watched.id, MESSAGE, now=NOW, stream=stream)
        await here.store.append(other.id, MESSAGE, now=NOW, stream=GET_STREAM)
        await there.events.until(2)
        # In which order those of two streams are received is left open.
        positions = {(session_id, stream) for session_id, stream, _, _ in there.events.received}
        assert positions == {(watched.id, EVENTS), (other.id, GET_STREAM)}
        assert not here.events.received
        await there.exchange.watch(watched.id, POST_STREAM)
        await here.store.append(watched.id, MESSAGE, now=NOW, stream=POST_STREAM)
        await there.events.until(3)
        assert there.events.received[2][1] == POST_STREAM


async def a_stream_that_is_watched_again_delivers_again(make_two: MakeTwoStores) -> None:
    """However fast: what an unwatch that is under way undoes is the watch before it."""
    async with two_processes(make_two) as (here, there):
        session = await new_session(here.store)
        for number in range(20):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(there.exchange.watch, session.id, EVENTS)
                for _ in range(number % 4):
                    await checkpoint()
                tasks.start_soon(there.exchange.unwatch, session.id, EVENTS)
                for _ in range(number % 3):
                    await checkpoint()
                await there.exchange.watch(session.id, EVENTS)
                await there.exchange.watch(session.id, EVENTS)
            await there.exchange.watch(session.id, EVENTS)
            seen = len(there.events.received)
            await session.append()
            await there.events.until(seen + 1)


async def a_relayed_event_is_received_as_an_append_is(make_two: MakeTwoStores) -> None:
    """Its number is that of the stream it was relayed to (EVT7)."""
    async with two_processes(make_two) as (here, there):
        stream = await new_session(here.store, mode=Mode.TRANSPORT)
        session = await new_session(here.store)
        await there.exchange.watch(stream.id, GET_STREAM)
        start = await session.position(0)
        after = parse_position(start)
        assert after is not None
        assert await here.store.carry(stream.id, session.id, FencingEpoch(1), after)
        event = (await session.append(Draft(b"{}", key="a"))).event
        relayed = await here.store.relay(stream.id, session.id, FencingEpoch(1), event, now=NOW)
        await there.events.until(1)
        assert there.events.received == [(stream.id, GET_STREAM, relayed.event, None)]


async def a_process_is_alive_until_it_leaves(make_two: MakeTwoStores) -> None:
    """KEY11. A process that never joined is not alive."""
    async with two_processes(make_two) as (here, there):
        for process in (here, there):
            assert await here.exchange.is_alive(process.name)
        assert not await here.exchange.is_alive("nobody")
        await there.exchange.leave()
        assert not await here.exchange.is_alive(there.name)
        assert await here.exchange.is_alive(here.name)


async def what_a_session_keeps_in_one_process_has_one_holder(make_two: MakeTwoStores) -> None:
    """The first claim wins. A later one needs the holder's name, and a session that exists."""
    async with two_processes(make_two) as (here, there):
        session, other = await new_session(here.store), await new_session(here.store)
        claim, look = here.exchange.claim, there.exchange.claim
        assert await look(session.id, None) is None
        assert await claim(session.id, "a") == "a"
        assert await claim(session.id, "a") == "a"
        assert await look(session.id, None) == "a"
        assert await look(session.id, "b") == "a"
        assert await look(session.id, "b", instead_of="c") == "a"
        assert await look(session.id, "b", instead_of="a") == "b"
        assert await claim(session.id, "a") == "b"
        assert await claim(session.id, "c", instead_of="a") == "b"
        assert await claim(other.id, "c", instead_of="a") == "c"
        await here.store.end(session.id)
        assert await claim(session.id, "c", instead_of="b") is None
        assert await claim(session.id, None) is None
