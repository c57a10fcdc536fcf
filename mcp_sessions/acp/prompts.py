"""``session/prompt`` and ``session/cancel``: the agent's turns.

Rules that must hold, and that ``tests/acp/test_prompts.py`` owns:

1. The user's message is in the record before the agent sees it; each update of the agent
   before the client sees it.
2. A turn of which an update could not be stored ends with an error, whatever the agent says.
3. A turn ends with an answer, also if the agent's task is cancelled, raises, or answers
   nonsense.
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, cast

from acp.schema import PromptRequest
from pydantic import ValidationError

from mcp_sessions.acp import acp_errors, catalogue
from mcp_sessions.acp.agent import AgentSide, explained
from mcp_sessions.acp.agent_questions import Json
from mcp_sessions.acp.link import Incoming, Link
from mcp_sessions.acp.open_conversation import Call, OpenConversation, Turn
from mcp_sessions.acp.params import session_id_of
from mcp_sessions.acp.registry import Registry, for_agent
from mcp_sessions.background import stopped
from mcp_sessions.errors import StoreUnavailable
from mcp_sessions.stores.contract import SessionStore

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Options:
    """Durations in seconds."""

    connect_servers: bool
    connect_timeout: float
    grace: float


@dataclass(slots=True, eq=False, repr=False)
class Prompts:
    _registry: Registry
    _agent: AgentSide
    _store: SessionStore
    _options: Options
    _clock: Callable[[], float]

    async def prompt(self, incoming: Incoming) -> None:
        params, link = incoming.params, incoming.link
        session_id = session_id_of(params)
        conversation = self._registry.conversation_of(link, session_id)
        turn = Turn(link)
        if conversation is not None:
            # Before anything is waited for: a cancel that comes next has to find it.
            conversation.turns.add(turn)
        try:
            conversation = await self._registry.seen_by(link, params)
            _check_prompt(params)
            if turn not in conversation.turns:
                conversation.turns.add(turn)
            result = await self._take_turn(link, conversation, params, turn)
            incoming.answer(result)
        finally:
            if conversation is not None:
                conversation.turns.discard(turn)
                if not conversation.turns:
                    await conversation.servers.close_retired()

    async def _take_turn(
        self, link: Link, conversation: OpenConversation, params: Json, turn: Turn
    ) -> Json:
        prompt = cast("list[Json]", params["prompt"])
        if prompt:
            await conversation.record(_user_message(prompt), sent_by=link)
        await self._note_activity(conversation, prompt)
        if turn.cancelled:
            return {"stopReason": "cancelled"}
        call = Call(link, conversation, turn=turn)
        # A task of its own, and the call's: a cancel may have to end it.
        task = asyncio.create_task(
            self._agent.called("session/prompt", for_agent(params, conversation), call)
        )
        turn.task = task
        try:
            await asyncio.wait({task})
        except asyncio.CancelledError:
            await stopped(task)
            raise
        if turn.fault is not None:
            if not task.cancelled():
                # The agent's own failure after that is not reported again.
                task.exception()
            raise turn.fault
        try:
            # Updates of another process, for example, come before the answer.
            await conversation.catch_up()
        except StoreUnavailable as failed:
            # Nothing of this turn is missing: each of its updates was stored.
            logger.error("the record could not be read again at the end of a prompt: %s", failed)
        if task.cancelled():
            if turn.cancelled:
                return {"stopReason": "cancelled"}
            raise acp_errors.internal_error("the agent's task was cancelled")
        result = task.result()
        if not isinstance(result.get("stopReason"), str):
            raise acp_errors.internal_error(
                "the agent's answer to session/prompt has no stopReason"
            )
        await self._note_activity(conversation, ())
        return result

    async def _note_activity(self, conversation: OpenConversation, prompt: Any) -> None:
        """Save the activity for ``session/list``. A failure does not stop the prompt."""
        known: Json = {catalogue.UPDATED_AT: catalogue.at(self._clock())}
        try:
            if prompt and conversation.takes_title():
                record = await self._store.load(conversation.session_id, now=self._clock())
                title = catalogue.title_of(prompt)
                if record is not None and title and not record.state.values.get(catalogue.TITLE):
                    known[catalogue.TITLE] = title
            await self._store.change_state(conversation.session_id, known, ())
        except StoreUnavailable as failed:
            logger.error("a conversation's title or date could not be stored: %s", failed)

    async def cancel(self, link: Link, params: Mapping[str, Any]) -> None:
        conversation = self._registry.conversation_of(link, params.get("sessionId"))
        if conversation is None:
            logger.debug("a cancel names no session that is open here")
            return
        await self._cancel_turns(conversation, link)

    async def _cancel_turns(self, conversation: OpenConversation, link: Link) -> None:
        for turn in conversation.turns:
            turn.cancelled = True
        if self._agent.has("cancel") and conversation.agent_id is not None:
            call = Call(link, conversation)
            params = {"sessionId": conversation.agent_id}
            await self._agent.notify("session/cancel", params, call)
            return
        # It cannot be asked: its task ends.
        for turn in conversation.turns:
            turn.stop()

    def others_work(self, link: Link) -> set[asyncio.Task[Any]]:
        return {
            turn.task
            for conversation in self._registry.all()
            if conversation.link is not link
            for turn in conversation.turns
            if turn.link is link and turn.task is not None
        }

    async def end_all(self, link: Link) -> None:
        """End the prompts of a client that is gone, except in conversations that another client
        has.
        """
        mine = self._registry.shown_to(link)
        await asyncio.gather(*(self.end(conversation, link) for conversation in mine))

    async def end(self, conversation: OpenConversation, link: Link) -> None:
        """Cancel the prompts, as the client may. A prompt that does not end is stopped."""
        tasks = {turn.task for turn in conversation.turns if turn.task is not None}
        if not conversation.turns:
            return
        grace = self._options.grace
        cancelling = asyncio.create_task(self._cancel_turns(conversation, link))
        _, running = await asyncio.wait({cancelling, *tasks}, timeout=grace)
        for task in running:
            task.cancel()
        if running:
            await asyncio.wait(running, timeout=grace)


def _user_message(prompt: list[Json]) -> list[Json]:
    message_id = str(uuid.uuid4())
    return [
        {
            "update": {
                "sessionUpdate": "user_message_chunk",
                "content": block,
                "messageId": message_id,
            }
        }
        for block in prompt
    ]


def _check_prompt(params: Json) -> None:
    """Refuse a prompt that no agent could read, before it gets into the record."""
    try:
        PromptRequest.model_validate(params)
    except ValidationError as error:
        raise acp_errors.invalid_params(explained(error)) from None
