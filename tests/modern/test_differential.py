"""A client that knows nothing of sessions gets the SDK's own answers, byte for byte.

"modern era, knows nothing of us: exactly what the SDK would answer, nothing added but the
capability advertisement" (CAP1, EVT6). The same requests go to a server bare and to its
twin wrapped; status, headers and body are compared.
"""

import json
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from tests.support.everything import EVERYTHING_KINDS, ODD, EverythingKind, make_everything
from tests.support.modern import (
    HOST,
    LOG_LEVEL,
    MODERN,
    envelope,
    routing_headers,
    wanted,
)
from tests.support.raw import EXTENSION, Json, call_params
from tests.support.side_by_side import Side, bare, expect_same, wrapped

pytestmark = [
    # `ctx.log` and its like.
    pytest.mark.filterwarnings("ignore:.*deprecated as of 2026-07-28"),
]

ACCEPT = "application/json, text/event-stream"


@pytest.fixture
def anyio_backend() -> str:
    """Real time: the bare servers use threads."""
    return "asyncio"


@pytest.fixture(params=EVERYTHING_KINDS)
def kind(request: pytest.FixtureRequest) -> EverythingKind:
    return request.param


async def expect_same_as_sdk(
    kind: EverythingKind, script: Callable[[Side], Awaitable[None]]
) -> list[str]:
    return await expect_same(lambda: make_everything(kind), script)


# --- every method ------------------------------------------------------------------------

METHODS: list[tuple[str, Json | None]] = [
    ("server/discover", None),
    ("tools/list", None),
    ("tools/list", {"cursor": "2"}),
    ("tools/list", {"cursor": 5}),
    ("resources/list", None),
    ("resources/templates/list", None),
    ("resources/read", {"uri": "note://a"}),
    ("resources/read", {"uri": "blob://b"}),
    ("resources/read", {"uri": "note://by/someone"}),
    ("resources/read", {"uri": "note://broken"}),
    ("resources/read", {"uri": "nowhere://at/all"}),
    ("resources/read", {"uri": ""}),
    ("resources/read", {}),
    ("prompts/list", None),
    ("prompts/get", {"name": "greet", "arguments": {"name": ODD}}),
    ("prompts/get", {"name": "greet"}),
    ("prompts/get", {"name": "unknown"}),
    (
        "completion/complete",
        {"ref": {"type": "ref/prompt", "name": "greet"}, "argument": {"name": "a", "value": "b"}},
    ),
    (
        "completion/complete",
        {
            "ref": {"type": "ref/resource", "uri": "note://by/{name}"},
            "argument": {"name": "nothing", "value": ""},
            "context": {"arguments": {"x": "y"}},
        },
    ),
    ("completion/complete", {}),
    ("subscriptions/listen", None),
    ("subscriptions/listen", {"notifications": "all"}),
    ("tools/call", {}),
    ("tools/call", {"name": 5}),
    ("tools/call", {"name": "echo", "arguments": []}),
    # Of the handshake era, or of nobody.
    ("ping", None),
    ("initialize", {"protocolVersion": "2025-11-25", "capabilities": {}}),
    ("logging/setLevel", {"level": "info"}),
    ("resources/subscribe", {"uri": "note://a"}),
    ("resources/unsubscribe", {"uri": "note://a"}),
    ("notifications/initialized", None),
    ("x/unknown", {"a": 1}),
    ("", None),
    ("session", {}),
    ("session/restart", {}),
    ("sessions/list", {}),
    ("example/custom", {"none": None}),
]


async def test_every_method_is_answered_as_the_sdk_does(kind: EverythingKind) -> None:
    async def script(side: Side) -> None:
        client = side.client()
        for method, params in METHODS:
            await client.send(method, params).done()

    answers = await expect_same_as_sdk(kind, script)

    assert len(answers) == len(METHODS)


async def test_discover_says_one_thing_more(kind: EverythingKind) -> None:
    """Rule: "``capabilities.sessions = {}`` at top level in … ``server/discover`` results, plus
    our settings under ``capabilities.extensions``". `expect_same` takes just that away.
    """
    async with wrapped(lambda: make_everything(kind)) as side:
        result = await side.client().send("server/discover").result()

    capabilities = result["capabilities"]
    assert capabilities["sessions"] == {}
    ours = capabilities["extensions"][EXTENSION]
    assert set(ours) == {"window", "requestKeys", "routing", "transports", "features", "level"}
    assert ours["level"] == "full"
    assert ours["window"] == {"maxEvents": 1_000, "maxBytes": 1_048_576, "maxAge": 3_600}
    assert ours["requestKeys"] == {"lifetime": 3_600, "maxBytes": 1_048_576}


# --- tool calls --------------------------------------------------------------------------


def _nested(levels: int) -> Any:
    value: Any = "leaf"
    for _ in range(levels):
        value = [value]
    return value


CALLS: list[tuple[str, Json]] = [
    ("echo", {"text": "plain"}),
    ("echo", {"text": ODD}),
    ("echo", {"text": "\ud800 alone"}),
    ("echo", {"text": "x" * 70_000}),
    ("echo", {}),
    ("echo", {"text": 5}),
    ("echo", {"text": _nested(300)}),
    ("weather", {"city": ODD}),
    *[("number", {"value": value}) for value in (0, 1.0, 0.1, -0.0, 1e22, 1e-7, 5e-324, 2**53)],
    ("integer", {"value": 2**63}),
    ("integer", {"value": -(2**64)}),
    ("integer", {"value": 10**300}),
    ("not_a_number", {}),
    ("several", {}),
    ("raw", {}),
    *[
        ("fail", {"how": how})
        for how in ("tool", "value", "mcp", "mapped", "not_found", "otherwise")
    ],
    ("mcp", {}),
    ("raise", {}),
    ("unknown", {}),
    ("standalone", {}),
    ("asks_now", {}),
    ("seen", {}),
    ("touch", {"uri": "note://a"}),
]


async def test_every_result_of_a_tool_is_written_as_the_sdk_does(kind: EverythingKind) -> None:
    """Structured output, errors, floats, big integers, lone surrogates, deep nesting."""

    async def script(side: Side) -> None:
        client = side.client(capabilities={"sampling": {}, "roots": {"listChanged": True}})
        for tool, arguments in CALLS:
            await client.call(tool, arguments, headers={"X-Mine": "sent"}).done()

    await expect_same_as_sdk(kind, script)


async def test_progress_and_log_messages_are_written_as_the_sdk_does(kind: EverythingKind) -> None:
    """The regression: they were in UTF-8, where the SDK escapes."""

    async def script(side: Side) -> None:
        client = side.client()
        for token in ("tök", 0, 7, "", 1.5, True, None, ["x"], 2**70):
            await client.call("steps", {"count": 2}, meta={"progressToken": token}).done()
        await client.call("steps", {"count": 2}).done()
        await client.call("bare_steps", {}, meta={"progressToken": 1}).done()
        for wanted_level in ("debug", "info", "emergency", "nonsense", 5, None):
            for level in ("info", "error"):
                arguments = {"level": level, "text": ODD}
                await client.call("log", arguments, meta={LOG_LEVEL: wanted_level}).done()
        await client.call("log", {"level": "info", "text": ODD}).done()

    await expect_same_as_sdk(kind, script)


@pytest.mark.parametrize("request_id", ["", "a", ODD, 0, -1, 2**70, "\ud800"])
async def test_any_id_is_answered_as_it_was_sent(request_id: str | int) -> None:
    async def script(side: Side) -> None:
        client = side.client()
        for method, params in (
            ("tools/call", call_params("echo", {"text": "x"})),
            ("tools/call", call_params("unknown")),
            ("x/unknown", None),
        ):
            await client.send(method, params, request_id=request_id).done()
        arguments = {"count": 1}
        sent = {"request_id": request_id, "meta": {"progressToken": "t"}}
        await client.call("steps", arguments, **sent).done()

    await expect_same_as_sdk("mcpserver", script)


# --- multi-round-trip requests -----------------------------------------------------------


async def test_a_question_in_two_rounds(kind: EverythingKind) -> None:
    """``input_required``, then the same call again with answers and ``requestState``."""
    tool = {"mcpserver": "order", "lowlevel": "ask", "fastmcp": "ask"}[kind]

    async def script(side: Side) -> None:
        client = side.client(capabilities={"elicitation": {"form": {}}})
        for answer in (
            {"action": "accept", "content": {"size": 3, "note": ODD}},
            {"action": "decline"},
            {"action": "cancel"},
            {"action": "accept", "content": {"size": "no number"}},
        ):
            first = await client.call(tool, {"item": "tea"}).result()
            if first.get("resultType") != "input_required":
                return
            side.mask(first["requestState"], "<state>")
            again = call_params(tool, {"item": "tea"})
            again["inputResponses"] = {key: answer for key in first["inputRequests"]}
            again["requestState"] = first["requestState"]
            await client.send("tools/call", again).done()
        spoiled = call_params(tool, {"item": "tea"})
        spoiled |= {"requestState": "v1.spoiled", "inputResponses": {}}
        await client.send("tools/call", spoiled).done()

    await expect_same_as_sdk(kind, script)


async def test_a_client_that_cannot_be_asked(kind: EverythingKind) -> None:
    """A missing capability has a code and a status of its own."""

    async def script(side: Side) -> None:
        declared: list[Json | None] = [None, {"sampling": {}}, {"elicitation": {"url": {}}}]
        for capabilities in declared:
            client = side.client(capabilities=capabilities)
            await client.call("order", {"item": "tea"}).done()

    await expect_same_as_sdk(kind, script)


# --- the envelope and its headers ----------------------------------------------------------


def _without(member: str) -> Json:
    meta = envelope()
    del meta[member]
    return meta


def _with(**members: Any) -> Json:
    return envelope({f"io.modelcontextprotocol/{n}": v for n, v in members.items()})


ENVELOPES: dict[str, Any] = {
    "none": None,
    "text": "text",
    "empty": {},
    "no version": _without("io.modelcontextprotocol/protocolVersion"),
    "no info": _without("io.modelcontextprotocol/clientInfo"),
    "no capabilities": _without("io.modelcontextprotocol/clientCapabilities"),
    "old version": _with(protocolVersion="2025-11-25"),
    "new version": _with(protocolVersion="2027-01-01"),
    "odd version": _with(protocolVersion=7),
    "odd info": _with(clientInfo="me"),
    "null info": _with(clientInfo=None),
    "odd capabilities": _with(clientCapabilities=[]),
    "null capabilities": _with(clientCapabilities=None),
    "more": _with(clientCapabilities={"elicitation": {}, "extensions": {"x/y": {"a": None}}}),
}


async def test_every_envelope_is_judged_as_the_sdk_does(kind: EverythingKind) -> None:
    async def script(side: Side) -> None:
        client = side.client()
        for meta in ENVELOPES.values():
            for method, params in (
                ("tools/list", {}),
                ("tools/call", call_params("echo", {"text": "x"})),
                ("tools/call", call_params("header", {"region": "here"})),
            ):
                members = {**params, "_meta": meta} if meta is not None else params
                client.post({"jsonrpc": "2.0", "id": 1, "method": method, "params": members})
        others: list[Any] = [None, [], "text", 5]
        for params in others:
            client.post({"jsonrpc": "2.0", "id": 1, "method": "tools/list", "params": params})
        client.post({"jsonrpc": "2.0", "id": 1, "method": "tools/list"})
        await _all_done(side)

    await expect_same_as_sdk(kind, script)


HEADERS: list[dict[str, str | None]] = [
    {},
    {"Mcp-Method": None},
    {"Mcp-Method": "tools/list"},
    {"Mcp-Method": "TOOLS/CALL"},
    {"Mcp-Name": None},
    {"Mcp-Name": "other"},
    {"Mcp-Name": "=?base64?ZWNobw==?="},
    {"Mcp-Name": "=?base64?!!?="},
    {"Mcp-Protocol-Version": "2027-01-01"},
    {"Mcp-Protocol-Version": ""},
    {"Mcp-Protocol-Version": "nonsense"},
    {"Accept": None},
    {"Accept": "application/json"},
    {"Accept": "text/event-stream"},
    {"Accept": "*/*"},
    {"Accept": "application/*, text/*"},
    {"Accept": "text/event-stream;q=0, application/json;q=1"},
    {"Accept": "text/html"},
    {"Content-Type": None},
    {"Content-Type": "text/plain"},
    {"Content-Type": "application/json; charset=utf-8"},
    {"Content-Type": "APPLICATION/JSON"},
    {"Content-Type": "application/jsonp"},
    {"Content-Encoding": "gzip"},
    {"Host": None},
    {"Host": "evil.example"},
    {"Host": "localhost:1"},
    {"Host": "[::1]:8000"},
    {"Origin": "http://evil.example"},
    {"Origin": "http://localhost:3000"},
    {"Origin": "null"},
    {"Mcp-Session-Id": "whatever"},
    {"Last-Event-ID": "whatever"},
]


async def test_every_header_is_judged_as_the_sdk_does(kind: EverythingKind) -> None:
    """Also ``Mcp-Session-Id``: "In the modern era without ``_meta`` session it is ignored"."""

    async def script(side: Side) -> None:
        client = side.client()
        for headers in HEADERS:
            await client.call("echo", {"text": "x"}, headers=headers).done()
            await client.send("tools/list", headers=headers).done()
            await client.notify("notifications/cancelled", {"requestId": 1}, headers=headers)

    await expect_same_as_sdk(kind, script)


NAMES: dict[tuple[str, str], tuple[int, int]] = {
    ("Host", "localhost"): (421, 200),
    ("Host", "127.0.0.1"): (421, 200),
    ("Host", "[::1]"): (421, 200),
    ("Host", "LOCALHOST:8000"): (421, 200),
    ("Host", "localhost.:8000"): (421, 200),
    ("Host", "[0:0:0:0:0:0:0:1]:8000"): (421, 200),
    ("Host", "localhost:8000/"): (200, 421),
    ("Host", "localhost:port"): (200, 421),
    ("Origin", "http://localhost"): (403, 200),
    ("Origin", "HTTP://LocalHost:3000"): (403, 200),
    ("Origin", "http://localhost:3000/page"): (200, 403),
}
"""A name → the status of the SDK, and of the layer: it compares the parts of a name."""


@pytest.mark.parametrize("kind", ["mcpserver", "lowlevel"])
async def test_the_layer_compares_the_parts_of_a_name_where_the_sdk_compares_text(
    kind: EverythingKind,
) -> None:
    """Rules 1 to 3 of ``origin.py``. Nothing else of Host and Origin is judged in another way."""
    answered: list[list[int | None]] = []
    for side_of in (bare, wrapped):
        async with side_of(lambda: make_everything(kind)) as side:
            client = side.client()
            for name, value in NAMES:
                await client.send("tools/list", headers={name: value}).done()
            answered.append([reply.status for reply in side.replies])
    sdk, ours = answered
    assert dict(zip(NAMES, zip(sdk, ours, strict=True), strict=True)) == NAMES


@pytest.mark.parametrize(
    "name", ["Mcp-Method", "Mcp-Name", "Mcp-Protocol-Version", "Mcp-Session-Id", "Accept"]
)
async def test_a_header_that_is_there_twice(name: str) -> None:
    async def script(side: Side) -> None:
        for second in ("the same", "another"):
            message = _message("tools/call", call_params("echo", {"text": "x"}))
            lines = _lines(message)
            known = dict(lines).get(name, "a")
            lines.append((name, known if second == "the same" else "other"))
            side.send("POST", "/mcp", lines, json.dumps(message).encode())
        await _all_done(side)

    await expect_same_as_sdk("mcpserver", script)


MCP_PARAMS: list[tuple[Json, list[tuple[str, str]]]] = [
    ({}, []),
    ({"region": "here"}, []),
    ({"region": "here"}, [("Mcp-Param-Region", "here")]),
    ({"region": "here"}, [("mcp-param-region", "there")]),
    ({"region": "here"}, [("Mcp-Param-Region", "here"), ("Mcp-Param-Region", "here")]),
    ({"region": "æ"}, [("Mcp-Param-Region", "=?base64?w6Y=?=")]),
    ({"region": "æ"}, [("Mcp-Param-Region", "=?base64?w6Y?=")]),
    ({}, [("Mcp-Param-Region", "here")]),
    ({"region": None}, [("Mcp-Param-Region", "here")]),
    ({"region": "here", "count": 3}, [("Mcp-Param-Region", "here"), ("Mcp-Param-Count", "3")]),
    ({"region": "here", "count": 3}, [("Mcp-Param-Region", "here"), ("Mcp-Param-Count", "3.0")]),
    ({"region": "here", "count": 3}, [("Mcp-Param-Region", "here"), ("Mcp-Param-Count", "4")]),
    ({"region": ["x"]}, [("Mcp-Param-Region", "x")]),
    ({"other": 1}, [("Mcp-Param-Other", "1")]),
]


async def test_arguments_that_are_repeated_in_headers(kind: EverythingKind) -> None:
    async def script(side: Side) -> None:
        for arguments, more in MCP_PARAMS:
            message = _message("tools/call", call_params("header", arguments))
            side.send("POST", "/mcp", [*_lines(message), *more], json.dumps(message).encode())
            await _all_done(side)

    await expect_same_as_sdk(kind, script)


# --- bodies --------------------------------------------------------------------------------

BODIES: list[bytes] = [
    b"",
    b" ",
    b"null",
    b"5",
    b'"text"',
    b"[]",
    b"{}",
    b"{",
    b"\xff",
    b"\xef\xbb\xbf{}",
    b"nan",
    b"NaN",
    b'{"jsonrpc":"2.0"}',
    b'{"jsonrpc":"2.0","id":1}',
    b'{"jsonrpc":"2.0","method":"tools/list"}',
    b'{"jsonrpc":"2.0","method":"notifications/cancelled","params":{"requestId":1}}',
    b'{"jsonrpc":"2.0","method":"notifications/cancelled","params":[]}',
    b'{"jsonrpc":"2.0","method":5}',
    b'{"jsonrpc":"1.0","method":"x"}',
    b'{"jsonrpc":"2.0","id":null,"method":"tools/list"}',
    b'{"jsonrpc":"2.0","id":1.5,"method":"tools/list"}',
    b'{"jsonrpc":"2.0","id":1.0,"method":"tools/list"}',
    b'{"jsonrpc":"2.0","id":true,"method":"tools/list"}',
    b'{"jsonrpc":"2.0","id":{},"method":"tools/list"}',
    b'{"jsonrpc":"2.0","id":1,"result":{}}',
    b'{"jsonrpc":"2.0","id":1,"error":{"code":1,"message":"x"}}',
    b'{"jsonrpc":"2.0","id":1,"method":"tools/list","params":{"_meta":NaN}}',
    b'{"jsonrpc":"2.0","id":1,"method":"tools/list","id":2}',
    b"[" * 100_000,
    b'{"a":' * 2_000 + b"1" + b"}" * 2_000,
    b'{"jsonrpc":"2.0","id":1,"method":"x","params":{"n":' + b"9" * 5_000 + b"}}",
    b'[{"jsonrpc":"2.0","id":1,"method":"tools/list"}]',
]


async def test_every_body_is_judged_as_the_sdk_does(kind: EverythingKind) -> None:
    """Batches, posted responses, notifications, and what is no JSON at all."""

    async def script(side: Side) -> None:
        client = side.client()
        for body in BODIES:
            await client.post(body).done()
        for value in (b"NaN", b"Infinity", b"-1e999", b"1e999"):
            message = json.dumps(_message("tools/call", call_params("number", {"value": 77})))
            await client.post(message.encode().replace(b"77", value), _named("number")).done()

    await expect_same_as_sdk(kind, script)


@pytest.mark.parametrize("method", ["GET", "DELETE", "PUT", "HEAD", "OPTIONS", "PATCH"])
async def test_only_post_is_of_this_era(kind: EverythingKind, method: str) -> None:
    async def script(side: Side) -> None:
        lines = [("Host", HOST), ("Accept", ACCEPT), ("Mcp-Protocol-Version", MODERN)]
        side.send(method, "/mcp", lines, b"")
        side.send(method, "/mcp", [*lines, ("Mcp-Session-Id", "x"), ("Last-Event-ID", "y")], b"")
        await _all_done(side)

    await expect_same_as_sdk(kind, script)


async def test_a_body_that_is_too_large(kind: EverythingKind) -> None:
    async def script(side: Side) -> None:
        client = side.client()
        await client.post(b"x" * (4 * 1024 * 1024 + 1)).done()
        await client.post(b"{}", {"Content-Length": str(4 * 1024 * 1024 + 1)}).done()
        for declared in ("nonsense", "-1", "٣"):
            try:
                await client.post(b"{}", {"Content-Length": declared}).done()
            except UnicodeEncodeError:
                continue

    await expect_same_as_sdk(kind, script)


async def test_another_path_is_not_the_endpoint(kind: EverythingKind) -> None:
    async def script(side: Side) -> None:
        for path in ("/", "/mcp/x", "/MCP", "/other"):
            client = side.client(path=path)
            await client.send("tools/list").done()

    await expect_same_as_sdk(kind, script)


# --- subscriptions/listen -------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["mcpserver", "lowlevel"])
async def test_a_listen_stream_without_a_session_is_the_sdks_own(kind: EverythingKind) -> None:
    """Acknowledged, then what was asked for; nothing of a session in it."""

    async def script(side: Side) -> None:
        client = side.client()
        received = await client.listening(None, "note://a", f"note://{ODD}", lists=("tools",))
        for uri in ("note://a", "note://unasked", f"note://{ODD}"):
            await side.rich.publish(uri)
        await received.has(3)
        if kind == "lowlevel":
            # It takes one at a time.
            await client.listen(None, "note://a").done()
        await received.gone()

    answers = await expect_same_as_sdk(kind, script)

    assert answers[0].count("notifications/resources/updated") == 2


@pytest.mark.parametrize("kind", ["mcpserver", "lowlevel"])
async def test_every_filter_is_judged_as_the_sdk_does(kind: EverythingKind) -> None:
    filters: list[Any] = [
        {},
        {"resourceSubscriptions": []},
        {"resourceSubscriptions": ["a", "a", "b"]},
        {"resourceSubscriptions": "a"},
        {"resourceSubscriptions": [5]},
        {"toolsListChanged": False, "promptsListChanged": True, "resourcesListChanged": None},
        {"toolsListChanged": "yes"},
        {"unknown": True},
        wanted("æ"),
    ]

    async def script(side: Side) -> None:
        client = side.client()
        for filters_of_one in filters:
            received = client.send("subscriptions/listen", {"notifications": filters_of_one})
            await received.until(lambda h=received: bool(h.messages), "an answer")
            await received.gone()

    await expect_same_as_sdk(kind, script)


# --- helpers ---------------------------------------------------------------------------------


def _message(method: str, params: Json) -> Json:
    return {
        "jsonrpc": "2.0",
        "id": 1,
        "method": method,
        "params": {**params, "_meta": envelope()},
    }


def _lines(message: Json) -> list[tuple[str, str]]:
    return [
        ("Host", HOST),
        ("Accept", ACCEPT),
        ("Content-Type", "application/json"),
        ("Mcp-Protocol-Version", MODERN),
        *routing_headers(message).items(),
    ]


def _named(tool: str) -> dict[str, str | None]:
    return {"Mcp-Method": "tools/call", "Mcp-Name": tool}


async def _all_done(side: Side) -> None:
    for reply in side.replies:
        await reply.done()
