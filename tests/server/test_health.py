"""``layer.health_routes()``: alive, and ready to be sent requests."""

import asyncio

import httpx2
import pytest
from starlette.applications import Starlette

from mcp_sessions import SessionLayer
from mcp_sessions.errors import ConfigurationError
from tests.support.interposed import Interposed
from tests.support.world import Gate, Toolbox


def asking(layer: SessionLayer) -> httpx2.AsyncClient:
    application = Starlette(routes=[*layer.health_routes("/"), *layer.routes()])
    transport = httpx2.ASGITransport(app=application)
    return httpx2.AsyncClient(transport=transport, base_url="http://10.0.0.7")


async def said(client: httpx2.AsyncClient, path: str) -> tuple[int, str]:
    answer = await client.get(path)
    return answer.status_code, answer.text.strip()


async def test_it_is_ready_while_it_runs_and_does_not_drain() -> None:
    """Alive it is all the time: a process that drains must not be killed for it."""
    layer = SessionLayer(Toolbox().server)
    async with asking(layer) as client:
        assert await said(client, "/readyz") == (503, "not running")
        async with layer.lifespan():
            assert await said(client, "/readyz") == (200, "ready")
            await layer.drain(grace=0)
            assert await said(client, "/readyz") == (503, "draining")
            assert await said(client, "/healthz") == (200, "alive")


async def test_it_is_not_ready_while_its_store_is_away_or_says_nothing() -> None:
    """A store that is away is not the process's fault: it stays alive."""
    steps = Interposed()
    layer = SessionLayer(Toolbox().server, store=steps.store)
    async with asking(layer) as client, layer.lifespan():
        steps.fails("load", "before")
        assert await said(client, "/readyz") == (503, "the session store is away")
        assert await said(client, "/healthz") == (200, "alive")
    steps = Interposed()
    layer = SessionLayer(Toolbox().server, store=steps.store)
    async with asking(layer) as client, layer.lifespan():
        steps.before["load"] = Gate().arrive
        assert await said(client, "/readyz") == (503, "the session store is away")


async def test_however_many_ask_the_store_is_asked_once() -> None:
    """Nobody needs a credential to ask."""
    steps = Interposed()
    layer = SessionLayer(Toolbox().server, store=steps.store)
    async with asking(layer) as client, layer.lifespan():
        steps.calls.clear()
        answers = await asyncio.gather(*(said(client, "/readyz") for _ in range(50)))

    assert set(answers) == {(200, "ready")}
    assert steps.calls.count("load") == 1


async def test_a_path_begins_with_a_slash() -> None:
    with pytest.raises(ConfigurationError, match="begins with '/'"):
        SessionLayer(Toolbox().server).health_routes("health")
