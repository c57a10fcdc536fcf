"""A client and a server in one process, with nothing between them: for unit tests.

A `mcp_sessions.client.dialer.Link` whose other end is a connection like any other.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from anyio.abc import TaskStatus

from mcp_sessions.client.dialer import (
    Down,
    Failed,
    Failure,
    Json,
    LinkSettings,
    Received,
    Sink,
)
from mcp_sessions.core.messages import RequestId, decode, encode
from mcp_sessions.core.resume import Cause
from mcp_sessions.principal import ANONYMOUS
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
            await sink(self, Down(Failure(Cause.CLOSED, "the server ended the connection")))

    async def send(self, message: Json, headers: Mapping[str, str]) -> None:
        if self._connection.transport.outbox.closed:
            raise Failed(Failure(Cause.CUT, "the server ended the connection"))
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
