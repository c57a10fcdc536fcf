"""Stock clients of the modern era against wrapped servers, over real sockets.

The SDK's ``Client`` and FastMCP's, in mode ``auto`` and pinned to 2026-07-28. Nothing of them
is replaced or patched; they know nothing of sessions.
"""

from collections.abc import AsyncGenerator, Generator
from contextlib import asynccontextmanager
from typing import Any, Literal

import anyio
import fastmcp
import mcp_types as types
import pytest
from fastmcp.exceptions import ToolError
from mcp.client.client import Client
from mcp.client.subscriptions import SubscriptionLost
from mcp.shared.exceptions import MCPError
from mcp.shared.subscriptions import ResourceUpdated

from mcp_sessions import SessionLayer
from tests.support.everything import (
    EVERYTHING_KINDS,
    ODD,
    Everything,
    EverythingKind,
    make_everything,
)
from tests.support.servers import RunningServer, serve

pytestmark = pytest.mark.filterwarnings("ignore:.*deprecated as of 2026-07-28")

Mode = Literal["auto", "2026-07-28"]
MODES: list[Mode] = ["auto", "2026-07-28"]


@pytest.fixture
def anyio_backend() -> str:
    """Real time: these clients talk over sockets."""
    return "asyncio"


class Served:
    def __init__(
        self, kind: EverythingKind, rich: Everything, layer: SessionLayer, server: RunningServer
    ):
        self.kind = kind
        self.rich = rich
        self.layer = layer
        self.server = server

    def methods_since(self, number: int) -> list[str]:
        """What clients asked for after the first ``number`` exchanges."""
        return [str(e.sent.get("method")) for e in self.server.wire.since(number)]


@pytest.fixture(scope="module", params=EVERYTHING_KINDS)
def served(request: pytest.FixtureRequest) -> Generator[Served]:
    kind: EverythingKind = request.param
    rich = make_everything(kind)
    layer = SessionLayer(rich.server)
    with serve(layer.asgi_app()) as server:
        yield Served(kind, rich, layer, server)


@pytest.fixture(params=MODES)
def mode(request: pytest.FixtureRequest) -> Mode:
    return request.param


@asynccontextmanager
async def sdk_client(served: Served, mode: Mode, **options: Any) -> AsyncGenerator[Client]:
    with anyio.fail_after(20):
        async with Client(served.server.url(), mode=mode, **options) as client:
            yield client


async def test_the_sdks_client_negotiates_the_modern_era(served: Served, mode: Mode) -> None:
    """It probes ``server/discover``, or adopts the version, and never shakes hands."""
    before = len(served.server.wire.exchanges)
    async with sdk_client(served, mode) as client:
        assert client.protocol_version == "2026-07-28"
        assert [tool.name for tool in (await client.list_tools()).tools]
    asked = served.methods_since(before)
    assert "initialize" not in asked
    assert ("server/discover" in asked) == (mode == "auto")


async def test_the_sdks_client_works_unmodified(served: Served, mode: Mode) -> None:
    """Tools, structured output, errors, resources, prompts, progress."""
    steps: list[float] = []

    async def on_progress(progress: float, total: float | None, message: str | None) -> None:
        assert message is not None and ODD in message
        steps.append(progress)

    async with sdk_client(served, mode) as client:
        result = await client.call_tool("echo", {"text": ODD})
        assert _text(result) == ODD
        result = await client.call_tool("steps", {"count": 3}, progress_callback=on_progress)
        assert _text(result) == "done"
        assert len(steps) == 3
        result = await client.call_tool("unknown", {})
        assert result.is_error
        read = await client.read_resource("note://a")
        assert isinstance(read.contents[0], types.TextResourceContents)
        assert read.contents[0].text == ODD
        if served.kind != "lowlevel":
            prompt = await client.get_prompt("greet", {"name": "you"})
            assert "you" in str(prompt.messages[0].content)
            weather = await client.call_tool("weather", {"city": ODD})
            assert weather.structured_content is not None
            assert weather.structured_content["city"] == ODD
        else:
            with pytest.raises(MCPError) as failed:
                await client.get_prompt("greet", {"name": "you"})
            assert failed.value.code == -32601


async def test_the_sdks_client_is_asked_in_rounds(served: Served, mode: Mode) -> None:
    """Multi-round-trip elicitation: the client drives it by itself."""
    if served.kind == "fastmcp":
        # FastMCP elicits in the middle of a call only, which this era has not.
        return
    asked: list[str] = []

    async def answer(context: Any, params: types.ElicitRequestParams) -> types.ElicitResult:
        asked.append(params.message)
        return types.ElicitResult(action="accept", content={"size": 4, "note": "sweet"})

    tool = {"mcpserver": "order", "lowlevel": "ask"}[served.kind]
    async with sdk_client(served, mode, elicitation_callback=answer) as client:
        result = await client.call_tool(tool, {"item": "tea"})

    assert len(asked) == 1 and ODD in asked[0]
    expected = {"mcpserver": "tea: 4 sweet", "lowlevel": "plain state: ['q']"}
    assert _text(result) == expected[served.kind]


async def test_the_sdks_client_opts_in_to_logs(served: Served, mode: Mode) -> None:
    if served.kind == "fastmcp":
        arguments = {"text": ODD}
    else:
        arguments = {"level": "warning"}
    logged: list[Any] = []

    async def on_log(params: types.LoggingMessageNotificationParams) -> None:
        logged.append(params.data)

    async with sdk_client(served, mode, log_level="info", logging_callback=on_log) as client:
        assert _text(await client.call_tool("log", arguments)) == "logged"
    assert len(logged) == 1 and ODD in logged[0].values()
    async with sdk_client(served, mode, logging_callback=on_log) as client:
        await client.call_tool("log", arguments)
    assert len(logged) == 1


async def test_the_sdks_client_listens(served: Served, mode: Mode) -> None:
    """``subscriptions/listen`` without a session: the SDK's own stream."""
    if served.kind == "fastmcp":
        async with sdk_client(served, mode) as client:
            with pytest.raises((MCPError, SubscriptionLost)):
                async with client.listen(resource_subscriptions=["note://a"]):
                    raise AssertionError("FastMCP serves no listen")
        return
    async with (
        sdk_client(served, mode) as client,
        client.listen(resource_subscriptions=["note://a"], tools_list_changed=True) as received,
    ):
        await client.call_tool("touch", {"uri": "note://b"})
        await client.call_tool("touch", {"uri": "note://a"})
        assert await anext(received) == ResourceUpdated(uri="note://a")


async def test_many_calls_at_once_are_each_answered(served: Served, mode: Mode) -> None:
    answers: dict[int, str] = {}

    async def call(client: Client, number: int) -> None:
        answers[number] = _text(await client.call_tool("echo", {"text": str(number)}))

    async with sdk_client(served, mode) as client, anyio.create_task_group() as tasks:
        for number in range(30):
            tasks.start_soon(call, client, number)
    assert answers == {number: str(number) for number in range(30)}


async def test_fastmcps_client_works_unmodified(served: Served, mode: Mode) -> None:
    steps: list[float] = []

    async def on_progress(progress: float, total: float | None, message: str | None) -> None:
        steps.append(progress)

    before = len(served.server.wire.exchanges)
    with anyio.fail_after(20):
        async with fastmcp.Client(served.server.url(), mode=mode) as client:
            assert "echo" in [tool.name for tool in await client.list_tools()]
            result = await client.call_tool("echo", {"text": ODD})
            assert isinstance(result.content[0], types.TextContent)
            assert result.content[0].text == ODD
            await client.call_tool("steps", {"count": 2}, progress_handler=on_progress)
            assert len(steps) == 2
            with pytest.raises(ToolError):
                await client.call_tool("unknown", {})
            read = await client.read_resource("note://a")
            assert isinstance(read[0], types.TextResourceContents) and read[0].text == ODD
    assert "initialize" not in served.methods_since(before)
    assert "tools/call" in served.methods_since(before)


async def test_nothing_of_a_session_reaches_a_client_that_did_not_ask(served: Served) -> None:
    """Rule: "exactly what the SDK would answer, nothing added but the capability
    advertisement"; and nothing is left behind for it.
    """
    number = len(served.server.wire.exchanges)
    async with sdk_client(served, "auto") as client:
        await client.call_tool("echo", {"text": "x"})
        await client.list_tools()
    for exchange in served.server.wire.since(number):
        assert "mcp-session-id" not in exchange.response_headers
        if exchange.sent.get("method") != "server/discover":
            assert b"session" not in bytes(exchange.response_body).lower()
    assert await served.server.call(served.layer.sessions.list) == []


def _text(result: types.CallToolResult) -> str:
    content = result.content[0]
    assert isinstance(content, types.TextContent)
    return content.text
