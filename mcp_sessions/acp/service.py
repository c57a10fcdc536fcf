from __future__ import annotations

import logging
from collections.abc import Callable
from typing import cast

from mcp_sessions.acp import acp_errors, catalogue
from mcp_sessions.acp.agent import AcpAgent, AgentSide
from mcp_sessions.acp.agent_questions import Answered, Json, Question
from mcp_sessions.acp.conversation_methods import Openings, may_fork
from mcp_sessions.acp.current import CALL, Call, Opening
from mcp_sessions.acp.link import Incoming, Link
from mcp_sessions.acp.negotiation import client_capabilities, negotiated, with_ours
from mcp_sessions.acp.prompts import Options, Prompts
from mcp_sessions.acp.registry import Registry, for_agent
from mcp_sessions.core.messages import Notification
from mcp_sessions.errors import INTERNAL_ERROR, StoreUnavailable
from mcp_sessions.stores.contract import SessionStore

logger = logging.getLogger(__name__)

CONVERSATION_CONTENT = frozenset(
    {
        "user_message_chunk",
        "agent_message_chunk",
        "agent_thought_chunk",
        "tool_call",
        "tool_call_update",
        "plan",
    }
)
"""Updates that an agent repeats when it loads a session itself. The record has them already."""

MAX_HELD = 1_000
"""Updates that an agent may send while a session is being opened."""


class AcpService:
    def __init__(
        self, agent: AcpAgent, store: SessionStore, options: Options, *, clock: Callable[[], float]
    ) -> None:
        self.agent = AgentSide(agent, self)
        self._store, self._options = store, options
        self._registry = Registry(store, clock)
        self.prompts = Prompts(self._registry, self.agent, store, options, clock)
        self.openings = Openings(self._registry, self.prompts, self.agent, store, options, clock)

    # --- from a client -------------------------------------------------------------------------

    async def initialize(self, incoming: Incoming) -> None:
        params = incoming.params
        version = negotiated(params)
        capabilities = client_capabilities(params)
        call = Call(incoming.link)
        result = await self.agent.call(
            incoming.method, {**params, "protocolVersion": version}, call
        )
        connects = self._options.connect_servers
        answer = with_ours(
            result,
            version,
            connects_servers=connects,
            survives=self._store.survives_process,
            forks=may_fork(self.agent),
        )
        servers = cast("Json", answer["agentCapabilities"].get("mcpCapabilities") or {})
        self.openings.agent_connects(
            frozenset(
                name
                for name, declared in servers.items()
                if declared is True and not (connects and name in ("http", "sse"))
            )
        )
        incoming.link.agreed(capabilities)
        incoming.answer(answer)

    async def serve(self, incoming: Incoming) -> None:
        match incoming.method:
            case "session/new":
                await self.openings.new(incoming)
            case "session/load" | "session/resume":
                await self.openings.load(incoming)
            case "session/list":
                await self.openings.list_all(incoming)
            case "session/close":
                await self.openings.close(incoming)
            case "session/prompt":
                await self.prompts.prompt(incoming)
            case "session/delete":
                await self.openings.delete(incoming)
            case "session/fork":
                await self.openings.fork(incoming)
            case _:
                await self._pass_on(incoming)

    async def notified(self, link: Link, notification: Notification) -> None:
        params = notification.params or {}
        if notification.method == "session/cancel":
            await self.prompts.cancel(link, params)
            return
        conversation = self._registry.conversation_of(link, params.get("sessionId"))
        await self.agent.notify(
            notification.method, for_agent(params, conversation), Call(link, conversation)
        )

    async def _pass_on(self, incoming: Incoming) -> None:
        params, conversation = incoming.params, None
        if "sessionId" in params and not incoming.method.startswith("_"):
            conversation = await self._registry.seen_by(incoming.link, params)
        else:
            conversation = self._registry.conversation_of(incoming.link, params.get("sessionId"))
        call = Call(incoming.link, conversation)
        result = await self.agent.call(incoming.method, for_agent(params, conversation), call)
        incoming.answer(result)

    # --- from the agent ------------------------------------------------------------------------

    async def sent(self, method: str, params: Json) -> None:
        call = CALL.get()
        if method != "session/update":
            link, params = self._registry.towards(call, params)
            if link is not None:
                link.push_message({"jsonrpc": "2.0", "method": method, "params": params})
            return
        agent_id = params.get("sessionId")
        update = {name: value for name, value in params.items() if name != "sessionId"}
        conversation = self._registry.named(call, agent_id)
        opening = call.opening if call is not None else None
        if (
            opening is not None
            and not opening.ended
            and (conversation is None or (call is not None and conversation is call.conversation))
        ):
            self._hold(opening, update)
            return
        if conversation is None:
            raise acp_errors.invalid_params("sessionId names no session that is open")
        try:
            await conversation.record([update])
        except StoreUnavailable as error:
            if call is not None and call.turn is not None:
                # Also an agent that goes on as if nothing had happened does not end well.
                call.turn.fault = error
            raise acp_errors.store_unavailable() from error
        title = update["update"].get("title")
        if update["update"].get("sessionUpdate") == "session_info_update" and title is not None:
            await self._store.change_state(conversation.session_id, {catalogue.TITLE: title}, ())

    def _hold(self, opening: Opening, update: Json) -> None:
        kind = update["update"].get("sessionUpdate")
        if not opening.is_new and kind in CONVERSATION_CONTENT:
            return
        if len(opening.held) >= MAX_HELD:
            raise acp_errors.internal_error("too many updates before the session is open")
        opening.held.append(update)

    def asked(self, method: str, params: Json, answered: Answered) -> None:
        link, params = self._registry.towards(CALL.get(), params)
        session_id = params.get("sessionId")
        question = Question(
            session_id if isinstance(session_id, str) else None, method, params, answered
        )
        if link is None:
            question.refuse(INTERNAL_ERROR, "no client has this session open")
        else:
            link.questions.ask(question)
