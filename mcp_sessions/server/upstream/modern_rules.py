"""Define the port to the rules of the modern era for a 2026-07-28 POST.

The rules are the SDK's. A binding applies them, and serves the requests that pass.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from mcp_sessions.core.messages import Notification, Request


@dataclass(frozen=True, slots=True)
class ModernRefusal:
    status: int
    body: bytes | None
    """JSON, or None: no body."""


class Route(Protocol):
    @property
    def protocol_version(self) -> str: ...

    @property
    def client_capabilities(self) -> Any: ...

    @property
    def client_info(self) -> Any: ...


class ModernRules(Protocol):
    async def check(
        self, http_request: Any, body: bytes
    ) -> tuple[Request, Route] | Notification | ModernRefusal:
        """Read a body, or return the answer that refuses it."""
        ...

    def route(self, method: str, params: Any) -> Route | tuple[int, str, Any]:
        """Read the envelope of a request without HTTP headers. If it is refused, return the error
        (code, message, data).
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
