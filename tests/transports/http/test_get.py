"""The GET stream of a transport-mode session, and ``Last-Event-ID`` on it."""

import asyncio

import pytest

from mcp_sessions import current_session
from tests.support.raw import (
    EXTENSION,
    NEWEST,
    UPDATED,
    VERSIONS,
    RawClient,
    event_ids,
    in_session,
    uris,
)
from tests.support.virtual_time import cycles
from tests.support.world import Ctx, World, connected_world, world


async def subscribed(w: World, *resources: str, **options: object) -> RawClient:
    """A client that knows nothing of us, with subscriptions of its connection."""
    client = await w.connected(**options)
    for uri in resources:
        await client.result("resources/subscribe", {"uri": uri})
    return client


async def update(w: World, session: str, *changed: str) -> None:
    """Events of one session, one per URI, from a request that attaches nothing."""
    for uri in changed:
        await w.client().text("update", uri=uri, meta=in_session(session))


# --- opening ----------------------------------------------------------------------------------


@pytest.mark.parametrize("version", VERSIONS)
async def test_the_stream_opens_with_a_priming_event(version: str) -> None:
    """Rule: "Priming events on POST and GET streams for 2025-11-25 clients", and for no older."""
    async with world() as w:
        client = await subscribed(w, "a:1", version=version)
        stream = await client.get().started()
        await w.layer.notify_resource_updated("a:1")
        await stream.has(1)

        assert (stream.status, stream.is_sse) == (200, True)
        first, second = stream.events if version == NEWEST else (None, stream.events[0])
        if first is not None:
            assert first.fields == {"id": first.id, "retry": "1000", "data": ""}
        assert second.message == {"jsonrpc": "2.0", "method": UPDATED, "params": {"uri": "a:1"}}
        assert second.id


async def test_the_first_stream_takes_what_waits() -> None:
    """Rule: "session events go to the connection's GET stream and wait for it to open … The first
    GET of a connection takes what waits"; stock clients open it 0.1 s after their handshake.
    """
    async with world() as w:
        client = await subscribed(w, "b:1")
        session = (await client.start())["sessionId"]
        await update(w, session, "a:1", "a:2")
        await w.layer.notify_resource_updated("b:1")

        stream = client.get()

        assert uris(await stream.has(3)) == ["a:1", "a:2", "b:1"]


async def test_what_waits_for_the_first_stream_is_bounded() -> None:
    """ATT7: and a first stream that cannot take all of it is not left in silent doubt."""
    async with world(max_events=5) as w:
        client = await subscribed(w, "b:1", "b:2")
        for number in range(8):
            await client.text("update", uri=f"a:{number}")

        stream = client.get()

        assert uris(await stream.has(5)) == [
            "b:1",
            "b:2",
            "notifications/prompts/list_changed",
            "notifications/resources/list_changed",
            "notifications/tools/list_changed",
        ]


async def test_a_later_stream_without_a_position_detaches() -> None:
    """Rule: "a later one without ``Last-Event-ID`` detaches the connection's sessions: they wait
    for ``session/resume``"; rule 2 still finds the session.
    """
    async with connected_world() as (w, client):
        first = await client.get().started()
        started = await client.start()
        await first.gone()
        await update(w, started["sessionId"], "a:1")

        stream = await client.get().started()
        await update(w, started["sessionId"], "a:2")
        await cycles()
        assert stream.messages == []
        assert await client.text("session_id") == started["sessionId"]

        resumed = await client.resume(started["sessionId"], started["sessionEventId"])
        await update(w, started["sessionId"], "a:3")
        assert (resumed["catchup"], resumed["replayed"]) == (True, 2)
        assert uris(await stream.has(3)) == ["a:1", "a:2", "a:3"]


async def test_a_later_stream_without_a_position_gets_what_follows() -> None:
    """Of its connection's own subscriptions; and what nobody was handed meanwhile."""
    async with world() as w:
        client = await subscribed(w, "b:1", "b:2")
        first = client.get()
        await w.layer.notify_resource_updated("b:1")
        await first.has(1)
        await first.gone()
        await w.layer.notify_resource_updated("b:2")

        stream = client.get()
        await stream.has(1)
        await w.layer.notify_resource_updated("b:1")

        assert uris(await stream.has(2)) == ["b:2", "b:1"]


async def test_a_stream_that_only_looks_open_was_handed_what_it_was_handed() -> None:
    """HTL8: "Half-open old connection: reconnect before the server noticed the drop works at
    once" (the SDK answers 409), and what the dead stream took is not notified a second time.
    """
    async with world() as w:
        client = await subscribed(w, "b:1", "b:2")
        first = client.get()
        await w.layer.notify_resource_updated("b:1")
        await first.has(1)
        await first.gone()
        dead = client.get()
        await w.layer.notify_resource_updated("b:2")
        await dead.has(1)

        stream = await client.get().started()
        await w.layer.notify_resource_updated("b:1")

        assert stream.status == 200
        await dead.done()
        assert uris(await stream.has(1)) == ["b:1"]


# --- Last-Event-ID ----------------------------------------------------------------------------


async def test_a_cut_stream_continues_where_it_was_cut() -> None:
    """Rule: "a client that re-opens a cut GET with ``Last-Event-ID`` gets them once, in order", and
    the session never left its connection.
    """
    async with world() as w:
        client = await w.connected(capabilities={"extensions": {EXTENSION: {}}})
        first = client.get()
        session = (await client.start())["sessionId"]
        await update(w, session, "a:1", "a:2")
        await first.has(2)
        position = first.events[1].id  # it has processed a:1
        await first.gone()
        await update(w, session, "a:3")

        again = client.get(position)
        await again.has(2)
        await update(w, session, "a:4")

        messages = await again.has(3)
        assert uris(messages) == ["a:2", "a:3", "a:4"]
        assert event_ids(messages) == sorted(event_ids(messages))
        assert await client.text("session_id") == session


async def test_a_cut_before_the_first_event_loses_nothing() -> None:
    """STA3: the priming event is a position."""
    async with world() as w:
        client = await subscribed(w, "b:1")
        first = client.get()
        position = (await first.event(0)).id
        await first.gone()
        await w.layer.notify_resource_updated("b:1")

        assert uris(await client.get(position).has(1)) == ["b:1"]


async def test_a_half_open_stream_gives_way() -> None:
    """HTL8: with a position, while the old stream still seems to be there."""
    async with world() as w:
        client = await subscribed(w, "b:1", "b:2")
        dead = client.get()
        await w.layer.notify_resource_updated("b:1")
        await dead.has(1)
        position = dead.events[0].id

        stream = client.get(position)
        assert uris(await stream.has(1)) == ["b:1"]
        await dead.done()
        await w.layer.notify_resource_updated("b:2")

        assert uris(await stream.has(2)) == ["b:1", "b:2"]
        assert len(dead.messages) == 1


async def test_what_comes_while_the_past_is_read_comes_once_and_in_order() -> None:
    """ATT6, on the stream: a producer writes while the reader is slow with its replay."""
    async with world(send_buffer=300) as w:
        every = [f"a:{number}" for number in range(40)]
        client = await subscribed(w, *every)
        first = client.get()
        position = (await first.event(0)).id
        await first.gone()
        for uri in every[:20]:
            await w.layer.notify_resource_updated(uri)

        stream = client.get(position)
        for uri in every[20:]:
            stream.stall()
            await w.layer.notify_resource_updated(uri)
            stream.unstall()
            await cycles(3)

        assert uris(await stream.has(40)) == every
        await cycles()
        assert len(stream.messages) == 40


@pytest.mark.parametrize("position", ["x", "5", "se_305", "0" * 32, "Ω".encode().decode("latin-1")])
async def test_a_position_it_never_gave_is_answered_with_the_truth(position: str) -> None:
    """Rule: "is not left in silent doubt (the SDK opens an empty stream)": "one
    ``resources/updated`` per subscribed resource and one ``list_changed`` per list".
    """
    async with world() as w:
        client = await subscribed(w, "b:2", "b:1")
        stream = client.get(position)

        assert stream.status in (None, 200)
        assert uris(await stream.has(5)) == [
            "b:1",
            "b:2",
            "notifications/prompts/list_changed",
            "notifications/resources/list_changed",
            "notifications/tools/list_changed",
        ]
        await w.layer.notify_resource_updated("b:1")
        assert uris(await stream.has(6))[-1] == "b:1"


async def test_an_evicted_position_is_answered_with_the_truth() -> None:
    """CUP5: the same when the position was good once."""
    async with world(max_events=3) as w:
        client = await subscribed(w, "b:1")
        first = client.get()
        position = (await first.event(0)).id
        for number in range(5):
            await client.text("update", uri=f"a:{number}")
        await first.has(5)
        await first.gone()

        stream = client.get(position)

        assert uris(await stream.has(4))[0] == "b:1"
        await cycles()
        assert len(stream.messages) == 4

        # A client that is cut before the last of them has no newer position, and is sent all
        # of them again; after that its position is as good as any.
        assert [event.fields.get("id") for event in stream.events[:3]] == [None] * 3
        good = stream.events[3].id
        await client.text("update", uri="a:9")
        again = client.get(good)
        assert uris(await again.has(1)) == ["a:9"]


async def test_the_truth_may_be_larger_than_the_window() -> None:
    """More subscriptions than the window has events: told through the stream's log, they fell
    out of it, the stream was cut, and so was every one after it.
    """
    async with world(max_events=10) as w:
        client = await subscribed(w, *(f"b:{number:02}" for number in range(50)))
        stream = client.get("lost")

        assert len(await stream.has(53)) == 53
        await w.layer.notify_resource_updated("b:07")
        assert uris(await stream.has(54))[-1] == "b:07"


async def test_an_evicted_position_lets_go_of_the_connections_sessions() -> None:
    """Their own positions may still be good: nothing is sent that would hide the hole."""
    async with connected_world(max_events=3) as (w, client):
        first = client.get()
        started = await client.start()
        position = (await first.event(0)).id
        for number in range(5):
            await client.text("update", uri=f"b:{number}", meta=in_session(None))
        await update(w, started["sessionId"], "a:1")
        await first.has(6)
        await first.gone()

        stream = client.get(position)
        await stream.has(3)
        await update(w, started["sessionId"], "a:2")
        await cycles()
        assert "a:2" not in uris(stream.messages)

        resumed = await client.resume(started["sessionId"], started["sessionEventId"])
        assert (resumed["catchup"], resumed["replayed"]) == (True, 2)
        assert uris(await stream.has(5))[3:] == ["a:1", "a:2"]


async def test_a_first_stream_that_came_too_late_lets_go_of_the_connections_sessions() -> None:
    """HTL3, HTL9: it was treated like a later stream without a position. Its client was not
    told, and went on with requests by rule 2 as if it received what they caused.
    """
    async with world(max_events=3) as w:
        client = await w.connected(capabilities={"extensions": {EXTENSION: {}}})
        started = await client.start()
        for number in range(5):
            await update(w, started["sessionId"], f"a:{number}")

        stream = client.get()

        notified = (await stream.has(4))[3]
        assert notified["method"] == "notifications/sessions/detached"
        assert notified["params"]["reason"] == "evicted"
        assert (await client.error("tools/list"))["code"] == -31010


async def test_the_stream_of_another_connection_never_yields_it() -> None:
    """SEC7: "Replay is scoped to session *and* stream *and* owner"."""
    async with world() as w:
        client, other = await subscribed(w, "b:1"), await w.connected()
        first = client.get()
        session = (await client.start())["sessionId"]
        position = (await first.event(0)).id
        await update(w, session, "a:1")
        await w.layer.notify_resource_updated("b:1")
        await first.has(2)

        stolen = other.get(position)
        messages = await stolen.has(3)

        assert not {"a:1", "b:1"} & set(uris(messages))


async def test_what_was_withdrawn_is_not_replayed() -> None:
    """Rule: "``session/resume`` first removes that session's entries from every GET stream": after
    a takeover the old connection's ``Last-Event-ID`` yields nothing of that session.
    """
    async with world() as w:
        client = await subscribed(w, "b:1")
        first = client.get()
        started = await client.start()
        await client.result("resources/subscribe", {"uri": "b:1", "_meta": in_session(None)})
        position = (await first.event(0)).id
        await update(w, started["sessionId"], "a:1")
        await w.layer.notify_resource_updated("b:1")
        await first.has(2)
        other = await w.connected()
        await other.resume(started["sessionId"], started["sessionEventId"])

        again = client.get(position)

        assert uris(await again.has(1)) == ["b:1"]
        await cycles()
        assert len(again.messages) == 1


async def test_ids_survive_the_trip_through_a_header() -> None:
    """EVT8: "survive the trip through an HTTP header (0x21–0x7E)"."""
    async with world() as w:
        client = await subscribed(w, "b:1")
        stream = client.get()
        await w.layer.notify_resource_updated("b:1")
        await stream.has(1)

        for event in stream.events:
            assert all(0x21 <= ord(character) <= 0x7E for character in event.id)


# --- closing ----------------------------------------------------------------------------------


async def test_a_handler_closes_the_stream_and_the_client_comes_back() -> None:
    """``ctx.close_standalone_sse_stream()``: nothing is lost in between."""
    async with world() as w:

        async def close(ctx: Ctx, arguments: object) -> str:
            assert ctx.close_standalone_sse_stream is not None
            await ctx.close_standalone_sse_stream()
            return "closed"

        w.box.tools["close"] = close
        client = await subscribed(w, "b:1")
        first = client.get()
        await first.event(0)
        await client.text("close")
        await first.done()
        await w.layer.notify_resource_updated("b:1")

        assert uris(await client.get(first.events[-1].id).has(1)) == ["b:1"]


async def test_delete_ends_the_stream() -> None:
    """END2: and with it everything that could be fetched."""
    async with world() as w:
        client = await subscribed(w, "b:1")
        stream = client.get()
        position = (await stream.event(0)).id
        reply = await client.delete().done()

        assert (reply.status, bytes(reply.body)) == (200, b"")
        await stream.done()
        assert (await client.get(position).done()).status == 404
        assert (await client.delete().done()).status == 404
        assert (await client.post({"jsonrpc": "2.0", "method": "x"}).done()).status == 404


async def test_an_open_stream_that_is_dead_does_not_keep_a_session_alive() -> None:
    """SES14: "an open but dead stream does not keep a session alive"; it ends, and 404 follows."""
    async with world(idle_timeout=100, slow_timeout=100_000) as w:
        client = await subscribed(w, "b:1")
        stream = await client.get().started()
        stream.stall()
        for _ in range(3):
            w.clock.advance(40)
            await w.layer.notify_resource_updated("b:1")
        assert await w.expire() == 1

        await stream.gone()
        assert (await client.get().done()).status == 404


# --- a reader that stalls ---------------------------------------------------------------------


async def test_a_handler_that_floods_its_session_waits_for_room() -> None:
    """Rule: "A handler that emits faster than its own session's connection takes yields to the
    writer and waits for room (at most 10 s)"; then it goes on, and its stalled reader is cut.
    """
    async with world(send_buffer=10_000, max_events=10_000, max_bytes=100_000_000) as w:

        async def flood(ctx: Ctx, arguments: object) -> str:
            for number in range(200):
                await ctx.session.send_resource_updated(f"a:{number}" + "x" * 1_000)
            return "flooded"

        w.box.tools["flood"] = flood
        client = await w.connected()
        stream = client.get()
        started = await client.start()
        await stream.event(0)
        stream.stall()
        begun = asyncio.get_running_loop().time()

        assert await client.text("flood") == "flooded"

        assert 10 <= asyncio.get_running_loop().time() - begun < 12
        stream.unstall()
        await stream.done()
        other = await w.connected()
        resumed = await other.resume(started["sessionId"], started["sessionEventId"])
        assert resumed["replayed"] == 200


async def test_a_reader_that_keeps_up_gets_all_of_a_flood() -> None:
    """Rule: "yields to the writer": more events than the window holds, and no await in between,
    from one handler; not one is evicted before it was sent.
    """
    async with connected_world(max_events=100) as (w, client):
        stream = await client.get().started()
        await client.start()

        async def flood(ctx: Ctx, arguments: object) -> str:
            for number in range(2_000):
                await current_session().notify("notifications/x", {"n": number})
            return "flooded"

        w.box.tools["flood"] = flood
        assert await client.text("flood") == "flooded"

        assert [m["params"]["n"] for m in await stream.has(2_000)] == [*range(2_000)]


async def test_a_stalled_reader_is_cut_though_nobody_waits_for_it() -> None:
    """Rule: "A connection is slow, and detached, only when its peer has taken nothing for 10 s with
    a full buffer": a server-wide change waits for no reader, and the stream ended never.
    """
    async with world(send_buffer=10_000, max_events=10_000) as w:
        client = await subscribed(w, *(f"a:{number}" + "x" * 1_000 for number in range(50)))
        stream = client.get()
        await stream.event(0)
        stream.stall()
        begun = asyncio.get_running_loop().time()
        for number in range(50):
            await w.layer.notify_resource_updated(f"a:{number}" + "x" * 1_000)
        assert asyncio.get_running_loop().time() == begun

        await asyncio.sleep(9.5)
        assert not stream.ended
        await stream.done()
        assert asyncio.get_running_loop().time() - begun < 12

        again = client.get(stream.events[0].id)
        assert len(await again.has(50)) == 50


async def test_a_reader_with_room_in_its_buffer_is_never_cut() -> None:
    """Rule: "only when … with a full buffer": however long it takes nothing."""
    async with world() as w:
        client = await subscribed(w, "a:1")
        stream = client.get()
        await stream.event(0)
        stream.stall()
        await w.layer.notify_resource_updated("a:1")

        await asyncio.sleep(3_600)
        stream.unstall()

        assert uris(await stream.has(1)) == ["a:1"]
        assert not stream.ended


async def test_a_stalled_reader_delays_no_other_session() -> None:
    """ATT7: "one slow reader cannot hold memory for others", or time."""
    async with world(send_buffer=10_000) as w:
        slow, quick = await subscribed(w, "a:1"), await subscribed(w, "a:1")
        slow_stream, stream = slow.get(), quick.get()
        await slow_stream.event(0)
        slow_stream.stall()
        begun = asyncio.get_running_loop().time()

        for count in range(1, 300):
            await w.layer.notify_resource_updated("a:1")
            await stream.has(count)

        assert asyncio.get_running_loop().time() == begun
        before = len(w.carrier.journal)
        slow_stream.unstall()
        await cycles(100)
        sent = [len(chunk) for reply, chunk in w.carrier.journal[before:] if reply is slow_stream]
        # What did not fit into the buffer was coalesced in the log.
        assert sum(sent) < 12_000
