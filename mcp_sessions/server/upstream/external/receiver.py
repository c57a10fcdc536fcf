"""Define the receiver of a child's messages: ``child.py`` calls it, ``slot.py`` implements it."""

from __future__ import annotations

from typing import Any, Protocol

from mcp_sessions.server.upstream.external.cause import UNKNOWN, Cause
from mcp_sessions.server.upstream.port import OnProgress, UpstreamCall


class Client(Protocol):
    def label(self) -> str: ...

    async def notified(
        self, method: str, params: dict[str, Any] | None, cause: Cause = UNKNOWN
    ) -> None:
        """Take a notification of the child. Raises nothing: a fault of a receiver does not end the
        child.

        Args:
            cause: The request that it is about.
        """
        ...

    async def reported(self, call: UpstreamCall, params: dict[str, Any]) -> None:
        """Take progress of a request.

        Args:
            params: Those of the notification, without the token.
        """
        ...

    async def asked(
        self,
        method: str,
        params: dict[str, Any] | None,
        on_progress: OnProgress | None,
        cause: Cause = UNKNOWN,
    ) -> dict[str, Any]:
        """Take a question of the child to its client, and return the answer.

        Args:
            cause: See :meth:`notified`.

        Raises:
            PeerError: See :meth:`Outbound.send_request`.
        """
        ...
