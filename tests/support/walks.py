"""Walks: one request of each kind through a running server, each ready to be recorded.

A walk is an async context. It yields a function that does the request once, and that opens the
block to be recorded around the part of interest. The client of these walks is the tests' own, so
nothing of it is counted.
"""

from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import partial
from typing import Any

from mcp_sessions.authentication.tokens import Tokens
from mcp_sessions.conversations import Conversations
from mcp_sessions.server.upstream.sdk.authentication import SdkVerifier, resource_server
from tests.support.children import child_world
from tests.support.duplex import DECLARED, WITHIN, DuplexPeer, duplex_world
from tests.support.identities import FAR
from tests.support.issuers import AUDIENCE, URL, Login
from tests.support.modern import BearerCarrier, ModernClient
from tests.support.raw import RawClient, at_most, in_session, keyed, uris
from tests.support.replicas import cluster, share
from tests.support.world import STORES, Clock, world

Measured = Callable[[], Any]
"""Makes the block that is recorded: ``with measured(): …``."""

Once = Callable[[Measured], Awaitable[None]]

Walk = Callable[[], AbstractAsyncContextManager[Once]]


@asynccontextmanager
async def handshake_call(
    *, session: bool = False, key: bool = False, store: str = "memory"
) -> AsyncGenerator[Once]:
    """A `tools/call` over HTTP, answered as JSON."""
    async with world(store=STORES[store]()) as w:
        client = await w.connected()
        named = str((await client.start())["sessionId"]) if session else None

        async def once(measured: Measured) -> None:
            meta = None if named is None else in_session(named)
            if key:
                meta = keyed(f"key-{next(client.numbers)}", named)
            with measured():
                assert await client.text("echo", text="x", meta=meta) == "x"

        yield once


@asynccontextmanager
async def token_call() -> AsyncGenerator[Once]:
    """A `tools/call` over HTTP with a JWT that was seen before."""
    clock = Clock()
    login = Login(clock)
    verifier = SdkVerifier([Tokens(login.issuer, AUDIENCE, clock)])
    authentication = resource_server(verifier, URL, AUDIENCE, ["use"])
    # The SDK compares its end with the machine's clock.
    token = login.token(exp=FAR)
    async with world(store=STORES["memory"](), auth=authentication) as w:
        client = RawClient(BearerCarrier(w.carrier, token))
        await client.initialize()

        yield partial(_call, client)


@asynccontextmanager
async def modern_call(*, session: bool = False, key: bool = False) -> AsyncGenerator[Once]:
    async with world(store=STORES["memory"]()) as w:
        client = ModernClient(w.carrier)
        named = str((await client.start())["sessionId"]) if session else None

        async def once(measured: Measured) -> None:
            keyed_as = f"key-{next(client.numbers)}" if key else None
            with measured():
                said = await client.text("echo", {"text": "x"}, session=named, key=keyed_as)
                assert said == "x"

        yield once


async def _call(client: RawClient | DuplexPeer, measured: Measured) -> None:
    with measured():
        assert await client.text("echo", text="x") == "x"


@asynccontextmanager
async def duplex_call(kind: str) -> AsyncGenerator[Once]:
    """A `tools/call` in a session on one connection of both directions."""
    async with duplex_world(store=STORES["memory"]()) as w:
        client = await w.connected(kind)
        await client.start()

        yield partial(_call, client)


@asynccontextmanager
async def command_call() -> AsyncGenerator[Once]:
    """A `tools/call` over HTTP to a command's process."""
    async with child_world(store=STORES["memory"]()) as w:
        client = await w.connected()

        yield partial(_call, client)


@asynccontextmanager
async def modern_command_call() -> AsyncGenerator[Once]:
    """The same of a client that can be asked, and is not."""
    async with child_world(store=STORES["memory"]()) as w:
        client = ModernClient(w.carrier, capabilities={"elicitation": {}})

        async def once(measured: Measured) -> None:
            with measured():
                assert await client.text("echo", {"text": "x"}) == "x"

        yield once


@asynccontextmanager
async def conversation_call() -> AsyncGenerator[Once]:
    """A `tools/call` of a host that names only a conversation."""
    async with world(store=STORES["memory"](), conversations=Conversations()) as w:
        client = ModernClient(w.carrier)

        async def once(measured: Measured) -> None:
            with measured():
                said = await client.text("echo", {"text": "x"}, meta={"openai/session": "one"})
                assert said == "x"

        yield once


@asynccontextmanager
async def update() -> AsyncGenerator[Once]:
    """An update of a resource that a session subscribed to, whose GET stream is at another
    replica.
    """
    async with cluster(2, seed=1) as c:
        client = await c[0].connected()
        await client.start()
        await client.result("resources/subscribe", {"uri": "a:1"})
        stream = await c.at(1, client).get().started()
        sent = 0

        async def once(measured: Measured) -> None:
            nonlocal sent
            sent += 1
            with measured():
                await c[0].layer.notify_resource_updated("a:1")
                assert uris(await at_most(WITHIN, stream.has(sent))) == ["a:1"] * sent

        yield once


@asynccontextmanager
async def update_over_redis() -> AsyncGenerator[Once]:
    """The same of replicas that share a Redis."""
    with share("redis"):
        async with update() as once:
            yield once


@asynccontextmanager
async def takeover() -> AsyncGenerator[Once]:
    """A WebSocket's `session/resume` of a session with an event since, whose old connection has its
    GET stream open.
    """
    async with duplex_world() as w:

        async def once(measured: Measured) -> None:
            http = await w.inner.connected(capabilities=DECLARED)
            stream = await http.get().started()
            started = await http.start()
            await http.result("resources/subscribe", {"uri": "a:1"})
            await w.layer.notify_resource_updated("a:1")
            await at_most(WITHIN, stream.has(1))
            socket = await w.connected("websocket", capabilities=DECLARED)
            await socket.start()
            with measured():
                await socket.resume(started["sessionId"], started["sessionEventId"])
                assert uris(await socket.has_events(1)) == ["a:1"]
                *_, notice = await at_most(WITHIN, stream.has(2))
            assert notice["params"]["reason"] == "taken_over"

        yield once


WALKS: dict[str, Walk] = {
    "http": handshake_call,
    "http-session": partial(handshake_call, session=True),
    "http-key": partial(handshake_call, session=True, key=True),
    "http-session-sqlite": partial(handshake_call, session=True, store="sqlite"),
    "http-session-redis": partial(handshake_call, session=True, store="redis"),
    "http-token": token_call,
    "modern": modern_call,
    "modern-session": partial(modern_call, session=True),
    "modern-key": partial(modern_call, session=True, key=True),
    "websocket": partial(duplex_call, "websocket"),
    "stdio": partial(duplex_call, "pipe"),
    "command": command_call,
    "command-modern": modern_command_call,
    "conversation": conversation_call,
    "update": update,
    "update-redis": update_over_redis,
    "takeover": takeover,
}
"""Name → walk. ``modern`` is the 2026-07-28 era."""
