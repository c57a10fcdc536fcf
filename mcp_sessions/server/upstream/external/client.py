"""What a child is to those who hear it: ``child.py`` speaks to this, ``place.py`` is one."""

from __future__ import annotations

from typing import Any, Protocol

from mcp_sessions.server.upstream.external.cause import UNKNOWN, Cause
from mcp_sessions.server.upstream.port import Call, OnProgress


class Client(Protocol):
    """Who hears what a child says by itself."""

    def label(self) -> str:
        """Whose child it is, for the log."""
        ...

    async def notified(
        self, method: str, params: dict[str, Any] | None, cause: Cause = UNKNOWN
    ) -> None:
        """It notifies its client. Raises nothing: what is wrong there does not end the child.

        Args:
            cause: The request that it is about.
        """
        ...

    async def reported(self, call: Call, params: dict[str, Any]) -> None:
        """It reports progress of a request.

        Args:
            params: But for the token.
        """
        ...

    async def asked(
        self,
        method: str,
        params: dict[str, Any] | None,
        on_progress: OnProgress | None,
        cause: Cause = UNKNOWN,
    ) -> dict[str, Any]:
        """It asks its client.

        Args:
            cause: See :meth:`notified`.

        Raises:
            PeerError: See :meth:`Outbound.send_request`.
        """
        ...
