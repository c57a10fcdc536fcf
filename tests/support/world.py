"""One wrapped server in the test's own event loop: its tools, its layer, its clock, clients.

    async with world() as w:
        client = await w.connected()
        assert await client.text("echo", text="hello") == "hello"

All tools are async functions, so that this also runs where time is virtual.

With ``MCP_SESSIONS_TEST_STORE=shared`` in the environment a world that names no store gets one of
`tests.support.replicas`, which suspends at every call and hands out copies: whatever holds over a
store in memory must hold over any other one.
"""

import asyncio
import os
from collections.abc import AsyncGenerator, Awaitable, Callable, Collection, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar, cast

import mcp_types as types
from mcp.server import Server
from mcp.server.context import ServerRequestContext
from mcp.server.session import ServerSession

from mcp_sessions import (
    Conversations,
    SessionHandle,
    SessionLayer,
    SessionPolicy,
    SessionSecurity,
    current_session,
)
from mcp_sessions.assembly import Assembly
from mcp_sessions.ids import SessionId
from mcp_sessions.policy import TaskPolicy
from mcp_sessions.protocol_versions import Eras
from mcp_sessions.stores.contract import SessionStore
from mcp_sessions.testing.memory_client import inside
from mcp_sessions.testing.timed_layer import ClockedLayer
from tests.stores.every_store import ENCRYPTED, STORES
from tests.support.raw import AsgiCarrier, Json, RawClient, in_process
from tests.support.virtual_time import VirtualTimeLoop

Ctx = ServerRequestContext[Any, Any]
Tool = Callable[[Ctx, Json], Awaitable[str]]
Call = TypeVar("Call")
"""A request that was sent, in either era."""

_SCHEMA: types.ElicitRequestedSchema = {
    "type": "object",
    "properties": {"answer": {"type": "string"}},
    "required": ["answer"],
}


class Clock:
    """The layer's clock: it moves when the test moves it."""

    def __init__(self, now: float = 1_800_000_000.0) -> None:
        self.now = now

    def __call__(self) -> float:
        """Seconds since 1970."""
        return self.now

    def advance(self, seconds: float) -> None:
        self.now += seconds


def started_session() -> SessionHandle | None:
    """The session that the client of a call started; none is its connection's."""
    session = current_session(default=None)
    return session if session is not None and session.source == "session" else None


async def count(ctx: Ctx, arguments: Json) -> str:
    """A tool that counts in its session's ``state`` and ``data``."""
    session = current_session()
    session.state["n"] = session.state.get("n", 0) + 1
    async with session.data.edit() as data:
        data["n"] = data.get("n", 0) + 1
    return f"{session.source} {session.state['n']} {data['n']}"


class Gate:
    """Where a tool waits until the test lets it through."""

    def __init__(self) -> None:
        self.started = asyncio.Event()
        self.go = asyncio.Event()
        self.cancelled = asyncio.Event()
        self.arrivals = 0

    async def arrive(self) -> None:
        """A tool is here, and waits."""
        self.arrivals += 1
        self.started.set()
        try:
            await self.go.wait()
        except asyncio.CancelledError:
            self.cancelled.set()
            raise


class Toolbox:
    """A lowlevel ``Server`` with the tools below, and what the test adds."""

    def __init__(self, name: str = "tools") -> None:
        self.calls: list[str] = []
        """The tools that were called, in order."""
        self.kept: list[ServerSession] = []
        """The ``ctx.session`` that ``keep`` kept."""
        self.tools: dict[str, Tool] = {
            "ask": self._ask,
            "ask_standalone": self._ask_standalone,
            "close_stream": self._close_stream,
            "echo": self._echo,
            "keep": self._keep,
            "log": self._log,
            "progress": self._progress,
            "session_id": self._session_id,
            "tell": self._notify,
            "update": self._update,
            "wait": self._wait,
        }
        self._gates: dict[str, Gate] = {}
        self.server = Server[dict[str, Any]](
            name,
            version="1.0",
            on_call_tool=self._on_call_tool,
            on_list_tools=self._on_list_tools,
            on_list_resources=self._on_list_resources,
            on_list_prompts=self._on_list_prompts,
        )

    def gate(self, name: str) -> Gate:
        return self._gates.setdefault(name, Gate())

    async def _echo(self, ctx: Ctx, arguments: Json) -> str:
        return str(arguments["text"])

    async def _wait(self, ctx: Ctx, arguments: Json) -> str:
        await self.gate(arguments["gate"]).arrive()
        return f"through {arguments['gate']}"

    async def _progress(self, ctx: Ctx, arguments: Json) -> str:
        """Reports 1, waits at the gate, if any, and reports the rest."""
        for step in range(1, int(arguments["steps"]) + 1):
            await ctx.session.report_progress(step, arguments["steps"])
            if step == 1 and "gate" in arguments:
                await self.gate(arguments["gate"]).arrive()
        return "reported"

    async def _ask(self, ctx: Ctx, arguments: Json) -> str:
        """On the request's own channel."""
        result = await ctx.session.elicit_form(
            arguments["question"], _SCHEMA, related_request_id=ctx.request_id
        )
        return f"{result.action}: {(result.content or {}).get('answer')}"

    async def _ask_standalone(self, ctx: Ctx, arguments: Json) -> str:
        """On the connection's, or the session's, standalone channel."""
        result = await ctx.session.elicit_form(arguments["question"], _SCHEMA)
        return f"{result.action}: {(result.content or {}).get('answer')}"

    async def _log(self, ctx: Ctx, arguments: Json) -> str:
        await ctx.session.send_log_message(  # pyright: ignore[reportDeprecated]
            "info", arguments["text"], related_request_id=ctx.request_id
        )
        return "logged"

    async def _update(self, ctx: Ctx, arguments: Json) -> str:
        """On the standalone channel: a session event, subscribed or not."""
        await ctx.session.send_resource_updated(arguments["uri"])
        return "updated"

    async def _notify(self, ctx: Ctx, arguments: Json) -> str:
        """By the session's handle."""
        await current_session().notify(arguments["method"], arguments.get("params"))
        return "told"

    async def _keep(self, ctx: Ctx, arguments: Json) -> str:
        self.kept.append(ctx.session)
        return "kept"

    async def _close_stream(self, ctx: Ctx, arguments: Json) -> str:
        if ctx.close_sse_stream is None:
            return "cannot be closed"
        await ctx.close_sse_stream()
        await self.gate(arguments["gate"]).arrive()
        return "answered after its stream was closed"

    async def _session_id(self, ctx: Ctx, arguments: Json) -> str:
        session = started_session()
        return session.id if session is not None else "none"

    async def _on_call_tool(
        self, ctx: Ctx, params: types.CallToolRequestParams
    ) -> types.CallToolResult:
        self.calls.append(params.name)
        text = await self.tools[params.name](ctx, params.arguments or {})
        return types.CallToolResult(content=[types.TextContent(text=text)])

    async def _on_list_tools(
        self, ctx: Ctx, params: types.PaginatedRequestParams | None
    ) -> types.ListToolsResult:
        return types.ListToolsResult(
            tools=[types.Tool(name=name, input_schema={"type": "object"}) for name in self.tools]
        )

    async def _on_list_resources(
        self, ctx: Ctx, params: types.PaginatedRequestParams | None
    ) -> types.ListResourcesResult:
        return types.ListResourcesResult(resources=[])

    async def _on_list_prompts(
        self, ctx: Ctx, params: types.PaginatedRequestParams | None
    ) -> types.ListPromptsResult:
        return types.ListPromptsResult(prompts=[])


@dataclass
class World:
    box: Toolbox
    layer: SessionLayer
    clock: Clock
    carrier: AsgiCarrier
    stack: AsyncExitStack = field(repr=False)

    def client(self, **options: Any) -> RawClient:
        """A client that has not said a word yet; options as of :class:`RawClient`."""
        return RawClient(self.carrier, **options)

    async def connected(self, **options: Any) -> RawClient:
        client = self.client(**options)
        await client.initialize()
        return client

    async def carrier_of(self, user: object = None) -> AsgiCarrier:
        """Another connection, whose requests come with a user's credential if there is one."""
        return await self.stack.enter_async_context(in_process(self.layer_app, user=user))

    async def waits(self, call: Call, gate: str = "g") -> Call:
        """``call``, once its handler waits at the gate."""
        await self.box.gate(gate).started.wait()
        return call

    async def produce(self, session: str, count: int, **more: Any) -> None:
        """Publish so many numbered events of a session."""
        for n in range(count):
            params = {"n": n, **more}
            await self.inside.publisher.publish(SessionId(session), "notifications/x", params)

    async def carrier_from(self, address: str) -> AsgiCarrier:
        """A carrier whose requests come from an address, without a credential."""
        return await self.stack.enter_async_context(in_process(self.layer_app, address=address))

    @property
    def layer_app(self) -> Any:
        return self.carrier._app  # pyright: ignore[reportPrivateUsage]

    @property
    def inside(self) -> Assembly:
        return inside(self.layer)

    async def expire(self) -> int:
        """What the reaper does in one round; how many sessions it ended."""
        return await self.inside.lifecycle.round()


@asynccontextmanager
async def _running(layer: SessionLayer) -> AsyncGenerator[None]:
    """The layer's lifespan. Where time jumps, it stands still while its store's thread works."""
    loop, writer = asyncio.get_running_loop(), getattr(layer.store, "_writer", None)
    if not isinstance(loop, VirtualTimeLoop) or writer is None:
        async with layer.lifespan():
            yield
        return
    outside_work, call = loop.outside_work, writer.call

    def counted(work: Any, **how: bool) -> asyncio.Future[Any]:
        future = call(work, **how)
        if not future.done():
            outside_work.add(future)
            future.add_done_callback(outside_work.discard)
        return future

    writer.call = counted
    outside_work.add(writer)
    async with layer.lifespan():
        outside_work.discard(writer)
        yield
        outside_work.add(writer)
    outside_work.discard(writer)


def _store_by_name(name: str) -> SessionStore:
    if name == "shared":
        # Here: that module makes worlds, too.
        from tests.support.replicas import Backplane

        return cast("SessionStore", Backplane().store())
    return {**STORES, **ENCRYPTED}[name]()


@asynccontextmanager
async def world(
    *,
    store: SessionStore | str | None = None,
    box: Toolbox | None = None,
    server: object = None,
    clock: Clock | None = None,
    security: SessionSecurity | None = None,
    conversations: Conversations | None = None,
    hidden: Collection[str] = (),
    auth: Any = None,
    tasks: TaskPolicy | None = None,
    eras: Eras = "both",
    request_keys: Sequence[str] = (),
    **limits: Any,
) -> AsyncGenerator[World]:
    """A wrapped server, running.

    Args:
        store: None: the one that ``MCP_SESSIONS_TEST_STORE`` names, of those in
            `tests.stores.every_store`; else in memory.
        server: Instead of the box's.
        auth: What stands before it.
        tasks: Which calls become tasks.
        eras: The eras that the layer speaks.
        request_keys: The places of request keys that hosts send.
        limits: Of the policy.
    """
    box = box or Toolbox()
    clock = clock or Clock()
    if store is None:
        name = os.environ.get("MCP_SESSIONS_TEST_STORE", "memory")
        store = _store_by_name(name)
    if security is None and conversations is not None:
        # Over a store that others share they are found by keys that others have, too.
        security = SessionSecurity(["k" * 32])
    # What a test says of idle time goes for every session, also over a store that lasts.
    if conversations is None:
        limits.setdefault("forget_after", limits.get("idle_timeout", SessionPolicy().idle_timeout))
    layer = ClockedLayer(
        server if server is not None else box.server,
        store=store,
        policy=SessionPolicy(**limits),
        security=security,
        conversations=conversations,
        hidden=hidden,
        auth=auth,
        tasks=tasks,
        eras=eras,
        request_keys=request_keys,
        clock=clock,
    )
    app = layer.asgi_app()
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(_running(layer))
        carrier = await stack.enter_async_context(in_process(app))
        yield World(box, layer, clock, carrier, stack)


@asynccontextmanager
async def connected_world(**options: Any) -> AsyncGenerator[tuple[World, RawClient]]:
    """A wrapped server as `world` makes it, and a client that is connected to it."""
    async with world(**options) as w:
        yield w, await w.connected()
