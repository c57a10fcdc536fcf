"""Incidents that an operator finds from the page alone, as ``docs/dashboard.md`` says.

A client that names a dead id is in ``test_layer_dashboard.py``.
"""

import asyncio
import re
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

import anyio
import pytest
from mcp.server import MCPServer

from mcp_sessions import SessionLayer, StdioServer
from mcp_sessions.core.ends import EndReason, SessionEnd
from mcp_sessions.core.story import Entry, Why, detaches
from mcp_sessions.ids import SessionId, digest
from mcp_sessions.principal import Principal
from mcp_sessions.server.cluster.replica_messages import Instruct
from mcp_sessions.stores.contract import SessionStore
from mcp_sessions.stores.memory import MemoryStore
from mcp_sessions.stores.record_changes import Tell
from mcp_sessions.stores.redis import RedisStore
from tests.dashboard.pages import PROCESS, attached, made, opened, pages_of
from tests.dashboard.test_layer_dashboard import ACCEPT, INITIALIZE, begun, browser, seen
from tests.support.duplex import duplex_world
from tests.support.redis_server import asked, namespace, redis_server, shared_redis

pytestmark = pytest.mark.anyio


class Replicas:
    """Replicas that say what a test makes them say."""

    hint = ""

    def __init__(self, *said: Mapping[str, Any], alive: bool = True) -> None:
        self.said, self._alive = said, alive

    def hold(self, task: asyncio.Task[Any]) -> None:
        """Do nothing: they stay until the test ends."""

    async def look(self) -> Sequence[Mapping[str, Any]]:
        return self.said

    async def is_alive(self, process: str) -> bool | None:
        return self._alive

    async def instruct(self, process: str, message: Instruct) -> bool:
        return False


async def told(store: SessionStore, text: str) -> str:
    """The digest of a session with an entry in its story."""
    session_id = await made(store)
    assert await store.change(session_id, Tell([Entry(time.time(), text)]))
    return digest(session_id)


async def test_a_flooder_has_most_sessions_and_its_story_has_the_refusals() -> None:
    async with opened(MemoryStore) as store, pages_of(store) as pages:
        for _ in range(30):
            await made(store, client="flooder 1", principal=Principal(subject="mallory"))
        await made(store)
        overview = await pages.get()
        name = await told(store, "refused max_running_requests tools/call 40")
        await pages.snapshots.whole()

        assert "mallory</a><b>30</b>" in overview and "flooder 1</a><b>30</b>" in overview
        clock = pages.snapshots.clock
        pages.snapshots.clock = lambda: clock() + 5
        said = await pages.get(f"/session/{name}")
        assert "refused tools/call (max_running_requests), 40 times" in said


async def test_a_replica_that_died_gives_no_sign_of_life() -> None:
    async with opened(MemoryStore) as store, pages_of(store, Replicas(alive=False)) as pages:
        await attached(store, await made(store), PROCESS)
        said = await pages.get("/replicas")

        assert "abcdefgh</a>" in said and "no sign of life" in said


async def test_a_store_that_was_emptied_is_the_first_line() -> None:
    async with opened(MemoryStore) as store, pages_of(store) as pages:
        now = pages.snapshots.clock()
        end = SessionEnd("0123456789ab", EndReason.EMPTIED, now - 60)
        await store.remember_ends([end], now=now)

        assert "The store was emptied or replaced" in await pages.get()
        assert "0123456789ab" in await pages.get("/ended?reason=emptied")


@pytest.mark.parametrize(
    ("text", "said", "overview"),
    [
        (
            detaches(0, Why.SLOW, "abcdefgh").text,
            "detached at replica abcdefgh: slow",
            r"cut: its client took nothing</span><b>1<",
        ),
        (
            detaches(0, Why.CREDENTIAL_EXPIRED, "abcdefgh").text,
            "abcdefgh: credential-expired",
            r"cut: its credential expired</span><b>1<",
        ),
        (
            "attached http abcdefgh resumed free 3 40 0 30 evicted",
            "from event 3: nothing replayed (evicted); events up to 30 were evicted",
            r"resumes without replay</span><b>1<",
        ),
        (
            "asked elicitation/create 45",
            "elicitation/create waited for its client for 45s",
            r"no live session was cut or refused",
        ),
    ],
    ids=["a slow reader", "an expired credential", "a window too small", "a proxy that buffers"],
)
async def test_the_story_of_a_session_says_it(text: str, said: str, overview: str) -> None:
    async with opened(MemoryStore) as store, pages_of(store) as pages:
        name = await told(store, text)

        now = await pages.get()
        assert re.search(overview, now) and (f"/session/{name}" in now) == ("cut or ref" not in now)
        assert said in await pages.get(f"/session/{name}")


async def test_what_is_counted_has_a_rate() -> None:
    """An eviction a minute is not what a flood of them is."""
    before = {"Sessions over (protocol, evicted)": 100}
    replicas = Replicas({"name": "abcdefgh", "process": PROCESS, "counts": before})
    async with opened(MemoryStore) as store, pages_of(store, replicas) as pages:
        now = pages.snapshots.clock()
        pages.snapshots.clock = lambda: now
        assert "evicted)</span><b>100<" in await pages.get()
        pages.snapshots.clock = lambda: now + 30
        replicas.said = ({**replicas.said[0], "counts": {next(iter(before)): 120}},)
        assert "evicted) · 40 a minute</span><b>120<" in await pages.get()


async def test_a_clock_that_is_an_hour_off_is_the_first_line() -> None:
    facts = {"name": "abcdefgh", "process": PROCESS, "age": 9.0, "memory": None, "clock_off": 3_600}
    async with opened(MemoryStore) as store, pages_of(store, Replicas(facts)) as pages:
        assert "The clock of replica abcdefgh is 1h ahead." in await pages.get()
        assert "1h ahead" in await pages.get("/replicas")


@pytest.mark.redis
async def test_a_redis_that_somebody_flushes_is_the_first_line() -> None:
    with redis_server() as redis:
        store = RedisStore(redis.url)
        layer = SessionLayer(MCPServer("notes"), store=store)
        async with layer.lifespan(), browser(layer.asgi_app(dashboard="/sessions")) as client:
            name = digest(SessionId(await begun(client)))
            await seen(client, "/sessions/", r">1</div><div class=\"label\">sessions")
            assert await asked(store, "FLUSHALL") == b"OK"

            said = await seen(client, "/sessions/", "The store was emptied or replaced")
            assert "1 sessions ended by that" in said
            ended = (await client.get(f"/sessions/session/{name}")).text
            assert "The store was emptied or replaced. What to do: give the sessions a" in ended


@pytest.mark.redis
async def test_a_clock_that_is_an_hour_ahead_of_redis_is_the_first_line() -> None:
    store = RedisStore(shared_redis().url, namespace=namespace(), clock=lambda: time.time() + 3_600)
    layer = SessionLayer(MCPServer("notes"), store=store)
    async with layer.lifespan(), browser(layer.asgi_app(dashboard="/sessions")) as client:
        await begun(client)

        await seen(client, "/sessions/", r"The clock of replica \S+ is (1h|59m59s) ahead\.")


async def seen_anew(layer: SessionLayer, path: str, text: str) -> None:
    """A new page has a text, in the end. The clock of the layer does not move, so an open one would
    not be read again.
    """
    with anyio.fail_after(40):
        while True:
            async with browser(layer.dashboard()) as client:
                if text in (await client.get(path)).text:
                    return
            await anyio.sleep(0.1)


async def test_a_client_that_does_not_read_is_named() -> None:
    """First its buffer is full. Then it is cut, and its session stays."""
    limits: dict[str, Any] = {"send_buffer": 20_000, "slow_timeout": 3.0}
    async with duplex_world(send_buffer_of_kernel=16_384, **limits) as world:
        slow = await world.websocket(receive_buffer=4_096)
        await slow.initialize()
        session_id = SessionId((await slow.start())["sessionId"])
        await slow.stall()
        flood = [f"note://{number}/{'x' * 800}" for number in range(300)]
        await world.publish(session_id, *flood)

        await seen_anew(world.layer, "/", "Clients whose buffer is full</span><b>1<")
        name = digest(session_id)
        cut = f"{name}</a> cut: its client took nothing</span><b>1<"
        await seen_anew(world.layer, "/", cut)
        what_to_do = "look at the client, and for a proxy that buffers"
        await seen_anew(world.layer, f"/session/{name}", what_to_do)
        slow.unstall()


async def test_a_command_that_crashes_at_each_start_is_counted() -> None:
    layer = SessionLayer(StdioServer(sys.executable, "-c", "raise SystemExit(3)"))
    async with layer.lifespan(), browser(layer.asgi_app(dashboard="/sessions")) as client:
        await client.get("/sessions/")
        await client.post("/mcp", json=INITIALIZE, headers=ACCEPT)

        await seen(client, "/sessions/", r"that were begun \(failed\)[^<]*</span><b>[1-9]")
