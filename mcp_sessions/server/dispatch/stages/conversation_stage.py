from __future__ import annotations

from dataclasses import dataclass

from mcp_sessions.core.handles import not_a_handle
from mcp_sessions.core.messages import NotNamed
from mcp_sessions.server.calls.table import Call, Outcome, Stage
from mcp_sessions.server.dispatch.conversation_sessions import ConversationSessions, UnknownHandle


@dataclass(slots=True, eq=False, repr=False)
class ConversationStage(Stage):
    """Rule 3 of association: its handlers see a session, its client does not."""

    _conversations: ConversationSessions

    async def before(self, call: Call) -> Outcome | None:
        request, inbound = call.request, call.inbound
        if call.record is not None or request.session is NotNamed.NULL:
            return None
        try:
            found = await self._conversations.session_of(request, inbound)
        except UnknownHandle:
            argument = self._conversations.argument_for(inbound)
            if argument is None:
                raise AssertionError("a handle was found where none is looked for") from None
            return Outcome(inbound.of_its_era(not_a_handle(argument.name)), None)
        call.conversation = found
        return None
