"""Gating: what the server serves inside a session only."""

from __future__ import annotations

from collections.abc import Iterable

from mcp_sessions.core.messages import Request
from mcp_sessions.errors import SessionRequiredByServer
from mcp_sessions.stores.records import SessionRecord


class Gates:
    """The methods and tools that need a protocol-mode session."""

    def __init__(self) -> None:
        self._methods: set[str] = set()
        self._tools: set[str] = set()

    def add(self, *, tools: Iterable[str], methods: Iterable[str]) -> None:
        """Gate these from now on, beside those that are gated already."""
        self._tools.update(tools)
        self._methods.update(methods)

    def check(self, request: Request, record: SessionRecord | None) -> None:
        """Let a request through, or not.

        Raises:
            SessionRequiredByServer: It is gated, and belongs to no protocol-mode session.
        """
        if record is not None or not (self._methods or self._tools):
            return
        gated = request.method in self._methods or (
            request.method == "tools/call" and (request.params or {}).get("name") in self._tools
        )
        if gated:
            raise SessionRequiredByServer
