"""END2: memory after many clients that came and went is what it was before."""

import asyncio
import gc
import sys
from typing import Any

import pytest

from mcp_sessions.core.ends import MOST_ENDS, REMEMBERED_FOR
from tests.support.raw import RawClient, in_session, keyed
from tests.support.virtual_time import cycles
from tests.support.world import World, world

CYCLES = 10_000


def sizes(w: World) -> dict[str, int]:
    store: Any = w.layer.store
    connections: Any = w.inside.connections
    attachments: Any = w.inside.attachments
    host: Any = w.inside.runner
    questions: Any = w.inside.questions
    sealed: Any = w.inside.sealed
    return {
        "sessions": len(store._sessions),
        "principals": len(store._by_principal),
        "subscriptions": len(store._by_uri),
        "connections": len(connections._connections),
        "used on": len(connections._used_on),
        "turns": len(attachments._session_locks),
        "running": host.running,
        "by connection": sum(host.calls.has(each.id) for each in connections.all()),
        "by session": len(host.held),
        "by key": len(host.calls._by_key),
        "newest requests": len(host.calls._latest) + len(host.calls._latest_before),
        "detached": len(host._detached),
        "asked": len(questions._open),
        "asked by session": len(questions.by_session),
        "tokens": len(sealed._tokens),
    }


def blocks() -> int:
    """Pieces of memory that Python objects take; counting bytes would take minutes."""
    gc.collect()
    return sys.getallocatedblocks()


async def come_and_go(w: World, count: int) -> None:
    """Clients that start a session, use it and are never seen again."""
    for number in range(count):
        client = w.client()
        session = (await client.start())["sessionId"]
        if number % 20 == 0:
            connected = await w.connected()
            stream = await connected.get().started()
            await connected.resume(session)
            await connected.result("resources/subscribe", {"uri": f"a:{number}"})
            await connected.call("echo", text="x", meta=keyed("k")).result()
            await connected.call("progress", steps=2, meta={"progressToken": 1}).result()
            await w.layer.notify_resource_updated(f"a:{number}")
            await stream.gone()
        elif number % 20 == 1:
            await client.text("update", uri="a:1", meta=in_session(session))


@pytest.mark.full
@pytest.mark.in_memory
async def test_ten_thousand_that_come_and_go_leave_nothing() -> None:
    """END2: "10,000 create/drop cycles without DELETE: memory returns to baseline"."""
    async with world(idle_timeout=100) as w:
        await come_and_go(w, 500)
        w.clock.advance(200)
        await w.expire()
        w.carrier.forget()
        empty = sizes(w)
        before = blocks()

        for _ in range(10):
            await come_and_go(w, CYCLES // 10)
            w.clock.advance(200)
            assert await w.expire() >= CYCLES // 10
            w.carrier.forget()
        assert len(await w.layer.sessions.ended()) == MOST_ENDS
        # An end is remembered for a time, in bounds.
        w.clock.advance(REMEMBERED_FOR)
        await come_and_go(w, 1)
        w.clock.advance(200)
        assert await w.expire() >= 1
        w.carrier.forget()
        await cycles()
        after = blocks()

        assert sizes(w) == empty
        assert not any(size for name, size in empty.items() if name != "turns"), empty
        assert len(asyncio.all_tasks()) < 10
        # One object per session that was forgotten would be 10,000.
        assert after - before < 2_000


@pytest.mark.in_memory
async def test_sessions_that_are_ended_leave_nothing_before_their_time(w: World) -> None:
    """END2: the place that a session had in the queue of deadlines was kept until then: a
    client that starts and ends sessions all day filled the memory.
    """
    client = w.client()
    for _ in range(3_000):
        await client.end((await client.start())["sessionId"])
        w.carrier.forget()

    store: Any = w.layer.store
    assert len(store._sessions) == 0
    assert len(store._deadlines) < 300


@pytest.mark.in_memory
async def test_connections_that_are_deleted_leave_nothing(w: World) -> None:
    """END2: with an open stream, a session attached, and a request that nobody waits for."""
    for number in range(100):
        client: RawClient = await w.connected()
        stream = await client.get().started()
        await client.start()
        sent = await w.waits(
            client.call("wait", gate=f"g{number}", meta=in_session(None)), f"g{number}"
        )
        await client.delete().done()
        await stream.done()
        await sent.reply.done()
    await cycles()

    left = sizes(w)
    assert left["connections"] == left["running"] == left["used on"] == 0
    assert left["sessions"] == 100  # the protocol-mode ones, which nobody ended
