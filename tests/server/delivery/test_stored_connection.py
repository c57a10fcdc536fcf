"""A connection is in the store: another process serves it without a new handshake.

Two layers over one store stand for two processes, which do not know of each other. Those that
do are in `tests/replicas`.
"""

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

from mcp_sessions.stores.memory import MemoryStore
from mcp_sessions.testing.timed_layer import ClockedLayer
from tests.support.modern import ModernClient
from tests.support.raw import (
    RawClient,
    call_params,
    in_process,
    in_session,
    keyed,
    text_of,
    uris,
)
from tests.support.world import Toolbox, World, world


@asynccontextmanager
async def two_processes() -> AsyncGenerator[tuple[World, RawClient, RawClient]]:
    """The first process, a client of it, and the same client as the second one sees it."""
    store = MemoryStore()
    async with world(store=store) as w:
        box = Toolbox()
        other = ClockedLayer(box.server, store=store, policy=w.layer.policy, clock=w.clock)
        app = other.asgi_app()
        async with other.lifespan(), in_process(app) as carrier:
            client = await w.connected(capabilities={"elicitation": {}})
            same = RawClient(carrier, capabilities=client.capabilities)
            same.session_id = client.session_id
            yield w, client, same


async def test_another_process_opens_the_stream() -> None:
    """What waited for the first GET is there, wherever that arrives."""
    async with two_processes() as (_, client, same):
        await client.start()
        await client.text("update", uri="a:1")

        stream = same.get()

        assert uris(await stream.has(1)) == ["a:1"]
        await same.text("update", uri="a:2")
        assert uris(await stream.has(2)) == ["a:1", "a:2"]


async def test_another_process_asks_the_client_what_it_declared() -> None:
    """The handshake is in the store: capabilities and version with it."""
    async with two_processes() as (_, client, same):
        asked = same.call("ask", question="?")
        question = (await asked.reply.has(1))[0]
        await same.respond(question, {"action": "decline"})

        assert text_of(await asked.result()) == "decline: None"
        assert (await asked.reply.event(0)).message is None  # primed: 2025-11-25
        del client


async def test_a_key_that_runs_at_another_replica_is_unknown_here() -> None:
    """KEY3: "Its runner gone … ``-31012``": another process cannot know how it goes, and does
    not run it again; the answer it can give.
    """
    async with two_processes() as (w, client, same):
        session = (await client.start())["sessionId"]
        running = await w.waits(client.call("wait", gate="g", meta=keyed("k")))

        modern = ModernClient(same.carrier).call("wait", {"gate": "g"}, session=session, key="k")
        for sent in (same.call("wait", gate="g", meta=keyed("k")), modern):
            error = await sent.error()
            assert (error["code"], error["message"]) == (-31012, "Outcome unknown")
        assert modern.status == 200
        w.box.gate("g").go.set()
        first = await running.result()
        again = await same.result("tools/call", call_params("wait", {"gate": "g"}, keyed("k")))
        assert again == first
        named = await same.text("session_id", meta=in_session(session))
        assert named == session
        assert w.box.calls == ["wait"]
