from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from mcp_sessions import method_names
from mcp_sessions.core.named import name_in
from mcp_sessions.core.spelling import folded, is_one_of
from mcp_sessions.core.visibility import TOOLS, Visibility, calls_one
from mcp_sessions.errors import SessionRequiredByServer
from mcp_sessions.server.calls.table import Call, Outcome, Stage


@dataclass(slots=True, eq=False, repr=False)
class Gates(Stage):
    _visibility: Visibility
    _methods: set[str] = field(default_factory=set[str])
    _tools: set[str] = field(default_factory=set[str])
    """Folded: a server may take another spelling for the same tool."""

    @property
    def is_on(self) -> bool:
        return bool(self._methods or self._tools)

    def add(self, *, tools: Iterable[str], methods: Iterable[str]) -> None:
        self._tools.update(map(folded, tools))
        self._methods.update(methods)

    async def before(self, call: Call) -> Outcome | None:
        if call.record is not None or call.conversation is not None:
            return None
        request = call.request
        if request.method in self._methods:
            raise SessionRequiredByServer
        if not self._tools or request.method != method_names.CALL_TOOL:
            return None
        tool = name_in(request.method, request.params)
        # If it is not sure which tool the server reads, it may be one of these.
        if calls_one(request.params or {}) and (tool is None or not is_one_of(tool, self._tools)):
            return None
        sees = self._visibility
        if sees.needed:
            sees = sees.with_scopes(call.inbound.principal.checked_scopes)
        if not sees.is_hidden(TOOLS, str(tool)):
            raise SessionRequiredByServer
        # A rule of its connection may show the tool: see Concealing.
        call.is_gated = True
        return None
