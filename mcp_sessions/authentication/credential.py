from __future__ import annotations

from collections.abc import Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Protocol

OPERATOR = "mcp-sessions:operator"
"""The scope of a key or token whose owner may see the sessions of all principals."""

ASKER: ContextVar[Mapping[str, Any] | None] = ContextVar("asker", default=None)
"""The scope of the request whose credential is verified now."""


@dataclass(frozen=True, slots=True)
class Credential:
    """A credential that was accepted. It does not hold the credential itself."""

    client_id: str
    issuer: str
    subject: str | None
    scopes: tuple[str, ...]
    expires_at: float | None
    """In seconds since 1970; None: never."""


class CannotVerify(Exception):
    """It is unknown for now whether a credential is good.

    Args:
        retry_after: Seconds after which a client should ask again.
    """

    def __init__(self, retry_after: float) -> None:
        super().__init__("the credential cannot be verified for now")
        self.retry_after = retry_after


class NotAllowed(Exception):
    """The credential is good, and its owner may not use the server."""


class Verifier(Protocol):
    async def verify(self, token: str) -> Credential | None:
        """Return what the token stands for. None: it is not good, or of another kind.

        Raises:
            CannotVerify: That is unknown for now.
        """
        ...
