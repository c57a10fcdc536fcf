"""What a refusal of a URL proves, case by case: the table of ``url_requests.py``.

Each case counts how often the tool ran, and looks at what its client was told. A server may give
any status and any text after its tool has run (KEY3, KEY17, ERR7).
"""

import asyncio
import json
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager, closing, suppress
from typing import Any

import mcp_types as types
import pytest
from mcp.shared.exceptions import MCPError
from starlette.types import ASGIApp, Receive, Scope, Send

from mcp_sessions import HTTPServer
from tests.support import apps
from tests.support.modern import ModernClient
from tests.support.modern_server import Ctx, ModernServer, modern_url
from tests.support.raw import RawClient
from tests.support.url_server import UrlServer
from tests.support.urls import url_of
from tests.support.world import world

pytestmark = pytest.mark.filterwarnings(apps.DEPRECATED)

UNKNOWN = -31012
TEXTS = (
    "",
    "no valid session ID provided",
    "unsupported protocol version",
    "the request was not started",
)


def error(code: int, text: str, request_id: str = "null", data: str = "null") -> str:
    return (
        f'{{"jsonrpc": "2.0", "id": {request_id}, '
        f'"error": {{"code": {code}, "message": "{text}", "data": {data}}}}}'
    )


def refusal(status: int, body: str = "", **headers: str) -> dict[str, Any]:
    return {"status": status, "body": body, "headers": headers}


OF_STATUS = [
    (refusal(status, text), UNKNOWN)
    for status in (
        *(300, 301, 302, 303, 304, 305, 400, 402, 403, 404, 405, 406, 408, 409, 410, 411, 413),
        *(414, 415, 417, 418, 421, 422, 425, 426, 428, 429, 431, 451, 499, 500, 501, 502, 503),
        *(504, 507, 520, 599),
    )
    for text in (TEXTS if status in (400, 403, 404, 429, 503) else TEXTS[:2])
]
WITH_HEADERS = [
    (refusal(429, **{"retry-after": "0"}), UNKNOWN),
    (refusal(503, **{"retry-after": "0"}), UNKNOWN),
    (refusal(401), UNKNOWN),
    (refusal(401, "session expired"), UNKNOWN),
    (refusal(403, **{"www-authenticate": 'Bearer error="insufficient_scope"'}), UNKNOWN),
    (refusal(302, location="/mcp"), UNKNOWN),
    (refusal(303, location="/mcp"), UNKNOWN),
    (refusal(307, location="/mcp"), UNKNOWN),
    (refusal(308, location="/mcp"), UNKNOWN),
    (refusal(307, location="http://elsewhere.example/mcp"), UNKNOWN),
    (refusal(308, location="http://elsewhere.example/mcp"), UNKNOWN),
]
OF_THE_SERVER = [
    (refusal(status, error(code, text, request_id)), code)
    for status in (400, 403, 404, 409, 422, 429)
    for code, text in (
        (-32000, "Bad Request: No valid session ID provided"),
        (-32600, "Bad Request: Unsupported protocol version: 2025-11-25"),
        (-32601, "Method not found"),
        (-32602, "no such session"),
        (-32603, "Handler returned an invalid result"),
    )
    for request_id in ("null", '"server-error"', "ID")
]
OF_SUCCESS = [
    (refusal(200, error(code, "session id not found", "ID")), -32603 if code == -32020 else code)
    # ERR16: a client would call again after -32020.
    for code in (-32000, -32001, -32600, -32601, -32602, -32603, -32020, -32022)
]


@asynccontextmanager
async def refusing(server: UrlServer, **options: Any) -> AsyncGenerator[RawClient]:
    async with url_of(server) as url, world(server=HTTPServer(url, **options)) as w:
        yield await w.connected()


def shakes(server: UrlServer) -> int:
    return sum(1 for message in server.received if message.get("method") == "initialize")


@pytest.mark.parametrize("has_sessions", [True, False], ids=["sessions", "stateless"])
@pytest.mark.parametrize("cases", [OF_STATUS, WITH_HEADERS, OF_THE_SERVER, OF_SUCCESS])
async def test_a_tool_that_ran_runs_once_whatever_comes_after_it(
    cases: list[tuple[dict[str, Any], int]], has_sessions: bool
) -> None:
    """Neither a status nor a text is taken for a proof, and others lose nothing."""
    server = UrlServer("" if has_sessions else "stateless")
    async with refusing(server) as client:
        for number, (said, code) in enumerate(cases, 1):
            refused = await client.call("refuses", **said).error()
            assert refused["code"] == code, said
            assert "started" not in str(refused.get("data")), said
            assert len(server.calls) == number, said
        assert await client.text("count") == str(len(cases) + 1)
    assert shakes(server) == 1, "the session goes on"


@pytest.mark.parametrize("cases", [OF_STATUS, WITH_HEADERS, OF_THE_SERVER])
async def test_a_tool_of_the_modern_era_that_ran_runs_once_as_well(
    cases: list[tuple[dict[str, Any], int]],
) -> None:
    """That era has no session there, so its 404 proves nothing."""
    ran: list[int] = []
    modern = ModernServer()
    app = modern.server.streamable_http_app()

    async def refuses(scope: Scope, receive: Receive, send: Send) -> None:
        headers = dict(scope["headers"])
        if headers.get(b"mcp-method") != b"tools/call":
            await modern.only(app)(scope, receive, send)
            return
        message = json.loads((await receive())["body"])
        said, _ = cases[len(ran)]
        ran.append(said["status"])
        fields = [(name.encode(), value.encode()) for name, value in said["headers"].items()]
        await send({"type": "http.response.start", "status": said["status"], "headers": fields})
        body = said["body"].replace("ID", str(message["id"])).encode()
        await send({"type": "http.response.body", "body": body})

    async with app.router.lifespan_context(app), url_of(refuses) as url:
        async with world(server=HTTPServer(url)) as w:
            client = ModernClient(w.carrier)
            for number, (said, code) in enumerate(cases, 1):
                refused = await client.call("works").error()
                assert (refused["code"], len(ran)) == (code, number), said
                assert "started" not in str(refused.get("data")), said


@pytest.mark.parametrize("code", [-32000, -32020, -32022, -32600, -32601, -32602, -32603])
async def test_an_error_of_a_handler_of_the_modern_era_is_its_answer(code: int) -> None:
    """The SDK gives some codes of a handler the status of a refusal, 400 or 404."""
    ran = 0
    modern = ModernServer()

    async def fails(ctx: Ctx, params: types.CallToolRequestParams) -> types.CallToolResult:
        nonlocal ran
        ran += 1
        raise MCPError(code, "unsupported protocol version: no session id")

    modern.server.add_request_handler("tools/call", types.CallToolRequestParams, fails)
    async with modern_url(modern) as url, world(server=HTTPServer(url)) as w:
        for client in (await w.connected(), ModernClient(w.carrier)):
            before = ran
            refused = await client.call("fails").error()
            assert (refused["code"], ran - before) == (-32603 if code == -32020 else code, 1)
            assert "started" not in str(refused.get("data"))


async def test_404_is_a_proof_for_a_session_that_the_server_issued() -> None:
    server = UrlServer()
    async with refusing(server) as client:
        assert await client.text("count") == "1"
        server.forget()
        assert await client.text("count") == "2"
    assert shakes(server) == 2


async def test_a_challenge_is_a_proof_and_a_401_of_a_handler_is_none() -> None:
    """RFC 9110, 15.5.2: a 401 has a challenge, and was not applied. A 401 that a handler passes on
    has none. The next request has another credential all the same.
    """
    server, asked = UrlServer(), 0

    def credential(_: object) -> dict[str, str]:
        nonlocal asked
        asked += 1
        return {"Authorization": f"Bearer {asked}"}

    async with refusing(server, auth=credential) as client:
        refused = await client.call("refuses", **refusal(401)).error()
        assert (refused["code"], server.calls, asked) == (UNKNOWN, ["refuses"], 2)
        assert server.headers[-1]["authorization"] == "Bearer 1"
        server.accepts = "Bearer 3"
        assert await client.text("count") == "2"
        assert asked == 3
        server.accepts = "of nobody"
        refused = await client.call("count").error()
        assert refused["data"]["started"] is False and len(server.calls) == 2


class Deployed:
    """Another server may take the place of the one before it, at the same URL."""

    def __init__(self, now: ASGIApp) -> None:
        self.now = now

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self.now(scope, receive, send)


async def test_a_400_for_what_has_no_effect_either_ends_the_session_for_the_next_request() -> None:
    """The call itself may have run: it is not sent again."""
    deployed = Deployed(UrlServer("stateless"))
    async with url_of(deployed) as url, world(server=HTTPServer(url)) as w:
        client = await w.connected()
        assert await client.text("count") == "1"
        deployed.now = server = UrlServer("sessions")
        refused = await client.call("count").error()
        assert refused["code"] == -32600 and "started" not in refused.get("data", {})
        assert server.calls == []
        assert await client.text("count") == "1"


async def test_a_connection_that_ends_after_a_request_proves_nothing() -> None:
    """Also one that was open before, and that the server left meanwhile."""
    ran: list[str] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            head = await reader.readuntil(b"\r\n\r\n")
            fields = dict(
                line.lower().split(b": ", 1) for line in head.split(b"\r\n")[1:] if b": " in line
            )
            message = json.loads(
                await reader.readexactly(int(fields.get(b"content-length", 0))) or "{}"
            )
            if message.get("method") == "tools/call":
                ran.append(message["params"]["name"])
                writer.transport.abort()
                return
            result: dict[str, Any] = {
                "protocolVersion": "2025-11-25",
                "capabilities": {},
                "serverInfo": {},
            }
            body = json.dumps({"jsonrpc": "2.0", "id": message.get("id"), "result": result})
            status = "200 OK" if "id" in message else "405 No" if not message else "202 Accepted"
            body = body if "id" in message else ""
            writer.write(
                f"HTTP/1.1 {status}\r\ncontent-type: application/json\r\n"
                f"content-length: {len(body)}\r\n\r\n{body}".encode()
            )

    async def one(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(asyncio.IncompleteReadError), closing(writer):
            await serve(reader, writer)

    async with await asyncio.start_server(one, "127.0.0.1", 0) as listener:
        port = listener.sockets[0].getsockname()[1]
        async with world(server=HTTPServer(f"http://127.0.0.1:{port}/mcp")) as w:
            client = await w.connected()
            for number in (1, 2):
                refused = await client.call("work").error()
                assert (refused["code"], len(ran)) == (UNKNOWN, number)
            listener.close()
            await listener.wait_closed()
            refused = await client.call("work").error()
            assert refused["data"]["started"] is False and len(ran) == 2
