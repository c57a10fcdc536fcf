"""Track the open conversations of this process, by each of their names.

A conversation has one id on the wire, which never changes. The agent has its own for it, and
may have another one in each process.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping
from contextlib import asynccontextmanager
from typing import Any

from mcp_sessions.acp import acp_errors
from mcp_sessions.acp.agent_questions import Json
from mcp_sessions.acp.link import Link
from mcp_sessions.acp.open_conversation import Call, OpenConversation
from mcp_sessions.acp.params import session_id_of
from mcp_sessions.core.states import Mode
from mcp_sessions.ids import FencingEpoch, SessionId
from mcp_sessions.principal import ANONYMOUS
from mcp_sessions.stores.contract import SessionStore
from mcp_sessions.stores.records import Admitted, SessionRecord


class Registry:
    def __init__(self, store: SessionStore, clock: Callable[[], float]) -> None:
        self._store = store
        self._clock = clock
        self._open: dict[SessionId, OpenConversation] = {}
        self._by_agent_id: dict[str, OpenConversation] = {}
        self._locks: dict[SessionId, asyncio.Lock] = {}
        self._lock_users: Counter[SessionId] = Counter()
        """How many hold it, or wait for it."""

    @asynccontextmanager
    async def lock(self, session_id: SessionId) -> AsyncGenerator[None, None]:
        """Hold the lock under which one caller at a time opens or closes a conversation."""
        lock = self._locks.setdefault(session_id, asyncio.Lock())
        self._lock_users[session_id] += 1
        try:
            async with lock:
                yield
        finally:
            self._lock_users[session_id] -= 1
            if not self._lock_users[session_id]:
                del self._locks[session_id], self._lock_users[session_id]

    def add(self, conversation: OpenConversation) -> None:
        self._open[conversation.session_id] = conversation

    def name(self, conversation: OpenConversation, agent_id: str) -> None:
        conversation.named_by_agent(agent_id)
        self._by_agent_id[agent_id] = conversation

    def remove(self, conversation: OpenConversation) -> None:
        self._open.pop(conversation.session_id, None)
        for agent_id in conversation.agent_ids:
            if self._by_agent_id.get(agent_id) is conversation:
                del self._by_agent_id[agent_id]

    def all(self) -> Iterable[OpenConversation]:
        return list(self._open.values())

    def find(self, session_id: SessionId) -> OpenConversation | None:
        return self._open.get(session_id)

    def shown_to(self, link: Link) -> list[OpenConversation]:
        return [conversation for conversation in self.all() if conversation.link is link]

    def conversation_of(self, link: Link, session_id: object) -> OpenConversation | None:
        if not isinstance(session_id, str):
            return None
        conversation = self._open.get(SessionId(session_id))
        return conversation if conversation is not None and conversation.link is link else None

    async def seen_by(self, link: Link, params: Mapping[str, Any]) -> OpenConversation:
        """The conversation that a request is about.

        Raises:
            RequestError: There is none, this client did not open it, or another has it now.
        """
        session_id = session_id_of(params)
        conversation = self._open.get(session_id)
        if conversation is None:
            await self._admit(session_id)
            raise acp_errors.not_open(session_id)
        admitted = await self._admit(session_id, conversation.fencing_epoch)
        if conversation.link is not link or admitted.displaced:
            if conversation.was_seen_by(link):
                raise acp_errors.taken_over(session_id)
            raise acp_errors.not_open(session_id)
        return conversation

    async def record_of(self, session_id: SessionId) -> SessionRecord:
        """Read the conversation's record from the store.

        Raises:
            RequestError: The store has no such session.
            StoreUnavailable: The store did not answer.
        """
        return (await self._admit(session_id)).record

    async def _admit(
        self, session_id: SessionId, fencing_epoch: FencingEpoch | None = None
    ) -> Admitted:
        mode, now = Mode.AGENT, self._clock()
        admitted = await self._store.admit(
            session_id, ANONYMOUS, mode=mode, now=now, fencing_epoch=fencing_epoch
        )
        if admitted is None:
            raise acp_errors.session_not_found(session_id)
        return admitted

    def named(self, call: Call | None, agent_id: object) -> OpenConversation | None:
        if not isinstance(agent_id, str):
            return None
        if call is not None and call.conversation is not None:
            ids = call.conversation.agent_ids
            if agent_id in ids or agent_id == call.conversation.session_id:
                return call.conversation
        found = self._by_agent_id.get(agent_id)
        return found or self._open.get(SessionId(agent_id))

    def towards(self, call: Call | None, params: Json) -> tuple[Link | None, Json]:
        conversation = self.named(call, params.get("sessionId"))
        if conversation is None:
            return (call.link if call is not None else None), params
        link = conversation.link if not conversation.taken_away else None
        if link is None and call is not None and call.opening is not None:
            # It is being opened: the client that does it may be asked.
            link = call.link
        return link, {**params, "sessionId": conversation.session_id}


def for_agent(params: Mapping[str, Any], conversation: OpenConversation | None) -> Json:
    if conversation is None:
        return dict(params)
    return {**params, "sessionId": conversation.agent_id or conversation.session_id}
