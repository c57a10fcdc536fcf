"""A key that was recorded, and a request that never began: at whichever replica it comes again,
it runs, once (KEY3, KEY11).
"""

import asyncio

import pytest

from mcp_sessions.security import mint_connection_id
from tests.support.failing_calls import fails, is_keyed
from tests.support.raw import RawClient, at_most, keyed, text_of
from tests.support.replicas import Cluster, cluster, lost

SOON = 1.0
"""Seconds; less than a round takes."""


async def refused(c: Cluster) -> tuple[RawClient, str]:
    """A client whose call "k" was refused by the first replica, which recorded its key."""
    client = await c[0].connected()
    session = (await client.start())["sessionId"]
    failed = fails(c[0].layer.store, "admit", after=True, when=is_keyed)
    reply = await client.call("wait", gate="g", meta=keyed("k", session)).reply.done()
    assert failed and reply.status == 503
    for number in range(len(c.worlds)):
        c[number].box.gate("g").go.set()
    return client, session


def ran(c: Cluster) -> int:
    return sum(len(w.box.calls) for w in c.worlds)


async def test_a_call_that_never_began_runs_at_the_same_replica() -> None:
    """Who recorded the key knows that nothing began under it."""
    async with cluster(2) as c:
        client, session = await refused(c)
        again = client.call("wait", gate="g", meta=keyed("k", session))
        assert text_of(await at_most(SOON, again.result())) == "through g"
        assert ran(c) == 1


@pytest.mark.parametrize("seed", range(6))
async def test_a_call_that_never_began_runs_at_another_replica(seed: int) -> None:
    """Which asks the one that recorded the key, and begins it in its place; once, however many
    ask at once and wherever.
    """
    async with cluster(3, seed=seed) as c:
        client, session = await refused(c)
        sent = [
            c.at(number % 3, client).call("wait", gate="g", meta=keyed("k", session))
            for number in (1, 2, 0, 2, 1)
        ]
        answers = [await at_most(16, one.result()) for one in sent]
        assert [text_of(answer) for answer in answers] == ["through g"] * 5
        assert ran(c) == 1


@pytest.mark.in_process
async def test_a_call_that_never_began_is_begun_though_the_question_for_it_is_lost() -> None:
    """Messages between replicas may be lost; who waits asks again."""
    async with cluster(2) as c:
        client, session = await refused(c)
        c.backplane.loses = lost("ask", "result")
        again = c.at(1, client).call("wait", gate="g", meta=keyed("k", session))
        await asyncio.sleep(3)
        c.backplane.loses = lambda _: False
        assert text_of(await at_most(16, again.result())) == "through g"
        assert ran(c) == 1


@pytest.mark.in_process
async def test_a_call_that_never_began_is_begun_when_the_store_is_back() -> None:
    """The replica that takes it over cannot record that at once."""
    async with cluster(2) as c:
        client, session = await refused(c)
        failed = fails(
            c[1].layer.store,
            "admit",
            after=True,
            when=lambda named: is_keyed(named) and bool(named["key"].instead_of),
        )
        again = c.at(1, client).call("wait", gate="g", meta=keyed("k", session))
        assert text_of(await at_most(16, again.result())) == "through g"
        assert failed and ran(c) == 1


@pytest.mark.in_process
async def test_a_call_that_never_began_says_so_if_the_store_stays_away() -> None:
    """ERR17: it waits for 15 seconds, and runs when it is sent again."""
    async with cluster(2) as c:
        client, session = await refused(c)
        failed = fails(
            c[1].layer.store,
            "admit",
            after=False,
            times=100,
            when=lambda named: is_keyed(named) and bool(named["key"].instead_of),
        )
        again = c.at(1, client).call("wait", gate="g", meta=keyed("k", session))
        error = await at_most(30, again.error())
        assert error["code"] == -32603
        assert error["data"] == {"reason": "store_unavailable", "started": False}
        assert ran(c) == 0
        failed.extend(["enough"] * 100)
        last = c.at(1, client).call("wait", gate="g", meta=keyed("k", session))
        assert text_of(await at_most(30, last.result())) == "through g"
        assert ran(c) == 1


@pytest.mark.in_process
async def test_a_repeat_is_told_of_an_unknown_outcome_if_the_store_stays_away() -> None:
    """KEY11: it runs at the other replica. Its answer is there when the store is back."""
    async with cluster(2) as c:
        client = await c[0].connected()
        session = (await client.start())["sessionId"]
        first = client.call("wait", gate="g", meta=keyed("k", session))
        await c[0].box.gate("g").started.wait()
        again = c.at(1, client).call("wait", gate="g", meta=keyed("k", session))
        await again.reply.started()
        c.backplane.is_away = True
        error = await at_most(40, again.error())
        assert error["code"] == -31012 and error["data"] == {"reason": "store_unavailable"}
        c.backplane.is_away = False
        c[0].box.gate("g").go.set()
        assert text_of(await first.result()) == "through g"
        last = c.at(1, client).call("wait", gate="g", meta=keyed("k", session))
        assert text_of(await at_most(40, last.result())) == "through g"
        assert ran(c) == 1


@pytest.mark.in_process
async def test_what_died_before_it_could_say_that_nothing_began_leaves_an_unknown_outcome() -> None:
    """KEY11: "the process that ran it is gone": nobody can tell any more."""
    async with cluster(2) as c:
        client, session = await refused(c)
        c.kill(0)
        again = c.at(1, client).call("wait", gate="g", meta=keyed("k", session))
        assert (await at_most(20, again.error()))["code"] == -31012
        assert ran(c) == 0


async def test_a_connection_that_this_process_had_and_has_no_more_is_not_there() -> None:
    """Its process lives, and knows better than the store: the session is free."""
    async with cluster(2) as c:
        own, other = (w.inside.connections for w in c.worlds)
        process = c[0].inside.runner.process
        gone = mint_connection_id("websocket", process)

        assert not await own.is_there(gone)
        # Another one cannot know.
        assert await other.is_there(gone)


async def test_an_answer_that_waits_for_the_store_reaches_another_replica() -> None:
    """KEY4: the process that ran the call has the answer. It stores it when it is asked for it."""
    async with cluster(2) as c:
        client = await c[0].connected()
        session = (await client.start())["sessionId"]
        failed = fails(c[0].layer.store, "finish_request", after=False, times=4)
        first = await client.call("echo", text="x", meta=keyed("k", session)).result()
        other = c.at(1, client)
        again = await at_most(60, other.call("echo", text="x", meta=keyed("k", session)).result())
        assert text_of(first) == text_of(again) == "x"
        assert len(failed) == 4 and c[0].box.calls == ["echo"] and c[1].box.calls == []
