"""Refuse a request before anything is looked up for it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from mcp_sessions.core.messages import error_body
from mcp_sessions.errors import INTERNAL_ERROR
from mcp_sessions.server.calls.table import Call, Outcome, Stage
from mcp_sessions.server.connection import Inbound
from mcp_sessions.server.requests.runner import RequestRunner


@dataclass(slots=True, eq=False, repr=False)
class Acceptance(Stage):
    """The limits of a server that stops, of a sender, and of an id.

    Args:
        is_ours: The layer answers the request itself. A request key means nothing there, and the
            request is nobody's load.
    """

    _runner: RequestRunner
    is_ours: bool = False

    async def before(self, call: Call) -> Outcome | None:
        if self._runner.draining and not self.is_served_still(call.inbound):
            return stopping()
        if not self.is_ours and call.request.is_miskeyed:
            # ASC20: a malformed key is refused before anything else.
            call.request.keyed()
        self._runner.calls.open(call, is_ours=self.is_ours)
        return None

    def is_served_still(self, inbound: Inbound) -> bool:
        """Whether a request may begin while the process stops. Over HTTP others came no further
        than its door. A connection that is open both ways is asked here.
        """
        is_leaving = inbound.connection is not None and inbound.connection.transport.is_leaving
        return is_leaving or (inbound.is_let_in and not self._runner.is_over)


def stopping() -> Outcome:
    """Refuse a request that is not begun any more; ERR15: its client may send it elsewhere."""
    data: dict[str, Any] = {"reason": "draining", "started": False}
    return Outcome(None, error_body(INTERNAL_ERROR, "the server is shutting down", data))
