"""``session/new``, ``load``, ``resume``, ``fork``, ``list``, ``close`` and ``delete``.

Rules, tested in ``tests/acp/test_conversation_methods.py`` and ``test_documents.py``:

1. Nothing is made, and nobody loses anything, by a request that is refused.
2. A load shows the whole record, then answers (ACP, Session Setup: "When all the conversation
   entries have been streamed").
3. Messages of the agent while it opens a session come after the answer: the client does not know
   the session before. Messages that it repeats are left out: the record has them.
4. A conversation that is deleted is gone from the store before the answer, with its record. What
   runs for it anywhere ends with its next update. To delete it again changes nothing.
5. A fork has a copy of the record as it is. A record beyond a bound is not copied.
"""

from __future__ import annotations

import logging
import uuid
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import cast

from acp import RequestError

from mcp_sessions.acp import acp_errors, catalogue
from mcp_sessions.acp.agent import AgentSide
from mcp_sessions.acp.agent_questions import Json
from mcp_sessions.acp.conversation_jar import StoreJar
from mcp_sessions.acp.link import Incoming, Link
from mcp_sessions.acp.open_conversation import Call, OpenConversation, Opening, Record
from mcp_sessions.acp.params import (
    ServerSpec,
    absolute,
    cwd_of,
    directories_of,
    optional_text,
    servers_of,
    session_id_of,
)
from mcp_sessions.acp.prompts import Options, Prompts
from mcp_sessions.acp.registry import Registry
from mcp_sessions.acp.servers import UNKNOWN_TYPE, Servers, Unreachable
from mcp_sessions.core.states import Mode
from mcp_sessions.errors import StoreRefused, StoreUnavailable
from mcp_sessions.ids import SessionId
from mcp_sessions.principal import ANONYMOUS
from mcp_sessions.stores.contract import SessionStore
from mcp_sessions.stores.records import SessionRecord

logger = logging.getLogger(__name__)

MAX_COPIED = 16_777_216
"""Bytes of a record that is copied for a fork."""

NOTICE = "io.github.mcp-sessions/notice"
"""``_meta`` key of an update that the layer sends in the agent's place."""


@dataclass(slots=True, eq=False, repr=False)
class Openings:
    _registry: Registry
    _prompts: Prompts
    _agent: AgentSide
    _store: SessionStore
    _options: Options
    _clock: Callable[[], float]
    _others: frozenset[str] = frozenset()

    def agent_connects(self, transports: frozenset[str]) -> None:
        self._others = transports

    async def new(self, incoming: Incoming) -> None:
        await self._make(incoming)

    async def fork(self, incoming: Incoming) -> None:
        session_id = session_id_of(incoming.params)
        forked = await self._registry.record_of(session_id)
        conversation = self._registry.find(session_id)
        own_id = conversation.agent_id if conversation is not None else None
        own_id = own_id or forked.state.values.get(catalogue.AGENT_SESSION)
        if not may_fork(self._agent):
            raise acp_errors.method_not_found(incoming.method)
        await self._make(incoming, forked, own_id)

    async def _make(
        self, incoming: Incoming, forked: SessionRecord | None = None, own_id: object = None
    ) -> None:
        """Make a conversation.

        Args:
            forked: The one whose record it gets.
            own_id: The agent's name for that one.
        """
        params, link = incoming.params, incoming.link
        cwd, directories = cwd_of(params), directories_of(params)
        specs = servers_of(params, required=forked is None, others=self._others)
        made = await self._store.create(Mode.AGENT, ANONYMOUS, peer=None, now=self._clock())
        async with self._registry.lock(made.session_id):
            conversation = self._conversation(made.session_id, cwd)
            opening = Opening(is_new=forked is None)
            method, asked = "session/new", _opening_params(params, specs)
            asked.pop("sessionId", None)
            if forked is not None and self._agent.has("fork_session"):
                method, asked = incoming.method, {**asked, "sessionId": own_id}
            try:
                if forked is not None:
                    await self._copy(forked, made.session_id)
                failed = await self._connect(conversation, specs)
                result = await self._call_opening(method, asked, link, conversation, opening)
                await self._remember(conversation, cwd, directories, failed)
                answer = {**result, "sessionId": conversation.session_id}
                await conversation.show_to(
                    link, from_start=False, answer=lambda: incoming.answer(answer)
                )
            except BaseException:
                await self._forget(conversation)
                await self._store.end(conversation.session_id)
                raise
            finally:
                opening.ended = True
            await self._opened(conversation, opening, failed)

    async def _copy(self, forked: SessionRecord, session_id: SessionId) -> None:
        """Copy a conversation's record, as far as it goes now.

        Raises:
            RequestError: It is too large.
        """
        before = Record(self._store, forked.session_id, self._clock)
        copy = Record(self._store, session_id, self._clock)
        number, left = (await before.head()).number, MAX_COPIED
        async for page in before.pages():
            for event in page:
                left -= len(event.payload)
                if left < 0:
                    text = f"a record of more than {MAX_COPIED} bytes is not copied"
                    raise acp_errors.invalid_request(text, "too_large")
                if event.number <= number:
                    await copy.append(Record.updates([event]))
            if page[-1].number >= number:
                break
        title = forked.state.values.get(catalogue.TITLE)
        if title is not None:
            await self._store.change_state(session_id, {catalogue.TITLE: title}, ())

    async def load(self, incoming: Incoming) -> None:
        params, link = incoming.params, incoming.link
        is_load = incoming.method == "session/load"
        session_id = session_id_of(params)
        cwd, directories = cwd_of(params), directories_of(params)
        specs = servers_of(params, required=is_load, others=self._others)
        async with self._registry.lock(session_id):
            record = await self._registry.record_of(session_id)
            conversation = self._registry.find(session_id)
            was_open = conversation is not None
            if conversation is None:
                conversation = self._conversation(session_id, cwd)
            opening = Opening(is_new=False)
            reported = cast("list[str]", record.state.values.get(catalogue.REPORTED) or [])
            try:
                conversation.servers.work_in(cwd)
                failed = await self._connect(conversation, specs)
                result = await self._agent_opens(
                    incoming, specs, conversation, record, opening, was_open
                )
                await self._remember(conversation, cwd, directories, failed)
                answer = result or (None if is_load else {})
                await conversation.show_to(
                    link, from_start=is_load, answer=lambda: incoming.answer(answer)
                )
            except BaseException:
                if not was_open:
                    await self._forget(conversation)
                raise
            finally:
                opening.ended = True
            if not conversation.turns:
                await conversation.servers.close_retired()
            if is_load:
                # The replay said so already.
                failed = [server for server in failed if server.name not in reported]
            await self._opened(conversation, opening, failed)

    async def _agent_opens(
        self,
        incoming: Incoming,
        specs: list[ServerSpec],
        conversation: OpenConversation,
        record: SessionRecord,
        opening: Opening,
        was_open: bool,
    ) -> Json:
        params = _opening_params(incoming.params, specs)
        own_id = conversation.agent_id or record.state.values.get(catalogue.AGENT_SESSION)
        own = {**params, "sessionId": own_id or conversation.session_id}
        methods = {"session/load": "load_session", "session/resume": "resume_session"}
        # A resume is a load without a replay, and whatever the agent replays is not passed on.
        for method in dict.fromkeys((incoming.method, "session/load")):
            if self._agent.has(methods[method]):
                self._registry.name(conversation, own["sessionId"])
                result = await self._call_opening(method, own, incoming.link, conversation, opening)
                result.pop("sessionId", None)
                return result
        if was_open and conversation.agent_id is not None:
            return {}
        # It has no memory of its own: to it this is a new session, whose past is `history()`.
        result = await self._call_opening(
            "session/new", params, incoming.link, conversation, opening
        )
        result.pop("sessionId", None)
        return result

    async def _call_opening(
        self,
        method: str,
        params: Json,
        link: Link,
        conversation: OpenConversation,
        opening: Opening,
    ) -> Json:
        call = Call(link, conversation, opening=opening)
        result = await self._agent.call(method, params, call)
        if method in ("session/new", "session/fork"):
            agent_id = result.get("sessionId")
            if not isinstance(agent_id, str) or not agent_id:
                raise acp_errors.internal_error(f"the agent's answer to {method} has no sessionId")
            self._registry.name(conversation, agent_id)
        return result

    async def _opened(
        self, conversation: OpenConversation, opening: Opening, failed: list[Unreachable]
    ) -> None:
        for update in opening.held:
            await conversation.record([update])
        for server in failed:
            await conversation.record([_notice(server)])

    async def _connect(
        self, conversation: OpenConversation, specs: list[ServerSpec]
    ) -> list[Unreachable]:
        if not self._options.connect_servers:
            return [Unreachable(it.name, UNKNOWN_TYPE) for it in specs if it.kind == "unknown"]
        return await conversation.servers.connect(specs)

    async def _remember(
        self,
        conversation: OpenConversation,
        cwd: str,
        directories: list[str],
        failed: list[Unreachable],
    ) -> None:
        known: Json = {
            catalogue.CWD: cwd,
            catalogue.DIRECTORIES: directories,
            catalogue.REPORTED: [server.name for server in failed],
            catalogue.UPDATED_AT: catalogue.at(self._clock()),
        }
        if conversation.agent_id is not None:
            known[catalogue.AGENT_SESSION] = conversation.agent_id
        if await self._store.change_state(conversation.session_id, known, ()) is None:
            raise acp_errors.session_not_found(conversation.session_id)

    def _conversation(self, session_id: SessionId, cwd: str) -> OpenConversation:
        jar = StoreJar(self._store, session_id)
        servers = Servers(jar, cwd, connect_timeout=self._options.connect_timeout)
        conversation = OpenConversation(session_id, self._store, servers, self._clock)
        self._registry.add(conversation)
        return conversation

    async def list_all(self, incoming: Incoming) -> None:
        cwd = optional_text(incoming.params, "cwd")
        if cwd is not None:
            absolute(cwd, "cwd")
        cursor = optional_text(incoming.params, "cursor")
        records = await self._store.all_sessions(ANONYMOUS)
        incoming.answer(catalogue.page(records, cwd=cwd, cursor=cursor))

    async def close(self, incoming: Incoming) -> None:
        session_id = session_id_of(incoming.params)
        if self._registry.find(session_id) is None:
            await self._registry.record_of(session_id)
            incoming.answer({})  # it is closed already
            return
        conversation = await self._registry.seen_by(incoming.link, incoming.params)
        async with self._registry.lock(conversation.session_id):
            await self._prompts.end(conversation, incoming.link)
            await self._detach(conversation, incoming.link)
        incoming.answer({})

    async def delete(self, incoming: Incoming) -> None:
        session_id = session_id_of(incoming.params)
        await self._delete(session_id, incoming.link)
        incoming.answer({})

    async def _delete(self, session_id: SessionId, link: Link) -> None:
        async with self._registry.lock(session_id):
            record = await self._store.load(session_id, now=self._clock())
            if record is None or record.mode is not Mode.AGENT:
                return
            # First: if the store is away, nothing has changed.
            await self._store.end(session_id)
            conversation = self._registry.find(session_id)
            if conversation is not None:
                await self._prompts.end(conversation, conversation.link or link)
                await self._detach(conversation, conversation.link or link)

    async def forget(self, before: float) -> int:
        """Delete the conversations that nobody used since then. Return how many.

        Raises:
            StoreUnavailable: The rest waits for the next time.
        """
        forgotten = 0
        for record in await self._store.all_sessions(ANONYMOUS):
            if record.mode is Mode.AGENT and catalogue.used_at(record) < before:
                with suppress(StoreRefused):  # It cannot be read, perhaps. The others can.
                    forgotten += await self._forget_unused(record.session_id, before)
        return forgotten

    async def _forget_unused(self, session_id: SessionId, before: float) -> bool:
        async with self._registry.lock(session_id):
            # It may have been used since it was listed.
            record = await self._store.load(session_id, now=self._clock())
            is_open = self._registry.find(session_id) is not None
            if record is None or is_open or catalogue.used_at(record) >= before:
                return False
            await self._store.end(session_id)
            return True

    async def client_disconnected(self, link: Link) -> None:
        for conversation in self._registry.shown_to(link):
            async with self._registry.lock(conversation.session_id):
                if conversation.link is link:
                    try:
                        await self._detach(conversation, link)
                    except StoreUnavailable as failed:
                        logger.error(
                            "a conversation could not be released in the store: %s", failed
                        )

    async def _detach(self, conversation: OpenConversation, link: Link) -> None:
        agent_id = conversation.agent_id
        if agent_id is not None and self._agent.has("close_session"):
            call = Call(link, conversation)
            try:
                await self._agent.call("session/close", {"sessionId": agent_id}, call)
            except RequestError as error:
                logger.debug("the agent could not close a session: %s", error)
        await self._forget(conversation)

    async def _forget(self, conversation: OpenConversation) -> None:
        self._registry.remove(conversation)
        await conversation.release()


def may_fork(agent: AgentSide) -> bool:
    """Whether a fork is a whole conversation: to an agent with a memory of its own, the copy of a
    record alone is a session that it does not know.
    """
    return agent.has("fork_session") or not agent.has("load_session")


def _opening_params(params: Json, specs: list[ServerSpec]) -> Json:
    """Add the members that a client may leave out and the agent's models require. Leave out the
    servers of an unknown type, which these models would take for commands.
    """
    entries = cast("list[Json]", params.get("mcpServers") or [])
    servers = [it for it, spec in zip(entries, specs, strict=True) if spec.kind != "unknown"]
    full: list[Json] = [
        {
            **{name: value for name, value in server.items() if name != "type"},
            "env": server.get("env") or [],
        }
        if server.get("type", "stdio") == "stdio"
        else server
        for server in servers
    ]
    return {**params, "mcpServers": full}


def _notice(server: Unreachable) -> Json:
    text = f"The MCP server {server.name!r} cannot be reached: {server.reason}"
    return {
        "update": {
            "sessionUpdate": "agent_message_chunk",
            "content": {"type": "text", "text": text},
            "messageId": str(uuid.uuid4()),
            "_meta": {NOTICE: {"server": server.name}},
        }
    }
