"""What only a real network shows: cut, stalled and half-open TCP connections, under uvicorn."""

import asyncio
import time
from collections.abc import AsyncGenerator, Generator
from contextlib import asynccontextmanager

import anyio
import pytest

from mcp_sessions import SessionLayer, SessionPolicy
from tests.support.proxy import Side, TcpProxy
from tests.support.raw import (
    Json,
    RawClient,
    Reply,
    SocketCarrier,
    call_params,
    event_ids,
    in_session,
    text_of,
    uris,
)
from tests.support.servers import RunningServer, serve
from tests.support.virtual_time import Backend
from tests.support.world import Ctx, Toolbox

pytestmark = pytest.mark.timeout(30)

SLOW = 0.5
"""Seconds after which a reader that takes nothing is cut."""


@pytest.fixture
def anyio_backend() -> Backend:
    """Real time, for a real network."""
    return ("asyncio", {})


class Site:
    """A server that runs, and the layer in it."""

    def __init__(self, server: RunningServer, layer: SessionLayer, box: Toolbox) -> None:
        self.server = server
        self.layer = layer
        self.box = box

    async def notify(self, uri: str) -> None:
        await self.server.call(self.layer.notify_resource_updated, uri)


@pytest.fixture(scope="module")
def site() -> Generator[Site]:
    box = Toolbox()

    async def flood(ctx: Ctx, arguments: Json) -> str:
        begun = time.monotonic()
        for number in range(arguments["count"]):
            await ctx.session.send_resource_updated(f"a:{number}" + "x" * 2_000)
        return str(time.monotonic() - begun)

    async def chatter(ctx: Ctx, arguments: Json) -> str:
        begun = time.monotonic()
        for number in range(arguments["count"]):
            await ctx.session.report_progress(number, None, "x" * 2_000)
        return str(time.monotonic() - begun)

    box.tools.update(flood=flood, chatter=chatter)
    policy = SessionPolicy(
        slow_timeout=SLOW, send_buffer=100_000, max_events=20_000, max_bytes=100_000_000
    )
    layer = SessionLayer(box.server, policy=policy)
    with serve(layer.asgi_app()) as server:
        yield Site(server, layer, box)


@asynccontextmanager
async def carrier_to(
    host: str, port: int, *, receive_buffer: int | None = None
) -> AsyncGenerator[SocketCarrier]:
    carrier = SocketCarrier(host, port, receive_buffer=receive_buffer)
    try:
        yield carrier
    finally:
        with anyio.CancelScope(shield=True):
            await carrier.aclose()


@asynccontextmanager
async def direct(site: Site, *, receive_buffer: int | None = None) -> AsyncGenerator[SocketCarrier]:
    server = site.server
    async with carrier_to(server.host, server.port, receive_buffer=receive_buffer) as carrier:
        yield carrier


async def test_a_client_whose_connection_is_cut_misses_nothing(site: Site) -> None:
    """The main job over TCP: the GET stream is reset, changes happen, a new connection
    with a new handshake resumes.
    """
    async with TcpProxy(site.server.host, site.server.port) as proxy:
        async with carrier_to(proxy.host, proxy.port) as carrier:
            client = RawClient(carrier)
            await client.initialize()
            stream = client.get()
            started = await client.start()
            for uri in ("b:1", "b:2"):
                await client.result("resources/subscribe", {"uri": uri})
            await site.notify("b:1")
            position = event_ids(await stream.has(1))[0]
            with proxy.offline():
                await stream.done()
                for _ in range(10):
                    await site.notify("b:2")
                    await site.notify("b:1")
            again = RawClient(carrier)
            await again.initialize()
            new_stream = again.get()

            resumed = await again.resume(started["sessionId"], position)

            assert (resumed["catchup"], resumed["replayed"]) == (True, 2)
            assert uris(await new_stream.has(2)) == ["b:2", "b:1"]


async def test_a_half_open_stream_does_not_lock_its_client_out(site: Site) -> None:
    """HTL8: the network swallowed the connection, nobody told the server; the client is back at
    once (the SDK answers 409 until it notices).
    """
    async with TcpProxy(site.server.host, site.server.port) as proxy:
        async with carrier_to(proxy.host, proxy.port) as carrier:
            client = RawClient(carrier)
            await client.initialize()
            await client.result("resources/subscribe", {"uri": "c:1"})
            dead = client.get()
            await dead.event(0)
            (await proxy.carrying(b"GET /mcp")).stall()

            stream = client.get(dead.events[0].id)
            await site.notify("c:1")

            assert (await stream.started()).status == 200
            assert uris(await stream.has(1)) == ["c:1"]
            assert not dead.ended


async def test_a_call_whose_response_is_cut_is_fetched_with_its_last_event_id(site: Site) -> None:
    """A8 over TCP: cut in the middle of an event, so that half of one had arrived."""
    async with TcpProxy(site.server.host, site.server.port) as proxy:
        async with carrier_to(proxy.host, proxy.port) as carrier:
            client = RawClient(carrier)
            await client.initialize()
            proxy.cut_next_after(30_000, sent_by=Side.SERVER)
            sent = client.call("chatter", count=50, meta={"progressToken": 1})
            await sent.reply.done()
            seen = sent.reply.events
            assert 1 < len(seen) < 50

            again = client.get(seen[-1].id)
            answer = await again.answer(sent.id)

            numbers = [m["params"]["progress"] for m in sent.reply.messages + again.messages[:-1]]
            assert numbers == [*range(50)]
            assert "result" in answer


async def test_a_stalled_stream_is_cut_and_delays_nobody(site: Site) -> None:
    """Rule: "A reader that stalls delays nothing else": the flooding handler waits for room once
    and goes on; a neighbour is served meanwhile; what was missed is there.
    """
    async with direct(site, receive_buffer=4_096) as carrier, direct(site) as other:
        client = RawClient(carrier)
        await client.initialize()
        started = await client.start()
        stream = client.get()
        await stream.event(0)
        stream.stall()
        neighbour = RawClient(other)
        await neighbour.initialize()

        flood = RawClient(other).call("flood", count=5_000, meta=in_session(started["sessionId"]))
        longest = 0.0
        while not flood.reply.ended:
            begun = time.monotonic()
            assert await neighbour.text("echo", text="x") == "x"
            longest = max(longest, time.monotonic() - begun)
        waited = float(text_of(await flood.result()))

        assert SLOW * 0.9 <= waited < 15
        assert longest < 10
        stream.unstall()
        await stream.done()
        await neighbour.resume(started["sessionId"], started["sessionEventId"])
        messages = await neighbour.get().has(5_000)
        assert event_ids(messages) == sorted(event_ids(messages))


async def test_a_stalled_post_reader_is_cut_and_delays_nobody(site: Site) -> None:
    """The same for a response stream."""
    async with direct(site, receive_buffer=4_096) as carrier, direct(site) as other:
        client = RawClient(carrier)
        await client.initialize()
        sent = client.call("chatter", count=5_000, meta={"progressToken": 1})
        await sent.reply.event(0)
        sent.reply.stall()
        neighbour = RawClient(other)
        await neighbour.initialize()
        assert await neighbour.text("echo", text="x") == "x"

        position = sent.reply.events[0].id
        sent.reply.unstall()
        await sent.reply.done()
        if sent.reply.answer_to(sent.id) is None:
            again = client.get(position)
            await again.answer(sent.id)
            assert len(again.messages) == 5_001
        else:
            assert len(sent.reply.messages) == 5_001


async def test_a_client_that_leaves_in_the_middle_of_its_body_disturbs_nobody(site: Site) -> None:
    """Half a request is none."""
    server = site.server
    for cut in (10, 120):
        request = b"POST /mcp HTTP/1.1\r\nHost: 127.0.0.1:1\r\nAccept: */*\r\n"
        request += b"Content-Type: application/json\r\nContent-Length: 1000\r\n\r\n" + b"{" * 500
        _, writer = await asyncio.open_connection(server.host, server.port)
        writer.write(request[:-cut])
        await writer.drain()
        writer.transport.abort()
    async with direct(site) as carrier:
        client = RawClient(carrier)
        await client.initialize()
        assert await client.text("echo", text="x") == "x"


async def test_a_large_body_is_refused_before_it_is_read(site: Site) -> None:
    """413, by what it declares and by what it has."""
    async with direct(site) as carrier:
        client = RawClient(carrier)
        await client.initialize()
        text = "x" * (3 * 1024 * 1024)
        assert await client.text("echo", text=text) == text
        sent = client.send("tools/call", call_params("echo", {"text": "x" * (5 * 1024 * 1024)}))
        await sent.reply.done()
        assert sent.reply.status in (413, None)  # None: reset while it was still sending
        headers = {**client.headers(), "Content-Type": "application/json"}
        declared = client.http("POST", {**headers, "Content-Length": str(5 * 1024 * 1024)})
        assert (await declared.started()).status == 413


async def test_many_streams_at_once(site: Site) -> None:
    """A hundred clients with a stream each receive one change each."""
    async with direct(site) as carrier:
        clients = [RawClient(carrier) for _ in range(100)]
        streams: list[Reply] = []
        for client in clients:
            await client.initialize()
            await client.start()
            await client.result("resources/subscribe", {"uri": "d:1"})
            streams.append(client.get())
        for stream in streams:
            await stream.started()

        await site.notify("d:1")

        for stream in streams:
            assert uris(await stream.has(1)) == ["d:1"]
