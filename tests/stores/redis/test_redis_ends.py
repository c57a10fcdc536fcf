"""How sessions ended, over Redis: reported by one replica, whatever happened to the Redis."""

import asyncio

import pytest

from mcp_sessions import SessionPolicy
from mcp_sessions.core.ends import EndReason, SessionEnd
from mcp_sessions.ids import SessionId, digest
from mcp_sessions.stores.redis.redis_store import RedisStore
from tests.support.redis_server import namespace, redis_store
from tests.support.world import connected_world, world

pytestmark = pytest.mark.redis

LOGGER = "mcp_sessions.server.dispatch.history"


@pytest.fixture(autouse=True)
def at_info(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", LOGGER)


def notified(caplog: pytest.LogCaptureFixture, session_id: str) -> list[str]:
    """What the log says of a session, without its name."""
    named = f"session {digest(session_id)} "
    said = [each.getMessage() for each in caplog.records if each.name == LOGGER]
    return [each.removeprefix(named) for each in said if each.startswith(named)]


async def emptied(store: RedisStore) -> None:
    """FLUSHALL, as far as it is this test's."""
    link = store._link  # pyright: ignore[reportPrivateUsage]
    own = store._namespace  # pyright: ignore[reportPrivateUsage]
    for node in await link.nodes():
        _, keys = await node.call("SCAN", 0, "MATCH", f"*{own}*", "COUNT", 100_000)
        for key in keys:
            await node.call("DEL", key)


async def test_one_replica_says_that_a_redis_was_flushed(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """And one of them which sessions were lost, though both had something of them."""
    own = namespace()
    store = redis_store(own=own)
    async with world(store=store) as w, world(store=redis_store(own=own)) as other:
        client = await w.connected()
        await client.text("echo", text="x")
        await w.expire()
        await other.expire()
        await emptied(store)
        await asyncio.gather(w.expire(), other.expire())
        await asyncio.gather(w.expire(), other.expire())
        assert client.session_id is not None
        gone = ["ended: the store was emptied or replaced"]
        assert notified(caplog, client.session_id)[1:] == gone
        assert caplog.text.count("the sessions in it are gone") == 1


async def test_a_record_that_is_lost_is_reported_by_one_replica(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As by a Redis that evicts: its place is there, and its record is not."""
    monkeypatch.setattr("mcp_sessions.stores.redis.lists.IN_FLIGHT", -10)
    own = namespace()
    store = redis_store(own=own)
    async with connected_world(store=store, idle_timeout=50) as (w, client):
        session_id = SessionId((await client.start())["sessionId"])
        key = store._key(session_id)  # pyright: ignore[reportPrivateUsage]
        link = store._link  # pyright: ignore[reportPrivateUsage]
        await link.call("DEL", key)
        w.clock.advance(60)
        await w.expire()
        await w.expire()
        assert notified(caplog, session_id)[1:] == ["ended: its record was lost in the store"]


async def test_an_end_is_not_notified_a_second_time_as_lost(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Another replica sees the place of a session that is ended at that moment."""
    store = redis_store(own=namespace())
    await store.open(SessionPolicy())
    try:
        end = SessionEnd("a" * 12, EndReason.CLIENT, 1.8e9)
        await store.remember_ends([end], now=1.8e9)
        lost = SessionEnd("a" * 12, EndReason.LOST, 1.8e9 + 1)
        await store.remember_ends([lost], now=1.8e9 + 1, outside=True)
        assert list(await store.ended_outside(now=1.8e9 + 2)) == []
        assert list(await store.ends(now=1.8e9 + 2)) == [end]
    finally:
        await store.close()
