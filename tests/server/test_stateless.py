"""A layer without a store: ``sessions/*`` only (SLS1), and nothing is remembered."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest
from mcp.server import MCPServer

from mcp_sessions.errors import ConfigurationError
from mcp_sessions.policy import SessionPolicy
from mcp_sessions.security import SessionSecurity, mint_key
from mcp_sessions.server.requests.handle import current_session
from mcp_sessions.testing.timed_layer import ClockedLayer

pytestmark = pytest.mark.anyio

SESSION = "io.modelcontextprotocol/session"
HEADERS = {
    "Accept": "application/json, text/event-stream",
    "Content-Type": "application/json",
    "Host": "127.0.0.1:80",
}
ENVELOPE: dict[str, Any] = {
    "io.modelcontextprotocol/protocolVersion": "2026-07-28",
    "io.modelcontextprotocol/clientCapabilities": {},
}


class Clock:
    """Time, passed in."""

    def __init__(self) -> None:
        self.now = 1_800_000_000.0

    def __call__(self) -> float:
        return self.now


class Client:
    """Sends JSON-RPC to an application, in each era."""

    def __init__(self, http: httpx.AsyncClient, *, modern: bool) -> None:
        self._http = http
        self._modern = modern

    async def send(
        self, method: str, params: dict[str, Any] | None = None, session: Any = None
    ) -> dict[str, Any]:
        meta: dict[str, Any] = dict(ENVELOPE) if self._modern else {}
        if session is not None:
            meta[SESSION] = session
        members: dict[str, Any] = {**(params or {}), **({"_meta": meta} if meta else {})}
        headers: dict[str, Any] = dict(HEADERS)
        if self._modern:
            headers |= {"MCP-Protocol-Version": "2026-07-28", "Mcp-Method": method}
            if "name" in members:
                headers["Mcp-Name"] = members["name"]
        message = {"jsonrpc": "2.0", "id": 1, "method": method, "params": members}
        answered = await self._http.post("/mcp", json=message, headers=headers)
        assert "mcp-session-id" not in answered.headers
        return answered.json()

    async def count(self, session: Any) -> dict[str, Any]:
        """Call the tool that counts in ``session.state``; the whole answer."""
        return await self.send("tools/call", {"name": "count", "arguments": {}}, session)


def server() -> MCPServer[Any]:
    counting: MCPServer[Any] = MCPServer("counting", log_level="ERROR")

    @counting.tool()
    async def count() -> int:  # pyright: ignore[reportUnusedFunction]
        session = current_session()
        session.state["count"] = session.state.get("count", 0) + 1
        return session.state["count"]

    @counting.tool()
    async def keep() -> str:  # pyright: ignore[reportUnusedFunction]
        try:
            return str(await current_session().data.read())
        except ConfigurationError as refused:
            return str(refused)

    return counting


@asynccontextmanager
async def served(
    *, modern: bool = True, clock: Clock | None = None, security: SessionSecurity | None = None
) -> AsyncGenerator[Client]:
    layer = ClockedLayer(
        server(),
        store=None,
        clock=clock or Clock(),
        security=security,
        policy=SessionPolicy(stateless_lifetime=600),
    )
    transport = httpx.ASGITransport(app=layer.asgi_app())  # pyright: ignore[reportArgumentType]
    async with (
        layer.lifespan(),
        httpx.AsyncClient(transport=transport, base_url="http://h") as http,
    ):
        yield Client(http, modern=modern)


@pytest.mark.parametrize("modern", [True, False])
async def test_the_token_is_the_state(modern: bool) -> None:
    """SLS3: what the client sends back is what the handler sees."""
    async with served(modern=modern) as client:
        created = (await client.send("sessions/create"))["result"]["session"]
        assert set(created) == {"sessionId", "expiresAt", "state"}
        one = await client.count(created)
        two = await client.count(one["result"]["_meta"][SESSION])
        again = await client.count(one["result"]["_meta"][SESSION])

    assert one["result"]["structuredContent"] == {"result": 1}
    assert two["result"]["structuredContent"] == {"result": 2}
    # The older token is the older state: it can be replayed until its end.
    assert again["result"]["structuredContent"] == {"result": 2}
    named = two["result"]["_meta"][SESSION]
    assert (named["sessionId"], named["expiresAt"]) == (created["sessionId"], created["expiresAt"])


@pytest.mark.parametrize("modern", [True, False])
async def test_without_a_state_it_begins_anew(modern: bool) -> None:
    """A session that comes without its token has an empty state."""
    async with served(modern=modern) as client:
        created = (await client.send("sessions/create"))["result"]["session"]
        await client.count(created)
        bare = await client.count({"sessionId": created["sessionId"]})

    assert bare["result"]["structuredContent"] == {"result": 1}


async def test_another_process_with_the_same_keys_continues() -> None:
    """Nothing is remembered, so nothing has to be here."""
    security = SessionSecurity([mint_key()])
    async with served(security=security) as client:
        created = (await client.send("sessions/create"))["result"]["session"]
        one = (await client.count(created))["result"]["_meta"][SESSION]
    async with served(security=security) as client:
        two = await client.count(one)

    assert two["result"]["structuredContent"] == {"result": 2}


async def test_it_ends_at_its_fixed_time_and_not_before() -> None:
    """``stateless_lifetime``: use does not prolong it."""
    clock = Clock()
    async with served(clock=clock) as client:
        created = (await client.send("sessions/create"))["result"]["session"]
        clock.now += 599
        alive = await client.count(created)
        clock.now += 2
        ended = await client.count({"sessionId": created["sessionId"]})

    assert "result" in alive
    assert ended["error"]["code"] == -32043
    assert ended["error"]["data"] == {"sessionId": created["sessionId"]}


async def test_delete_answers_and_revokes_nothing() -> None:
    """The docs say so; a client that deletes does not receive an error."""
    async with served() as client:
        created = (await client.send("sessions/create"))["result"]["session"]
        deleted = await client.send("sessions/delete", None, created)
        after = await client.count(created)

    assert deleted["result"] == {"resultType": "complete"}
    assert "result" in after


@pytest.mark.parametrize("method", ["session/start", "session/resume", "session/end"])
@pytest.mark.parametrize("modern", [True, False])
async def test_the_other_proposal_is_not_spoken(method: str, modern: bool) -> None:
    """STA6: a server without protocol-level sessions responds with that error."""
    async with served(modern=modern) as client:
        answered = await client.send(method, {"sessionId": "x"})

    assert answered["error"]["code"] == -32601


@pytest.mark.parametrize("modern", [True, False])
async def test_an_unknown_id_and_a_forged_state_are_what_they_are_with_a_store(
    modern: bool,
) -> None:
    """-32043 for the id, ``invalid_state`` for the token."""
    async with served(modern=modern) as client:
        created = (await client.send("sessions/create"))["result"]["session"]
        unknown = await client.count({"sessionId": "sess-invalid"})
        forged = await client.count({**created, "state": "x" + created["state"]})

    assert unknown["error"]["code"] == -32043
    assert (forged["error"]["code"], forged["error"]["data"]) == (
        -32602,
        {"reason": "invalid_state"},
    )


async def test_what_needs_a_store_says_so() -> None:
    """``session.data`` cannot be kept anywhere."""
    async with served() as client:
        created = (await client.send("sessions/create"))["result"]["session"]
        params: dict[str, Any] = {"name": "keep", "arguments": {}}
        answered = await client.send("tools/call", params, created)

    assert "needs a store" in answered["result"]["content"][0]["text"]


async def test_a_handshake_leaves_nothing_behind() -> None:
    """No ``Mcp-Session-Id``, and what comes next needs none."""
    async with served(modern=False) as client:
        info = {"name": "t", "version": "1"}
        hello = {
            "protocolVersion": "2025-11-25",
            "capabilities": dict[str, Any](),
            "clientInfo": info,
        }
        shaken = await client.send("initialize", hello)
        listed = await client.send("tools/list")

    features = shaken["result"]["capabilities"]["extensions"]["io.github.mcp-sessions/sessions"]
    assert features["transports"] == ["streamable-http", "websocket", "stdio"]
    assert features["features"] == ["create", "delete", "state"]
    assert {tool["name"] for tool in listed["result"]["tools"]} == {"count", "keep"}
