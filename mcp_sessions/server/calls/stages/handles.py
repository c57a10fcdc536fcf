"""Some tools take a handle, of which the wrapped server knows nothing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from mcp_sessions.core.handles import without_handle
from mcp_sessions.server.calls.stages.stage import Stage
from mcp_sessions.server.upstream.handle_argument import LIST, HandleArgument


@dataclass(slots=True, eq=False, repr=False)
class Handles(Stage):
    """The handles of one call.

    Args:
        tool: The called tool, if it takes a handle.
        started: The handle of the session that the call started.
    """

    _argument: HandleArgument
    _tool: str | None
    _started: str | None

    def before(self, method: str, params: dict[str, Any] | None) -> dict[str, Any] | None:
        """The tool never sees it."""
        return params if self._tool is None else without_handle(params, self._argument.name)

    def after(self, method: str, result: dict[str, Any]) -> dict[str, Any]:
        """A list says which tools take one, and the first answer says what to pass."""
        if method == LIST:
            return self._argument.listed(result)
        if self._tool is None or self._started is None:
            return result
        return self._argument.told(self._tool, result, self._started)
