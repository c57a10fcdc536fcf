"""The wrapped server as one session sees it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from mcp_sessions.core.visibility import Visibility, restored
from mcp_sessions.server.upstream.port import Call, UpstreamError
from mcp_sessions.server.upstream.subscriptions import Around


@dataclass(slots=True, eq=False, repr=False)
class Visible(Around):
    """Leaves out of its lists what is hidden, and lets nobody ask it for that by name."""

    _visibility: Visibility

    async def request(
        self, call: Call, method: str, params: dict[str, Any] | None
    ) -> dict[str, Any]:
        """See :class:`UpstreamPeer`."""
        seen, put = self._visibility.concealed(method, params)
        try:
            result = await self._peer.request(call, method, seen)
        except UpstreamError as failed:
            if not put:
                raise
            raise UpstreamError(restored(failed.error, put)) from failed
        return self._visibility.shown(method, restored(result, put) if put else result)
