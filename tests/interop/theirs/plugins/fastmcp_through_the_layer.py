"""A pytest plugin for FastMCP's own tests: their connections in memory and in process go through
the layer, by FastMCP's own HTTP transport or by `resumable`.

``MCP_SESSIONS_LEG`` is ``fastmcp``, ``resumable``, or ``bare``: FastMCP's own HTTP application
in the layer's place, to compare with. Nothing of the tests is changed: what they call is
replaced before they import it.
"""

from __future__ import annotations

import os
from collections.abc import AsyncGenerator, Generator
from contextlib import asynccontextmanager
from typing import Any, cast

import fastmcp
import pytest
from fastmcp.client.transports.memory import FastMCPTransport
from fastmcp.utilities import tests as testing
from fastmcp.utilities.asgi_transport import run_asgi_lifespan

import mcp_sessions.fastmcp
from mcp_sessions.layer import SessionLayer

LEG = os.environ["MCP_SESSIONS_LEG"]
BASE_URL = "http://127.0.0.1"
"""As FastMCP's. An SDK server takes a host with a port only."""

_asked_for: list[dict[str, Any]] = []
"""The options of the application that is being made, while the layer asks the server for what
it has around its endpoint."""

_connections = 0

_own_application: Any = fastmcp.FastMCP.http_app
_own_server: Any = testing.asgi_server


def _http_app(server: Any, path: str | None = None, **options: Any) -> Any:
    given = _asked_for[-1] if _asked_for else {}
    return _own_application(server, path=path, **{**given, **options})


@asynccontextmanager
async def _asgi_server(
    server: Any, transport: Any = "http", path: str | None = None, **options: Any
) -> AsyncGenerator[Any]:
    """``asgi_server``, with the layer's endpoint in it. The layer has no transport of before
    2025-03-26.
    """
    if transport == "sse" or LEG == "bare":
        async with _own_server(server, transport=transport, path=path, **options) as running:
            yield running
        return
    global _connections
    _connections += 1
    path = path or "/mcp"
    stateless = options.get("stateless_http")
    if stateless is None:
        stateless = fastmcp.settings.stateless_http
    _asked_for.append({"transport": transport, **options})
    try:
        app = SessionLayer(server, store=None if stateless else "memory://").asgi_app(path)
    finally:
        _asked_for.pop()
    is_own = isinstance(cast(object, server), fastmcp.FastMCP)
    base_url = BASE_URL if is_own else f"{BASE_URL}:8000"
    async with run_asgi_lifespan(app):
        yield testing.ASGIServer(url=f"{base_url}{path}", app=app, transport_type=transport)


@asynccontextmanager
async def _connect_session(
    transport: Any, *, transport_options: Any = None, **session_options: Any
) -> AsyncGenerator[Any]:
    if LEG == "bare" and not isinstance(cast(object, transport.server), fastmcp.FastMCP):
        async with _own_connection(
            transport, transport_options=transport_options, **session_options
        ) as session:
            yield session
        return
    global _connections
    _connections += LEG == "bare"
    async with _asgi_server(transport.server) as running:
        if LEG != "resumable":
            chosen = running.transport()
            async with chosen.connect_session(
                transport_options=transport_options, **session_options
            ) as session:
                yield session
            return
        async with (
            running.http_client() as http_client,
            mcp_sessions.fastmcp.resumable(running.url, http_client=http_client).connect_session(
                transport_options=transport_options, **session_options
            ) as session,
        ):
            yield session


_own_connection: Any = FastMCPTransport.connect_session

setattr(fastmcp.FastMCP, "http_app", _http_app)  # noqa: B010
setattr(testing, "asgi_server", _asgi_server)  # noqa: B010
setattr(FastMCPTransport, "connect_session", _connect_session)  # noqa: B010


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Some have a time limit of their own, for a machine that does nothing else. That of the
    whole run holds.
    """
    for item in items:
        for node in item.listchain():
            node.own_markers[:] = [mark for mark in node.own_markers if mark.name != "timeout"]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_setup(item: pytest.Item) -> Generator[None]:
    """Note whether a test connects; how many do is in the list of what is expected."""
    item.stash[_BEFORE] = _connections
    yield


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_teardown(item: pytest.Item) -> None:
    """Before its reports are complete."""
    if _connections > item.stash.get(_BEFORE, _connections):
        item.user_properties.append(("connected", True))


_BEFORE = pytest.StashKey[int]()
