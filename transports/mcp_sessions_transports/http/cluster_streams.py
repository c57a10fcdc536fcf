"""Act on other processes' messages about the HTTP connections that are open here.

Any process may serve the next request of a transport-mode session. Its messages are hints (see
:mod:`mcp_sessions.server.cluster.replica_messages`). The round does the rest if a message was lost.
"""

from __future__ import annotations

from collections.abc import Collection, Coroutine
from contextlib import suppress
from typing import Any

from mcp_sessions.errors import StoreRefused
from mcp_sessions.ids import ConnectionId, SessionId
from mcp_sessions.server.calls.table import Calls
from mcp_sessions.server.cluster.replica import Replica
from mcp_sessions.server.cluster.replica_messages import StreamRead
from mcp_sessions.server.delivery.connections import ConnectionRegistry
from mcp_sessions.server.delivery.stored_connection import StoredConnection
from mcp_sessions.server.delivery.transport_sessions import TransportSessions
from mcp_sessions.server.requests.running import RunningRequest
from mcp_sessions_transports.http.channel import PostChannel, http_transport


class ClusterStreams:
    def __init__(
        self,
        replica: Replica,
        connections: ConnectionRegistry,
        sessions: TransportSessions,
        *,
        calls: Calls[RunningRequest],
    ) -> None:
        self._bus, self._policy, self._clock = (
            replica.bus,
            replica.policy,
            replica.clock,
        )
        self._connections, self._sessions, self._calls = connections, sessions, calls

    def stream_read(self, sender: str, message: StreamRead) -> Coroutine[Any, Any, None] | None:
        connection = self._connections.local(ConnectionId(message.session_id))
        if not isinstance(connection, StoredConnection):
            return None
        responses = http_transport(connection).responses
        if message.is_read:
            channel = responses.read_again(message.stream)
            if channel is not None:
                channel.read_at_replica(sender)
            return None
        channel = responses.channels.get(message.stream)
        return channel.left_at_replica(sender) if channel is not None else None

    async def round(self, carrying: Collection[SessionId]) -> None:
        unused = self._clock() - self._policy.idle_timeout
        streaming: list[StoredConnection] = []
        for connection in self._connections.all():
            if not isinstance(connection, StoredConnection):
                continue
            responses = http_transport(connection).responses
            if connection.is_streaming:
                self._connections.in_use(connection)
                streaming.append(connection)
            elif self._connections.in_use_at(connection) < unused and not (
                responses.has_any or self._calls.has(connection.id)
            ):
                await self._connections.release(connection)
            for channel in list(responses.channels.values()):
                await self._check_readers(channel)
        for connection in streaming:
            if connection.session_id in carrying:
                with suppress(StoreRefused):  # It cannot be read, perhaps. The others can.
                    await self._sessions.catch_up(connection)

    async def _check_readers(self, channel: PostChannel) -> None:
        # One that is gone is taken out, and others come, while this waits for the store.
        for process in list(channel.readers):
            if not await self._bus.is_alive(process):
                await channel.left_at_replica(process)
