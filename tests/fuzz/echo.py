"""A server whose handlers never fail. An internal error is the layer's."""

from typing import Any

import mcp_types as types
from mcp.server import Server
from mcp.server.subscriptions import InMemorySubscriptionBus, ListenHandler

from mcp_sessions import current_session
from tests.support.world import Ctx

STATUSES = {200, 202, 400, 404, 405, 406, 413, 415, 421, 403}
"""The possible statuses; there is no authentication."""

CODES = {
    -32700,  # parse error
    -32600,  # invalid request: also mode_conflict, key_reused, duplicate_id
    -32601,  # method not found
    -32602,  # invalid params: also invalid_state
    -32020,  # header mismatch
    -32022,  # unsupported protocol version
    -32043,  # session not found
    -31010,  # session detached
    -31011,  # limit reached
    -31012,  # outcome unknown
    -32800,  # cancelled
}
"""Every error that may be answered. An internal one is none of them."""


def echo_server() -> Server[Any]:
    """A lowlevel server whose handlers return what they get."""

    async def call(ctx: Ctx, params: types.CallToolRequestParams) -> types.CallToolResult:
        session = current_session(default=None)
        if session is not None and params.name == "state":
            session.state["seen"] = session.state.get("seen", 0) + 1
        if params.name == "emit":
            await ctx.session.report_progress(1, None, params.name)
            await ctx.session.send_resource_updated(params.name)
        return types.CallToolResult(content=[], structured_content=params.arguments)

    async def tools(ctx: Ctx, params: types.PaginatedRequestParams | None) -> types.ListToolsResult:
        return types.ListToolsResult(tools=[])

    async def read(ctx: Ctx, params: types.ReadResourceRequestParams) -> types.ReadResourceResult:
        return types.ReadResourceResult(
            contents=[types.TextResourceContents(uri=params.uri, text=params.uri)]
        )

    async def custom(ctx: Ctx, params: types.RequestParams) -> dict[str, Any]:
        return {"echo": (ctx.params or {}).get("echo")}

    bus = InMemorySubscriptionBus()
    server = Server[Any](
        "echo",
        on_call_tool=call,
        on_list_tools=tools,
        on_read_resource=read,
        on_subscriptions_listen=ListenHandler(bus),
    )
    server.add_request_handler("example/echo", types.RequestParams, custom)
    return server
