"""The modern era across replicas: listen streams, the server's own bus, keyed requests."""

import asyncio
from typing import Any

import pytest
from mcp.server import MCPServer

from mcp_sessions import current_session
from mcp_sessions.ids import SessionId
from tests.support.modern import ModernClient, Received
from tests.support.raw import UPDATED, Json, at_most, in_session, text_of
from tests.support.replicas import Cluster, cluster, events_are_lost, lost, numbers
from tests.support.virtual_time import cycles
from tests.support.world import Ctx, Toolbox

SOON = 1.0
SEEDS = range(6)


def modern(c: Cluster, number: int) -> ModernClient:
    return ModernClient(c[number].carrier)


async def listening(client: ModernClient, session: str | None) -> Received:
    return await client.listening(session, "a:1", lists=("tools",))


async def created(c: Cluster) -> SessionId:
    return SessionId((await modern(c, 0).create())["sessionId"])


@pytest.mark.parametrize("seed", SEEDS)
async def test_a_listen_stream_gets_what_other_replicas_store(seed: int) -> None:
    """ATT6, EVT7: what waits, then live, once and in order, by whichever replica."""
    async with cluster(3, seed=seed) as c:
        session = await created(c)

        producing = [
            asyncio.create_task(c[number].produce(session, 20, by=number)) for number in range(2)
        ]
        await cycles(seed * 3)
        received = await listening(modern(c, 2), session)
        await asyncio.gather(*producing)
        events = await at_most(SOON, received.has_events(40))
        await cycles(50)

        ids = [m["params"]["sessionEventId"] for m in received.events]
        assert ids == sorted(set(ids)) and len(ids) == 40
        for number in range(2):
            mine = [m for m in events if m["params"]["by"] == number]
            assert numbers(mine) == [*range(20)]


async def test_a_newer_listen_stream_at_another_replica_ends_the_older_one() -> None:
    """HTM9: "a newer listen of that session ends the older with its completion result"."""
    async with cluster(2) as c:
        session = await created(c)
        old = await listening(modern(c, 0), session)
        new = await listening(modern(c, 1), session)

        assert "error" not in await at_most(SOON, old.answer())
        await modern(c, 0).text("update", {"uri": "a:9"}, session=session)
        assert len(await at_most(SOON, new.has_events(1))) == 1
        assert not old.events


@pytest.mark.parametrize("replicas", [1, 2])
async def test_requests_at_once_do_not_make_a_state_together_that_cannot_be_sent(
    replicas: int,
) -> None:
    """STT12: each sees the same state, and adds half of what a token can hold. One is refused,
    and the session's answers can be sent.
    """
    async with cluster(replicas) as c:
        session = await created(c)
        both = asyncio.Barrier(2)

        async def set_half(ctx: Ctx, arguments: Json) -> str:
            current_session().state[arguments["name"]] = "x" * 2_000
            await both.wait()
            return "set"

        async def look(ctx: Ctx, arguments: Json) -> str:
            return ",".join(current_session().state)

        for number in range(replicas):
            c[number].box.tools |= {"set_half": set_half, "look": look}
        clients = modern(c, 0), modern(c, replicas - 1)
        received = [
            client.call("set_half", {"name": name}, session=session)
            for client, name in zip(clients, "ab", strict=True)
        ]
        answers = [await at_most(SOON, each.answer()) for each in received]

        [refused] = [answer["error"] for answer in answers if "error" in answer]
        assert refused["code"] == -32603
        [stored] = [name for name, a in zip("ab", answers, strict=True) if "result" in a]
        for client in clients:
            assert await client.text("look", session=session) == stored


@pytest.mark.parametrize("notified", [True, False])
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.in_process
async def test_a_displaced_listen_stream_gets_nothing_more(seed: int, notified: bool) -> None:
    """RES3: not one event that was stored after the takeover, whether it was notified of it or
    not.
    """
    async with cluster(3, seed=seed) as c:
        session = await created(c)
        old = await listening(modern(c, 0), session)
        if not notified:
            c.backplane.loses = lost("displaced")

        producing = asyncio.create_task(c[2].produce(session, 40))
        await cycles(seed * 5)
        rival = await c[1].connected()
        stream = await rival.get().started()
        resumed = await rival.resume(session)
        await producing
        await asyncio.sleep(6 if notified else 20)

        assert all(m["params"]["sessionEventId"] <= resumed["sessionEventId"] for m in old.events)
        theirs = [m for m in stream.messages if "sessionEventId" in m["params"]]
        assert numbers(old.events) + numbers(theirs) == [*range(40)]
        assert old.reply.ended


@pytest.mark.in_process
async def test_a_replay_that_waits_is_given_to_one_of_two_streams() -> None:
    """Both listen at once, on two replicas: the replay waits for one of them."""
    for seed in range(12):
        async with cluster(2, seed=seed) as c:
            session = await created(c)
            for n in range(3):
                await c[0].client().text("update", uri=f"a:{n}", meta=in_session(session))
            received = [modern(c, number).listen(session) for number in range(2)]
            await asyncio.gather(*(one.has(1) for one in received))
            await asyncio.sleep(6)

            assert sum(len(one.events) for one in received) in (0, 3)
            assert sorted(one.reply.ended for one in received) == [False, True]
            replayed = next(one for one in received if not one.reply.ended or one.events)
            assert len(replayed.events) in (0, 3)


@pytest.mark.in_process
async def test_a_lost_event_of_a_listen_stream_is_read() -> None:
    """ATT10."""
    async with cluster(2) as c:
        session = await created(c)
        received = await listening(modern(c, 1), session)
        c.backplane.loses = events_are_lost
        await modern(c, 0).text("update", {"uri": "a:9"}, session=session)
        await cycles(50)
        assert not received.events
        await at_most(6, received.has_events(1))


@pytest.mark.in_process
async def test_a_session_ended_at_another_replica_ends_its_listen_stream() -> None:
    """With -32043; also when the word of it is lost."""
    async with cluster(2) as c:
        for loses in (lost(), lost("ended")):
            session = await created(c)
            received = await listening(modern(c, 1), session)
            c.backplane.loses = loses
            await c[0].client().end(session)
            answer = await at_most(6, received.answer())
            assert answer["error"]["code"] == -32043


@pytest.mark.in_process
async def test_a_listen_stream_whose_attach_failed_leaves_nothing_behind() -> None:
    """It is no connection: nobody serves it."""
    async with cluster(1) as c:
        session = await created(c)
        store: Any = c.stores[0]
        attach = store.attach

        async def ended_just_before(*args: Any, **options: Any) -> None:
            del args, options

        store.attach = ended_just_before
        error = await modern(c, 0).listen(session).error()
        store.attach = attach

        assert error["code"] == -32043
        registry = c[0].inside.connections
        assert not registry.all()
        assert not c.stores[0].exchange.watched
        await listening(modern(c, 0), session)


# --- the server's own bus --------------------------------------------------------------------


def with_bus() -> tuple[Toolbox, object]:
    return Toolbox(), MCPServer("bus")


@pytest.mark.in_process
async def test_the_servers_bus_reaches_the_listeners_of_every_replica() -> None:
    """The SDK's bus is local to a process; over the store its listeners at another replica receive
    it, once.
    """
    async with cluster(3, server=with_bus) as c:
        bare = [await listening(modern(c, number), None) for number in range(3)]
        session = await created(c)
        own = await listening(modern(c, 1), session)

        await c[0].layer.notify_resource_updated("a:1")
        await c[2].layer.notify_tools_changed()
        for received in (*bare, own):
            await at_most(SOON, received.has_events(2))
        await asyncio.sleep(10)

        for received in (*bare, own):
            methods = sorted(m["method"] for m in received.events)
            assert methods == [
                "notifications/resources/updated",
                "notifications/tools/list_changed",
            ]
        assert c.notified("change") == 2


@pytest.mark.in_process
async def test_a_change_is_stored_once_for_each_session() -> None:
    """By the replica where it was announced, whoever learns of it."""
    async with cluster(3, server=with_bus) as c:
        session = await created(c)
        await c[0].layer.notify_tools_changed()
        await asyncio.sleep(10)

        head = await c.backplane.memory.head(session)
        assert head is not None and head.number == 1


@pytest.mark.in_process
async def test_a_server_without_a_bus_notifies_the_bare_connections_of_every_replica() -> None:
    """Transport-mode clients receive it from the store, once."""
    async with cluster(3) as c:
        clients = [await c[number].connected() for number in range(3)]
        streams = [
            await c.at((number + 1) % 3, client).get().started()
            for number, client in enumerate(clients)
        ]
        await c[0].layer.notify_tools_changed()
        await clients[0].result("resources/subscribe", {"uri": "a:1"})
        await c[2].layer.notify_resource_updated("a:1")

        await at_most(SOON, streams[0].has(2))
        for stream in streams[1:]:
            await at_most(SOON, stream.has(1))
        await asyncio.sleep(10)
        assert [len(stream.messages) for stream in streams] == [2, 1, 1]
        assert streams[0].messages[1]["method"] == UPDATED


async def test_a_keyed_request_of_the_modern_era_is_joined_at_another_replica() -> None:
    """KEY3, REQ5: its stream breaks, it runs on; sent again to B it gets the one answer."""
    async with cluster(2) as c:
        session = await created(c)
        first = await c[0].waits(modern(c, 0).call("wait", {"gate": "g"}, session=session, key="k"))
        first.leave()
        again = modern(c, 1).call("wait", {"gate": "g"}, session=session, key="k")
        await asyncio.sleep(0.5)
        c[0].box.gate("g").go.set()

        result = await at_most(SOON, again.result())
        assert text_of(result) == "through g"
        assert result["resultType"] == "complete"
        assert c[1].box.calls == []
