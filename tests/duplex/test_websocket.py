"""WebSocket over real sockets: the frames, the limits, the closing, both eras."""

import asyncio
import contextlib
import time
from typing import Any

import fastmcp
import pytest
from fastapi import FastAPI
from mcp.server.transport_security import TransportSecuritySettings
from starlette.applications import Starlette
from starlette.routing import Mount
from websockets.asyncio.client import connect
from websockets.exceptions import InvalidStatus

from mcp_sessions import SessionLayer, SessionPolicy
from mcp_sessions.ids import FencingEpoch, SessionId
from mcp_sessions.stores.memory import MemoryStore
from tests.support import apps
from tests.support.duplex import (
    DECLARED,
    ELICITS,
    WITHIN,
    duplex_world,
    listening,
    websocket,
)
from tests.support.modern import ACKNOWLEDGED, SUBSCRIPTION_ID
from tests.support.raw import EXTENSION, at_most, in_session, uris
from tests.support.world import Toolbox

pytestmark = [pytest.mark.anyio, pytest.mark.filterwarnings(apps.DEPRECATED)]

KINDS = ("websocket", "stdio")


async def refusal(url: str, **options: Any) -> InvalidStatus:
    """How a handshake was refused."""
    with pytest.raises(InvalidStatus) as refused:
        async with websocket(url, **options):
            pass
    return refused.value


# --- the handshake ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("offered", "selected"),
    [((), None), (("mcp",), "mcp"), (("other", "mcp"), "mcp"), (("other",), None)],
)
async def test_subprotocol_mcp_is_selected_when_offered_and_nothing_else_ever(
    offered: tuple[str, ...], selected: str | None
) -> None:
    """"Select it, and only it, when offered"; node clients refuse anything else."""
    async with duplex_world() as served:
        peer = await served.websocket(subprotocols=offered)
        assert peer.connection.subprotocol == selected
        assert (await peer.initialize())["serverInfo"]["name"] == "tools"


async def test_compression_is_off_in_our_own_server_and_the_same_path_serves_http() -> None:
    """Pitfall F9: compression off. (Somebody else's uvicorn has a flag for it.)"""
    import concurrent.futures
    import socket

    layer = SessionLayer(Toolbox().server)
    sock = socket.create_server(("127.0.0.1", 0))
    url = f"ws://127.0.0.1:{sock.getsockname()[1]}/mcp"
    loop, up = asyncio.get_running_loop(), asyncio.Event()
    started = concurrent.futures.Future[None]()

    def run() -> None:
        # uvicorn leaves signals alone outside of the main thread.
        layer.run(
            sock=sock, on_started=lambda: loop.call_soon_threadsafe(up.set) and None, grace=1
        )

    del started
    running = asyncio.create_task(asyncio.to_thread(run))
    await at_most(WITHIN, up.wait())
    async with connect(url, proxy=None) as offering:
        assert offering.protocol.extensions == []
    async with websocket(url, capabilities=DECLARED) as peer:
        await peer.initialize()
        session_id = (await peer.start())["sessionId"]
        import threading

        thread = next(t for t in threading.enumerate() if t.name.startswith("asyncio_"))
        del thread
        for server in _servers():
            if server.config.app is not None and not server.should_exit:
                server.should_exit = True
        told = await peer.told("notifications/sessions/detached")
        assert told["params"]["sessionId"] == session_id
        assert (await peer.closed())[0] == 1012
    await at_most(WITHIN, running)


def _servers() -> list[Any]:
    import gc

    from mcp_sessions.serving import DrainingServer

    gc.unfreeze()
    return [found for found in gc.get_objects() if isinstance(found, DrainingServer)]
