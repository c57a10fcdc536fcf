"""A server of the SDK that speaks the era of 2026-07-28 only: what it speaks of the era before is
refused on the way. As a URL, or as a command: ``modern_server.py``.
"""

import json
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any

import anyio
import mcp_types as types
from mcp.server import Server
from mcp.server.context import ServerRequestContext
from mcp.server.stdio import stdio_server
from mcp.server.subscriptions import InMemorySubscriptionBus, ListenHandler, ResourceUpdated
from mcp.shared.message import SessionMessage
from starlette.types import ASGIApp, Receive, Scope, Send

Ctx = ServerRequestContext[Any, Any]
MODERN = b"2026-07-28"


class ModernServer:
    """The server, and what it saw.

    Args:
        listens: How many there may be at the same time.
    """

    def __init__(self, *, listens: int = 1024) -> None:
        self.bus = InMemorySubscriptionBus()
        self.headers: list[dict[str, str]] = []
        self.repeated: dict[str, Any] = {}
        """The arguments of the tool ``route``, whose schemas may say that headers repeat them."""
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
            on_subscriptions_listen=ListenHandler(self.bus, max_subscriptions=listens),
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
        if params is None or params.cursor is None:
            ask = types.Tool(name="ask", input_schema={"type": "object"})
            return types.ListToolsResult(tools=[ask], next_cursor="2" if self.repeated else None)
        schema = {"type": "object", "properties": self.repeated}
        return types.ListToolsResult(tools=[types.Tool(name="route", input_schema=schema)])

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

    def only(self, app: ASGIApp, refuses: ASGIApp | None = None) -> ASGIApp:
        """The application, of which the era before is refused, by ``refuses`` if there is one."""

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
            if refuses is not None:
                await refuses(scope, receive, send)
                return
            error = {"code": -32022, "message": "Unsupported protocol version"}
            body = json.dumps({"jsonrpc": "2.0", "id": None, "error": error}).encode()
            kind = [(b"content-type", b"application/json")]
            await send({"type": "http.response.start", "status": 400, "headers": kind})
            await send({"type": "http.response.body", "body": body})

        return modern

    async def on_stdio(self) -> None:
        """Serve standard input and output, where a handshake is refused."""
        async with stdio_server() as (read, write):
            forward, filtered = anyio.create_memory_object_stream[SessionMessage | Exception](0)
            async with anyio.create_task_group() as tg:

                async def refuse() -> None:
                    async with forward:
                        async for item in read:
                            message = item.message if isinstance(item, SessionMessage) else None
                            if getattr(message, "method", "") != "initialize":
                                await forward.send(item)
                                continue
                            assert isinstance(message, types.JSONRPCRequest)
                            error = types.ErrorData(code=-32022, message="Unsupported version")
                            answer = types.JSONRPCError(jsonrpc="2.0", id=message.id, error=error)
                            await write.send(SessionMessage(answer))

                tg.start_soon(refuse)
                options = self.server.create_initialization_options()
                await self.server.run(filtered, write, options)
                tg.cancel_scope.cancel()


def _text(text: str) -> types.CallToolResult:
    return types.CallToolResult(content=[types.TextContent(text=text)])


@asynccontextmanager
async def modern_url(modern: ModernServer) -> AsyncGenerator[str]:
    """Where it is served over HTTP."""
    # Here, so that the command does without them.
    from tests.support.urls import url_of

    app = modern.server.streamable_http_app()
    async with app.router.lifespan_context(app), url_of(modern.only(app)) as url:
        yield url


if __name__ == "__main__":
    anyio.run(ModernServer().on_stdio)
