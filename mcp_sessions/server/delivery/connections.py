"""The connections of this process, and what is used on them.

A connection of a transport-mode session lives in the store: here is what this process knows of
it, made anew when it is needed.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

from mcp_sessions.background import report
from mcp_sessions.core.states import Mode
from mcp_sessions.ids import ConnectionId, SessionId, process_of
from mcp_sessions.protocol_versions import DEFAULT_VERSION
from mcp_sessions.server.cluster.replica import Replica
from mcp_sessions.server.connection.connection import ClientConnection
from mcp_sessions.server.delivery.stored_connection import StoredConnection
from mcp_sessions.server.upstream.port import UpstreamPeer
from mcp_sessions.stores.records import Peer, SessionRecord

NewConnection = Callable[[SessionRecord, Peer], StoredConnection]
"""Makes the connection of a transport-mode session that has none in this process."""


class ConnectionRegistry:
    def __init__(self, replica: Replica, new_connection: NewConnection) -> None:
        self._store, self._bus = replica.store, replica.bus
        self._clock, self.new_connection = replica.clock, new_connection
        self._connections: dict[ConnectionId, ClientConnection] = {}
        self.local = self._connections.get
        """A connection of this process; None: there is none."""

        self._in_use_at: dict[ConnectionId, float] = {}
        self._sessionless: dict[str, dict[ClientConnection, None]] = {}
        self._sessionless_of: dict[ClientConnection, dict[str, None]] = {}
        self._used_on: dict[SessionId, dict[ClientConnection, None]] = {}

    def add(self, connection: ClientConnection) -> None:
        self._connections[connection.id] = connection
        self.in_use(connection)

    def in_use(self, connection: ClientConnection) -> None:
        if connection.id in self._connections:
            self._in_use_at[connection.id] = self._clock()

    def in_use_at(self, connection: ClientConnection) -> float:
        """Seconds since 1970 of the last call of :meth:`in_use`. 0: it was released."""
        return self._in_use_at.get(connection.id, 0)

    def all(self) -> list[ClientConnection]:
        return list(self._connections.values())

    async def find(self, connection_id: ConnectionId) -> ClientConnection | None:
        """A connection, of this process or revived from the store; None: it is gone, or
        lives in another process.
        """
        connection = self._connections.get(connection_id)
        if connection is not None or process_of(connection_id) is not None:
            return connection
        record = await self._store.load(SessionId(connection_id), now=self._clock())
        if record is None or record.mode is not Mode.TRANSPORT:
            return None
        return self.stored(record)

    def stored(self, record: SessionRecord) -> StoredConnection:
        connection_id = ConnectionId(record.session_id)
        known = self._connections.get(connection_id)
        if isinstance(known, StoredConnection):
            self._in_use_at[connection_id] = self._clock()
            return known
        connection = self.new_connection(record, record.client.peer or Peer(DEFAULT_VERSION))
        self.add(connection)
        return connection

    async def is_there(self, connection_id: ConnectionId) -> bool:
        """Return whether a connection may still live, in any process.

        Raises:
            StoreUnavailable: Unknown.
        """
        if connection_id in self._connections:
            return True
        home = process_of(connection_id)
        if home is None:
            # It is in the store, until its session ends.
            return await self._store.load(SessionId(connection_id), now=0) is not None
        # One of this process is gone.
        return self._bus.is_remote(home) and await self._bus.is_alive(home)

    async def release(self, connection: ClientConnection) -> None:
        """Forget a connection that this process no longer serves. Its record stays in the store."""
        connection.has_left = True
        if self._connections.get(connection.id) is connection:
            del self._connections[connection.id], self._in_use_at[connection.id]
        for uri in list(self._sessionless_of.get(connection, ())):
            self.subscribe_sessionless(connection, uri, on=False)
        upstream_peers = dict(connection.upstream_peers)
        connection.upstream_peers.clear()
        for session_id in upstream_peers:
            if session_id is not None:
                self._unused(session_id, connection)
        for upstream_peer in upstream_peers.values():
            await _closed(upstream_peer)

    def subscribe_sessionless(self, connection: ClientConnection, uri: str, *, on: bool) -> None:
        connections = self._sessionless.setdefault(uri, {})
        uris = self._sessionless_of.setdefault(connection, {})
        if on:
            connections[connection] = None
            uris[uri] = None
        else:
            connections.pop(connection, None)
            uris.pop(uri, None)
        if not connections:
            del self._sessionless[uri]
        if not uris:
            del self._sessionless_of[connection]

    def sessionless_subscriptions(self, connection: ClientConnection) -> Collection[str]:
        return self._sessionless_of.get(connection, {}).keys()

    def sessionless_subscribers(self, uri: str) -> list[ClientConnection]:
        return list(self._sessionless.get(uri, ()))

    def used(self, session_id: SessionId, connection: ClientConnection) -> None:
        self._used_on.setdefault(session_id, {})[connection] = None

    def _unused(self, session_id: SessionId, connection: ClientConnection) -> None:
        connections = self._used_on.get(session_id)
        if connections is not None:
            connections.pop(connection, None)
            if not connections:
                del self._used_on[session_id]

    async def close_peers(self, session_id: SessionId) -> None:
        for connection in self._used_on.pop(session_id, ()):
            upstream_peer = connection.upstream_peers.pop(session_id, None)
            if upstream_peer is not None:
                await _closed(upstream_peer)

    def knows(self, session_id: SessionId) -> bool:
        return (
            ConnectionId(session_id) in self._connections
            or session_id in self._used_on
            or any(session_id in connection.attached for connection in self._connections.values())
        )


async def _closed(upstream_peer: UpstreamPeer) -> None:
    """Close a peer. The clean-up of the wrapped server holds no other peer's lock."""
    try:
        await upstream_peer.close()
    except Exception as failed:
        report("the end of a client's connection in the wrapped server", failed)
