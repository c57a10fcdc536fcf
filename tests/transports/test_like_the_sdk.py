"""The same requests to the SDK's own HTTP application and to ours: the same answers.

"exactly 2025-11-25 Streamable HTTP": a stock client must not be able to tell the two apart
by statuses, bodies or headers. Where they differ on purpose, `DIFFERENCES` says why, and a
difference that is gone has to be taken out of there.
"""

import json
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import mcp_types as types
import pytest
from mcp.server.transport_security import TransportSecuritySettings
from starlette.types import ASGIApp

from mcp_sessions import SessionLayer
from tests.support.raw import (
    Json,
    RawClient,
    Reply,
    call_params,
    in_process,
    initialize_params,
)
from tests.support.world import Ctx, Toolbox

SETTINGS = TransportSecuritySettings(
    allowed_hosts=["127.0.0.1:*", "exact.example"],
    allowed_origins=["http://localhost:*", "https://exact.example"],
)
LIMIT = 50_000

HANDSHAKE: Json = initialize_params()


@dataclass(frozen=True)
class Case:
    """One HTTP request; its session is the one that was opened before."""

    method: str = "POST"
    body: bytes = b'{"jsonrpc":"2.0","id":7,"method":"ping"}'
    headers: dict[str, str | None] = field(default_factory=dict[str, str | None])
    """Instead of a stock client's; None: without that header."""


def rpc(**members: Any) -> Case:
    """A POST of a JSON-RPC message."""
    return Case(body=json.dumps({"jsonrpc": "2.0", **members}).encode())


def call(tool: str, **arguments: Any) -> Case:
    return rpc(id=7, method="tools/call", params=call_params(tool, arguments))


def raw(body: bytes) -> Case:
    return Case(body=body)


def headed(**headers: str | None) -> Case:
    """A ping with other headers: ``x_y`` for ``X-Y``."""
    return Case(headers={name.replace("_", "-"): value for name, value in headers.items()})


def got(**headers: str | None) -> Case:
    return Case("GET", b"", {name.replace("_", "-"): value for name, value in headers.items()})


CASES: dict[str, Case] = {
    # What is right.
    "ping": rpc(id=7, method="ping"),
    "ping with text id": rpc(id="seven", method="ping"),
    "ping with empty id": rpc(id="", method="ping"),
    "ping with negative id": rpc(id=-1, method="ping"),
    "ping with id 0": rpc(id=0, method="ping"),
    "ping with id 2**63": rpc(id=2**63, method="ping"),
    "ping with null params": rpc(id=7, method="ping", params=None),
    "ping with another member": rpc(id=7, method="ping", extra=1),
    "call": call("echo", text="hello"),
    "call with text that is not ASCII": call("echo", text='ü€😀\u2028\u0000\\"'),
    "call of a tool that fails": call("fail"),
    "call of an unknown tool": call("nothing"),
    "call with an MCP error": call("mcp_error"),
    "call with long numbers": call("echo", text=[2**53 + 1, 2**63, 2**64 - 1, -(2**63), 1.5]),
    "call with longer numbers": call("echo", text=[2**64 + 1, -(2**63) - 1]),
    "list": rpc(id=7, method="tools/list"),
    "list with a cursor of the wrong type": rpc(id=7, method="tools/list", params={"cursor": 7}),
    "unknown method": rpc(id=7, method="x/unknown"),
    "empty method": rpc(id=7, method=""),
    "known method without a handler": rpc(
        id=7,
        method="completion/complete",
        params={
            "ref": {"type": "ref/prompt", "name": "x"},
            "argument": {"name": "a", "value": "b"},
        },
    ),
    "known method with malformed params": rpc(id=7, method="tools/call", params={"name": 7}),
    "known method without its params": rpc(id=7, method="tools/call"),
    "removed method": rpc(id=7, method="sessions/list"),
    "modern method": rpc(id=7, method="server/discover"),
    "notification": rpc(method="notifications/roots/list_changed"),
    "unknown notification": rpc(method="notifications/x"),
    "malformed notification": rpc(method="notifications/progress", params={"x": 1}),
    "answer to nothing": rpc(id="x", result={}),
    "error answer to nothing": rpc(id=3, error={"code": 1, "message": "no"}),
    "error answer without an id": rpc(id=None, error={"code": 1, "message": "no"}),
    "cancellation of nothing": rpc(method="notifications/cancelled", params={"requestId": 99}),
    # Bodies that are wrong.
    "empty body": raw(b""),
    "white space": raw(b"  \n"),
    "no JSON": raw(b"hello"),
    "half a message": raw(b'{"jsonrpc":"2.0","id":7,'),
    "two messages": raw(b'{"jsonrpc":"2.0","id":7,"method":"ping"}{}'),
    "bad UTF-8": raw(b'{"jsonrpc":"2.0","id":"\xff","method":"ping"}'),
    "byte order mark": raw(b'\xef\xbb\xbf{"jsonrpc":"2.0","id":7,"method":"ping"}'),
    "NaN": raw(b'{"jsonrpc":"2.0","id":7,"method":"ping","params":{"x":NaN}}'),
    "deep": raw(b'{"jsonrpc":"2.0","id":7,"method":"ping","params":' + b"[" * 5_000),
    "batch": raw(b'[{"jsonrpc":"2.0","id":7,"method":"ping"}]'),
    "empty batch": raw(b"[]"),
    "null": raw(b"null"),
    "number": raw(b"7"),
    "text": raw(b'"ping"'),
    "empty object": raw(b"{}"),
    "no version": raw(b'{"id":7,"method":"ping"}'),
    "version 1.0": raw(b'{"jsonrpc":"1.0","id":7,"method":"ping"}'),
    "version as a number": raw(b'{"jsonrpc":2.0,"id":7,"method":"ping"}'),
    "id null": rpc(id=None, method="ping"),
    "id true": rpc(id=True, method="ping"),
    "id 1.5": rpc(id=1.5, method="ping"),
    "id list": rpc(id=[1], method="ping"),
    "id object": rpc(id={}, method="ping"),
    "method null": rpc(id=7, method=None),
    "method number": rpc(id=7, method=7),
    "params list": rpc(id=7, method="ping", params=[]),
    "params text": rpc(id=7, method="ping", params="x"),
    "params number": rpc(id=7, method="ping", params=0),
    "result null": rpc(id=7, result=None),
    "result text": rpc(id=7, result="x"),
    "result without id": rpc(result={}),
    "error text": rpc(id=7, error="x"),
    "error without message": rpc(id=7, error={"code": 1}),
    "error with text code": rpc(id=7, error={"code": "one", "message": "x"}),
    "only an id": rpc(id=7),
    # Headers.
    "accept JSON only": headed(Accept="application/json"),
    "accept SSE only": headed(Accept="text/event-stream"),
    "accept nothing": headed(Accept=None),
    "accept anything": headed(Accept="*/*"),
    "accept kinds": headed(Accept="application/*, text/*"),
    "accept with quality": headed(Accept="text/event-stream;q=0.5, application/json; q=1"),
    "accept in capitals": headed(Accept="Application/JSON, TEXT/Event-Stream"),
    "accept something else": headed(Accept="text/html"),
    "content type missing": headed(Content_Type=None),
    "content type text": headed(Content_Type="text/plain"),
    "content type with charset": headed(Content_Type="application/json; charset=utf-8"),
    "content type in capitals": headed(Content_Type="Application/JSON"),
    "content type almost": headed(Content_Type="application/jsonx"),
    "no session": headed(Mcp_Session_Id=None),
    "unknown session": headed(Mcp_Session_Id="f" * 32),
    "empty session": headed(Mcp_Session_Id=""),
    "no version header": headed(Mcp_Protocol_Version=None),
    "older version": headed(Mcp_Protocol_Version="2025-06-18"),
    "oldest version": headed(Mcp_Protocol_Version="2025-03-26"),
    "unknown version": headed(Mcp_Protocol_Version="1999-01-01"),
    "empty version": headed(Mcp_Protocol_Version=""),
    "host exact": headed(Host="exact.example"),
    "host with another port": headed(Host="127.0.0.1:1"),
    "host without a port": headed(Host="127.0.0.1"),
    "host unknown": headed(Host="evil.example"),
    "host that begins alike": headed(Host="127.0.0.1.evil.example:80"),
    "host missing": headed(Host=None),
    "host empty": headed(Host=""),
    "origin exact": headed(Origin="https://exact.example"),
    "origin with a port": headed(Origin="http://localhost:3000"),
    "origin without a port": headed(Origin="http://localhost"),
    "origin unknown": headed(Origin="https://evil.example"),
    "origin null": headed(Origin="null"),
    "origin empty": headed(Origin=""),
    "length too large": headed(Content_Length=str(LIMIT + 1)),
    "length no number": headed(Content_Length="many"),
    "body too large": raw(b" " * LIMIT + b"{}"),
    "body just right": raw(b'{"jsonrpc":"2.0","id":7,"method":"ping"}'.ljust(LIMIT)),
    # Opening.
    "handshake": Case(
        body=json.dumps(
            {"jsonrpc": "2.0", "id": 0, "method": "initialize", "params": HANDSHAKE}
        ).encode(),
        headers={"Mcp-Session-Id": None},
    ),
    "handshake of an unknown version": Case(
        body=json.dumps(
            {
                "jsonrpc": "2.0",
                "id": 0,
                "method": "initialize",
                "params": {**HANDSHAKE, "protocolVersion": "1999-01-01"},
            }
        ).encode(),
        headers={"Mcp-Session-Id": None, "Mcp-Protocol-Version": None},
    ),
    "handshake without params": Case(
        body=b'{"jsonrpc":"2.0","id":0,"method":"initialize"}', headers={"Mcp-Session-Id": None}
    ),
    "handshake of an unknown session": Case(
        body=b'{"jsonrpc":"2.0","id":0,"method":"initialize"}',
        headers={"Mcp-Session-Id": "f" * 32},
    ),
    "notification without a session": Case(
        body=b'{"jsonrpc":"2.0","method":"notifications/initialized"}',
        headers={"Mcp-Session-Id": None},
    ),
    "answer without a session": Case(
        body=b'{"jsonrpc":"2.0","id":1,"result":{}}', headers={"Mcp-Session-Id": None}
    ),
    # Other methods.
    "GET without a session": got(Mcp_Session_Id=None),
    "GET of an unknown session": got(Mcp_Session_Id="f" * 32),
    "GET that accepts JSON": got(Accept="application/json"),
    "GET that accepts nothing": got(Accept=None),
    "GET from an unknown host": got(Host="evil.example"),
    "PUT": Case("PUT"),
    "PATCH": Case("PATCH"),
    "OPTIONS": Case("OPTIONS", b""),
    "HEAD": Case("HEAD", b""),
    "DELETE without a session": Case("DELETE", b"", {"Mcp-Session-Id": None}),
    "DELETE of an unknown session": Case("DELETE", b"", {"Mcp-Session-Id": "f" * 32}),
    "DELETE": Case("DELETE", b""),
}

DIFFERENCES: dict[str, str] = {
    "content type missing": "the SDK answers 400 and not HTTP's own 415",
    "content type text": "the SDK answers 400 and not HTTP's own 415",
    "content type in capitals": "the SDK refuses what RFC 9110 says is the same type",
    "NaN": "the SDK's parser takes what is no JSON",
    **dict.fromkeys(
        ("id null", "id true", "id 1.5", "id list", "id object"),
        "the SDK takes a request with a malformed id for a notification, and nobody answers it",
    ),
    **dict.fromkeys(
        ("length too large", "body too large"), "the SDK does not say how large a body may be"
    ),
    **dict.fromkeys(
        ("host without a port", "origin without a port"),
        "the SDK compares names as text, and takes no port for another one",
    ),
    "handshake without params": "D1: the SDK names a session though it opened none",
}


@pytest.mark.parametrize("name", CASES)
async def test_the_answer_is_the_sdks(name: str) -> None:
    """Statuses, bodies and headers of one request, after a handshake on each side."""
    case = CASES[name]
    async with two_applications() as (bare, wrapped):
        theirs, ours = await answer(bare, case), await answer(wrapped, case)

    if name in DIFFERENCES:
        assert ours != theirs, f"no difference any more: {DIFFERENCES[name]}"
    else:
        assert ours == theirs


@asynccontextmanager
async def two_applications() -> AsyncGenerator[tuple[RawClient, RawClient]]:
    """A client of the SDK's application and one of ours, each after its handshake."""
    box = Toolbox()

    async def fail(ctx: Ctx, arguments: Json) -> str:
        raise RuntimeError("on purpose")

    async def mcp_error(ctx: Ctx, arguments: Json) -> str:
        from mcp.shared.exceptions import MCPError

        raise MCPError(-32000, "refused", {"why": "because"})

    async def echo(ctx: Ctx, arguments: Json) -> str:
        return json.dumps(arguments["text"])

    box.tools.update(fail=fail, mcp_error=mcp_error, echo=echo)
    bare = box.server.streamable_http_app(transport_security=SETTINGS, max_request_body_size=LIMIT)
    layer = SessionLayer(box.server)
    app = layer.asgi_app(security=SETTINGS, max_body=LIMIT)
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(bare.router.lifespan_context(bare))
        await stack.enter_async_context(layer.lifespan())
        yield (await client_of(bare, stack), await client_of(app, stack))


async def client_of(app: ASGIApp, stack: AsyncExitStack) -> RawClient:
    """A client of an application, after its handshake."""
    client = RawClient(await stack.enter_async_context(in_process(app)))
    await client.initialize()
    return client


async def answer(client: RawClient, case: Case) -> Json:
    headers: dict[str, str | None] = {
        **client.headers(),
        "Content-Type": "application/json",
        **case.headers,
    }
    sent = {name: value for name, value in headers.items() if value is not None}
    reply = await client.http(case.method, sent, case.body).done()
    return {
        "status": reply.status,
        "body": without_texts(reply),
        "allow": reply.header("allow"),
        "session": reply.status == 200 and reply.header("mcp-session-id") is not None,
        "raised": repr(reply.error),
    }


def without_texts(reply: Reply) -> object:
    """The messages of a body: what another parser says of a mistake is its own; what our
    layer can do next to is not in the comparison.
    """
    if reply.is_sse:
        messages = reply.messages
    elif (reply.header("content-type") or "").startswith("application/json") and reply.body:
        messages = [reply.json]
    else:
        return bytes(reply.body).decode()
    for message in messages:
        error = message.get("error")
        if error is not None and error["message"].startswith(("Parse error", "Validation error")):
            error["message"] = error["message"].partition(":")[0]
        result = message.get("result", {})
        if "protocolVersion" in result:
            result["capabilities"] = sorted(
                types.ServerCapabilities.model_validate(
                    {
                        name: {}
                        for name in result["capabilities"]
                        if name not in ("sessions", "extensions")
                    }
                ).model_dump(exclude_none=True)
            )
    return messages
