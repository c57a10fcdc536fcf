"""What a request of the era of 2026-07-28 says in its headers.

All else is the same for a command: ``tests/server/upstream/external/test_child_eras.py``.
"""

from typing import Any

import pytest
from mcp.shared.inbound import decode_header_value
from starlette.requests import Request
from starlette.responses import JSONResponse

from mcp_sessions import HTTPServer
from mcp_sessions.core.messages import decode
from mcp_sessions.server.upstream.external.param_headers import DeclaredHeaders, headers_of
from tests.support import apps
from tests.support.modern import ModernClient
from tests.support.modern_server import ModernServer, modern_url
from tests.support.urls import url_of
from tests.support.world import world

pytestmark = pytest.mark.filterwarnings(apps.DEPRECATED)


async def test_headers_repeat_what_a_request_is() -> None:
    modern = ModernServer()
    async with modern_url(modern) as url, world(server=HTTPServer(url)) as w:
        client = await w.connected()
        assert await client.text("echo") == "echo"
        read = await client.result("resources/read", {"uri": "note://é"})
        assert read["contents"][0]["text"] == "read"
    sent = {(h["mcp-method"], h.get("mcp-name")) for h in modern.headers}
    assert {("tools/call", "echo"), ("resources/read", "=?base64?bm90ZTovL8Op?=")} <= sent


def test_the_name_of_a_request_about_a_task_is_the_task() -> None:
    """A URL may have tasks of its own."""
    for method in ("tasks/get", "tasks/update", "tasks/cancel"):
        sent = headers_of({"method": method, "params": {"taskId": "é"}})
        assert sent == {"mcp-method": method, "mcp-name": "=?base64?w6k=?="}


REGION: dict[str, Any] = {"region": {"type": "string", "x-mcp-header": "Region"}}


def test_a_schema_that_is_too_large_for_headers_is_said_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A server that wants the header refuses each call of the tool, and nobody learned why."""
    declared = DeclaredHeaders()
    schema = {"type": "object", "properties": REGION, "description": "x" * 65_536}
    for _ in range(3):
        declared.learn({"tools": [{"name": "large", "inputSchema": schema}]})
    assert declared.headers_for({"name": "large", "arguments": {"region": "eu"}}) == {}
    said = "no header repeats arguments of tool 'large': its schema has over 65536 bytes"
    assert caplog.messages == [said]


def routed(modern: ModernServer) -> list[str | None]:
    """What the header of each call said, decoded."""
    return [
        decode_header_value(headers.get("mcp-param-region"))
        for headers in modern.headers
        if headers["mcp-method"] == "tools/call"
    ]


async def test_headers_repeat_the_arguments_that_a_schema_says_and_nobody_listed_before() -> None:
    """Such a tool could not be called: the server refused what lacked its header."""
    modern = ModernServer()
    modern.repeated = REGION
    async with modern_url(modern) as url, world(server=HTTPServer(url)) as w:
        client = await w.connected()
        assert await client.text("route", region="eu") == "route"
        assert routed(modern) == [None, "eu"], "it was refused, and read what it has to be"
        assert await client.text("route", region="Köln") == "route"
        assert routed(modern)[2:] == ["Köln"], "that is known now"
        assert await client.text("route") == "route"
        assert routed(modern)[3:] == [None]
        modern.repeated = {"region": {"type": "string"}, "zone": {**REGION["region"]}}
        assert await client.text("route", region="eu", zone="1") == "route"
        assert routed(modern)[4:] == ["eu", "1"], "its schema changed meanwhile"


async def test_what_a_client_lists_is_known() -> None:
    modern = ModernServer()
    modern.repeated = REGION
    async with modern_url(modern) as url, world(server=HTTPServer(url)) as w:
        client = ModernClient(w.carrier)
        cursor = (await client.send("tools/list").result())["nextCursor"]
        await client.send("tools/list", {"cursor": cursor}).result()
        headers = {"mcp-param-region": "eu"}
        assert await client.text("route", {"region": "eu"}, headers=headers) == "route"
        assert routed(modern) == ["eu"]


async def test_a_server_that_refuses_headers_whatever_they_are_is_asked_no_third_time() -> None:
    posted: list[str] = []

    async def refuses(scope: Any, receive: Any, send: Any) -> None:
        request = Request(scope, receive)
        message = await request.json()
        posted.append(message["method"])
        result: dict[str, Any] | None = {"tools": []}
        if message["method"] == "server/discover":
            result = {"supportedVersions": ["2026-07-28"], "capabilities": {}}
        elif message["method"] != "tools/list":
            result = None
        answer = {"result": result} if result else {"error": {"code": -32020, "message": "no"}}
        body = {"jsonrpc": "2.0", "id": message["id"], **answer}
        await JSONResponse(body, 200 if result else 400)(scope, receive, send)

    async with url_of(refuses) as url, world(server=HTTPServer(url)) as w:
        client = await w.connected()
        # A handler may have said it as well: see ERR16.
        assert (await client.call("route", region="eu").error())["code"] == -32603
        assert posted.count("tools/call") == 1, "it would be the same again"


@pytest.mark.parametrize(
    ("schema", "expected"),
    [
        ({"properties": REGION}, {"mcp-param-region": "=?base64?w6k=?="}),
        (
            {"properties": {"a": {"type": "object", "properties": REGION}}},
            {"mcp-param-region": "x"},
        ),
        (
            {"properties": {"flag": {"type": "boolean", "x-mcp-header": "F"}}},
            {"mcp-param-f": "true"},
        ),
        ({"properties": {**REGION, "b": {"type": "string", "x-mcp-header": "REGION"}}}, {}),
        ({"properties": {"x": {"type": "number", "x-mcp-header": "X"}}}, {}),
        ({"properties": {"region": {"type": "string"}}, "x-mcp-header": "Root"}, {}),
        ({"properties": [1]}, {}),
        ({"properties": REGION, "description": "x" * 65_536}, {}),
        (None, {}),
    ],
)
def test_only_declared_arguments_are_repeated(schema: Any, expected: dict[str, str]) -> None:
    """A tool with an annotation that is invalid has none."""
    declared = DeclaredHeaders()
    declared.learn({"tools": [{"name": "t", "inputSchema": schema}, 1, {"name": 2}]})
    arguments = {"region": "é", "a": {"region": "x"}, "flag": True, "x": 1}
    assert declared.headers_for({"name": "t", "arguments": arguments}) == expected
    assert declared.headers_for({"name": "t", "arguments": [1]}) == {}
    assert declared.headers_for({"name": ["t"], "arguments": arguments}) == {}


def test_half_a_surrogate_pair_stands_in_no_header() -> None:
    """A client sends it beside a number that only Python's decoder reads. The call is sent, and a
    server that wants the header refuses it: whether it ran was unknown, and the log had a mistake.
    """
    declared = DeclaredHeaders()
    declared.learn({"tools": [{"name": "t", "inputSchema": {"properties": REGION}}]})
    (arguments,) = decode(b'[{"region":"\\ud800","n":123456789012345678901234567890}]')
    assert declared.headers_for({"name": "t", "arguments": arguments}) == {}
