"""What of the SDK's work on a modern request is done once, and that nobody can tell."""

import json
import math
from typing import Annotated, Any

import pytest
from mcp.server import MCPServer
from mcp.server.connection import Connection
from mcp.shared.inbound import InboundModernRoute
from mcp_types import HEADER_MISMATCH
from pydantic import Field
from starlette.requests import Request as HttpRequest

from mcp_sessions.core.messages import Request
from mcp_sessions.server.upstream.modern_rules import ModernRefusal
from mcp_sessions.server.upstream.sdk import sdk_peer
from mcp_sessions.server.upstream.sdk.kernel import SdkUpstream
from mcp_sessions.server.upstream.sdk.sdk_modern_rules import SdkModernRules, client_of
from mcp_sessions.server.upstream.sdk.sdk_peer import Envelopes
from mcp_sessions.stores.records import Peer
from tests.support.modern import MODERN, envelope, routing_headers
from tests.support.raw import Json, call_params

INFOS: list[Any] = [
    {"name": "me", "version": "1"},
    {"name": "me", "version": "2", "title": "Me"},
    {"name": "me"},
    {"name": math.nan, "version": None},
    {"name": None, "version": None},
    "me",
    None,
    [],
]
CAPABILITIES: list[Any] = [
    {},
    {"elicitation": {}},
    {"experimental": {"x": {"y": math.nan}}},
    {"experimental": {"x": {"y": None}}},
    {"roots": {"listChanged": 1}},
    {"roots": {"listChanged": True}},
    [],
    None,
]


def client(info: Any, capabilities: Any) -> Peer:
    return client_of(InboundModernRoute(MODERN, info, capabilities))


def notified(connection: Connection) -> tuple[Any, ...]:
    """What a handler can see of its client."""
    params, capabilities = connection.client_params, connection.client_capabilities
    return (
        connection.protocol_version,
        repr(params),
        repr(capabilities),
        connection.initialized.is_set(),
        connection.session_id,
        connection.state,
        type(connection.outbound),
    )


def test_a_client_is_seen_as_the_sdk_sees_it_each_time() -> None:
    """Also what differs in little: a NaN and a null, 1 and true."""
    envelopes = Envelopes()
    for _ in range(2):
        for info in INFOS:
            for capabilities in CAPABILITIES:
                peer = client(info, capabilities)
                expected = Connection.from_envelope(MODERN, info, capabilities)
                assert notified(envelopes.connection(peer)) == notified(expected)


def test_what_a_handler_leaves_on_its_connection_is_on_no_other() -> None:
    envelopes = Envelopes()
    peer = client(INFOS[0], {})
    first, second = envelopes.connection(peer), envelopes.connection(peer)
    first.state["mine"] = 1
    first.session_id = "session"
    first.client_params = None
    assert (second.state, second.session_id) == ({}, None)
    assert second.client_params is not None
    assert first.exit_stack is not second.exit_stack


def test_few_and_small_envelopes_are_known(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each request may bring another one."""
    monkeypatch.setattr(sdk_peer, "_KEPT", 3)
    envelopes = Envelopes()
    for number in range(9):
        envelopes.connection(client({"name": "n", "version": f"{number}"}, {}))
    envelopes.connection(client({"name": "n" * 5_000, "version": "1"}, {}))
    known = envelopes._known  # pyright: ignore[reportPrivateUsage]
    assert len(known) == 3 and all(len(each) < 5_000 for each in known)


async def test_what_is_on_the_exit_stack_is_torn_down_and_its_errors_stay_there() -> None:
    peer = SdkUpstream(MCPServer("s")).modern_peer(client(None, {}), None, None)
    connection = peer._connection  # pyright: ignore[reportPrivateUsage]
    done: list[str] = []

    async def clean_up(name: str) -> None:
        done.append(name)
        if name == "second":
            raise RuntimeError("while cleaning up")

    connection.exit_stack.push_async_callback(clean_up, "first")
    connection.exit_stack.push_async_callback(clean_up, "second")
    await peer.close()
    assert done == ["second", "first"]


# --- headers that repeat arguments ---------------------------------------------------------


def plain_and_declaring() -> tuple[Any, Any]:
    async def plain(region: str) -> str:
        return region

    async def declaring(
        region: Annotated[str, Field(json_schema_extra={"x-mcp-header": "Region"})],
    ) -> str:
        return region

    return plain, declaring


async def checked(rules: SdkModernRules, arguments: Json, **headers: str) -> int | None:
    """The code that a call of ``where`` is refused with, or None."""
    params = {**call_params("where", arguments), "_meta": envelope()}
    message: Json = {"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": params}
    lines = {"Mcp-Protocol-Version": MODERN, **routing_headers(message), **headers}
    scope: dict[str, Any] = {
        "type": "http",
        "method": "POST",
        "path": "/mcp",
        "query_string": b"",
        "headers": [(n.lower().encode(), v.encode()) for n, v in lines.items()],
    }
    found = await rules.check(HttpRequest(scope), json.dumps(message).encode())
    if isinstance(found, ModernRefusal):
        assert found.body is not None
        code: int = json.loads(found.body)["error"]["code"]
        return code
    assert isinstance(found, tuple) and isinstance(found[0], Request)
    return None


async def test_a_tool_that_comes_to_declare_a_header_is_held_to_it() -> None:
    """That one declared none is known of its schema, not of its name."""
    plain, declaring = plain_and_declaring()
    server = MCPServer("server")
    rules = SdkModernRules(SdkUpstream(server))
    there = {"Mcp-Param-Region": "there"}
    for _ in range(2):
        server.add_tool(plain, name="where")
        assert await checked(rules, {"region": "here"}) is None
        assert await checked(rules, {"region": "here"}, **there) is None
        server.remove_tool("where")
        server.add_tool(declaring, name="where")
        assert await checked(rules, {"region": "here"}) == HEADER_MISMATCH
        assert await checked(rules, {"region": "here"}, **there) == HEADER_MISMATCH
        assert await checked(rules, {"region": "there"}, **there) is None
        server.remove_tool("where")
        assert await checked(rules, {"region": "here"}, **there) is None


async def test_a_lookup_that_raises_breaks_no_call(caplog: pytest.LogCaptureFixture) -> None:
    """The SDK logs it, and goes on."""
    server = MCPServer("server")
    upstream = SdkUpstream(server)
    rules = SdkModernRules(upstream)

    def broken(_: str) -> dict[str, Any]:
        raise RuntimeError("no schema today")

    upstream.lowlevel.get_tool_input_schema = broken
    assert await checked(rules, {"region": "here"}) is None
    assert "no schema today" in caplog.text
