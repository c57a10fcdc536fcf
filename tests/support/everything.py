"""Servers with a bit of everything that 2026-07-28 can put on the wire, one of each class.

Two servers made by the same function are alike, so that one can be wrapped and the other
served bare. All tools are async functions: time may be virtual.
"""

import math
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import fastmcp
import mcp_types as types
from fastmcp.exceptions import ToolError as FastMCPToolError
from fastmcp.server.dependencies import get_http_request
from mcp.server import MCPServer, Server
from mcp.server.caching import CacheHint
from mcp.server.context import ServerRequestContext
from mcp.server.mcpserver import Context, Elicit, Resolve
from mcp.server.mcpserver.exceptions import ToolError
from mcp.server.subscriptions import InMemorySubscriptionBus, ListenHandler, ResourceUpdated
from mcp.shared.exceptions import MCPError
from pydantic import BaseModel, Field
from starlette.applications import Starlette

EverythingKind = Literal["mcpserver", "lowlevel", "fastmcp"]
EVERYTHING_KINDS: tuple[EverythingKind, ...] = ("mcpserver", "lowlevel", "fastmcp")

ODD = 'æøå 雪 \u2028 \x7f "\\ <é>'
"""Characters that JSON writers treat differently."""

Publish = Callable[[str], Awaitable[None]]


class Weather(BaseModel):
    """A structured result with every kind of JSON value."""

    city: str
    degrees: float
    wind: float | None = None
    tags: list[str] = Field(default_factory=list)
    nested: dict[str, Any] = Field(default_factory=dict)


class Choice(BaseModel):
    """What ``order`` asks for."""

    size: int
    note: str = ""


@dataclass
class Everything:
    """A server, and how its own application publishes a change."""

    server: Any
    publish: Publish


def make_everything(kind: EverythingKind) -> Everything:
    match kind:
        case "mcpserver":
            return everything_mcpserver()
        case "lowlevel":
            return everything_lowlevel()
        case "fastmcp":
            return everything_fastmcp()


async def _ask_size(ctx: Context[Any, Any]) -> Elicit[Choice]:
    return Elicit(f"How large? {ODD}", Choice)


def everything_mcpserver() -> Everything:
    bus = InMemorySubscriptionBus()
    server = MCPServer[Any](
        "rich",
        version="1.2",
        instructions=ODD,
        subscriptions=bus,
        cache_hints={"tools/list": CacheHint(ttl_ms=60_000, scope="public")},
    )

    @server.tool(title="Écho")
    async def echo(text: str) -> str:
        """Returns what it gets."""
        return text

    @server.tool()
    async def weather(city: str) -> Weather:
        """Structured output."""
        return Weather(
            city=city,
            degrees=1e22,
            tags=["a", ODD],
            nested={"none": None, "tiny": 5e-324, "big": 2**60, "minus": -0.0, "list": [1.0, 1]},
        )

    @server.tool()
    async def number(value: float) -> float:
        """A float, back again."""
        return value

    @server.tool()
    async def integer(value: int) -> int:
        """An integer, back again."""
        return value

    @server.tool()
    async def not_a_number() -> float:
        """What JSON cannot say."""
        return math.nan

    @server.tool()
    async def several() -> list[types.ContentBlock]:
        """Content of several kinds."""
        return [
            types.TextContent(text=ODD, annotations=types.Annotations(priority=0.5)),
            types.ImageContent(data="AAAA", mime_type="image/png"),
            types.ResourceLink(uri="note://a", name="a", size=3),
            types.EmbeddedResource(
                resource=types.TextResourceContents(uri="note://b", text="b", mime_type=None)
            ),
        ]

    @server.tool(structured_output=False)
    async def raw() -> types.CallToolResult:
        """A result with members that no model knows."""
        return types.CallToolResult(
            content=[types.TextContent(text="raw")],
            structured_content={"none": None, "odd": ODD, "deep": {"x": [None, 1.5, True]}},
            _meta={"example.com/mine": {"none": None, "n": 1}},
        )

    @server.tool()
    async def fail(how: str) -> str:
        """Fails in one of the ways that tools fail."""
        match how:
            case "tool":
                raise ToolError(f"on purpose {ODD}")
            case "value":
                raise ValueError(f"by accident {ODD}")
            case "mcp":
                raise MCPError(code=-32050, message=f"mine {ODD}", data={"none": None, "x": [1.0]})
            case "mapped":
                raise MCPError(code=-32602, message="the tool says so")
            case "not_found":
                raise MCPError(code=-32601, message="no such thing", data="inner")
            case _:
                raise RuntimeError(how)

    @server.tool()
    async def steps(count: int, ctx: Context[Any, Any]) -> str:
        """Reports progress."""
        for step in range(1, count + 1):
            await ctx.report_progress(step / 2, float(count), f"step {step} {ODD}")
        return "done"

    @server.tool()
    async def bare_steps(ctx: Context[Any, Any]) -> str:
        """Reports progress without total and message, then fails."""
        await ctx.report_progress(1)
        raise ToolError("after progress")

    @server.tool()
    async def log(level: types.LoggingLevel, ctx: Context[Any, Any]) -> str:
        """Logs at a level."""
        data = {"odd": ODD, "none": None, "n": 1e22}
        await ctx.log(level, data, logger_name="lög")  # pyright: ignore[reportDeprecated]
        return "logged"

    @server.tool()
    async def order(item: str, choice: Annotated[Choice, Resolve(_ask_size)]) -> str:
        """Asks, by a resolver, in a second round."""
        return f"{item}: {choice.size} {choice.note}"

    @server.tool()
    async def header(
        region: Annotated[str, Field(json_schema_extra={"x-mcp-header": "Region"})] = "",
        count: Annotated[int, Field(json_schema_extra={"x-mcp-header": "Count"})] = 0,
    ) -> str:
        """Arguments that are repeated in headers."""
        return f"{region} {count}"

    @server.tool()
    async def touch(uri: str, ctx: Context[Any, Any]) -> str:
        """Changes a resource."""
        await ctx.notify_resource_updated(uri)
        return "touched"

    @server.tool()
    async def standalone(ctx: Context[Any, Any]) -> str:
        """Sends on the connection's channel, which a modern request does not have."""
        await ctx.session.send_resource_updated("note://a")
        await ctx.session.send_tool_list_changed()
        return "sent"

    @server.tool()
    async def asks_now(ctx: Context[Any, Any]) -> str:
        """Asks the client in the middle of a call, as the handshake era can."""
        result = await ctx.elicit("now?", Choice)
        return result.action

    @server.tool()
    async def seen(ctx: Context[Any, Any]) -> dict[str, Any]:
        """What a handler sees of its request."""
        capabilities = ctx.client_capabilities
        request = ctx.request_context.request
        return {
            "version": ctx.protocol_version,
            "capabilities": capabilities.model_dump(exclude_none=True) if capabilities else None,
            "id": ctx.request_id,
            "header": (ctx.headers or {}).get("x-mine"),
            "method": request.method if request is not None else None,
            "path": request.url.path if request is not None else None,
            "can_ask": ctx.session.can_send_request,
            "app": request is not None and isinstance(request.app, Starlette),
            "router": request is not None and "router" in request.scope,
        }

    @server.resource("note://a", mime_type="text/x-odd")
    async def note_a() -> str:
        return ODD

    @server.resource("blob://b")
    async def blob_b() -> bytes:
        return b"\x00\xff"

    @server.resource("note://by/{name}")
    async def note_by(name: str) -> str:
        return f"by {name}"

    @server.resource("note://broken")
    async def broken() -> str:
        raise ValueError("broken")

    @server.prompt(title="Grüße")
    async def greet(name: str, times: str = "1") -> str:
        """Greets."""
        return f"{name} {times} {ODD}"

    @server.completion()
    async def complete(
        ref: Any, argument: types.CompletionArgument, context: types.CompletionContext | None
    ) -> types.Completion | None:
        if argument.name == "nothing":
            return None
        return types.Completion(values=[argument.value + "é", "two"], total=2, has_more=False)

    async def publish(uri: str) -> None:
        await bus.publish(ResourceUpdated(uri=uri))

    del echo, weather, number, integer, not_a_number, several, raw, fail, steps, bare_steps, log
    del order, header, touch, standalone, asks_now, seen, note_a, blob_b, note_by, broken, greet
    del complete
    return Everything(server, publish)


_Ctx = ServerRequestContext[Any, Any]


def everything_lowlevel() -> Everything:
    bus = InMemorySubscriptionBus()

    async def on_call_tool(
        ctx: _Ctx, params: types.CallToolRequestParams
    ) -> types.CallToolResult | types.InputRequiredResult:
        arguments = params.arguments or {}
        match params.name:
            case "echo":
                return _text(str(arguments.get("text")))
            case "steps":
                for step in range(1, int(arguments.get("count", 1)) + 1):
                    await ctx.session.report_progress(step, None, ODD)
                return _text("done")
            case "log":
                await ctx.session.send_log_message(  # pyright: ignore[reportDeprecated]
                    arguments["level"], {"odd": ODD}, related_request_id=ctx.request_id
                )
                return _text("logged")
            case "ask" if not params.input_responses:
                request = types.ElicitRequest(
                    params=types.ElicitRequestFormParams(
                        message=ODD,
                        requested_schema={"type": "object", "properties": {}},
                    )
                )
                return types.InputRequiredResult(
                    input_requests={"q": request}, request_state="plain state"
                )
            case "ask":
                return _text(f"{params.request_state}: {sorted(params.input_responses or {})}")
            case "raise":
                raise RuntimeError(ODD)
            case "mcp":
                raise MCPError(code=-32050, message=ODD, data={"none": None})
            case "touch":
                await bus.publish(ResourceUpdated(uri=arguments["uri"]))
                return _text("touched")
            case _:
                return types.CallToolResult(
                    content=[types.TextContent(text="no such tool")], is_error=True
                )

    async def on_list_tools(
        ctx: _Ctx, params: types.PaginatedRequestParams | None
    ) -> types.ListToolsResult:
        if params is not None and params.cursor == "2":
            annotated = {
                "type": "object",
                "properties": {"region": {"type": "string", "x-mcp-header": "Region"}},
            }
            return types.ListToolsResult(tools=[types.Tool(name="header", input_schema=annotated)])
        return types.ListToolsResult(
            tools=[types.Tool(name="echo", input_schema={"type": "object"}, title=ODD)],
            next_cursor="2",
        )

    async def on_read_resource(
        ctx: _Ctx, params: types.ReadResourceRequestParams
    ) -> types.ReadResourceResult:
        return types.ReadResourceResult(
            contents=[types.TextResourceContents(uri=params.uri, text=ODD)]
        )

    async def custom(ctx: _Ctx, params: types.RequestParams) -> dict[str, Any]:
        return {"none": None, "odd": ODD, "numbers": [1.0, 1, 1e22, 2**70], "nested": {"n": None}}

    server = Server[Any](
        "rich",
        on_call_tool=on_call_tool,
        on_list_tools=on_list_tools,
        on_read_resource=on_read_resource,
        on_subscriptions_listen=ListenHandler(bus, max_subscriptions=1),
    )
    server.add_request_handler("example/custom", types.RequestParams, custom)

    async def publish(uri: str) -> None:
        await bus.publish(ResourceUpdated(uri=uri))

    return Everything(server, publish)


def _text(text: str) -> types.CallToolResult:
    return types.CallToolResult(content=[types.TextContent(text=text)])


def everything_fastmcp() -> Everything:
    server: fastmcp.FastMCP[Any] = fastmcp.FastMCP("rich", version="1.2", instructions=ODD)

    @server.tool
    async def echo(text: str) -> str:
        """Returns what it gets."""
        return text

    @server.tool
    async def weather(city: str) -> Weather:
        """Structured output."""
        return Weather(city=city, degrees=1e22, nested={"none": None, "odd": ODD})

    @server.tool
    async def fail(how: str) -> str:
        """Fails in one of the ways that tools fail."""
        if how == "tool":
            raise FastMCPToolError(ODD)
        raise ValueError(ODD)

    @server.tool
    async def steps(count: int, ctx: fastmcp.Context) -> str:
        """Reports progress."""
        for step in range(1, count + 1):
            await ctx.report_progress(step / 2, float(count), f"step {step} {ODD}")
        return "done"

    @server.tool
    async def log(text: str, ctx: fastmcp.Context) -> str:
        """Logs."""
        await ctx.info(text)
        return "logged"

    @server.tool
    async def seen(ctx: fastmcp.Context) -> dict[str, Any]:
        """What a handler sees of its request."""
        request = get_http_request()
        return {
            "id": ctx.request_id,
            "header": request.headers.get("x-mine"),
            "path": request.url.path,
            "transport": ctx.transport,
        }

    @server.resource("note://a")
    async def note_a() -> str:
        return ODD

    @server.prompt
    async def greet(name: str) -> str:
        """Greets."""
        return f"{name} {ODD}"

    async def publish(uri: str) -> None:
        raise AssertionError("FastMCP has no bus")

    del echo, weather, fail, steps, log, seen, note_a, greet
    return Everything(server, publish)
