"""The port to the rules of the modern era: what a 2026-07-28 POST must be like.

The rules are the SDK's; a binding asks them and serves what they let through.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from mcp_sessions.core.messages import Notification, Request


@dataclass(frozen=True, slots=True)
class Refused:
    """The answer to a POST that the rules do not let through."""

    status: int
    body: bytes | None
    """JSON, or None: no body."""


class Route(Protocol):
    """What the rules made of a request's envelope."""

    @property
    def protocol_version(self) -> str:
        """The version it speaks."""
        ...

    @property
    def client_capabilities(self) -> Any:
        """What its client declared, as it was sent."""
        ...

    @property
    def client_info(self) -> Any:
        """Its client's name and version, as they were sent."""
        ...


class ModernRules(Protocol):
    """What a POST must be like, and how its answer is written."""

    async def check(
        self, http_request: Any, body: bytes
    ) -> tuple[Request, Route] | Notification | Refused:
        """What a body is, or the answer to one that is refused."""
        ...

    def route(self, method: str, params: Any) -> Route | tuple[int, str, Any]:
        """What the envelope of a request without HTTP headers says, or the error it is
        answered with (code, message, data).
        """
        ...

    def header_mismatch(self, request_id: str | int) -> Refused:
        """``Mcp-Session-Id`` beside a different session in ``_meta``: -32020."""
        ...

    def status_of(self, code: int | None) -> int:
        """The HTTP status of an answer with that error code; None: a result."""
        ...

    def dumps(self, message: Any) -> bytes:
        """JSON as the SDK's own entry writes it, to the byte."""
        ...
