"""What other processes do with the HTTP connections that are open here, and leave undone.

Any process may serve the next request of a transport-mode session. What it tells of that is
a hint (see :mod:`mcp_sessions.server.cluster.bus`); what a message did not bring, the round does.
"""

from __future__ import annotations

from collections.abc import Coroutine
from typing import Any

from mcp_sessions.errors import Detached
from mcp_sessions.ids import ConnectionId, SessionId
from mcp_sessions.server.cluster.bus import Members
from mcp_sessions.server.delivery.hub import Hub
from mcp_sessions_transports.http.channel import PostChannel
from mcp_sessions_transports.http.connection import HttpConnection
from mcp_sessions_transports.served import Served


class Elsewhere:
    """Hears what other processes do, and looks after what they left, once a round."""

    def __init__(self, served: Served) -> None:
        self._served = served
        self._bus = served.bus

    def start(self) -> None:
        """Hear of it from now on, and take part in the rounds."""
        self._bus.on("get_opened", self._get_opened)
        self._bus.on("stream_read", self._stream_read)
        self._bus.on("withdrawn", self._withdrawn)
        self._bus.each_round.append(self._round)

    def _get_opened(self, message: Members) -> Coroutine[Any, Any, None] | None:
        connection = self._local(message["session"])
        if connection is None:
            return None
        opened = (message["at"], message["from"])
        if connection.opened_elsewhere(opened, self._served.runner.process):
            return None
        return connection.insist(message["from"])

    def _stream_read(self, message: Members) -> Coroutine[Any, Any, None] | None:
        connection = self._local(message["session"])
        channel = connection.responses.channels.get(message["stream"]) if connection else None
        if channel is None:
            return None
        if message["is_read"]:
            channel.read_elsewhere(message["from"])
            return None
        return channel.left_elsewhere(message["from"])

    def _withdrawn(self, message: Members) -> Coroutine[Any, Any, None] | None:
        connection = self._local(message["connection"])
        if connection is None:
            return None
        return connection.withdrawn_elsewhere(SessionId(message["session"]))

    async def _round(self) -> None:
        """Make good what a process that died left undone, and forget what is not in use."""
        served = self._served
        unused = served.clock() - served.policy.idle_timeout
        for connection in served.hub.connections():
            if not isinstance(connection, HttpConnection):
                continue
            if connection.is_streaming:
                await catch_up(connection, served.hub)
            elif connection.used_at < unused and not (
                connection.responses.channels or connection.requests
            ):
                await served.hub.let_go(connection)
            for channel in list(connection.responses.channels.values()):
                await self._check_readers(channel)

    async def _check_readers(self, channel: PostChannel) -> None:
        # One that is gone is taken out, and others come, while this waits for the store.
        for process in list(channel.readers):
            if not await self._bus.is_alive(process):
                await channel.left_elsewhere(process)

    def _local(self, session_id: str) -> HttpConnection | None:
        connection = self._served.hub.local(ConnectionId(session_id))
        return connection if isinstance(connection, HttpConnection) else None


async def catch_up(connection: HttpConnection, hub: Hub) -> None:
    """Relay what a process stored for a connection's sessions before it died; a session that
    cannot go on there is told to resume.

    Raises:
        StoreUnavailable: Not all of it was relayed.
    """
    for session_id in await connection.catch_up():
        await hub.displace(session_id, Detached.EVICTED)
