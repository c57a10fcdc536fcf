"""A client in memory, for unit tests of tools that use their session."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from typing import Any

import anyio
from mcp import Client
from mcp.shared.message import SessionMessage
from mcp_types import jsonrpc_message_adapter

from mcp_sessions.client.dialer import Event, Link, Received
from mcp_sessions.client.reconnect_policy import ReconnectPolicy
from mcp_sessions.client.sdk import ResumableTransport
from mcp_sessions.layer import SessionLayer
from mcp_sessions.testing.inside import inside
from mcp_sessions_transports.in_memory import InMemoryDialer


@asynccontextmanager
async def connect(
    server: object, *, session: bool = True, **options: Any
) -> AsyncGenerator[Client]:
    """A client of ``server``, connected in memory: no socket, no child process.

    ::

        async def test_a_basket_is_kept() -> None:
            async with connect(mcp) as client:
                await client.call_tool("put", {"item": "tea"})
                basket = await client.call_tool("basket", {})

    It goes the way that every client goes, on a connection of its own: what a tool does with
    its session is done as over a wire. Several may be connected to one layer at once, each
    with a session of its own, inside of ``layer.lifespan()``.

    Args:
        server: A server for :class:`SessionLayer`; or a layer, with its store and its policy. One
            that does not run yet runs until the client is closed, and not again.
        session: The client has a session of the protocol, as one that connects with
            ``resumable``. False: it is the SDK's own and asks for none.
        options: Of ``mcp.Client``: ``mode``, ``elicitation_callback``, ``client_info`` and others.

    Raises:
        ConfigurationError: The server cannot be wrapped, or the layer ran already.
        StoreUnavailable: The layer's store is away.
    """
    layer = server if isinstance(server, SessionLayer) else SessionLayer(server)
    parts = inside(layer)
    failed: Exception | None = None
    async with AsyncExitStack() as stack:
        if not parts.availability.is_running:
            await stack.enter_async_context(layer.lifespan())
        dialer = InMemoryDialer(parts)
        transport = _resumable(dialer) if session else _stock(dialer)
        client = await stack.enter_async_context(Client(transport, **options))
        try:
            yield client
        except Exception as raised:
            # A failure of a test stands alone, not in the exception groups of the tasks that it
            # ends.
            failed = raised
    if failed is not None:
        raise failed


def _resumable(dialer: InMemoryDialer) -> ResumableTransport:
    return ResumableTransport([dialer], None, ReconnectPolicy())


@asynccontextmanager
async def _stock(dialer: InMemoryDialer) -> AsyncGenerator[tuple[Any, Any]]:
    to_app, read = anyio.create_memory_object_stream[SessionMessage | Exception](0)
    write, from_app = anyio.create_memory_object_stream[SessionMessage](0)
    link = dialer.link()

    async def sink(_: Link, event: Event) -> None:
        if isinstance(event, Received):
            parsed = jsonrpc_message_adapter.validate_python(event.message, by_name=False)
            await to_app.send(SessionMessage(parsed))
        else:
            to_app.close()

    async def pump() -> None:
        async for item in from_app:
            message = item.message.model_dump(by_alias=True, mode="json", exclude_unset=True)
            await link.send(message, {})

    async with to_app, read, write, from_app, anyio.create_task_group() as tasks:
        await tasks.start(partial(link.run, sink))
        tasks.start_soon(pump)
        try:
            yield read, write
        finally:
            with anyio.CancelScope(shield=True):
                await link.close(leave=True)
            tasks.cancel_scope.cancel()
