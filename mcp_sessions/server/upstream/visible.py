"""The wrapped server as one session sees it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from mcp_sessions.core.messages import wire_error
from mcp_sessions.core.visibility import Visibility, restored
from mcp_sessions.errors import InvalidParams
from mcp_sessions.server.upstream.port import Call, UpstreamError
from mcp_sessions.server.upstream.subscriptions import Around


@dataclass(slots=True, eq=False, repr=False)
class Visible(Around):
    """Leaves out of its lists what is hidden, and lets nobody ask it for that by name."""

    _visibility: Visibility

    async def request(
        self, call: Call, method: str, params: dict[str, Any] | None
    ) -> dict[str, Any]:
        """See :class:`UpstreamPeer`.

        Raises:
            UpstreamError: It names something by a name or URI that servers read differently.
        """
        try:
            seen, put = self._visibility.concealed(method, params)
        except InvalidParams as refused:
            raise UpstreamError(wire_error(refused)) from refused
        try:
            result = await self._peer.request(call, method, seen)
        except UpstreamError as failed:
            if not put:
                raise
            raise UpstreamError(restored(failed.error, put)) from failed
        return self._visibility.shown(method, restored(result, put) if put else result, params)
