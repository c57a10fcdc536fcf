"""The session of a conversation, for handlers and for tools that take a handle.

The wrapped server knows nothing of the handle.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

from mcp_sessions import method_names
from mcp_sessions.core.handles import not_a_handle, without_handle
from mcp_sessions.core.messages import NotNamed
from mcp_sessions.seldom import Seldom
from mcp_sessions.server.calls.table import Call, Outcome, Stage
from mcp_sessions.server.dispatch.conversation_sessions import ConversationSessions, UnknownHandle
from mcp_sessions.server.dispatch.stages.serving import UpstreamPeers
from mcp_sessions.server.upstream.handle_argument import HandleArgument
from mcp_sessions.server.upstream.port import UpstreamError

logger = logging.getLogger(__name__)
logger.addFilter(Seldom())


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


@dataclass(slots=True, eq=False, repr=False)
class LearnedTools(Stage):
    """Looks up a tool that is to take a handle, if no list named it so far.

    This is done before the session is looked up. Whether a call has a handle decides that.
    """

    _argument: HandleArgument
    _conversations: ConversationSessions
    _peers: UpstreamPeers

    async def before(self, call: Call) -> Outcome | None:
        request, inbound, argument = call.request, call.inbound, self._argument
        if not argument.is_unknown(argument.tool_of(request)):
            return None
        if self._conversations.argument_for(inbound) is None:
            return None
        peer, inner = self._peers.peer_and_call(Call(request, inbound))
        try:
            await argument.learn(peer, inner, request)
        except UpstreamError:
            logger.warning(
                "a client called a tool that should take a handle, but the server did not list it"
            )
        finally:
            inner.end()
            if inbound.is_alone:
                await peer.close()
        return None


@dataclass(slots=True, eq=False, repr=False)
class HandleTools(Stage):
    _argument: HandleArgument
    _conversations: ConversationSessions

    async def before(self, call: Call) -> Outcome | None:
        request, argument = call.request, self._argument
        takes = argument.takes(argument.tool_of(request)) and not call.instead
        if not takes and request.method != method_names.LIST_TOOLS:
            return None
        if self._conversations.argument_for(call.inbound) is None:
            return None
        call.stages = (*call.stages, self)
        if takes:
            seen = without_handle(request.forwarded, argument.name)
            call.request = request._replace(forwarded=seen)
        return None

    def after(self, call: Call, outcome: Outcome) -> Outcome:
        result, request, argument = outcome.result, call.request, self._argument
        if result is None:
            return outcome
        if request.method == method_names.LIST_TOOLS:
            return outcome._replace(result=argument.listed(result))
        tool = argument.tool_of(request)
        started = call.conversation.started if call.conversation is not None else None
        if request.method != method_names.CALL_TOOL or tool is None or started is None:
            return outcome
        return outcome._replace(result=argument.with_handle(tool, result, started))
