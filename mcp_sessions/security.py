"""What needs randomness: ids that cannot be guessed.

The one place where ids are minted. A caller's id is never adopted (pitfall F5).
"""

from __future__ import annotations

import secrets
import time

from mcp_sessions.ids import ConnectionId, LogEpoch, SessionId, log_epoch


def mint_session_id() -> SessionId:
    """A new session id: 43 characters of base64url, 256 random bits."""
    return SessionId(secrets.token_urlsafe(32))


def mint_connection_id(kind: str) -> ConnectionId:
    """A new id for a connection that has no session id of its own."""
    return ConnectionId(f"{kind}-{secrets.token_urlsafe(16)}")


def mint_request_id() -> str:
    """A new id for a request to a client: random, so unique over all sessions."""
    return secrets.token_urlsafe(16)


def mint_log_epoch() -> LogEpoch:
    """The epoch of a log that is made now."""
    return log_epoch(time.time_ns() // 1_000_000, secrets.randbelow(1_000_000))


def mint_key() -> str:
    """A new secret for ``SessionSecurity``: 43 characters of base64url, 256 random bits."""
    return secrets.token_urlsafe(32)
