"""A request leaves nothing to the collector of cyclic garbage.

A process that serves puts collections off (``mcp_sessions/serve/garbage.py``): what is in a cycle
stays until the next one, with its answer, however large that is.
"""

import gc
from collections.abc import Awaitable, Callable
from typing import Any

import anyio
import anyio.lowlevel
import pytest

from tests.support.duplex import DuplexWorld, duplex_world
from tests.support.modern import ModernClient
from tests.support.raw import Json

CALLS = 10


async def slow(ctx: Any, arguments: Json) -> str:
    """Takes longer than an answer in JSON may."""
    await anyio.sleep(0.15)
    return "x"


async def handshake(w: DuplexWorld, tool: str) -> Callable[[], Awaitable[None]]:
    client = await w.inner.connected()

    async def call() -> None:
        await client.call(tool, text="x").result()

    return call


async def modern(
    w: DuplexWorld, tool: str, session: str | None = None
) -> Callable[[], Awaitable[None]]:
    client = ModernClient(w.inner.carrier)

    async def call() -> None:
        await client.call(tool, {"text": "x"}, session=session).result()

    return call


async def modern_in_a_session(w: DuplexWorld, tool: str) -> Callable[[], Awaitable[None]]:
    started = await ModernClient(w.inner.carrier).start()
    return await modern(w, tool, str(started["sessionId"]))


async def websocket(w: DuplexWorld, tool: str) -> Callable[[], Awaitable[None]]:
    peer = await w.connected("websocket")

    async def call() -> None:
        await peer.answer(await peer.call(tool, text="x"))

    return call


@pytest.mark.parametrize("connect", [handshake, modern, modern_in_a_session, websocket])
@pytest.mark.parametrize("tool", ["echo", "slow"])
async def test_a_call_leaves_nothing_to_the_collector(
    connect: Callable[[DuplexWorld, str], Awaitable[Callable[[], Awaitable[None]]]], tool: str
) -> None:
    async with duplex_world() as w:
        w.inner.box.tools["slow"] = slow
        call = await connect(w, tool)
        await call()
        await anyio.lowlevel.checkpoint()
        gc.collect()
        gc.disable()
        try:
            for _ in range(CALLS):
                await call()
            await anyio.lowlevel.checkpoint()
            gc.set_debug(gc.DEBUG_SAVEALL)
            gc.collect()
            left = {type(each).__name__ for each in gc.garbage}
        finally:
            gc.set_debug(0)
            gc.garbage.clear()
            gc.enable()
        assert not left & {
            "RunningRequest", "PostChannel", "ModernChannel", "DuplexChannel", "Call", "Inbound",
            "Outbox", "SseStream", "LogFeed", "RequestConnection",
        }  # fmt: skip
