"""A URL that speaks the era of 2026-07-28 only, for clients of both eras.

The server is the SDK's own; what it speaks of the era before is refused on the way.
"""

import json
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any

import mcp_types as types
import pytest
from mcp.server import Server
from mcp.server.context import ServerRequestContext
from mcp.server.subscriptions import InMemorySubscriptionBus, ListenHandler, ResourceUpdated
from starlette.types import ASGIApp, Receive, Scope, Send

from mcp_sessions import HTTPServer
from tests.support import apps
from tests.support.children import until
from tests.support.modern import ModernClient
from tests.support.raw import text_of
from tests.support.urls import url_of
from tests.support.world import World, world

pytestmark = [pytest.mark.anyio, pytest.mark.filterwarnings(apps.DEPRECATED)]

Ctx = ServerRequestContext[Any, Any]
MODERN = b"2026-07-28"
UPDATED = "notifications/resources/updated"


class Modern:
    """The server, and what it saw."""

    def __init__(self) -> None:
        self.bus = InMemorySubscriptionBus()
        self.headers: list[dict[str, str]] = []
        self.open = 0
        """Requests that are not over."""
        self.server = Server[Any](
            "modern",
            version="3",
            instructions="ask me",
            on_call_tool=self._call,
            on_list_tools=self._list,
            on_list_resources=self._resources,
            on_read_resource=self._read,
            on_subscriptions_listen=ListenHandler(self.bus),
        )

    async def _call(
        self, ctx: Ctx, params: types.CallToolRequestParams
    ) -> types.CallToolResult | types.InputRequiredResult:
        arguments = params.arguments or {}
        match params.name:
            case "ask" if not params.input_responses:
                schema: types.ElicitRequestedSchema = {"type": "object", "properties": {}}
                form = types.ElicitRequestFormParams(message="how many?", requested_schema=schema)
                question = types.ElicitRequest(params=form)
                return types.InputRequiredResult(
                    input_requests={"q": question}, request_state="kept"
                )
            case "ask":
                answers = params.input_responses or {}
                content = {name: answer.model_dump()["content"] for name, answer in answers.items()}
                return _text(json.dumps([params.request_state, content]))
            case "again":
                return types.InputRequiredResult(request_state="again")
            case "update":
                await self.bus.publish(ResourceUpdated(uri=arguments["uri"]))
                return _text("updated")
            case "progress":
                await ctx.session.report_progress(1, 2, "half")
                return _text("reported")
            case "log":
                await ctx.session.send_log_message(  # pyright: ignore[reportDeprecated]
                    "warning", "hello", related_request_id=ctx.request_id
                )
                return _text("logged")
            case _:
                return _text(params.name)

    async def _list(
        self, ctx: Ctx, params: types.PaginatedRequestParams | None
    ) -> types.ListToolsResult:
        return types.ListToolsResult(
            tools=[types.Tool(name="ask", input_schema={"type": "object"})]
        )

    async def _resources(
        self, ctx: Ctx, params: types.PaginatedRequestParams | None
    ) -> types.ListResourcesResult:
        return types.ListResourcesResult(resources=[])

    async def _read(
        self, ctx: Ctx, params: types.ReadResourceRequestParams
    ) -> types.ReadResourceResult:
        return types.ReadResourceResult(
            contents=[types.TextResourceContents(uri=params.uri, text="read")]
        )

    def only(self, app: ASGIApp) -> ASGIApp:
        """The application, of which the era before is refused."""

        async def modern(scope: Scope, receive: Receive, send: Send) -> None:
            headers = dict(scope["headers"])
            if headers.get(b"mcp-protocol-version") == MODERN:
                self.headers.append({k.decode(): v.decode() for k, v in headers.items()})
                self.open += 1
                try:
                    await app(scope, receive, send)
                finally:
                    self.open -= 1
                return
            error = {"code": -32022, "message": "Unsupported protocol version"}
            body = json.dumps({"jsonrpc": "2.0", "id": None, "error": error}).encode()
            kind = [(b"content-type", b"application/json")]
            await send({"type": "http.response.start", "status": 400, "headers": kind})
            await send({"type": "http.response.body", "body": body})

        return modern


def _text(text: str) -> types.CallToolResult:
    return types.CallToolResult(content=[types.TextContent(text=text)])


@asynccontextmanager
async def modern_world(modern: Modern, **options: Any) -> AsyncGenerator[World]:
    """A layer over it; options as of `HTTPServer`."""
    app = modern.server.streamable_http_app()
    async with app.router.lifespan_context(app), url_of(modern.only(app)) as url:
        async with world(server=HTTPServer(url, **options)) as w:
            yield w


async def test_a_client_of_the_era_before_gets_what_the_server_has() -> None:
    modern = Modern()
    async with modern_world(modern) as w:
        client = w.client()
        result = await client.initialize()
        assert result["serverInfo"] == {"name": "modern", "version": "3"}
        assert (result["instructions"], result["protocolVersion"]) == ("ask me", "2025-11-25")
        assert "tools" in result["capabilities"]
        assert await client.text("echo") == "echo"
        listed = await client.result("tools/list")
        assert [tool["name"] for tool in listed["tools"]] == ["ask"] and "resultType" not in listed
        read = await client.result("resources/read", {"uri": "note://é"})
        assert read["contents"][0]["text"] == "read"
    sent = {(h["mcp-method"], h.get("mcp-name")) for h in modern.headers}
    assert {("tools/call", "echo"), ("resources/read", "=?base64?bm90ZTovL8Op?=")} <= sent


async def test_what_it_asks_is_asked_of_a_client_and_goes_with_the_request_again() -> None:
    async with modern_world(Modern()) as w:
        client = await w.connected(capabilities={"elicitation": {}})
        sent = client.call("ask")
        (question,) = await sent.reply.has(1)
        assert question["params"]["message"] == "how many?"
        await client.respond(question, {"action": "accept", "content": {"answer": "two"}})
        assert json.loads(text_of(await sent.result())) == ["kept", {"q": {"answer": "two"}}]


async def test_what_a_client_refuses_or_the_server_asks_for_ever_is_an_error() -> None:
    async with modern_world(Modern()) as w:
        client = await w.connected(capabilities={"elicitation": {}})
        sent = client.call("ask")
        (question,) = await sent.reply.has(1)
        error = {"code": -1, "message": "no"}
        await client.post({"jsonrpc": "2.0", "id": question["id"], "error": error}).done()
        assert (await sent.error())["message"] == "no"
        assert "without end" in (await client.call("again").error())["message"]


async def test_a_client_of_its_own_era_gets_the_question_as_its_result() -> None:
    async with modern_world(Modern()) as w:
        client = ModernClient(w.carrier)
        assert await client.text("echo") == "echo"
        result = await client.call("ask").result()
        assert (result["resultType"], result["requestState"]) == ("input_required", "kept")


async def test_changes_are_heard_for_what_is_subscribed_and_what_is_not_asked_for_is_not() -> None:
    modern = Modern()
    async with modern_world(modern) as w:
        client = await w.connected()
        stream = await client.get().started()
        await client.start()
        for uri in ("test://a", "test://b"):
            await client.result("resources/subscribe", {"uri": uri})
        await client.text("update", uri="test://a")
        await client.text("update", uri="test://b")
        told = [m["params"]["uri"] for m in await stream.has(2) if m["method"] == UPDATED]
        assert told == ["test://a", "test://b"]
        assert "subscriptionId" not in json.dumps(stream.messages), "that is the layer's own"
        await until(lambda: modern.open <= 2, "one stream for each of its sessions there")


async def test_progress_and_a_log_come_with_their_request() -> None:
    async with modern_world(Modern()) as w:
        client = await w.connected()
        sent = client.call("progress", meta={"progressToken": "mine"})
        await sent.result()
        (report,) = [m["params"] for m in sent.reply.messages if "method" in m]
        assert report == {"progressToken": "mine", "progress": 1, "total": 2, "message": "half"}
        await client.result("logging/setLevel", {"level": "info"})
        sent = client.call("log")
        await sent.result()
        assert sent.reply.messages[0]["params"]["data"] == "hello"
