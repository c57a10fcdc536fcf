"""A server without sessions fails what needs them, and passes the rest."""

from collections.abc import Generator
from typing import Any

import pytest
from mcp.server import MCPServer
from mcp.server.mcpserver import Context

from mcp_sessions import SessionLayer
from mcp_sessions_conformance.loader import Vector
from mcp_sessions_conformance.peer import Limits
from mcp_sessions_conformance.report import as_text
from mcp_sessions_conformance.runner import LACKS_TOOLS, run
from mcp_sessions_conformance.targets import parse_target
from tests.support.servers import serve

IMPATIENT = Limits(wait=1.0, quiet=0.05)

NEEDS_NO_SESSION = {
    "a-callers-words-are-no-part-of-a-created-id",
    "a-foreign-host-is-refused",
    "a-foreign-origin-is-refused",
    "a-foreign-origin-is-refused-in-the-modern-era",
    "a-request-without-a-connection-is-400",
    "a-request-without-a-version-is-of-the-handshake-era",
    "an-unknown-connection-is-404",
    "named-in-the-wrong-member-is-not-named-2",
    "no-request-is-without-a-connection",
    "one-endpoint-both-eras",
    "sessions-are-optional",
    "unknown-methods-are-method-not-found",
}
"""What the core protocol says as well, or says of servers that have no sessions."""


@pytest.fixture(scope="module")
def bare_url() -> Generator[str]:
    """The SDK's own server, with the fixture tools that need no session."""
    server = MCPServer[Any]("bare", version="1.0")

    @server.tool(structured_output=False)
    async def echo(msg: str) -> str:
        return msg

    @server.tool(structured_output=False)
    async def session_id() -> str:
        return "none"

    @server.tool(structured_output=False)
    async def update(uri: str, ctx: Context[Any, Any], times: int = 1) -> str:
        for _ in range(times):
            await ctx.notify_resource_updated(uri)
        return "updated"

    del echo, session_id, update
    with serve(server.streamable_http_app()) as running:
        yield running.url()


@pytest.mark.full
@pytest.mark.timeout(400)
async def test_what_needs_sessions_fails_and_the_rest_passes(
    bare_url: str, vectors: list[Vector]
) -> None:
    done = await run([parse_target(bare_url)], vectors, limits=IMPATIENT)

    passed = {o.vector.id for o in done.outcomes if o.verdict == "passed"}
    assert not done.is_conformant
    assert passed == NEEDS_NO_SESSION, as_text(done)


@pytest.mark.parametrize("has_layer", [False, True])
async def test_a_server_without_the_tools_is_told_so_at_once(
    has_layer: bool, vectors: list[Vector]
) -> None:
    """It is some server that a user has, and each vector would fail for that reason."""
    server = MCPServer[Any]("notes", version="1.0")

    @server.tool()
    async def add(text: str) -> str:
        return text

    del add
    app = SessionLayer(server).asgi_app() if has_layer else server.streamable_http_app()
    with serve(app) as running:
        done = await run([parse_target(running.url())], vectors, limits=IMPATIENT)

    assert not done.is_conformant and not done.outcomes
    assert {entry.reason for entry in done.not_played} == {LACKS_TOOLS}
    assert f"http/modern: {LACKS_TOOLS}\n" in as_text(done)
    assert "no vector was selected" not in as_text(done)
