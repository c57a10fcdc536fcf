"""Hide names: leave them out of lists and answers, and replace them in requests."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from mcp_sessions import method_names
from mcp_sessions.core.messages import wire_error
from mcp_sessions.core.named import name_in
from mcp_sessions.core.spelling import folded, is_one_of
from mcp_sessions.core.visibility import TOOLS, Visibility, calls_one, restored
from mcp_sessions.errors import InvalidParams, SessionRequiredByServer
from mcp_sessions.server.calls.table import Call, Outcome, Stage


@dataclass(slots=True, eq=False, repr=False)
class Concealing(Stage):
    _visibility: Visibility

    @property
    def is_on(self) -> bool:
        """Whether the operator hides names. Otherwise only the handlers of a session may do so."""
        return bool(self._visibility.outside or self._visibility.needed)

    async def before(self, call: Call) -> Outcome | None:
        """Replace each hidden name with a name that nothing has."""
        sees, session = self._visibility, call.handler_record
        if session is not None:
            sees = sees.with_rules_in(session.state.values)
        if sees.needed:
            sees = sees.with_scopes(call.inbound.principal.checked_scopes)
        if not sees.is_plain:
            request = call.request
            call.stages = (*call.stages, _Concealed(sees, request.forwarded))
            try:
                seen, call.instead = sees.concealed(request.method, request.forwarded)
            except InvalidParams as refused:
                # It names something by a name or URI that servers read differently. Sent again
                # with its key it gets the same answer, so this is its outcome.
                call.error = call.error or wire_error(refused)
            else:
                call.request = request._replace(forwarded=seen)
        if call.is_gated and not call.instead:
            raise SessionRequiredByServer
        return None


@dataclass(slots=True, eq=False, repr=False)
class _Concealed(Stage):
    _visibility: Visibility
    _params: dict[str, Any] | None

    def after(self, call: Call, outcome: Outcome) -> Outcome:
        """Leave out what is hidden. An error names what the client asked for."""
        if call.instead:
            outcome = outcome._replace(
                result=restored(outcome.result, call.instead),
                error=restored(outcome.error, call.instead),
            )
        if outcome.result is None:
            return outcome
        shown = self._visibility.shown(call.request.method, outcome.result, self._params)
        return outcome._replace(result=shown)


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
