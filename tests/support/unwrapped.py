"""The three servers on the SDK's own Streamable HTTP app, without the layer.

To tell a broken client script from a broken layer: what fails here too is the script's
fault. The SDK delivers no ``resources/updated`` to handshake-era subscribers by itself, so
this module adds the least that does.
"""

from typing import Any

import fastmcp
import mcp_types as types
from mcp.server import MCPServer, Server
from mcp.server.context import ServerRequestContext
from mcp.server.session import ServerSession
from mcp.server.streamable_http import EventCallback, EventMessage, EventStore
from mcp.server.subscriptions import ResourceUpdated, ServerEvent
from mcp_types import JSONRPCMessage
from starlette.types import ASGIApp

from tests.support.apps import App


class ListEventStore(EventStore):
    def __init__(self) -> None:
        self._events: list[tuple[str, JSONRPCMessage | None]] = []

    async def store_event(self, stream_id: str, message: JSONRPCMessage | None) -> str:
        self._events.append((stream_id, message))
        return str(len(self._events))

    async def replay_events_after(
        self, last_event_id: str, send_callback: EventCallback
    ) -> str | None:
        """Replay the rest of the stream ``last_event_id`` belongs to."""
        at = int(last_event_id)
        stream_id = self._events[at - 1][0]
        for position, (stream, message) in enumerate(self._events[at:], start=at + 1):
            if stream == stream_id and message is not None:
                await send_callback(EventMessage(message, str(position)))
        return stream_id


def unwrapped_asgi_app(app: App) -> ASGIApp:
    """``app`` on the SDK's (FastMCP: on its) Streamable HTTP, with an event store."""
    subscribers: dict[str, ServerSession] = {}

    async def subscribe(
        ctx: ServerRequestContext[Any, Any], params: types.SubscribeRequestParams
    ) -> types.EmptyResult:
        subscribers[params.uri] = ctx.session
        return types.EmptyResult()

    async def unsubscribe(
        ctx: ServerRequestContext[Any, Any], params: types.UnsubscribeRequestParams
    ) -> types.EmptyResult:
        subscribers.pop(params.uri, None)
        return types.EmptyResult()

    async def publish(uri: str) -> None:
        if uri in subscribers:
            await subscribers[uri].send_resource_updated(uri)

    app.publish = publish
    server = app.server
    lowlevel: Server[Any]
    if isinstance(server, MCPServer):
        lowlevel = server._lowlevel_server  # pyright: ignore[reportPrivateUsage]

        def on_event(event: ServerEvent) -> None:
            if isinstance(event, ResourceUpdated) and app.background is not None:
                app.start(publish(event.uri))

        server._subscriptions.subscribe(on_event)  # pyright: ignore[reportPrivateUsage]
    elif isinstance(server, fastmcp.FastMCP):
        lowlevel = server._mcp_server  # pyright: ignore[reportPrivateUsage]
    else:
        lowlevel = server
    lowlevel.add_request_handler("resources/subscribe", types.SubscribeRequestParams, subscribe)
    lowlevel.add_request_handler(
        "resources/unsubscribe", types.UnsubscribeRequestParams, unsubscribe
    )
    if isinstance(server, fastmcp.FastMCP):
        return server.http_app("/mcp", event_store=ListEventStore(), retry_interval=50)
    return server.streamable_http_app(event_store=ListEventStore(), retry_interval=50)
