from __future__ import annotations

import asyncio
from typing import Any

from mcp_sessions.errors import INVALID_REQUEST
from mcp_sessions.server.upstream.port import Outbound, PeerError, PeerRequest, UpstreamCall


class Unsure:
    def __init__(self) -> None:
        self.questions: dict[asyncio.Timeout, list[UpstreamCall]] = {}
        """Time limits of the questions → the calls that each may be about."""

    async def ask(self, asked: PeerRequest, way: Outbound) -> dict[str, Any]:
        """Ask the client of several calls about one of them. The question ends with the last of
        them.

        Raises:
            PeerError: See :meth:`Outbound.send_request`.
        """
        try:
            async with asyncio.timeout(None) as limit:
                self.questions[limit] = list(asked.about)
                try:
                    return await way.send_request(asked)
                finally:
                    del self.questions[limit]
        except TimeoutError:
            raise PeerError(INVALID_REQUEST, "the request that asks has ended") from None

    def remove(self, call: UpstreamCall) -> None:
        """End the questions that were about this call only. Others continue."""
        for limit, calls in self.questions.items():
            if call in calls:
                calls.remove(call)
                if not calls:
                    limit.reschedule(asyncio.get_running_loop().time())
