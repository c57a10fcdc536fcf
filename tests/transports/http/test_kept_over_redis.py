"""A real Redis stands still while a call runs, and its client loses the stream (HTL10)."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

import pytest

from mcp_sessions import SessionSecurity
from mcp_sessions.stores.redis.redis_store import RedisStore
from tests.support.raw import RawClient, Reply, Sent, uris
from tests.support.redis_server import RedisServer, redis_server
from tests.support.virtual_time import Backend
from tests.support.world import World, world
from tests.transports.http.test_kept_messages import adds_steps, stepping, steps_of

pytestmark = pytest.mark.redis

AWAY = "writes wait until it is back"


@pytest.fixture
def anyio_backend() -> Backend:
    """Real time, for a real server."""
    return ("asyncio", {})


@asynccontextmanager
async def over_redis() -> AsyncGenerator[tuple[RedisServer, World, RawClient]]:
    """A process whose Redis has half a second to answer."""
    with redis_server() as server:
        store = RedisStore(server.url, timeout=0.5)
        async with world(store=store, security=SessionSecurity(["k" * 32])) as w:
            adds_steps(w.box)
            yield server, w, await w.connected()


async def is_away(caplog: pytest.LogCaptureFixture) -> None:
    async with asyncio.timeout(20):
        while AWAY not in caplog.text:  # noqa: ASYNC110
            await asyncio.sleep(0.02)


async def resumed(client: RawClient, position: str) -> Reply:
    """The rest of a stream. The store's connection may take a moment."""
    async with asyncio.timeout(20):
        while (reply := await client.get(position).done()).status == 503:  # noqa: ASYNC110
            await asyncio.sleep(0.05)
    return reply


@pytest.mark.parametrize("suspends", [True, False])
async def test_a_call_that_ends_while_redis_stands_still_is_answered_to_who_comes_back(
    suspends: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """The first write is executed late, when its sender has given it up: no message comes twice."""
    async with over_redis() as (server, w, client):
        sent: Sent = stepping(client, 1)
        await sent.reply.event(1)
        await sent.reply.gone()
        if suspends:
            server.suspend()
        else:
            server.ask("CLIENT PAUSE 2000 WRITE")
        w.box.gate("1").go.set()
        await is_away(caplog)
        if suspends:
            server.resume()

        reply = await resumed(client, sent.reply.events[0].id)
        assert steps_of(reply) == [1, 2, 3, 4]
        assert reply.answer_to(sent.id) is not None
        ids = [event.id for event in reply.events]
        assert ids == sorted(set(ids))


async def test_events_of_that_time_come_once_and_in_order(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with over_redis() as (server, w, client):

        async def updates(ctx: object, arguments: object) -> str:
            await w.box.gate("g").arrive()
            for number in "1234":
                await w.box.tools["update"](ctx, {"uri": number})  # pyright: ignore[reportArgumentType]
            return "updated"

        w.box.tools["updates"] = updates
        await client.start()
        stream = await client.get().started()
        sent = client.call("updates")
        await w.box.gate("g").started.wait()
        server.suspend()
        w.box.gate("g").go.set()
        await sent.result()
        await is_away(caplog)
        server.resume()
        assert uris(await stream.has(4)) == list("1234")
