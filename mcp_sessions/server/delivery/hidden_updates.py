"""Decide which clients get a resource's update: none from which it is hidden.

A subscription is not enough. It may be older than the rule that hides the resource. A server may
also send updates of resources below the one that the client subscribed to.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mcp_sessions.core.named import updated_uri
from mcp_sessions.core.visibility import RESOURCES, Visibility
from mcp_sessions.ids import SessionId
from mcp_sessions.server.connection.connection import ClientConnection
from mcp_sessions.server.delivery.connections import ConnectionRegistry
from mcp_sessions.stores.contract import SessionStore


@dataclass(slots=True, eq=False, repr=False)
class HiddenUpdates:
    _store: SessionStore
    _connections: ConnectionRegistry
    _visibility: Visibility

    def is_hidden_from_some(self, method: str, params: Mapping[str, Any] | None) -> bool:
        """Whether a change is of a resource that is hidden where no session's rule says
        otherwise. A session that hides one itself ends its subscriptions to it.
        """
        uri = updated_uri(method, params)
        return uri is not None and self._visibility.is_hidden(RESOURCES, uri)

    async def is_hidden_from(
        self, session_id: SessionId, method: str, params: Mapping[str, Any] | None
    ) -> bool:
        """Whether a change is of a resource that is hidden from a session.

        Raises:
            StoreUnavailable: Unknown.
        """
        uri = updated_uri(method, params)
        record = await self._store.load(session_id, now=0) if uri is not None else None
        if uri is None or record is None:
            return False
        return self._visibility.with_rules_in(record.state.values).is_hidden(RESOURCES, uri)

    async def is_hidden_from_connection(
        self, connection: ClientConnection, method: str, params: Mapping[str, Any] | None
    ) -> bool:
        """The same, of a connection outside of any session.

        Raises:
            StoreUnavailable: Unknown.
        """
        if connection.transport_session is not None:
            return await self.is_hidden_from(connection.transport_session, method, params)
        # A pipe keeps its rules itself, and no subscription to what they hide.
        own = self._connections.sessionless_subscriptions(connection)
        return self.is_hidden_from_some(method, params) and updated_uri(method, params) not in own
