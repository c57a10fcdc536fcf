"""Clean up after a session that was ended by a process that serves nothing."""

from __future__ import annotations

from mcp_sessions.core.states import Mode
from mcp_sessions.ids import SessionId, process_of
from mcp_sessions.server.cluster.codec import encode
from mcp_sessions.server.cluster.replica_messages import SessionEnded
from mcp_sessions.stores.contract import SessionStore
from mcp_sessions.stores.records import SessionRecord


async def ended_outside(store: SessionStore, record: SessionRecord) -> None:
    """A session has ended in a shared store: take out what it left in others, and tell every
    replica, as the one would that had ended it (``Lifecycle.forget``).

    Raises:
        StoreUnavailable: Not all of it was done; the replicas find out in their rounds.
    """
    connection_id = record.attachment.connection_id if record.attachment is not None else None
    if record.mode is Mode.TRANSPORT:
        for session_id, fencing_epoch in record.client.carried.items():
            await store.detach(session_id, fencing_epoch)
    elif connection_id is not None and process_of(connection_id) is None:
        await store.drop_origin(SessionId(connection_id), record.session_id)
    if store.exchange is not None:
        ended = SessionEnded(session_id=record.session_id, connection_id=connection_id)
        await store.exchange.send(encode(ended, sender=""))
