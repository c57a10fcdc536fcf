"""Remove hidden names from lists, and replace them in requests."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mcp_sessions.core.messages import wire_error
from mcp_sessions.core.visibility import Visibility, restored
from mcp_sessions.errors import InvalidParams
from mcp_sessions.server.calls.stages.stage import Stage
from mcp_sessions.server.upstream.port import UpstreamError


class Concealing(Stage):
    """Hides names in one call."""

    __slots__ = ("_params", "_put", "_visibility")

    def __init__(self, visibility: Visibility) -> None:
        self._visibility = visibility
        self._params: dict[str, Any] | None = None
        self._put: Mapping[str, str] = {}

    def before(self, method: str, params: dict[str, Any] | None) -> dict[str, Any] | None:
        """Put something that nothing is called for each hidden name.

        Raises:
            UpstreamError: It names something by a name or URI that servers read differently.
        """
        try:
            seen, put = self._visibility.concealed(method, params)
        except InvalidParams as refused:
            raise UpstreamError(wire_error(refused)) from refused
        self._params, self._put = params, put
        return seen

    def after(self, method: str, result: dict[str, Any]) -> dict[str, Any]:
        """Leave out what is hidden."""
        shown = restored(result, self._put) if self._put else result
        return self._visibility.shown(method, shown, self._params)

    def failed(self, error: dict[str, Any]) -> dict[str, Any]:
        """The error names what the client asked for."""
        return restored(error, self._put) if self._put else error
