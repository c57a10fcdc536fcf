"""Requests whose answer, cancellation or second sending comes to another replica."""

import asyncio

import pytest

from mcp_sessions.stores.exchange import LIVENESS
from tests.support.raw import (
    Json,
    RawClient,
    at_most,
    call_params,
    in_session,
    keyed,
    text_of,
    uris,
)
from tests.support.replicas import Cluster, cluster, events_are_lost, lost, user
from tests.support.virtual_time import cycles
from tests.support.world import count

SOON = 1.0
"""Seconds; less than a round takes."""

SEEDS = range(6)

ELICITS: Json = {"elicitation": {}}


async def with_session(c: Cluster, **options: object) -> tuple[RawClient, str]:
    client = await c[0].connected(**options)
    return client, (await client.start())["sessionId"]


# --- questions to the client -----------------------------------------------------------------


async def test_the_answer_to_a_question_finds_who_asked() -> None:
    """C4 across replicas: asked on the request's own stream on A, answered on B."""
    async with cluster(2) as c:
        client = await c[0].connected(capabilities=ELICITS)
        asked = client.call("ask", question="?")
        question = (await asked.reply.has(1))[0]

        await c.at(1, client).respond(question, {"action": "accept", "content": {"answer": "42"}})
        assert text_of(await at_most(SOON, asked.result())) == "accept: 42"


async def test_a_question_on_the_standalone_channel_travels_both_ways() -> None:
    """ASK2: asked by a handler on A, received on the GET stream of B, answered on C."""
    async with cluster(3) as c:
        client, _ = await with_session(c, capabilities=ELICITS)
        stream = await c.at(1, client).get().started()
        asked = client.call("ask_standalone", question="?")
        question = (await at_most(SOON, stream.has(1)))[0]

        await c.at(2, client).respond(question, {"action": "decline"})
        assert text_of(await at_most(SOON, asked.result())) == "decline: None"


async def test_an_open_question_is_asked_again_where_the_session_attaches() -> None:
    """ASK2: "re-sent … on resume, never left hanging", with its id, whichever replica it is."""
    async with cluster(3) as c:
        client, session = await with_session(c, capabilities=ELICITS)
        asked = client.call("ask_standalone", question="?")
        await cycles(50)
        rival = await c[1].connected(capabilities=ELICITS)
        stream = await c.at(2, rival).get().started()

        await rival.resume(session)
        question = (await at_most(SOON, stream.has(1)))[0]
        await rival.respond(question, {"action": "decline"})
        assert text_of(await at_most(SOON, asked.result())) == "decline: None"


async def test_nobody_else_answers_for_a_client() -> None:
    """SES8: the first answer of the *owner* counts, on other replicas too."""
    async with cluster(2) as c:
        client, _ = await with_session(c, capabilities=ELICITS)
        asked = client.call("ask", question="?")
        question = (await asked.reply.has(1))[0]
        stranger = RawClient(await c[1].carrier_of(user("stranger")))
        await stranger.initialize()
        await stranger.respond(question, {"action": "accept", "content": {"answer": "theirs"}})
        await cycles(50)

        await c.at(1, client).respond(question, {"action": "accept", "content": {"answer": "own"}})
        assert text_of(await at_most(SOON, asked.result())) == "accept: own"


@pytest.mark.in_process
async def test_an_answer_for_a_replica_that_died_is_accepted_nowhere() -> None:
    """A lone POST learns that nobody waits for it; nothing hangs."""
    async with cluster(2) as c:
        client = await c[0].connected(capabilities=ELICITS)
        asked = client.call("ask", question="?")
        question = (await asked.reply.has(1))[0]
        c.kill(0)
        await asyncio.sleep(20)

        answer = {"jsonrpc": "2.0", "id": question["id"], "result": {"action": "decline"}}
        assert (await c[1].client().post(answer).done()).status == 400
        assert (await c.at(1, client).post(answer).done()).status == 202


# --- cancelling ------------------------------------------------------------------------------


async def test_a_cancellation_finds_the_request() -> None:
    """REQ5, "an explicit cancel always wins": sent to B, runs on A."""
    async with cluster(3) as c:
        client = await c[0].connected()
        waits = await c[0].waits(client.call("wait", gate="g"))

        await c.at(1, client).notify("notifications/cancelled", {"requestId": waits.id})
        assert (await at_most(SOON, waits.error()))["code"] == -32800
        await at_most(SOON, c[0].box.gate("g").cancelled.wait())


async def test_a_cancellation_by_key_finds_the_request() -> None:
    """REQ5: by session and key, of the modern era as of the other."""
    async with cluster(2) as c:
        client, session = await with_session(c)
        waits = await c[0].waits(client.call("wait", gate="g", meta=keyed("k")))
        stranger = RawClient(await c[1].carrier_of(user("stranger")))
        await stranger.initialize()
        cancel = {"requestId": "ignored", "_meta": keyed("k", session)}
        await stranger.notify("notifications/cancelled", cancel)
        await cycles(50)
        assert not c[0].box.gate("g").cancelled.is_set()

        await c.at(1, client).notify("notifications/cancelled", cancel)
        assert (await at_most(SOON, waits.error()))["code"] == -32800


# --- keyed requests --------------------------------------------------------------------------


@pytest.mark.parametrize("seed", SEEDS)
async def test_a_key_sent_again_at_another_replica_gets_the_one_answer(seed: int) -> None:
    """KEY3: "the same key again, on any … replica … never runs it again: it gets the one answer,
    now or when it is done".
    """
    async with cluster(3, seed=seed) as c:
        client, session = await with_session(c)
        sent = [
            c[number % 3].client().call("wait", gate="g", meta=keyed("k", session))
            for number in range(6)
        ]
        await asyncio.sleep(0.5)
        gates = [c[number].box.gate("g") for number in range(3)]
        assert sum(gate.arrivals for gate in gates) == 1
        for gate in gates:
            gate.go.set()

        answers = [await at_most(SOON, one.result()) for one in sent]
        assert [text_of(answer) for answer in answers] == ["through g"] * 6
        again = c.at(2, client).call("wait", gate="g", meta=keyed("k"))
        assert text_of(await again.result()) == "through g"
        assert sum(len(c[number].box.calls) for number in range(3)) == 1


async def test_progress_goes_where_the_key_was_sent_again() -> None:
    """The one answer, "and from then on its progress and server-to-client requests"."""
    async with cluster(2) as c:
        client, _ = await with_session(c)
        first = await c[0].waits(
            client.call("progress", steps=3, gate="g", meta=keyed("k", progressToken="a"))
        )
        first.reply.leave()
        again = c.at(1, client).call(
            "progress", steps=3, gate="g", meta=keyed("k", progressToken="b")
        )
        await asyncio.sleep(0.5)
        c[0].box.gate("g").go.set()

        assert text_of(await at_most(SOON, again.result())) == "reported"
        reports = [m["params"] for m in again.reply.messages[:-1]]
        assert [(report["progressToken"], report["progress"]) for report in reports] == [
            ("b", 1),
            ("b", 2),
            ("b", 3),
        ]


async def test_a_question_goes_where_the_key_was_sent_again() -> None:
    """Open ones with their ids; answered on a third replica."""
    async with cluster(3) as c:
        client, _ = await with_session(c, capabilities=ELICITS)
        first = client.call("ask", question="?", meta=keyed("k"))
        question = (await first.reply.has(1))[0]
        first.reply.leave()
        again = c.at(1, client).call("ask", question="?", meta=keyed("k"))
        asked = (await at_most(SOON, again.reply.has(1)))[0]

        assert asked == question
        await c.at(2, client).respond(asked, {"action": "accept", "content": {"answer": "yes"}})
        assert text_of(await at_most(SOON, again.result())) == "accept: yes"


@pytest.mark.in_process
async def test_a_key_whose_runner_died_is_unknown() -> None:
    """KEY11, KEY3: noticed within its time; the caller is answered, and nothing runs twice."""
    async with cluster(2) as c:
        client, _ = await with_session(c)
        await c[0].waits(client.call("wait", gate="g", meta=keyed("k")))
        again = c.at(1, client).call("wait", gate="g", meta=keyed("k"))
        await asyncio.sleep(1)
        c.kill(0)

        assert (await at_most(16, again.error()))["code"] == -31012
        later = c.at(1, client).call("wait", gate="g", meta=keyed("k"))
        assert (await at_most(SOON, later.error()))["code"] == -31012
        assert c[1].box.calls == []


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.in_process
async def test_an_answer_kept_before_its_runner_died_is_given(seed: int) -> None:
    """HTL10: "when A dies → the store's kept answer if there", whatever messages were lost."""
    async with cluster(2, seed=seed) as c:
        client, session = await with_session(c)
        await c[0].waits(client.call("wait", gate="g", meta=keyed("k")))
        again = c.at(1, client).call("wait", gate="g", meta=keyed("k"))
        await asyncio.sleep(0.5)
        c.backplane.loses = lost("result", "update")
        c[0].box.gate("g").go.set()
        await cycles(seed)
        c.kill(0)
        answer = await at_most(16, again.answer())

        if "error" in answer:
            assert answer["error"]["code"] == -31012
        else:
            assert text_of(answer["result"]) == "through g"
        third = await c.at(1, client).call("wait", gate="g", meta=keyed("k")).answer()
        assert third.get("result") == answer.get("result")
        assert c[1].box.calls == []
        del session


@pytest.mark.in_process
async def test_a_lost_word_of_the_answer_is_made_good() -> None:
    """Rule 1 of the messages: the store is asked again by itself."""
    async with cluster(2) as c:
        client, _ = await with_session(c)
        await c[0].waits(client.call("wait", gate="g", meta=keyed("k")))
        c.backplane.loses = lost("ask", "result")
        again = c.at(1, client).call("wait", gate="g", meta=keyed("k"))
        await asyncio.sleep(0.5)
        c[0].box.gate("g").go.set()
        assert text_of(await at_most(4, again.result())) == "through g"


@pytest.mark.in_process
async def test_a_second_sending_with_a_listener_keeps_the_request_alive() -> None:
    """REQ8: without a listener work is bounded in time; what another replica's client waits for is
    received.
    """
    async with cluster(2, detached_timeout=30) as c:
        client, _ = await with_session(c)
        first = await c[0].waits(client.call("wait", gate="g", meta=keyed("k")))
        again = c.at(1, client).call("wait", gate="g", meta=keyed("k"))
        await asyncio.sleep(1)
        first.reply.leave()
        await asyncio.sleep(60)
        assert not c[0].box.gate("g").cancelled.is_set()

        again.reply.leave()
        await asyncio.sleep(60)
        assert c[0].box.gate("g").cancelled.is_set()


@pytest.mark.in_process
async def test_a_second_sending_from_a_replica_that_died_counts_no_more() -> None:
    """REQ8: its client listens there no more."""
    async with cluster(2, detached_timeout=30) as c:
        client, _ = await with_session(c)
        first = await c[0].waits(client.call("wait", gate="g", meta=keyed("k")))
        c.at(1, client).call("wait", gate="g", meta=keyed("k"))
        await asyncio.sleep(1)
        first.reply.leave()
        await asyncio.sleep(1)
        c.kill(1)
        await asyncio.sleep(70)
        assert c[0].box.gate("g").cancelled.is_set()


async def test_a_second_sending_can_be_cancelled_where_it_waits() -> None:
    """REQ6: by its own id, on B, and from C."""
    async with cluster(3) as c:
        for canceller in (1, 2):
            client, _ = await with_session(c)
            first = await c[0].waits(client.call("wait", gate="g", meta=keyed("k")))
            again = c.at(1, client).call("wait", gate="g", meta=keyed("k"))
            await asyncio.sleep(0.5)

            cancel = {"requestId": again.id}
            await c.at(canceller, client).notify("notifications/cancelled", cancel)
            for one in (first, again):
                assert (await at_most(SOON, one.error()))["code"] == -32800
            c[0].box.gate("g").started.clear()


async def test_a_second_sending_fails_with_its_session() -> None:
    """``session/end`` on C while A runs it and B waits for it."""
    async with cluster(3) as c:
        client, session = await with_session(c)
        first = await c[0].waits(client.call("wait", gate="g", meta=keyed("k")))
        again = c.at(1, client).call("wait", gate="g", meta=keyed("k"))
        await asyncio.sleep(0.5)
        await c[2].client().end(session)
        for one in (first, again):
            error = await at_most(4, one.error())
            assert (error["code"], error["data"]["started"]) == (-32043, True)


# --- response streams ------------------------------------------------------------------------


@pytest.mark.parametrize("seed", SEEDS)
async def test_a_response_stream_continues_on_another_replica(seed: int) -> None:
    """HTL10, REQ4: cut at A, fetched at B while A runs on; progress and answer, once, in order."""
    async with cluster(2, seed=seed) as c:
        client = await c[0].connected()
        sent = client.call("progress", steps=15, gate="g", meta={"progressToken": 1})
        position = (await sent.reply.event(0)).id
        await c[0].box.gate("g").started.wait()
        sent.reply.leave()
        again = c.at(1, client).get(position)
        await again.has(1)
        c[0].box.gate("g").go.set()
        answer = await at_most(SOON, again.answer(sent.id))
        await at_most(SOON, again.done())

        assert text_of(answer["result"]) == "reported"
        assert [m["params"]["progress"] for m in again.messages[:-1]] == [*range(1, 16)]


@pytest.mark.in_process
async def test_a_response_stream_whose_answer_is_kept_is_replayed() -> None:
    """HTL10: also when who answered is dead by now."""
    async with cluster(2) as c:
        client = await c[0].connected()
        sent = client.call("progress", steps=2, meta={"progressToken": 1})
        position = (await sent.reply.event(0)).id
        await sent.result()
        c.kill(0)
        again = c.at(1, client).get(position)
        await at_most(SOON, again.done())

        assert [m["params"]["progress"] for m in again.messages[:-1]] == [1, 2]
        assert text_of(again.messages[-1]["result"]) == "reported"


@pytest.mark.in_process
async def test_a_response_stream_whose_runner_died_is_answered() -> None:
    """KEY11, CLI1: what it sent, then -31012, within the time that a death takes to be noticed."""
    async with cluster(2) as c:
        client = await c[0].connected()
        sent = client.call("progress", steps=2, gate="g", meta={"progressToken": 1})
        position = (await sent.reply.event(0)).id
        await c[0].box.gate("g").started.wait()
        c.kill(0)
        again = c.at(1, client).get(position)
        answer = await at_most(15, again.answer(sent.id))
        await at_most(SOON, again.done())

        assert answer["error"]["code"] == -31012
        assert [m["params"]["progress"] for m in again.messages[:-1]] == [1]


@pytest.mark.in_process
@pytest.mark.parametrize("seed", range(12))
async def test_what_a_dead_runner_sent_is_given_once(seed: int) -> None:
    """HTL10, "the rest of that stream": its death is known when the client comes back. One task
    reads the stream, and another ends it: it sent again what the first one had sent.
    """
    async with cluster(2, seed=seed) as c:
        client = await c[0].connected()
        sent = client.call("progress", steps=2, gate="g", meta={"progressToken": 1})
        position = (await sent.reply.event(0)).id
        await c[0].box.gate("g").started.wait()
        sent.reply.leave()
        c.kill(0)
        await asyncio.sleep(LIVENESS + 1)
        again = c.at(1, client).get(position)
        answer = await at_most(SOON, again.answer(sent.id))
        await at_most(SOON, again.done())

        assert answer["error"]["code"] == -31012
        assert [m["params"]["progress"] for m in again.messages[:-1]] == [1]


@pytest.mark.in_process
async def test_a_lost_answer_on_a_far_response_stream_is_read() -> None:
    """ATT10: on response streams too."""
    async with cluster(2) as c:
        client = await c[0].connected()
        sent = client.call("progress", steps=2, gate="g", meta={"progressToken": 1})
        position = (await sent.reply.event(0)).id
        await c[0].box.gate("g").started.wait()
        again = c.at(1, client).get(position)
        await again.has(1)
        c.backplane.loses = events_are_lost
        c[0].box.gate("g").go.set()
        answer = await at_most(6, again.answer(sent.id))
        assert text_of(answer["result"]) == "reported"


@pytest.mark.in_process
async def test_a_far_response_stream_is_received() -> None:
    """REQ8: as long as its client reads it, wherever."""
    async with cluster(2, detached_timeout=30) as c:
        client = await c[0].connected()
        sent = client.call("progress", steps=2, gate="g", meta={"progressToken": 1})
        position = (await sent.reply.event(0)).id
        await c[0].box.gate("g").started.wait()
        sent.reply.leave()
        again = await c.at(1, client).get(position).started()
        await asyncio.sleep(60)
        assert not c[0].box.gate("g").cancelled.is_set()
        again.leave()
        await asyncio.sleep(60)
        assert c[0].box.gate("g").cancelled.is_set()


@pytest.mark.in_process
async def test_a_far_response_stream_ends_if_the_store_stays_away() -> None:
    """HTP5: its reader comes back, and is told so. The answer is there when the store is back."""
    async with cluster(2) as c:
        client = await c[0].connected()
        sent = client.call("progress", steps=2, gate="g", meta={"progressToken": 1})
        position = (await sent.reply.event(0)).id
        await c[0].box.gate("g").started.wait()
        sent.reply.leave()
        again = c.at(1, client).get(position)
        await again.has(1)
        c.backplane.is_away = True
        c[0].box.gate("g").go.set()
        assert (await at_most(20, again.done())).messages[-1]["params"]["progress"] == 1
        assert (await at_most(20, c.at(1, client).get(position).done())).status == 503
        c.backplane.is_away = False
        last = c.at(1, client).get(position)
        answer = await at_most(20, last.answer(sent.id))
        assert text_of(answer["result"]) == "reported"


async def test_a_forged_position_on_a_far_stream_is_answered() -> None:
    """SEC7: of no stream of this session; its request id is answered with -31012, and it ends."""
    async with cluster(2) as c:
        client = await c[0].connected()
        sent = client.call("progress", steps=1, meta={"progressToken": 1})
        position = (await sent.reply.event(0)).id
        await sent.result()
        other = await c[1].connected()

        reply = await at_most(SOON, other.get(position).done())
        assert [m["error"]["code"] for m in reply.messages] == [-31012]


# --- what they share -------------------------------------------------------------------------


async def test_state_and_data_are_the_same_on_every_replica() -> None:
    """Both are in the store, and so each request sees what the last one left."""
    async with cluster(3) as c:
        for world in c.worlds:
            world.box.tools["count"] = count
        client, session = await with_session(c)
        texts = [await c.at(number % 3, client).text("count") for number in range(6)]
        assert texts == [f"session {n} {n}" for n in range(1, 7)]
        named = await c[2].client().text("count", meta=in_session(session))
        assert named == "session 7 7"


async def test_the_current_session_is_the_same_on_every_replica() -> None:
    """Rule 2 by the store, while requests to other replicas are on their way."""
    async with cluster(3, seed=5) as c:
        client = c.spread(await c[0].connected())
        for _ in range(10):
            noise = [client.call("echo", text="x") for _ in range(5)]
            session = (await client.start())["sessionId"]
            assert await client.text("session_id") == session
            for one in noise:
                await one.result()
            await client.end(session)
            assert await client.text("session_id") == "none"


async def test_one_clients_ordinary_day_goes_round_robin() -> None:
    """ATT9: rate 1 − 1/N of 404 is what others have; here there is none."""
    async with cluster(3) as c:
        client = c.spread(c[0].client())
        await client.initialize()
        await client.start()
        stream = await client.get().started()
        for number in range(60):
            assert await client.text("echo", text=str(number)) == str(number)
            await client.text("update", uri=f"a:{number}")
        assert uris(await stream.has(60)) == [f"a:{number}" for number in range(60)]
        assert [len(world.box.calls) for world in c.worlds] == [40, 40, 40]


@pytest.mark.in_process
async def test_the_session_is_running_wherever_it_is() -> None:
    """SES14: a busy session on A is not reaped by B, however long that takes."""
    async with cluster(2, idle_timeout=10) as c:
        client, session = await with_session(c)
        waits = await c[0].waits(client.call("wait", gate="g", meta=in_session(session)))
        for _ in range(12):
            c.clock.advance(3)
            await c[0].expire()
            await c[1].expire()
        c[0].box.gate("g").go.set()
        assert text_of(await waits.result()) == "through g"
        c.clock.advance(20)
        assert await c[1].expire() == 2
        error = (
            await c[0]
            .client()
            .error("tools/call", call_params("echo", {"text": "x"}, in_session(session)))
        )
        assert error["code"] == -32043
