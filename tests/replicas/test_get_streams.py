"""The GET stream of a transport-mode session is open on one replica, and fed by all of them."""

import asyncio

import pytest

from tests.support.raw import (
    EXTENSION,
    Sent,
    at_most,
    call_params,
    event_ids,
    in_session,
    text_of,
    uris,
)
from tests.support.replicas import cluster, events_are_lost, lost, numbers
from tests.support.virtual_time import cycles

SOON = 1.0
"""Seconds; less than a round takes, so what is there by then came as a message."""

SEEDS = range(6)


async def test_one_client_on_three_replicas() -> None:
    """ATT9, and "any replica serves any request": initialize on A, calls on B, GET on C, DELETE on
    D; 404 everywhere after it.
    """
    async with cluster(4) as c:
        client = await c[0].connected()
        b, stream = c.at(1, client), await c.at(2, client).get().started()

        assert await b.text("echo", text="hello") == "hello"
        await b.result("resources/subscribe", {"uri": "a:1"})
        await c[0].layer.notify_resource_updated("a:1")
        assert uris(await at_most(SOON, stream.has(1))) == ["a:1"]

        assert (await c.at(3, client).delete().done()).status == 200
        await at_most(SOON, stream.done())
        for number in range(4):
            same = c.at(number, client)
            ping = {"jsonrpc": "2.0", "id": 99, "method": "ping"}
            assert (await same.post(ping).done()).status == 404


@pytest.mark.parametrize("seed", SEEDS)
async def test_events_stored_on_any_replica_come_once_and_in_order(seed: int) -> None:
    """ATT6, EVT7: three replicas store, a fourth has the stream: one numbering for all."""
    async with cluster(4, seed=seed) as c:
        client = await c[0].connected()
        session = (await client.start())["sessionId"]
        stream = await c.at(3, client).get().started()

        await asyncio.gather(*(c[number].produce(session, 20, by=number) for number in range(3)))
        messages = await at_most(SOON, stream.has(60))
        await cycles(50)

        ids = event_ids(stream.messages)
        assert ids == sorted(set(ids)) and len(ids) == 60
        for number in range(3):
            assert numbers([m for m in messages if m["params"]["by"] == number]) == [*range(20)]
        sse = [event.id for event in stream.events if event.message is not None]
        assert sse == sorted(set(sse))


@pytest.mark.parametrize("seed", SEEDS)
async def test_a_stream_that_is_reopened_at_another_replica_continues(seed: int) -> None:
    """``Last-Event-ID`` on another replica, under load: whole, once, in order (ATT6, CUP2)."""
    async with cluster(3, seed=seed) as c:
        client = await c[0].connected()
        session = (await client.start())["sessionId"]

        producing = asyncio.create_task(c[0].produce(session, 60))
        received: list[int] = []
        stream = c.at(0, client).get()
        for turn in range(1, 6):
            # On a busy machine all may have come before the last turn.
            if len(received) == 60:
                break
            await stream.has(min(3, 60 - len(received)))
            await stream.gone()
            received += numbers(stream.messages)
            stream = c.at(turn % 3, client).get(stream.events[-1].id)
        await producing
        await stream.until(lambda: len(received) + len(stream.messages) >= 60)
        await cycles(30)

        assert received + numbers(stream.messages) == [*range(60)]


async def test_events_and_questions_come_again_in_the_order_in_which_they_came() -> None:
    """HTL4, "once and in order": a question is in the log of the connection, an event in that of
    its session, and three replicas stored them.
    """
    async with cluster(3) as c:
        client = await c[0].connected(capabilities={"elicitation": {}})
        session = (await client.start())["sessionId"]
        stream = await client.get().started()
        start = stream.events[0].id
        publishers = [each.inside.publisher for each in (c[0], c[1], c[2])]
        asked: list[Sent] = []
        for number in range(3):
            await publishers[number].publish(session, "notifications/x", {"n": number})
            await at_most(SOON, stream.has(2 * number + 1))
            asked.append(c.at(2 - number, client).call("ask_standalone", question="?"))
            await at_most(SOON, stream.has(2 * number + 2))
        await stream.gone()

        again = c.at(1, client).get(start)
        await at_most(SOON, again.has(6))
        await cycles(30)
        assert again.messages == stream.messages
        for question in again.messages[1::2]:
            await client.respond(question, {"action": "accept", "content": {"answer": "1"}})
        assert [text_of(await each.result()) for each in asked] == ["accept: 1"] * 3


@pytest.mark.in_process
async def test_a_newer_stream_at_another_replica_ends_the_older_one() -> None:
    """One GET stream per connection, wherever it is: B4, the old one may be dead and nobody
    noticed.
    """
    async with cluster(2) as c:
        client = await c[0].connected()
        await client.start()
        old = await client.get().started()
        await client.text("update", uri="a:1")
        await old.has(1)
        await asyncio.sleep(5)
        new = await c.at(1, client).get(old.events[-1].id).started()

        await at_most(SOON, old.done())
        await client.text("update", uri="a:2")
        assert uris(await at_most(SOON, new.has(1))) == ["a:2"]
        assert uris(old.messages) == ["a:1"]


@pytest.mark.parametrize("seed", SEEDS)
async def test_of_two_streams_opened_at_once_one_stays(seed: int) -> None:
    """Never two, never none (RES3)."""
    async with cluster(2, seed=seed) as c:
        client = await c[0].connected()
        await client.start()
        streams = [c.at(number, client).get("x") for number in range(2)]
        await asyncio.gather(*(stream.started() for stream in streams))
        ends = [asyncio.create_task(stream.done()) for stream in streams]
        await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED, timeout=SOON)
        await cycles(60)
        for end in ends:
            end.cancel()

        assert sorted(stream.ended for stream in streams) == [False, True]


@pytest.mark.in_process
async def test_a_lost_last_event_is_seen_by_its_number() -> None:
    """ATT10: nothing follows that would show the gap; a round looks at the head."""
    async with cluster(2) as c:
        client = await c[0].connected()
        await client.start()
        stream = await c.at(1, client).get().started()
        await cycles(20)
        c.backplane.loses = events_are_lost

        await client.text("update", uri="a:1")
        await cycles(50)
        assert not stream.messages
        assert uris(await at_most(6, stream.has(1))) == ["a:1"]


@pytest.mark.in_process
async def test_a_lost_event_in_the_middle_is_read() -> None:
    """ATT10: the next one's number shows the gap, at once."""
    async with cluster(2) as c:
        client = await c[0].connected()
        await client.start()
        stream = await c.at(1, client).get().started()
        await client.text("update", uri="a:1")
        await stream.has(1)
        c.backplane.loses = events_are_lost
        await client.text("update", uri="a:2")
        c.backplane.loses = lambda _: False
        await client.text("update", uri="a:3")

        assert uris(await at_most(SOON, stream.has(3))) == ["a:1", "a:2", "a:3"]


@pytest.mark.in_process
async def test_what_was_missed_while_cut_off_is_read() -> None:
    """ATT10: on a gap every stream is read again."""
    async with cluster(2) as c:
        client = await c[0].connected()
        await client.start()
        stream = await c.at(1, client).get().started()
        await cycles(20)
        c.stores[1].exchange.cut_off()
        await client.text("update", uri="a:1")
        await cycles(50)
        assert not stream.messages

        c.stores[1].exchange.mend()
        assert uris(await at_most(SOON, stream.has(1))) == ["a:1"]


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.in_process
async def test_what_a_dying_replica_stored_and_did_not_relay_comes(seed: int) -> None:
    """EVT10: killed between any two steps, also between storing an event and handing it on; what
    is stored is delivered, once and in order.
    """
    async with cluster(2, seed=seed) as c:
        client = await c[0].connected()
        started = await client.start()
        session = started["sessionId"]
        stream = await c.at(1, client).get().started()

        producing = asyncio.create_task(c[0].produce(session, 1_000))
        await stream.has(5)
        await cycles(seed)
        c.kill(0)
        kept, _ = await c.backplane.memory.read(session, started["sessionEventId"], now=c.clock())
        await at_most(6, stream.has(len(kept)))
        await cycles(20)

        assert numbers(stream.messages) == [*range(len(kept))]
        producing.cancel()


async def test_a_takeover_on_another_replica_is_seen_where_the_stream_is() -> None:
    """RES3: the displaced connection receives nothing more of that session, and is notified why
    (TKO7).
    """
    async with cluster(3) as c:
        client = await c[0].connected(capabilities={"extensions": {EXTENSION: {}}})
        started = await client.start()
        session = started["sessionId"]
        old = await c.at(1, client).get().started()
        await client.text("update", uri="a:1")
        await old.has(1)

        rival = await c[2].connected()
        new = await rival.get().started()
        resumed = await rival.resume(session, started["sessionEventId"])
        assert resumed["catchup"] and resumed["replayed"] == 1
        notified = (await at_most(SOON, old.has(2)))[1]
        assert notified["method"] == "notifications/sessions/detached"
        assert notified["params"] == {"sessionId": session, "reason": "taken_over"}
        await c[0].client().text("update", uri="a:2", meta=in_session(session))

        assert uris(await at_most(SOON, new.has(2))) == ["a:1", "a:2"]
        await cycles(50)
        assert len(old.messages) == 2
        for number in range(3):
            error = await c.at(number, client).error("tools/list")
            assert error["code"] == -31010


@pytest.mark.parametrize("seed", SEEDS)
async def test_rivals_on_three_replicas_leave_one_owner(seed: int) -> None:
    """RES3: "never two owners, never none", on several processes."""
    async with cluster(3, seed=seed) as c:
        session = (await c[0].client().start())["sessionId"]
        rivals = [await c[number % 3].connected() for number in range(6)]
        streams = [await rival.get().started() for rival in rivals]

        await asyncio.gather(*(rival.resume(session) for rival in rivals))
        await cycles(50)
        await c[0].client().text("update", uri="a:1", meta=in_session(session))
        notified = [asyncio.create_task(stream.has(1)) for stream in streams]
        await asyncio.wait(notified, return_when=asyncio.FIRST_COMPLETED, timeout=SOON)
        await cycles(100)
        for one in notified:
            one.cancel()

        assert sorted(uris(stream.messages) for stream in streams) == [[]] * 5 + [["a:1"]]
        errors = [(await rival.answer("tools/list")).get("error") for rival in rivals]
        owners = [stream for stream, error in zip(streams, errors, strict=True) if error is None]
        assert [uris(stream.messages) for stream in owners] == [["a:1"]]


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.in_process
async def test_a_takeover_under_load_loses_nothing_and_doubles_nothing(seed: int) -> None:
    """RES3, EVT10: the session moves from replica to replica while others store its events."""
    async with cluster(3, seed=seed) as c:
        started = await c[0].client().start()
        session, position = started["sessionId"], started["sessionEventId"]
        publisher = c[2].inside.publisher
        clients = [await c[number].connected() for number in range(2)]
        streams = [
            await c.at(1 - number, client).get().started() for number, client in enumerate(clients)
        ]
        await clients[0].resume(session, position)

        producing = asyncio.create_task(c[2].produce(session, 60))
        for turn in range(1, 6):
            await cycles(30)
            ids = event_ids(streams[(turn + 1) % 2].messages)
            resumed = await clients[turn % 2].resume(session, ids[-1] if ids else position)
            assert resumed["catchup"], resumed
        await producing
        await publisher.publish(session, "notifications/x", {"n": 60})
        await asyncio.sleep(10)

        for stream in streams:
            ids = event_ids(stream.messages)
            assert ids == sorted(set(ids))
        received = {m["params"]["n"] for stream in streams for m in stream.messages}
        assert received == set(range(61))
        assert [numbers(stream.messages)[-1] == 60 for stream in streams] == [False, True]


async def test_a_session_ended_at_another_replica_has_ended_where_its_stream_is() -> None:
    """SES18, END1: and nothing of it follows."""
    async with cluster(3) as c:
        client = await c[0].connected()
        session = (await client.start())["sessionId"]
        stream = await c.at(1, client).get().started()
        await client.text("update", uri="a:1")
        await stream.has(1)

        assert await c.at(2, client).end(session) == {}
        publisher = c[0].inside.publisher
        assert not await publisher.publish(session, "notifications/x", {})
        await cycles(50)

        assert len(stream.messages) == 1
        for number in range(3):
            assert (await c[number].client().error("session/resume", {"sessionId": session}))[
                "code"
            ] == -32043


@pytest.mark.in_process
async def test_a_request_at_another_replica_fails_with_its_session() -> None:
    """END2, SES18: ended on B, running on A; also if the message is lost."""
    async with cluster(2) as c:
        client = await c[0].connected()
        for loses in (lost(), lost("ended")):
            session = (await c[1].client().start())["sessionId"]
            waits = await c[0].waits(client.call("wait", gate="g", meta=in_session(session)))
            c.backplane.loses = loses
            await c[1].client().end(session)

            error = await at_most(6, waits.error())
            assert (error["code"], error["data"]["started"]) == (-32043, True)
            c[0].box.gate("g").started.clear()


async def test_a_later_stream_without_a_position_at_another_replica_parts_its_sessions() -> None:
    """HTL7: "a later one without ``Last-Event-ID`` detaches the connection's sessions"; and
    where nobody knows what the older one was handed, the client is asked to look again.
    """
    async with cluster(2) as c:
        client = await c[0].connected()
        started = await client.start()
        await client.result("resources/subscribe", {"uri": "a:1"})
        stream = await client.get().started()
        await c[1].layer.notify_resource_updated("a:1")
        await stream.has(1)
        await stream.gone()

        later = await c.at(1, client).get().started()
        await c[0].layer.notify_resource_updated("a:1")
        await cycles(50)

        assert not event_ids([m for m in later.messages if "sessionEventId" in str(m)])
        resumed = await c.at(1, client).resume(started["sessionId"], started["sessionEventId"])
        assert resumed["catchup"]
        assert len([m for m in later.messages if "sessionEventId" in str(m)]) == 1


@pytest.mark.in_process
async def test_a_request_costs_one_admission() -> None:
    """The budget: no more questions to the store than that, on any replica, also if it goes to
    its connection's current session.
    """
    async with cluster(2) as c:
        client = await c[0].connected()
        session = (await client.start())["sessionId"]
        other = (await c[0].client().start())["sessionId"]
        same = c.at(1, client)
        await same.text("echo", text="x")
        store = c.stores[1]

        store.calls.clear()
        await same.text("echo", text="x")
        assert list(store.calls) == ["admit"]
        store.calls.clear()
        await (
            c[1]
            .client()
            .result("tools/call", call_params("echo", {"text": "x"}, in_session(session)))
        )
        assert list(store.calls) == ["admit"]
        store.calls.clear()
        await (
            c[1]
            .client()
            .result("tools/call", call_params("echo", {"text": "x"}, in_session(other)))
        )
        assert list(store.calls) == ["admit"]


async def test_a_session_whose_stream_another_replica_may_serve_makes_no_room() -> None:
    """SES20: what was never listened to goes; who listens at another replica receives on, and
    calls.
    """
    async with cluster(2, max_sessions=3) as c:
        listener, left = await c[0].connected(), await c[0].connected()
        stream = await listener.get().started()
        running = await c[0].connected()
        call = await c[0].waits(running.call("wait", gate="g"))
        c.clock.advance(61)
        await c[0].expire()

        await c[1].connected()

        assert not stream.ended
        assert await listener.text("echo", text="x") == "x"
        c[0].box.gate("g").go.set()
        assert text_of(await call.result()) == "through g"
        assert (await left.send("tools/list").reply.done()).status == 404
