"""Define the port to the rules of the modern era for a 2026-07-28 POST.

The rules are the SDK's. A binding applies them, and serves the requests that pass.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from mcp_sessions.core.messages import Notification, Request
from mcp_sessions.stores.records import Peer


@dataclass(frozen=True, slots=True)
class ModernRefusal:
    status: int
    body: bytes | None
    """JSON, or None: no body."""


class ModernRules(Protocol):
    handshake_versions: frozenset[str]
    """Versions with a handshake that the layer speaks. Empty: it speaks the modern era only."""

    async def check(
        self, http_request: Any, body: bytes
    ) -> tuple[Request, Peer] | Notification | ModernRefusal:
        """Read a body and its client, or return the answer that refuses it."""
        ...

    def client(self, method: str, params: Any) -> Peer | tuple[int, str, Any]:
        """Read the client of a request without HTTP headers from its envelope. If it is refused,
        return the error (code, message, data).
        """
        ...

    def header_mismatch(self, request_id: str | int) -> ModernRefusal:
        """Return the answer to an ``Mcp-Session-Id`` that contradicts the session in ``_meta``:
        -32020.
        """
        ...

    def status_of(self, code: int) -> int: ...

    def dumps(self, message: Any) -> bytes:
        """Write JSON as the SDK's own entry does, to the byte."""
        ...
