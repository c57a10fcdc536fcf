"""A session, its owner and its server's keys: what the tests of this folder share."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from mcp_sessions.errors import InvalidState
from mcp_sessions.principal import Principal
from mcp_sessions.security import SessionSecurity

NEW = "newest-key-7f3c9e1b5d2a8046-newest"
OLD = "former-key-2b8d4f6a0c1e3957-former"
OTHER = "others-key-9a1c3e5f7b2d4068-others"
AUDIENCE = "notes"

SESSION = "cE_n9zSecretSessionId-0123456789abcdefghijk"
ALICE = Principal("client", "https://issuer.example", "alice", frozenset({"read"}))

# Seconds since 1970.
MADE = 1_000.0
NOW = 1_500.0
EXPIRES = 2_000.0

STATE: dict[str, Any] = {"lang": "en", "cart": [{"id": 7, "price": 1.5}], "näme": None}

Face = tuple[object, ...]


def server(
    *keys: str, sign_only: bool = False, audience: str | None = AUDIENCE, max_token: int = 4_096
) -> SessionSecurity:
    """What a replica with these keys has; by default ``NEW``."""
    return SessionSecurity(
        keys or (NEW,), sign_only=sign_only, audience=audience, max_token=max_token
    )


def sealed(
    security: SessionSecurity,
    state: Mapping[str, Any] = STATE,
    *,
    session_id: str = SESSION,
    principal: Principal = ALICE,
    version: int = 3,
    expires_at: float = EXPIRES,
) -> str:
    return security.seal_state(
        state, session_id=session_id, principal=principal, version=version, expires_at=expires_at
    )


def opened(
    security: SessionSecurity,
    token: str,
    *,
    session_id: str = SESSION,
    principal: Principal = ALICE,
    now: float = NOW,
) -> tuple[dict[str, Any], int]:
    """State and version of the token, sent by Alice with her session."""
    return security.open_state(token, session_id=session_id, principal=principal, now=now)


def refusal(
    security: SessionSecurity,
    token: str,
    *,
    session_id: str = SESSION,
    principal: Principal = ALICE,
    now: float = NOW,
) -> InvalidState:
    """The error that the token gets, sent by Alice with her session."""
    with pytest.raises(InvalidState) as refused:
        opened(security, token, session_id=session_id, principal=principal, now=now)
    return refused.value


def face(error: InvalidState) -> Face:
    """All that may be seen of an error outside of the log."""
    return (
        type(error),
        str(error),
        repr(error),
        error.args,
        error.code,
        error.message,
        error.data,
        error.status,
    )


def flipped(token: str) -> list[str]:
    """The token with one bit of one character flipped, for each of its bits."""
    return [
        token[:position] + chr(ord(token[position]) ^ (1 << bit)) + token[position + 1 :]
        for position in range(len(token))
        for bit in range(8)
    ]
