"""``notifications/sessions/detached``: a client hears that a session left its connection."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

from mcp_sessions.core.messages import EXTENSION, notification_message, plain_draft
from mcp_sessions.errors import Detached
from mcp_sessions.ids import SessionId
from mcp_sessions.server.connection import ClientConnection

DETACHED = "notifications/sessions/detached"


async def tell_detached(
    connection: ClientConnection,
    session_id: SessionId,
    reason: Detached,
    *,
    retry_after: float | None = None,
    instance: str | None = None,
) -> None:
    """Tell the client, if it declared our extension.

    Args:
        connection: Where its client hears it.
        session_id: The session.
        reason: Why.
        retry_after: Seconds over which clients come back; None: that is not said.
        instance: How the client that has it now calls itself (TKO12); None: unknown.
    """
    if not declares_extension(connection):
        return
    params: dict[str, Any] = {"sessionId": session_id, "reason": reason.value}
    if retry_after is not None:
        params["retryAfter"] = retry_after
    if instance is not None:
        params["instance"] = instance
    await connection.send(plain_draft(notification_message(DETACHED, params)))


def declares_extension(connection: ClientConnection) -> bool:
    """Whether the client said in its handshake that it knows our extension."""
    params: Mapping[str, Any] = connection.peer.initialize_params or {}
    declared: Any = params.get("capabilities")
    if not isinstance(declared, dict):
        return False
    capabilities = cast("dict[str, Any]", declared)
    return EXTENSION in (capabilities.get("extensions") or ()) or (
        "experimental/sessions" in (capabilities.get("experimental") or ())
    )
