"""Processes that share a store: what they learn of each other."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence

import anyio
from anyio.lowlevel import checkpoint

from mcp_sessions.core.log import Draft
from mcp_sessions.core.states import Mode
from mcp_sessions.ids import (
    EVENTS,
    GET_STREAM,
    ConnectionId,
    FencingEpoch,
    SessionId,
    parse_position,
)
from mcp_sessions.stores.records import Appended
from mcp_sessions.testing.parts import (
    MESSAGE,
    NOW,
    POST_STREAM,
    MakeTwoStores,
    new_session,
    two_processes,
)


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


CHECKS: Sequence[Callable[[MakeTwoStores], Awaitable[None]]] = (
    a_message_reaches_one_process_or_all_the_others,
    what_is_appended_to_a_watched_stream_is_received,
    what_nobody_watches_is_not_received,
    a_stream_that_is_watched_again_delivers_again,
    a_relayed_event_is_received_as_an_append_is,
    a_process_is_alive_until_it_leaves,
    what_a_session_keeps_in_one_process_has_one_holder,
)
