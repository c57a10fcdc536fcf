"""Three MCP servers that do the same, one of each class the layer wraps.

========================== ==============================================================
tool                       what it does
========================== ==============================================================
``echo(text)``             returns ``text``
``add(a, b)``              returns the sum
``slow(steps, gate)``      reports progress 1…``steps``; with a gate it waits after step 1
``ask(question)``          elicits ``{"answer": string}`` and returns ``action: answer``
``sample(prompt)``         asks the client's model and returns its text
``roots()``                asks for the client's roots and returns their URIs
``log(text)``              sends a log message at level ``info``
``touch(uri)``             changes a resource and publishes the update
``close_stream(gate)``     ends its own response stream, waits, then answers
``background(uri, gate)``  answers at once and sends ``resources/updated`` after the gate
``session_id()``           the id of the session that its client started, or ``none``
``remember(text)``         counts in ``session.state``, adds to ``session.data``, tells the client
========================== ==============================================================

Resources: ``note://welcome`` and the template ``note://{n}``; one prompt: ``greet(name)``.

A *gate* is a word the test chooses. The tool sets the mark ``<gate>:started`` on the
`Stage` and waits for ``<gate>:go``; when it is cancelled there, it sets
``<gate>:cancelled``; after it, ``<gate>:done``. Without a gate nothing waits.

The SDK warns of what 2026-07-28 deprecated (logging, sampling, roots) or removed (subscribe,
ping). Tests that use these say ``pytest.mark.filterwarnings(apps.DEPRECATED)``.
"""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Literal, assert_never

import anyio
import fastmcp
import mcp_types as types
from mcp.server import MCPServer, Server
from mcp.server.context import ServerRequestContext
from mcp.server.mcpserver import Context
from mcp.server.session import ServerSession
from pydantic import BaseModel

from tests.support.board import Stage

DEPRECATED = "ignore:.*(deprecated|removed) as of 2026-07-28"
"""For ``pytest.mark.filterwarnings``: what the SDK says of the handshake era."""

Kind = Literal["mcpserver", "lowlevel", "fastmcp"]
KINDS: tuple[Kind, ...] = ("mcpserver", "lowlevel", "fastmcp")

Publish = Callable[[str], Awaitable[None]]
"""Tells everyone who may know that the resource of this URI has changed."""

TOOLS = (
    "add",
    "ask",
    "background",
    "close_stream",
    "echo",
    "log",
    "remember",
    "roots",
    "sample",
    "session_id",
    "slow",
    "touch",
)


async def _no_publisher(uri: str) -> None:
    raise AssertionError(f"nobody set App.publish, so the change of {uri} reaches nobody")


@dataclass
class App:
    """One of the three servers, and what the test shares with its tools."""

    kind: Kind
    server: "MCPServer[Any] | Server[Any] | fastmcp.FastMCP[Any]"
    stage: Stage
    publish: Publish = _no_publisher
    """How ``touch`` publishes. Whoever wraps the server sets it
    (``app.publish = layer.notify_resource_updated``); ``MCPServer`` does it itself."""
    versions: dict[str, int] = field(default_factory=dict[str, int])
    """How often each resource was touched."""
    lifespans: int = 0
    """How often the server's lifespan was entered."""
    background: set[asyncio.Task[None]] | None = None
    """What outlives a call; there while the lifespan is."""

    def read(self, uri: str) -> str:
        return f"{uri} version {self.versions.get(uri, 0)}"

    def change(self, uri: str) -> None:
        """A new version of a resource."""
        self.versions[uri] = self.versions.get(uri, 0) + 1

    @asynccontextmanager
    async def lifespan(self) -> AsyncGenerator[dict[str, Any]]:
        self.lifespans += 1
        # No anyio task group: FastMCP leaves a lifespan inside a cancel scope that it did
        # not enter it in.
        self.background = set()
        try:
            yield {"app": self.kind}
        finally:
            for task in self.background:
                task.cancel()
            await asyncio.gather(*self.background, return_exceptions=True)
            self.background = None

    def start(self, work: Coroutine[Any, Any, None]) -> None:
        """Run ``work`` in the background until it is done or the lifespan ends."""
        assert self.background is not None, "outside the server's lifespan"
        task = asyncio.create_task(work)
        self.background.add(task)
        task.add_done_callback(self.background.discard)

    async def wait_at(self, gate: str) -> None:
        """Wait where the test wants a tool to wait."""
        if not gate:
            return
        self.stage.mark(f"{gate}:started")
        try:
            await self.stage.reached(f"{gate}:go", within=30)
        except anyio.get_cancelled_exc_class():
            self.stage.mark(f"{gate}:cancelled")
            raise

    async def slow(
        self, steps: int, gate: str, report: Callable[[int], Awaitable[None]], last: str = ""
    ) -> str:
        """The tool ``slow``.

        Args:
            last: The gate before its last step.
        """
        for step in range(1, steps + 1):
            if last and step == steps:
                await self.wait_at(last)
            await report(step)
            if step == 1:
                await self.wait_at(gate)
            await anyio.sleep(0.001)
        self.stage.mark(f"{gate}:done")
        return f"{steps} steps"

    async def close_stream(self, gate: str, close: Callable[[], Awaitable[None]] | None) -> str:
        if close is not None:
            await close()
        await self.wait_at(gate)
        self.stage.mark(f"{gate}:done")
        return "answered after the stream was closed"

    def start_background(self, uri: str, gate: str, session: ServerSession) -> str:
        async def later() -> None:
            await self.wait_at(gate)
            await session.send_resource_updated(uri)
            self.stage.mark(f"{gate}:done")

        self.start(later())
        return "later"


class Answer(BaseModel):
    answer: str


def make_app(kind: Kind, *, name: str | None = None) -> App:
    match kind:
        case "mcpserver":
            return make_mcpserver(name or "notes")
        case "lowlevel":
            return make_lowlevel(name or "notes")
        case "fastmcp":
            return make_fastmcp(name or "notes")
        case _:
            assert_never(kind)


def make_mcpserver(name: str = "notes") -> App:
    @asynccontextmanager
    async def lifespan(_: MCPServer[dict[str, Any]]) -> AsyncGenerator[dict[str, Any]]:
        async with app.lifespan() as state:
            yield state

    server = MCPServer[dict[str, Any]](name, version="1.0", lifespan=lifespan)
    app = App("mcpserver", server, Stage())
    _equip(app, Context[Any, Any])
    return app


def make_fastmcp(name: str = "notes") -> App:
    @asynccontextmanager
    async def lifespan(_: "fastmcp.FastMCP[Any]") -> AsyncGenerator[dict[str, Any]]:
        async with app.lifespan() as state:
            yield state

    server: fastmcp.FastMCP[Any] = fastmcp.FastMCP(name, version="1.0", lifespan=lifespan)
    app = App("fastmcp", server, Stage())
    _equip(app, fastmcp.Context)
    return app


def _equip(app: App, context: object) -> None:
    """Add the tools, the resources and the prompt to an ``MCPServer`` or a FastMCP server.

    Args:
        context: The class by which the server knows a tool's ``ctx``.
    """
    server: Any = app.server

    async def echo(text: str) -> str:
        return text

    async def add(a: int, b: int) -> int:
        return a + b

    async def slow(steps: int, ctx: Any, gate: str = "", last: str = "") -> str:
        return await app.slow(steps, gate, lambda step: ctx.report_progress(step, steps), last)

    async def ask(question: str, ctx: Any) -> str:
        result = await ctx.elicit(question, Answer)
        return f"{result.action}: {result.data.answer if result.action == 'accept' else ''}"

    async def sample(prompt: str, ctx: Any) -> str:
        return await _sample(ctx.session, prompt, ctx.request_id)

    async def roots(ctx: Any) -> str:
        return await _roots(ctx.session)

    async def log(text: str, ctx: Any) -> str:
        await ctx.info(text)
        return "logged"

    async def touch(uri: str, ctx: Any) -> str:
        app.change(uri)
        await (ctx.notify_resource_updated if app.kind == "mcpserver" else app.publish)(uri)
        return app.read(uri)

    async def close_stream(ctx: Any, gate: str = "") -> str:
        return await app.close_stream(gate, ctx.close_sse_stream)

    async def background(uri: str, ctx: Any, gate: str = "") -> str:
        return app.start_background(uri, gate, ctx.session)

    async def session_id() -> str:
        return _session_id()

    async def remember(text: str) -> str:
        return await _remember(text)

    def welcome() -> str:
        return app.read("note://welcome")

    def note(n: str) -> str:
        return app.read(f"note://{n}")

    def greet(name: str) -> str:
        return f"Greet {name}."

    tools: list[Callable[..., Any]] = [
        *(echo, add, slow, ask, sample, roots, log, touch, close_stream, background),
        *(session_id, remember),
    ]
    for tool in tools:
        if "ctx" in tool.__annotations__:
            tool.__annotations__["ctx"] = context
        server.tool()(tool)
    server.resource("note://welcome")(welcome)
    server.resource("note://{n}")(note)
    server.prompt()(greet)


_Ctx = ServerRequestContext[dict[str, Any], Any]


def make_lowlevel(name: str = "notes") -> App:
    """The server as a lowlevel ``Server``, with handlers for subscribe and unsubscribe."""

    @asynccontextmanager
    async def lifespan(_: Server[Any]) -> AsyncGenerator[dict[str, Any]]:
        async with app.lifespan() as state:
            yield state

    async def call(ctx: _Ctx, tool: str, arguments: dict[str, Any]) -> str:
        session, request_id = ctx.session, ctx.request_id
        gate: str = arguments.get("gate", "")
        match tool:
            case "echo":
                return arguments["text"]
            case "add":
                return str(arguments["a"] + arguments["b"])
            case "slow":
                steps: int = arguments["steps"]
                return await app.slow(
                    steps, gate, lambda step: session.report_progress(step, steps)
                )
            case "ask":
                result = await session.elicit_form(
                    arguments["question"],
                    {
                        "type": "object",
                        "properties": {"answer": {"type": "string"}},
                        "required": ["answer"],
                    },
                    related_request_id=request_id,
                )
                return f"{result.action}: {(result.content or {}).get('answer', '')}"
            case "sample":
                return await _sample(session, arguments["prompt"], request_id)
            case "roots":
                return await _roots(session)
            case "log":
                await session.send_log_message(  # pyright: ignore[reportDeprecated]
                    "info", arguments["text"], related_request_id=request_id
                )
                return "logged"
            case "touch":
                app.change(arguments["uri"])
                await app.publish(arguments["uri"])
                return app.read(arguments["uri"])
            case "close_stream":
                return await app.close_stream(gate, ctx.close_sse_stream)
            case "background":
                return app.start_background(arguments["uri"], gate, session)
            case "session_id":
                return _session_id()
            case "remember":
                return await _remember(arguments["text"])
            case _:
                raise ValueError(f"no tool {tool}")

    async def on_call_tool(ctx: _Ctx, params: types.CallToolRequestParams) -> types.CallToolResult:
        try:
            text = await call(ctx, params.name, params.arguments or {})
        except ValueError as error:
            return types.CallToolResult(content=[types.TextContent(text=str(error))], is_error=True)
        return types.CallToolResult(content=[types.TextContent(text=text)])

    async def on_list_tools(
        ctx: _Ctx, params: types.PaginatedRequestParams | None
    ) -> types.ListToolsResult:
        return types.ListToolsResult(
            tools=[types.Tool(name=tool, input_schema={"type": "object"}) for tool in TOOLS]
        )

    async def on_list_resources(
        ctx: _Ctx, params: types.PaginatedRequestParams | None
    ) -> types.ListResourcesResult:
        return types.ListResourcesResult(
            resources=[types.Resource(name="welcome", uri="note://welcome")]
        )

    async def on_list_resource_templates(
        ctx: _Ctx, params: types.PaginatedRequestParams | None
    ) -> types.ListResourceTemplatesResult:
        return types.ListResourceTemplatesResult(
            resource_templates=[types.ResourceTemplate(name="note", uri_template="note://{n}")]
        )

    async def on_read_resource(
        ctx: _Ctx, params: types.ReadResourceRequestParams
    ) -> types.ReadResourceResult:
        return types.ReadResourceResult(
            contents=[types.TextResourceContents(uri=params.uri, text=app.read(params.uri))]
        )

    async def on_subscribe_resource(
        ctx: _Ctx, params: types.SubscribeRequestParams
    ) -> types.EmptyResult:
        app.stage.mark(f"subscribed {params.uri}")
        return types.EmptyResult()

    async def on_unsubscribe_resource(
        ctx: _Ctx, params: types.UnsubscribeRequestParams
    ) -> types.EmptyResult:
        app.stage.mark(f"unsubscribed {params.uri}")
        return types.EmptyResult()

    async def on_list_prompts(
        ctx: _Ctx, params: types.PaginatedRequestParams | None
    ) -> types.ListPromptsResult:
        return types.ListPromptsResult(
            prompts=[
                types.Prompt(
                    name="greet", arguments=[types.PromptArgument(name="name", required=True)]
                )
            ]
        )

    async def on_get_prompt(
        ctx: _Ctx, params: types.GetPromptRequestParams
    ) -> types.GetPromptResult:
        text = f"Greet {(params.arguments or {})['name']}."
        return types.GetPromptResult(
            messages=[types.PromptMessage(role="user", content=types.TextContent(text=text))]
        )

    server = Server[dict[str, Any]](
        name,
        version="1.0",
        lifespan=lifespan,
        on_call_tool=on_call_tool,
        on_list_tools=on_list_tools,
        on_list_resources=on_list_resources,
        on_list_resource_templates=on_list_resource_templates,
        on_read_resource=on_read_resource,
        on_subscribe_resource=on_subscribe_resource,
        on_unsubscribe_resource=on_unsubscribe_resource,
        on_list_prompts=on_list_prompts,
        on_get_prompt=on_get_prompt,
    )
    app = App("lowlevel", server, Stage())
    return app


async def _sample(session: ServerSession, prompt: str, request_id: types.RequestId | None) -> str:
    result = await session.create_message(  # pyright: ignore[reportDeprecated]
        [types.SamplingMessage(role="user", content=types.TextContent(text=prompt))],
        max_tokens=20,
        related_request_id=request_id,
    )
    assert isinstance(result.content, types.TextContent)
    return result.content.text


async def _roots(session: ServerSession) -> str:
    result = await session.list_roots()  # pyright: ignore[reportDeprecated]
    return ", ".join(str(root.uri) for root in result.roots)


def _session_id() -> str:
    # Here and not above: the servers also run bare, where there is no layer to import.
    from mcp_sessions import current_session

    session = current_session(default=None)
    return session.id if session is not None and session.source == "session" else "none"


async def _remember(text: str) -> str:
    """docs/server.md, "Inside a handler"."""
    from mcp_sessions import current_session

    session = current_session()
    session.state["notes"] = session.state.get("notes", 0) + 1
    async with session.data.edit() as data:
        log = data.setdefault("log", [])
        log.append(text)
        said = f"{session.state['notes']} notes: {', '.join(log)}"
    await session.notify("notifications/message", {"level": "info", "data": f"noted {text}"})
    return said
