"""A store refuses writes for ever: it is full. Nobody waits on an open stream without a word."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from mcp_sessions.errors import StoreRefused, StoreUnavailable
from mcp_sessions.ids import SessionId
from mcp_sessions.method_names import DETACHED
from mcp_sessions.server.delivery.pending_writes import PATIENCE
from mcp_sessions.stores.memory import MemoryStore
from tests.support.duplex import DECLARED
from tests.support.failing_calls import fails
from tests.support.in_memory import MemorySocket
from tests.support.modern import ModernClient
from tests.support.raw import in_session, uris
from tests.support.replicas import cluster
from tests.support.world import World, world

WRITES = ("append", "append_change", "relay", "attach", "detach", "change", "carry")
URI = "note:1"
LONG = 2 * PATIENCE + 10
"""Seconds: the last try of a write comes some time after its patience ended."""

BACK = 6.0
"""Seconds after which what waited is written."""


class Full:
    """Writes fail while it is set, and reads do not."""

    is_set = True

    def __init__(self, *stores: Any) -> None:
        refused = StoreRefused("it is full", "full")
        for store in stores:
            for name in WRITES:
                fails(
                    store,
                    name,
                    after=False,
                    times=10**9,
                    when=lambda _: self.is_set,
                    failure=refused,
                )


async def _updated(w: World, session: str) -> None:
    """An event of one session."""
    params = {"uri": URI}
    method = "notifications/resources/updated"
    await w.inside.publisher.publish(SessionId(session), method, params)


async def _changed(w: World, session: str) -> None:
    """A change of the server."""
    with pytest.raises(StoreUnavailable):
        await w.layer.notify_resource_updated(URI)


Event = Callable[[World, str], Awaitable[None]]
EVENTS_OF = pytest.mark.parametrize("event", [_updated, _changed])


async def test_a_get_stream_ends() -> None:
    """Its own messages: no session was started."""
    async with world(store=MemoryStore()) as w:
        client = await w.connected()
        stream = client.get()
        position = (await stream.event(0)).id
        full = Full(w.layer.store)
        assert await client.text("update", uri=URI) == "updated"
        await asyncio.wait_for(stream.done(), LONG)
        again = await client.get(position).done()
        assert again.status == 503 and int(again.header("retry-after") or 0) > 0
        full.is_set = False
        await asyncio.sleep(BACK)
        assert uris(await client.get(position).has(1)) == [URI]


@EVENTS_OF
async def test_a_get_stream_with_a_session_ends(event: Event) -> None:
    async with world(store=MemoryStore()) as w:
        client = await w.connected()
        stream = client.get()
        position = (await stream.event(0)).id
        session = (await client.start())["sessionId"]
        await client.result("resources/subscribe", {"uri": URI, "_meta": in_session(session)})
        full = Full(w.layer.store)
        await event(w, session)
        await asyncio.wait_for(stream.done(), LONG)
        assert (await client.get(position).done()).status == 503
        full.is_set = False
        await asyncio.sleep(BACK)
        assert uris(await client.get(position).has(1)) == [URI]


@EVENTS_OF
async def test_a_listen_stream_ends(event: Event) -> None:
    async with world(store=MemoryStore()) as w:
        client = ModernClient(w.carrier)
        started = await client.start()
        session = started["sessionId"]
        stream = await client.listening(session, URI)
        full = Full(w.layer.store)
        await event(w, session)
        await asyncio.wait_for(stream.done(), LONG)
        refused = await client.listen(session, URI).done()
        assert refused.status == 503
        full.is_set = False
        again = await client.listening(session, URI)
        assert uris(await again.has_events(1)) == [URI]


@EVENTS_OF
async def test_a_websocket_is_asked_to_resume(event: Event) -> None:
    """Its other requests go on."""
    async with world(store=MemoryStore()) as w:
        peer = MemorySocket(w.layer_app, capabilities=DECLARED)
        await peer.open()
        await peer.initialize()
        started = await peer.start()
        session = started["sessionId"]
        await peer.result("resources/subscribe", {"uri": URI})
        full = Full(w.layer.store)
        await event(w, session)
        told = await peer.notified(DETACHED)
        assert told["params"]["reason"] == "evicted"
        full.is_set = False
        resumed = await peer.resume(session, started["sessionEventId"])
        assert resumed["catchup"]
        await peer.until(lambda: URI in uris(peer.messages))
        await peer.leave()


async def test_a_websocket_that_knows_no_notice_ends() -> None:
    """TKO3: its client must not be sent one."""
    async with world(store=MemoryStore()) as w:
        peer = MemorySocket(w.layer_app)
        await peer.open()
        await peer.initialize()
        session = (await peer.start())["sessionId"]
        full = Full(w.layer.store)
        await _updated(w, session)
        await peer.until(lambda: peer.ended, within=LONG)
        full.is_set = False


async def test_a_stream_without_events_stays() -> None:
    async with world(store=MemoryStore()) as w:
        late, other = await w.connected(), await w.connected()
        streams = [client.get() for client in (late, other)]
        for stream in streams:
            await stream.event(0)
        full = Full(w.layer.store)
        await late.text("update", uri=URI)
        await asyncio.wait_for(streams[0].done(), LONG)
        assert not streams[1].ended
        full.is_set = False


async def test_a_stream_at_another_replica_ends() -> None:
    async with cluster(2) as c:
        client = await c[0].connected()
        stream = c.at(1, client).get()
        await stream.event(0)
        full = Full(*c.stores)
        assert await client.text("update", uri=URI) == "updated"
        await asyncio.wait_for(stream.done(), LONG)
        full.is_set = False
