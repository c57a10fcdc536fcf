"""Hide names: leave them out of lists and answers, and replace them in requests."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from mcp_sessions.core.messages import wire_error
from mcp_sessions.core.visibility import Visibility, restored
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
