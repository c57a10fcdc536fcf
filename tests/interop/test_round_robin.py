"""Stock clients before three replicas that share a Redis, every request to the next of them.

"0 errors in 1,000 calls": a load balancer that knows nothing of sessions is what makes servers
answer "404 Session not found" (ATT9).
"""

from collections.abc import Generator
from contextlib import ExitStack
from dataclasses import dataclass

import pytest

from examples.replicas.round_robin import RoundRobin, proxy
from mcp_sessions import SessionLayer
from tests.interop.clients import StockClient
from tests.interop.harness import ALL, Connect, clients
from tests.support import apps
from tests.support.apps import App, make_app
from tests.support.redis_server import namespace, redis_store
from tests.support.servers import RunningServer, serve

pytestmark = [
    pytest.mark.redis,
    pytest.mark.filterwarnings(apps.DEPRECATED),
    pytest.mark.layer_only,
]

CALLS = 1_000


@dataclass
class Replicas:
    apps: list[App]
    servers: list[RunningServer]
    robin: RoundRobin
    entrance: RunningServer

    async def publish(self, number: int, uri: str) -> None:
        """A resource changed, as one of them sees it."""
        app = self.apps[number]
        app.change(uri)
        await self.servers[number].call(app.publish, uri)


@pytest.fixture(scope="module")
def replicas() -> Generator[Replicas]:
    own = namespace()
    with ExitStack() as stack:
        made = [make_app("mcpserver") for _ in range(3)]
        servers: list[RunningServer] = []
        for app in made:
            layer = SessionLayer(app.server, store=redis_store(own=own))
            app.publish = layer.notify_resource_updated
            servers.append(stack.enter_context(serve(layer.asgi_app())))
        robin = RoundRobin([server.url("") for server in servers])
        entrance = stack.enter_context(serve(proxy(robin)))
        yield Replicas(made, servers, robin, entrance)


async def expect_ordinary_day(
    client: StockClient, replicas: Replicas, note: str, calls: int
) -> None:
    """Initialize is done: list, call, subscribe, watch."""
    assert sorted(await client.list("tools")) == sorted(apps.TOOLS)
    await client.subscribe(note)
    for number in range(calls):
        assert await client.call("add", {"a": number, "b": 1}) == str(number + 1)
    for number in range(3):
        seen = len(client.updated_uris())
        await replicas.publish(number, note)
        await client.until(
            lambda seen=seen: len(client.updated_uris()) > seen, what=f"update {number}"
        )
    progress: list[float] = []
    await client.call("slow", {"steps": 3}, progress=progress)
    assert progress == [1, 2, 3]
    assert await client.call("ask", {"question": "who?"}) == "accept: answer to who?"
    await client.ping()
    assert client.updated_uris() == [note] * 3


@clients(*ALL)
async def test_no_call_of_a_stock_client_fails(
    replicas: Replicas, connected: Connect, note: str, request: pytest.FixtureRequest
) -> None:
    """A thousand of them in the full run, and everything else that a client does in a day."""
    is_full = request.node.get_closest_marker("full") is not None
    calls = CALLS if is_full else 60
    before = dict(replicas.robin.served)
    async with connected(replicas.entrance.url(), within=200) as client:
        await expect_ordinary_day(client, replicas, note, calls)
        session = client.session_id

    served = [replicas.robin.served[name] - before[name] for name in before]
    assert sum(served) > calls and max(served) - min(served) <= 1
    assert session is not None
    for app in replicas.apps:
        assert app.server is not None


@pytest.mark.full
@pytest.mark.timeout(300)
@clients("python-2", "fastmcp-4")
async def test_no_call_of_a_thousand_fails(
    replicas: Replicas, connected: Connect, note: str
) -> None:
    """For the clients whose test above is a short one."""
    async with connected(replicas.entrance.url(), within=200) as client:
        await expect_ordinary_day(client, replicas, note, CALLS)


@clients("python-2")
async def test_a_deleted_session_is_gone_everywhere(replicas: Replicas, connected: Connect) -> None:
    """DELETE came to one of them; the 404 comes from each."""
    import httpx2

    async with connected(replicas.entrance.url(), terminate=True) as client:
        session = client.session_id
    headers = {
        "mcp-session-id": str(session),
        "accept": "application/json, text/event-stream",
        "mcp-protocol-version": "2025-11-25",
    }
    ping = {"jsonrpc": "2.0", "id": 9, "method": "ping"}
    async with httpx2.AsyncClient(trust_env=False) as http:
        for server in replicas.servers:
            answer = await http.post(server.url(), json=ping, headers=headers)
            assert answer.status_code == 404
