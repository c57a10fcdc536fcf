"""``readyz`` over a real Redis, in real time."""

import asyncio

import httpx2
import pytest
from starlette.applications import Starlette

from mcp_sessions import SessionLayer, SessionSecurity
from tests.support.redis_server import redis_server
from tests.support.virtual_time import Backend
from tests.support.world import Toolbox


@pytest.fixture
def anyio_backend() -> Backend:
    """Real time, for a real server."""
    return ("asyncio", {})


def asking(layer: SessionLayer) -> httpx2.AsyncClient:
    """A client of an application that has the checks."""
    application = Starlette(routes=layer.health_routes("/"))
    transport = httpx2.ASGITransport(app=application)
    return httpx2.AsyncClient(transport=transport, base_url="http://10.0.0.7")


async def said(client: httpx2.AsyncClient, path: str) -> tuple[int, str]:
    answer = await client.get(path)
    return answer.status_code, answer.text.strip()


@pytest.mark.redis
async def test_it_is_not_ready_while_its_store_refuses_writes() -> None:
    """A store that can be read only is none. A full one is not away."""
    with redis_server() as server:
        layer = SessionLayer(
            Toolbox().server, store=server.url, security=SessionSecurity(["k" * 32])
        )
        async with asking(layer) as client, layer.lifespan():
            assert await said(client, "/readyz") == (200, "ready")
            server.ask("CONFIG SET maxmemory 1")
            refused = (503, "the session store refuses requests: see the log")
            async with asyncio.timeout(10):
                # Its answer is good for a moment.
                while await said(client, "/readyz") != refused:  # noqa: ASYNC110
                    await asyncio.sleep(0.05)
            assert await said(client, "/healthz") == (200, "alive")
            server.ask("CONFIG SET maxmemory 0")
