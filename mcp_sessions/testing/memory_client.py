"""A client in memory, for unit tests of tools that use their session.

Client and server are in one process, with nothing between them. `InMemoryLink` is a
`mcp_sessions.client.dialer.Link` whose other end is a connection like any other.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from typing import Any

import anyio
from anyio.abc import TaskStatus
from mcp import Client
from mcp.shared.message import SessionMessage
from mcp_types import jsonrpc_message_adapter

from mcp_sessions.assembly import Assembly
from mcp_sessions.client.dialer import (
    Down,
    Event,
    Failed,
    Failure,
    Link,
    LinkSettings,
    Received,
    Sink,
)
from mcp_sessions.client.reconnect_policy import ReconnectPolicy
from mcp_sessions.client.sdk import ResumableTransport
from mcp_sessions.core.messages import Json, RequestId, decode, encode
from mcp_sessions.core.resume import FailureCause
from mcp_sessions.external_server import ExternalServer
from mcp_sessions.layer import SessionLayer
from mcp_sessions.principal import ANONYMOUS
from mcp_sessions.server.upstream.sdk.kernel import SdkServer
from mcp_sessions_transports.duplex import DuplexConnection
from mcp_sessions_transports.served import Served


class InMemoryDialer:
    target = "memory:"

    def __init__(self, served: Served) -> None:
        self._served = served

    def link(self) -> InMemoryLink:
        return InMemoryLink(self._served)


class InMemoryLink:
    kind = "memory"
    name = "memory:"

    def __init__(self, served: Served) -> None:
        self._served = served
        self._connection = DuplexConnection(self.kind, ANONYMOUS, served)
        # As on a wire: a message is taken after the one before it.
        self._taking = asyncio.Lock()
        self._runs = False
        self._closing = False

    async def run(self, sink: Sink, *, task_status: TaskStatus[None]) -> None:

        async def hand_over(chunks: list[bytes]) -> None:
            for chunk in chunks:
                await sink(self, Received(decode(chunk)))

        outbox = self._connection.transport.outbox
        self._served.connections.add(self._connection.client)
        self._runs = True
        task_status.started()
        try:
            await outbox.empty_into(hand_over, idle=None, interval=0)
        finally:
            await self._connection.gone()
        if not self._closing:
            await sink(self, Down(Failure(FailureCause.CLOSED, "the server ended the connection")))

    async def send(self, message: Json, headers: Mapping[str, str]) -> None:
        if self._connection.transport.outbox.closed:
            raise Failed(Failure(FailureCause.CUT, "the server ended the connection"))
        async with self._taking:
            await self._connection.take(encode(message))

    def configure(self, settings: LinkSettings) -> None:
        """Do nothing: the link has no settings."""

    def listen(self) -> None:
        """Do nothing: every message comes on one connection."""

    def abandon(self, request_id: RequestId) -> None:
        """Do nothing: a late answer is dropped."""

    async def close(self, *, leave: bool) -> None:
        self._closing = True
        self._connection.transport.outbox.cut()
        if self._runs:
            await self._connection.transport.closed.wait()


def inside(layer: SessionLayer) -> Assembly:
    """Return the parts of a layer, for this project's own tests. They change with any release."""
    return layer._assembly  # pyright: ignore[reportPrivateUsage]


@asynccontextmanager
async def connect(
    server: SdkServer | ExternalServer | SessionLayer, *, session: bool = True, **options: Any
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
