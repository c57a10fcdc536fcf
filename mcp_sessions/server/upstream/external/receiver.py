"""Define the receiver of a child's messages: ``child.py`` calls it, ``slot.py`` implements it."""

from __future__ import annotations

from typing import Any, Protocol

from mcp_sessions.server.upstream.port import OnProgress, UpstreamCall


class Client(Protocol):
    @property
    def is_one_client(self) -> bool:
        """Whether only one client ever asks there."""
        ...

    def label(self) -> str: ...

    async def notified(
        self, method: str, params: dict[str, Any] | None, about: UpstreamCall | None = None
    ) -> None:
        """Take a notification of the child. Raises nothing: a fault of a receiver does not end the
        child.

        Args:
            about: The request that caused it. None: unknown.
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
        about: UpstreamCall | None = None,
    ) -> dict[str, Any]:
        """Take a question of the child to its client, and return the answer.

        Args:
            about: See :meth:`notified`.

        Raises:
            PeerError: See :meth:`Outbound.send_request`.
        """
        ...
