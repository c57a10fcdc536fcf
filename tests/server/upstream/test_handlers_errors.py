"""An error of a handler is not taken for one of the layer (CLI6, END6, ERR15, ERR16).

The layer says by some errors that a request did not begin, or that its session is gone. A client
that believes that of a handler's error sends a call again that ran, or leaves its session.
"""

import json
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
from mcp import Client
from mcp.shared.exceptions import MCPError

from mcp_sessions import HTTPServer
from tests.support import apps
from tests.support.duplex import listening
from tests.support.raw import Json, RawClient
from tests.support.url_server import UrlServer
from tests.support.urls import url_of
from tests.support.world import Ctx, world

pytestmark = pytest.mark.filterwarnings(apps.DEPRECATED)

ERRORS: list[tuple[int, Any, int, Any]] = [
    (-32043, None, -32603, None),
    (-32043, {"sessionId": "theirs"}, -32603, {"sessionId": "theirs"}),
    (-32043, "text", -32603, "text"),
    (-31010, None, -32603, None),
    (-32603, {"started": False}, -32603, {"started": True}),
    (
        -32603,
        {"reason": "draining", "started": False},
        -32603,
        {"reason": "draining", "started": True},
    ),
    (
        -31012,
        {"reason": "store_unavailable"},
        -31012,
        {"reason": "store_unavailable", "started": True},
    ),
    (-32000, {"reason": "not_started"}, -32000, {"reason": "not_started", "started": True}),
    (-32602, {"reason": "invalid_state"}, -32602, {"reason": "invalid_state", "started": True}),
    (
        -31011,
        {"limit": "request_key_bytes"},
        -31011,
        {"limit": "request_key_bytes", "started": True},
    ),
    (-32000, {"reason": "quota", "limit": "mine"}, -32000, {"reason": "quota", "limit": "mine"}),
    (-32042, {"elicitations": []}, -32042, {"elicitations": []}),
    (-31012, None, -31012, None),
    (-1, [1], -1, [1]),
]


@asynccontextmanager
async def failing(
    kind: str,
) -> AsyncGenerator[tuple[RawClient, Callable[[int, Any], Json], list[str]]]:
    """A client, what makes the arguments of the tool ``refuses``, and the tools that ran."""
    if kind == "url":

        def at_a_url(code: int, data: Any) -> Json:
            error = {"code": code, "message": "no", **({"data": data} if data is not None else {})}
            body = json.dumps({"jsonrpc": "2.0", "id": "ID", "error": error})
            return {"status": 200, "headers": {}, "body": body.replace('"ID"', "ID")}

        server = UrlServer()
        async with url_of(server) as url, world(server=HTTPServer(url)) as w:
            yield await w.connected(), at_a_url, server.calls
        return

    def here(code: int, data: Any) -> Json:
        return {"code": code, "data": data}

    async with world() as w:
        w.box.tools["refuses"] = refuses
        yield await w.connected(), here, w.box.calls


async def refuses(ctx: Ctx, arguments: Json) -> str:
    raise MCPError(arguments["code"], "no", arguments["data"])


@pytest.mark.parametrize("kind", ["python", "url"])
async def test_it_says_that_its_request_began_and_ends_no_session(kind: str) -> None:
    async with failing(kind) as (client, arguments, ran):
        for number, (code, data, given, said) in enumerate(ERRORS, 1):
            error = await client.call("refuses", **arguments(code, data)).error()
            assert (error["code"], error.get("data")) == (given, said), (code, data)
            assert len(ran) == number


async def test_a_stock_client_does_not_call_a_tool_again_that_ran() -> None:
    """The client takes -32020 for a proof that no handler was reached."""
    async with world() as w, listening(w.layer_app) as port:
        w.box.tools["refuses"] = refuses
        async with Client(f"http://127.0.0.1:{port}/mcp") as client:
            assert client.protocol_version == "2026-07-28"
            with pytest.raises(MCPError, match="no"):
                await client.call_tool("refuses", {"code": -32020, "data": None})
        assert w.box.calls == ["refuses"]
