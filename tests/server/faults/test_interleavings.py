"""What must hold though the store suspends between any two steps.

A5: "Test with a producer that writes between every pair of awaits." Each test runs over many
orders; `tests.support.interposed` makes them.
"""

import asyncio
from typing import Any

import pytest

from tests.support.interposed import suspending_store
from tests.support.raw import (
    EXTENSION,
    Json,
    RawClient,
    Reply,
    call_params,
    event_ids,
    in_session,
    keyed,
    text_of,
    uris,
)
from tests.support.virtual_time import cycles
from tests.support.world import Ctx, World, world

SEEDS = range(25)


async def with_stream(w: World, **options: Any) -> tuple[RawClient, Reply]:
    client = await w.connected(**options)
    return client, await client.get().started()


@pytest.mark.parametrize("seed", SEEDS)
async def test_what_is_produced_while_a_replay_runs_comes_once_and_in_order(seed: int) -> None:
    """ATT6: "arrive once and in order (subscribe first, read history, merge)"."""
    async with world(store=suspending_store(seed)) as w:
        started = await w.client().start()
        session = started["sessionId"]

        producing = asyncio.create_task(w.produce(session, 40))
        await cycles(seed)
        client, stream = await with_stream(w)
        resumed = await client.resume(session, started["sessionEventId"])
        await producing
        messages = await stream.has(40)
        await cycles(50)

        assert resumed["catchup"]
        assert [m["params"]["n"] for m in stream.messages] == [*range(40)]
        assert event_ids(messages) == sorted(set(event_ids(messages)))


@pytest.mark.parametrize("seed", SEEDS)
async def test_a_takeover_under_load_loses_nothing_and_doubles_nothing(seed: int) -> None:
    """RES3, EVT10: two connections in turns; each event is on exactly one of them, after what the
    other had, and the displaced one receives nothing more.
    """
    async with world(store=suspending_store(seed)) as w:
        started = await w.client().start()
        session, position = started["sessionId"], started["sessionEventId"]
        clients = [await with_stream(w) for _ in range(2)]
        await clients[0][0].resume(session, position)

        producing = asyncio.create_task(w.produce(session, 60))
        for turn in range(1, 6):
            await cycles(7)
            old = clients[(turn + 1) % 2][1]
            new = clients[turn % 2][0]
            ids = event_ids(old.messages)
            resumed = await new.resume(session, ids[-1] if ids else position)
            assert resumed["catchup"], resumed
        await producing
        await cycles(100)

        received = [event_ids(stream.messages) for _, stream in clients]
        for ids in received:
            assert ids == sorted(ids)
        numbers = {m["params"]["n"] for _, stream in clients for m in stream.messages}
        assert numbers == set(range(60))
        last = clients[1][1].messages[-1]
        assert last["params"]["n"] == 59


@pytest.mark.parametrize("seed", SEEDS)
async def test_the_displaced_connection_gets_nothing_more(seed: int) -> None:
    """RES3: what was stored after the takeover never goes to the old connection."""
    async with world(store=suspending_store(seed)) as w:
        old, old_stream = await with_stream(w)
        started = await old.start()
        session = started["sessionId"]

        producing = asyncio.create_task(w.produce(session, 30))
        await cycles(seed)
        new, new_stream = await with_stream(w)
        resumed = await new.resume(session, started["sessionEventId"])
        received = len(old_stream.messages)
        await producing
        await cycles(100)

        assert len(old_stream.messages) == received
        assert resumed["catchup"]
        assert [m["params"]["n"] for m in new_stream.messages] == [*range(30)]


@pytest.mark.parametrize("seed", SEEDS)
async def test_rivals_leave_one_owner(seed: int) -> None:
    """RES3: "never two owners, never none"; every loser receives it."""
    async with world(store=suspending_store(seed)) as w:
        session = (await w.client().start())["sessionId"]
        knows_us: Json = {"extensions": {EXTENSION: {}}}
        rivals = [await with_stream(w, capabilities=knows_us) for _ in range(8)]

        answers = await asyncio.gather(*(client.resume(session) for client, _ in rivals))
        await w.client().text("update", uri="a:1", meta=in_session(session))
        await cycles(100)

        assert all(answer["resumed"] for answer in answers)
        for client, stream in rivals:
            error = (await client.answer("tools/list")).get("error")
            if error is None:
                assert uris(stream.messages) == ["a:1"]
            else:
                assert error["code"] == -31010
                assert uris(stream.messages) == ["notifications/sessions/detached"]
        received = [uris(stream.messages) for _, stream in rivals]
        assert received.count(["a:1"]) == 1


@pytest.mark.parametrize("seed", SEEDS)
async def test_one_key_runs_once(seed: int) -> None:
    """KEY3: "recorded … **before** the handler starts", however the sendings interleave; and each
    is answered.
    """
    async with world(store=suspending_store(seed)) as w:
        session = (await w.client().start())["sessionId"]

        sent = [w.client().call("echo", text="x", meta=keyed("k", session)) for _ in range(8)]

        assert [text_of(await one.result()) for one in sent] == ["x"] * 8
        assert w.box.calls == ["echo"]


@pytest.mark.parametrize("seed", SEEDS)
async def test_nothing_follows_the_end(seed: int) -> None:
    """SES18, END1: events, requests and questions race with ``session/end``: nothing of the session
    after its answer, and nobody waits for ever.
    """
    async with world(store=suspending_store(seed)) as w:
        client, stream = await with_stream(w)
        session = (await client.start())["sessionId"]
        publisher = w.inside.publisher

        async def produce() -> None:
            while await publisher.publish(session, "notifications/x", {}):
                pass

        producing = asyncio.create_task(produce())
        calls = [client.call("echo", text="x", meta=in_session(session)) for _ in range(3)]
        waits = client.call("wait", gate="g", meta=in_session(session))
        await cycles(seed)
        ended = await w.client().end(session)
        received = len(stream.messages)
        await producing
        await cycles(50)

        assert ended == {}
        assert len(stream.messages) == received
        for sent in calls:
            answer = await sent.answer()
            assert "result" in answer or answer["error"]["code"] == -32043
        assert (await waits.error())["code"] == -32043


@pytest.mark.parametrize("seed", SEEDS)
async def test_a_stream_that_is_fetched_while_it_is_written_is_whole(seed: int) -> None:
    """ATT6, HTL10: progress, answer and ``Last-Event-ID`` in any order."""
    async with world(store=suspending_store(seed)) as w:
        client = await w.connected()
        sent = client.call("progress", steps=15, gate="g", meta={"progressToken": 1})
        position = (await sent.reply.event(0)).id
        await w.box.gate("g").started.wait()
        sent.reply.leave()
        w.box.gate("g").go.set()
        await cycles(seed)

        again = client.get(position)
        answer = await again.answer(sent.id)
        await again.done()

        assert "result" in answer
        assert [m["params"]["progress"] for m in again.messages[:-1]] == [*range(1, 16)]


@pytest.mark.parametrize("seed", SEEDS)
async def test_many_emit_on_one_stream(seed: int) -> None:
    """A handler's own tasks report at the same time: each report once, then the answer."""
    async with world(store=suspending_store(seed)) as w:

        async def crowd(ctx: Ctx, arguments: object) -> str:
            await asyncio.gather(*(ctx.session.report_progress(n) for n in range(12)))
            return "all reported"

        w.box.tools["crowd"] = crowd
        client = await w.connected()

        sent = client.call("crowd", meta={"progressToken": 1})
        await sent.result()
        await sent.reply.done()

        progress = sorted(m["params"]["progress"] for m in sent.reply.messages[:-1])
        assert progress == [*range(12)]


@pytest.mark.parametrize("seed", SEEDS)
async def test_two_requests_with_one_id_are_both_served(seed: int) -> None:
    """REQ9, though both came while the store was asked for their session; one has a key."""
    async with world(store=suspending_store(seed)) as w:
        client = await w.connected()
        await client.start()
        plain, withkey = call_params("wait", {"gate": "g"}), call_params("wait", {"gate": "g"})
        withkey["_meta"] = keyed("k")
        sent = [
            client.send("tools/call", params, request_id="same")
            for params in ((plain, withkey) if seed % 2 else (withkey, plain))
        ]
        await w.box.gate("g").started.wait()
        await cycles(30)
        w.box.gate("g").go.set()

        assert [text_of(await one.result()) for one in sent] == ["through g"] * 2
        assert w.box.calls == ["wait"] * 2
        again = await client.answer("tools/call", withkey)
        assert "result" in again and w.box.calls == ["wait"] * 2


@pytest.mark.parametrize("seed", SEEDS)
async def test_subscriptions_and_changes_interleave(seed: int) -> None:
    """A change after the answer to ``resources/subscribe`` is received, one after the answer to
    ``resources/unsubscribe`` is not.
    """
    async with world(store=suspending_store(seed)) as w:
        client, stream = await with_stream(w)
        await client.start()
        for round_ in range(5):
            await client.result("resources/subscribe", {"uri": "a:1"})
            await w.layer.notify_resource_updated("a:1")
            await stream.has(round_ + 1)
            await client.result("resources/unsubscribe", {"uri": "a:1"})
            await w.layer.notify_resource_updated("a:1")
        await cycles(50)
        assert len(stream.messages) == 5
