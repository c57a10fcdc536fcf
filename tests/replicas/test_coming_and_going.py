"""Replicas that are drained, that die, and a store that is away."""

import asyncio
from typing import Any

import pytest

from mcp_sessions.core.messages import encode
from mcp_sessions.ids import SessionId
from tests.support.raw import (
    EXTENSION,
    at_most,
    in_session,
    keyed,
    text_of,
    uris,
)
from tests.support.replicas import Cluster, cluster
from tests.support.virtual_time import cycles

pytestmark = pytest.mark.in_process

SOON = 1.0
SEEDS = range(6)
PING = {"jsonrpc": "2.0", "id": 99, "method": "ping"}


async def test_a_drained_replica_hands_its_clients_over() -> None:
    """WSS17: it tells those whose streams are open there when to come back, finishes what runs, and
    takes nothing new; the sessions stay, attached as they were, on the others.
    """
    async with cluster(2, reconnect_spread=5) as c:
        client = await c[0].connected(capabilities={"extensions": {EXTENSION: {}}})
        session = (await client.start())["sessionId"]
        stream = await client.get().started()
        other = await c[1].connected(capabilities={"extensions": {EXTENSION: {}}})
        await other.start()
        other_stream = await other.get().started()
        await c.at(0, other).text("echo", text="x")
        waits = await c[0].waits(client.call("wait", gate="g"))

        draining = asyncio.create_task(c[0].layer.drain(grace=10))
        notified = (await at_most(SOON, stream.has(1)))[0]
        assert notified["params"] == {
            "sessionId": session,
            "reason": "draining",
            "retryAfter": 5.0,
        }
        refused = await client.post(PING).done()
        assert (refused.status, refused.header("retry-after")) == (503, "5")
        process = c[0].inside.runner.process
        assert await c.stores[1].exchange.is_alive(process)
        c[0].box.gate("g").go.set()
        assert text_of(await waits.result()) == "through g"
        await draining
        await stream.done()
        assert not await c.stores[1].exchange.is_alive(process)

        same = c.at(1, client)
        again = await same.get(stream.events[-1].id).started()
        assert await same.text("session_id") == session
        await same.text("update", uri="a:1")
        assert uris(await at_most(SOON, again.has(1))) == ["a:1"]
        assert not other_stream.messages


async def test_a_key_of_a_replica_that_was_drained_is_answered() -> None:
    """WSS17, KEY3: cut at the end of its grace, its outcome is kept as unknown; nobody waits."""
    async with cluster(2) as c:
        client = await c[0].connected()
        await client.start()
        waits = await c[0].waits(client.call("wait", gate="g", meta=keyed("k")))
        again = c.at(1, client).call("wait", gate="g", meta=keyed("k"))
        await asyncio.sleep(0.5)
        await c[0].layer.drain(grace=1)

        for one in (waits, again):
            assert (await at_most(SOON, one.error()))["code"] == -31012


async def test_what_waits_for_another_replica_is_answered_when_this_one_drains() -> None:
    """WSS17, CLI1: the client learns that nobody knows; sent again at another replica it is
    answered.
    """
    async with cluster(3) as c:
        client = await c[0].connected()
        await client.start()
        waits = await c[0].waits(client.call("wait", gate="g", meta=keyed("k")))
        again = c.at(1, client).call("wait", gate="g", meta=keyed("k"))
        await asyncio.sleep(0.5)
        await c[1].layer.drain(grace=1)
        assert (await at_most(SOON, again.error()))["code"] == -31012
        third = c.at(2, client).call("wait", gate="g", meta=keyed("k"))
        await asyncio.sleep(0.5)
        c[0].box.gate("g").go.set()

        for one in (waits, third):
            assert text_of(await at_most(SOON, one.result())) == "through g"


async def test_a_dead_replica_takes_nothing_with_it() -> None:
    """KEY11, ATT9: whatever was where: the stream, the session, the current session."""
    async with cluster(3) as c:
        client = await c[0].connected()
        started = await client.start()
        stream = await client.get().started()
        await client.text("update", uri="a:1")
        await stream.has(1)
        c.kill(0)

        same = c.at(1, client)
        again = await same.get(stream.events[-1].id).started()
        assert await same.text("session_id") == started["sessionId"]
        await c.at(2, client).text("update", uri="a:2")
        assert uris(await at_most(SOON, again.has(1))) == ["a:2"]


@pytest.mark.parametrize("seed", SEEDS)
async def test_a_store_that_is_away_is_reported_and_comes_back(seed: int) -> None:
    """HTP5: 503 with ``Retry-After``, never a silent fall back to memory; nothing is lost that was
    stored, and it recovers by itself.
    """
    async with cluster(2, seed=seed) as c:
        client = await c[0].connected()
        await client.start()
        stream = await c.at(1, client).get().started()
        await client.text("update", uri="a:1")
        await stream.has(1)
        c.backplane.is_away = True
        for number in range(2):
            reply = await c.at(number, client).post(PING).done()
            assert (reply.status, reply.header("retry-after")) == (503, "1")
        await asyncio.sleep(30)
        c.backplane.is_away = False

        await client.text("update", uri="a:2")
        assert uris(await at_most(6, stream.has(2))) == ["a:1", "a:2"]


async def test_a_store_that_is_away_is_not_asked_without_end() -> None:
    """HTP5: "no busy loop": per replica and second, a handful of questions."""
    async with cluster(2) as c:
        client = await c[0].connected()
        await client.start()
        await c.at(1, client).get().started()
        running = await c[0].waits(client.call("wait", gate="g", meta=keyed("k")))
        again = c.at(1, client).call("wait", gate="g", meta=keyed("k"))
        await asyncio.sleep(1)
        c.backplane.is_away = True
        for store in c.stores:
            store.exchange.put(lambda received: received.on_gap())
            store.calls.clear()
        await asyncio.sleep(100)
        assert all(len(store.calls) < 300 for store in c.stores)

        c.backplane.is_away = False
        c[0].box.gate("g").go.set()
        unknown = (await at_most(6, again.answer()))["error"]
        assert (unknown["code"], unknown["data"]) == (-31012, {"reason": "store_unavailable"})
        once_more = c.at(1, client).call("wait", gate="g", meta=keyed("k"))
        for one in (running, once_more):
            assert text_of(await at_most(6, one.result())) == "through g"


async def test_a_running_request_is_answered_though_the_store_is_away() -> None:
    """HTP5, CLI1: its handler ran; who still listens gets the answer, on a stream as on JSON."""
    async with cluster(1) as c:
        client = await c[0].connected()
        streamed = await c[0].waits(
            client.call("progress", steps=2, gate="g", meta={"progressToken": 1})
        )
        silent = client.call("wait", gate="g")
        await asyncio.sleep(1)
        c.backplane.is_away = True
        c[0].box.gate("g").go.set()

        assert text_of(await at_most(SOON, streamed.result())) == "reported"
        assert text_of(await at_most(SOON, silent.result())) == "through g"


async def test_a_message_of_another_version_is_left_out(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A deploy has two versions at once: what one does not know it leaves alone."""
    async with cluster(2) as c:
        client = await c[0].connected()
        session = (await client.start())["sessionId"]
        stream = await c.at(1, client).get().started()
        exchange = c.stores[0].exchange
        for message in (
            b"\xff",
            b"[]",
            b"{}",
            encode({"v": 2, "kind": "ended", "session": session, "connection": None}),
            encode({"v": 1, "kind": "ended", "from": "x"}),
            encode({"v": 1, "kind": "nothing-known", "from": "x"}),
        ):
            await exchange.send(message)
        await cycles(20)
        assert caplog.text.count("a message between replicas is malformed") == 4
        await client.text("update", uri="a:1")
        assert uris(await at_most(SOON, stream.has(1))) == ["a:1"]


async def test_a_message_is_only_a_hint() -> None:
    """Rule 2 of the messages: forged ones end, displace and hand over nothing."""
    async with cluster(2) as c:
        client = await c[0].connected()
        session = (await client.start())["sessionId"]
        stream = await client.get().started()
        waits = await c[0].waits(client.call("wait", gate="g", meta=in_session(session)))
        forged: list[dict[str, Any]] = [
            {"kind": "ended", "session": session, "connection": client.session_id},
            {"kind": "ended", "session": client.session_id, "connection": None},
            {"kind": "withdrawn", "session": session, "connection": client.session_id},
            {
                "kind": "displaced",
                "session": session,
                "connection": client.session_id,
                "epoch": 1,
                "reason": "taken_over",
                "newer": None,
            },
        ]
        for message in forged:
            await c.stores[1].exchange.send(encode({"v": 1, "from": "x", **message}))
        await cycles(50)
        await client.text("update", uri="a:1")
        assert uris(await at_most(SOON, stream.has(1))) == ["a:1"]
        c[0].box.gate("g").go.set()
        assert text_of(await waits.result()) == "through g"


async def test_a_connection_not_in_use_here_is_released() -> None:
    """END2: each replica that a client came by keeps nothing of it for ever."""
    async with cluster(2, idle_timeout=60, max_lifetime=10_000) as c:
        client = await c[0].connected()
        for number in range(2):
            await c.at(number, client).text("echo", text="x")
        for _ in range(8):
            c.clock.advance(20)
            await client.result("ping")
            await asyncio.sleep(5)

        assert [len(w.inside.connections.all()) for w in c.worlds] == [1, 0]
        assert await c.at(1, client).text("echo", text="x") == "x"


async def test_a_session_whose_connection_has_ended_is_free() -> None:
    """ATT9: who ended the connection died before it could say so of what was attached there."""
    async with cluster(2) as c:
        client = await c[0].connected()
        session = (await client.start())["sessionId"]
        assert client.session_id is not None
        await c.backplane.memory.end(SessionId(client.session_id))
        for world in c.worlds:
            await world.inside.lifecycle.forget_here(SessionId(client.session_id), None)
        other = await c[1].connected()
        stream = await other.get().started()
        await other.text("echo", text="x", meta=in_session(session))
        await other.text("update", uri="a:1", meta=in_session(session))

        assert uris(await at_most(SOON, stream.has(1))) == ["a:1"]


def listening(c: Cluster) -> int:
    """How many streams the replicas watch."""
    return sum(len(store.exchange.watched) for store in c.stores)


async def test_nothing_is_watched_that_nobody_has_open() -> None:
    """END2: streams come and go; what they were received by goes with them."""
    async with cluster(2) as c:
        client = await c[0].connected()
        session = (await client.start())["sessionId"]
        for number in range(10):
            stream = await c.at(number % 2, client).get().started()
            await stream.gone()
        await cycles(50)
        assert listening(c) == 0
        await client.end(session)
