"""Idle is not dead: a session that nobody used is found again, over a store that lasts."""

from pathlib import Path
from typing import Any

import pytest

from mcp_sessions import Conversations, SessionSecurity
from mcp_sessions.ids import SessionId, digest
from mcp_sessions.server.delivery.stored_connection import StoredConnection
from mcp_sessions.stores.memory import MemoryStore
from mcp_sessions.stores.sqlite.sqlite_store import SQLiteStore
from tests.server.dispatch.test_conversation_sessions import tools
from tests.support.raw import RawClient, in_session
from tests.support.replicas import Backplane, cluster, user
from tests.support.world import Clock, World, world

HALF_AN_HOUR, DAY = 1_800, 86_400
ON: dict[str, Any] = {"conversations": Conversations(), "forget_after": 30 * DAY}


def that_lasts(kind: str, tmp_path: Path) -> Any:
    """A store that outlives the process."""
    return f"sqlite:///{tmp_path}/s.db" if kind == "sqlite" else Backplane().store()


async def sleep(w: World) -> int:
    """What the rounds do; how many sessions have ended."""
    ended = await w.expire()
    await w.inside.lifecycle.sleep()
    return ended


def known_here(w: World) -> list[StoredConnection]:
    """What the process holds of connections over HTTP."""
    connections = w.inside.connections.all()
    return [each for each in connections if isinstance(each, StoredConnection)]


async def running(w: World) -> tuple[RawClient, str]:
    """A client that counted once, is subscribed, and had an event; and that one's id."""
    tools(w)
    client = await w.connected()
    await client.result("resources/subscribe", {"uri": "a:1"})
    assert await client.text("count") == "connection 1 1"
    stream = await client.get().started()
    await w.layer.notify_resource_updated("a:1")
    await stream.has(1)
    had = stream.events[-1].id
    assert had is not None
    await stream.gone()
    return client, had


async def refetched(client: RawClient, position: str | None) -> list[str]:
    """What a stream opens with for who lost its place."""
    stream = client.get(position)
    said = [message["method"].removeprefix("notifications/") for message in await stream.has(4)]
    stream.leave()
    return said


ALL = [
    "resources/updated",
    "prompts/list_changed",
    "resources/list_changed",
    "tools/list_changed",
]


async def test_a_client_that_was_idle_over_the_weekend_continues() -> None:
    """With its state, its subscriptions, and what it said of itself; of what it was sent it has to
    read everything again.
    """
    async with world(**ON) as w:
        client, had = await running(w)
        await w.layer.notify_resource_updated("a:1")
        w.clock.advance(HALF_AN_HOUR)
        assert (await sleep(w), known_here(w)) == (0, [])
        w.clock.advance(3 * DAY)
        assert await sleep(w) == 0

        assert await client.text("count") == "connection 2 2"
        assert await refetched(client, had) == ALL
        stream = await client.get().started()
        await w.layer.notify_resource_updated("a:1")
        assert (await stream.has(1))[0]["params"] == {"uri": "a:1"}
        await stream.gone()

        w.clock.advance(30 * DAY - 1)
        assert await sleep(w) == 0
        w.clock.advance(1)
        assert await sleep(w) == 1
        assert (await client.send("tools/list").reply.done()).status == 404


async def test_it_finds_what_came_while_it_slept() -> None:
    """Who had everything, and knows where it was, is sent that, and nothing else."""
    async with world(**ON) as w:
        client, had = await running(w)
        w.clock.advance(HALF_AN_HOUR)
        await sleep(w)
        await w.layer.notify_resource_updated("a:1")
        stream = client.get(had)
        await stream.has(1)
        await w.layer.notify_resource_updated("a:2")
        await w.layer.notify_resource_updated("a:1")
        assert [each["params"] for each in await stream.has(2)] == [{"uri": "a:1"}] * 2
        stream.leave()


async def test_off_it_ends_as_ever() -> None:
    async with world(forget_after=1) as w:
        client, had = await running(w)
        w.clock.advance(HALF_AN_HOUR)
        assert (await client.send("tools/list").reply.done()).status == 404
        assert (await client.get(had).done()).status == 404
        assert await sleep(w) == 1


async def test_a_stream_that_is_open_is_served_on() -> None:
    """The process keeps the connection, and only its past goes."""
    async with world(**ON) as w:
        client, _ = await running(w)
        stream = await client.get().started()
        w.clock.advance(HALF_AN_HOUR)
        await sleep(w)
        assert len(known_here(w)) == 1
        await w.layer.notify_resource_updated("a:1")
        assert (await stream.has(1))[0]["params"] == {"uri": "a:1"}
        stream.leave()


async def test_a_call_that_takes_longer_than_the_idle_time_is_answered() -> None:
    """The process keeps its connection, and the store what is sent on it."""
    async with world(**ON) as w:
        client = await w.connected()
        sent = await w.waits(client.call("wait", gate="g"))
        for _ in range(3):
            w.clock.advance(HALF_AN_HOUR - 1)
            await sleep(w)
        w.box.gate("g").go.set()
        assert (await sent.result())["content"][0]["text"] == "through g"


async def test_one_that_a_user_left_makes_room() -> None:
    """As if it had ended: who comes has a place, and nobody who is awake loses it."""
    async with world(**ON, max_sessions=3) as w:
        ann, bob, eve = [await w.carrier_of(user(name)) for name in ("ann", "bob", "eve")]
        left, mine = RawClient(ann), RawClient(bob)
        await left.initialize()
        await left.result("resources/subscribe", {"uri": "a:1"})
        w.clock.advance(HALF_AN_HOUR)
        for client in (mine, RawClient(eve), RawClient(eve)):
            await client.initialize()
        assert (await left.send("tools/list").reply.done()).status == 404
        assert (await mine.send("tools/list").reply.done()).status == 200


async def test_it_continues_after_a_restart(tmp_path: Path) -> None:
    """However long the server was away, and nobody put it to sleep."""
    security = SessionSecurity(["k" * 32])
    file = tmp_path / "sessions.db"
    settings: dict[str, Any] = {"conversations": Conversations(), "security": security}
    async with world(store=SQLiteStore(file), **settings) as w:
        client, _ = await running(w)
        await w.layer.notify_resource_updated("a:1")
        clock = w.clock
    clock.advance(3 * DAY)
    async with world(store=SQLiteStore(file), clock=clock, **settings) as w:
        tools(w)
        assert await sleep(w) == 0
        again = RawClient(w.carrier)
        again.session_id = client.session_id
        assert await again.text("count") == "connection 2 2"
        assert await refetched(again, None) == ALL


async def test_it_continues_at_another_replica() -> None:
    async with cluster(2, **ON) as c:
        client, had = await running(c[0])
        tools(c[1])
        for _ in range(2):
            c[0].clock.advance(HALF_AN_HOUR)
            for w in c.worlds:
                assert await sleep(w) == 0
        there = c.at(1, client)
        assert await there.text("count") == "connection 2 2"
        stream = there.get(had)
        await c[0].layer.notify_resource_updated("a:1")
        methods = [message["method"] for message in await stream.has(2)]
        assert methods == ["notifications/x", "notifications/resources/updated"]
        stream.leave()


@pytest.mark.parametrize("store", ["sqlite", "shared"])
async def test_over_a_store_that_lasts_it_sleeps_without_any_setting(
    store: str, tmp_path: Path
) -> None:
    """A stock client that comes back after a week is not answered 404. What it was sent is gone."""
    async with world(store=that_lasts(store, tmp_path), forget_after=None) as w:
        client, had = await running(w)
        w.clock.advance(7 * DAY)
        assert await sleep(w) == 0
        assert await client.text("echo", text="x") == "x"
        stream = await client.get(had).started()
        assert stream.status == 200
        await stream.gone()
        w.clock.advance(31 * DAY)
        assert (await client.send("tools/list").reply.done()).status == 404


async def test_after_a_restart_nobody_who_comes_back_makes_room(tmp_path: Path) -> None:
    """A client whose GET stream was open needs a moment to open it again. Then who is away goes."""
    url, clock = f"sqlite:///{tmp_path}/s.db", Clock()
    limits: dict[str, Any] = {"max_sessions": 2, "min_evictable_idle_time": 60.0}
    clients: list[RawClient] = []
    async with world(store=url, clock=clock, **limits) as w:
        for _ in range(2):
            clients.append(await w.connected())
            (await clients[-1].get().started()).leave()
        clock.advance(100)
    async with world(store=url, clock=clock, **limits) as w:
        for client in clients:
            client.carrier = w.carrier
        with pytest.raises(AssertionError, match="max_sessions"):
            await w.client().initialize()
        back = await clients[0].get().started()
        assert back.status == 200
        clock.advance(61)
        await w.connected()
        assert (await clients[0].send("ping").reply.done()).status == 200
        assert (await clients[1].send("ping").reply.done()).status == 404
        back.leave()


# --- sessions that a client started ---------------------------------------------------------


@pytest.mark.parametrize("store", ["sqlite", "shared"])
async def test_a_session_that_a_client_started_sleeps_over_a_store_that_lasts(
    store: str, tmp_path: Path
) -> None:
    """SES13: it is resumed after a weekend, with its data and its subscriptions, and receives what
    comes then. Its past is gone. ``expiresAt`` is the day on which it expires (SES16).
    """
    async with world(store=that_lasts(store, tmp_path), forget_after=None) as w:
        client = await w.connected()
        started = await client.start()
        session, had = started["sessionId"], started["sessionEventId"]
        await client.result("resources/subscribe", {"uri": "a:1"})
        assert await w.layer.store.replace_data(session, {"n": 1}, expected_version=0)
        await w.layer.notify_resource_updated("a:1")
        assert await client.delete().done()
        w.clock.advance(HALF_AN_HOUR)
        assert await sleep(w) == 0
        await w.layer.notify_resource_updated("a:1")
        w.clock.advance(3 * DAY - HALF_AN_HOUR)
        assert await sleep(w) == 0

        again = await (await w.connected()).resume(session, had)
        assert (again["resumed"], again["catchup"], again["reason"]) == (True, False, "evicted")
        assert again["expiresAt"] == "2027-02-17T08:00:00Z"
        head = again["sessionEventId"]
        data = await w.layer.store.load_data(session)
        assert data is not None and data.value == {"n": 1}
        w.clock.advance(HALF_AN_HOUR)
        await w.layer.notify_resource_updated("a:1")
        again = await (await w.connected()).resume(session, head)
        assert (again["catchup"], again["replayed"]) == (True, 1)

        w.clock.advance(30 * DAY)
        assert (await w.client().error("session/resume", {"sessionId": session}))["code"] == -32043
        assert await sleep(w) > 0
        [end] = [each for each in await w.layer.sessions.ended() if each.session == digest(session)]
        assert str(end) == "it expired after 30d without a request"


async def test_in_memory_it_expires_as_soon_as_it_would_sleep() -> None:
    """What is kept there costs memory, and ends with the process."""
    async with world(store=MemoryStore(), forget_after=None) as w:
        session = (await w.client().start())["sessionId"]
        w.clock.advance(HALF_AN_HOUR)
        assert (await w.client().error("session/resume", {"sessionId": session}))["code"] == -32043
        assert await sleep(w) == 1


@pytest.mark.parametrize("limit", ["max_sessions", "max_sessions_per_principal"])
async def test_what_sleeps_makes_room_for_what_a_client_starts(limit: str) -> None:
    """SES20: the least recently used first, also of a user who has a limit of his own. What is
    awake stays.
    """
    limits: dict[str, Any] = {"forget_after": 30 * DAY, limit: 2}
    async with world(**limits) as w:
        client = RawClient(await w.carrier_of(user("ann")))
        first, second = [(await client.start())["sessionId"] for _ in range(2)]
        w.clock.advance(HALF_AN_HOUR - 1)
        await client.resume(first)
        assert (await client.error("session/start"))["code"] == -31011
        w.clock.advance(1)
        await client.start()
        assert (await client.error("session/start"))["code"] == -31011
        assert (await client.resume(first))["resumed"]
        assert (await client.error("session/resume", {"sessionId": second}))["code"] == -32043
        ended = [(each.session, each.limit) for each in await w.layer.sessions.ended()]
        assert ended == [(digest(second), limit)]


async def test_what_sleeps_has_a_bound_in_bytes(caplog: pytest.LogCaptureFixture) -> None:
    """The least recently used end, with a reason. What is awake does not count."""
    async with world(forget_after=30 * DAY, max_sleeping_bytes=30_000) as w:
        client = await w.connected()
        sessions: list[SessionId] = []
        for _ in range(4):
            sessions.append(SessionId((await client.start())["sessionId"]))
            heavy = {"text": "x" * 11_000}
            assert await w.layer.store.replace_data(sessions[-1], heavy, expected_version=0)
            w.clock.advance(10)
        w.clock.advance(HALF_AN_HOUR - 30)
        await sleep(w)
        assert await w.layer.sessions.ended() == []
        w.clock.advance(20)
        await client.result("ping", {"_meta": in_session(sessions[3])})
        await sleep(w)
        [end] = await w.layer.sessions.ended()
        assert (end.session, end.limit) == (digest(sessions[0]), "max_sleeping_bytes")
        said = "hold more than 30000 bytes (max_sleeping_bytes): 1 unused ones were ended"
        assert said in caplog.text
        await sleep(w)
        assert len(await w.layer.sessions.ended()) == 1
