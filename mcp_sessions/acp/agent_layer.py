"""Wrap an agent, so that its conversations can be loaded.

AcpSessionLayer(agent, store="sqlite:///conversations.db").run()
"""

from __future__ import annotations

import asyncio
import logging
import math
import os
import signal
import time
from collections.abc import Callable
from functools import partial
from types import TracebackType
from typing import cast

from mcp_sessions.acp import acp_errors, catalogue
from mcp_sessions.acp.agent import AcpAgent, AgentSide
from mcp_sessions.acp.agent_questions import Answered, Json, Question
from mcp_sessions.acp.conversation_methods import Openings, may_fork
from mcp_sessions.acp.link import Incoming, Link, StreamsWire, Wire, stdio_wire
from mcp_sessions.acp.negotiation import client_capabilities, negotiated, with_ours
from mcp_sessions.acp.open_conversation import CALL, Call, Opening
from mcp_sessions.acp.prompts import Options, Prompts
from mcp_sessions.acp.registry import Registry, for_agent
from mcp_sessions.argument_types import checked
from mcp_sessions.background import Background, to_the_end
from mcp_sessions.core.messages import Notification
from mcp_sessions.errors import INTERNAL_ERROR, ConfigurationError, StoreInUse, StoreUnavailable
from mcp_sessions.layer_settings import AGENT_REPLACED
from mcp_sessions.policy import SessionPolicy
from mcp_sessions.security import SessionSecurity
from mcp_sessions.serve.sealing_key_file import encrypted_store
from mcp_sessions.stores.contract import SessionStore
from mcp_sessions.stores.encrypted import check_is_open
from mcp_sessions.stores.urls import open_store

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
                await link.outgoing.drain()
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


MAX_CONVERSATIONS = 10_000_000
"""They never expire, so this is a limit of a store's whole life."""


_FORGET_EVERY = 3_600.0
"""Seconds between two looks for conversations to forget, at the most."""


class AcpSessionLayer:
    """An agent with sessions that outlive their client and their process.

    The agent is any object with the methods of ``acp.Agent``. It is called as before, and
    sends as before; the layer stands between it and its clients. Its methods may ask
    ``current_conversation()``.
    """

    @checked("agent", store='a store, such as "sqlite:///sessions.db", or a path')
    def __init__(
        self,
        agent: AcpAgent,
        *,
        store: SessionStore | str | os.PathLike[str] = "memory://",
        encrypt_store: bool = False,
        connect_servers: bool = True,
        connect_timeout: float = 10,
        forget_after: float | None = None,
        grace: float = 2,
        max_message: int = 50 * 1024 * 1024,
        send_buffer: int = 1_048_576,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """Wrap ``agent``.

        Args:
            agent: One object for all clients and all conversations.
            store: The store of the conversations, or its URL, or the path of a SQLite file.
                ``memory://`` ends with the process.
            encrypt_store: Encrypt the conversations in the store, with the keys of
                ``MCP_SESSIONS_KEYS``, or those beside a SQLite file.
            connect_servers: Connect the MCP servers that clients name. False: the agent does
                it itself, with what its ``new_session`` is given.
            connect_timeout: Seconds that one MCP server has to be ready.
            forget_after: Seconds after its last use in which a conversation is deleted. None:
                it is kept until a client deletes it.
            grace: Seconds that a prompt has to end after its client is gone, and again after
                it was cancelled.
            max_message: Bytes of one message from a client; a longer one is refused.
            send_buffer: Bytes that wait for a slow client before the agent has to wait.
            clock: Seconds since 1970.

        Raises:
            ConfigurationError: ``agent`` is none, the store's URL is unknown, the store cannot be
                encrypted, or a limit is no positive number.
        """
        if not callable(getattr(agent, "prompt", None)):
            raise ConfigurationError(
                f"an ACP agent needs a method prompt; a {type(agent).__name__} has none"
            )
        replaced = AGENT_REPLACED.get({})
        store = replaced.get("store", store)
        encrypt_store = replaced.get("encrypt_store", encrypt_store)
        connect_timeout = replaced.get("connect_timeout", connect_timeout)
        forget_after = replaced.get("forget_after", forget_after)
        limits = {
            "connect_timeout": connect_timeout,
            "grace": grace,
            "max_message": max_message,
            "send_buffer": send_buffer,
        }
        if forget_after is not None:
            limits["forget_after"] = forget_after
        for name, value in limits.items():
            if not (value > 0 and math.isfinite(value)):
                raise ConfigurationError(f"{name} must be a positive number, not {value!r}")
        self._forget_after = forget_after
        self.agent = agent
        self.store: SessionStore = (
            open_store(store) if isinstance(store, (str, os.PathLike)) else store
        )
        if not self.store.remembers:
            raise ConfigurationError(
                "conversations need a store that remembers, such as sqlite:///conversations.db"
            )
        if encrypt_store:
            self.store = encrypted_store(self.store, SessionSecurity.default())
        self._options = Options(connect_servers, connect_timeout, grace)
        self._max_message = max_message
        self._send_buffer = send_buffer
        self._clock = clock
        self._users = 0
        self._was_open = False
        self._service: AcpService | None = None
        self._background = Background()

    async def __aenter__(self) -> AcpSessionLayer:
        """Open the store and connect the agent, for several clients; see :meth:`serve`."""
        if self._users == 0:
            if self._was_open:
                raise RuntimeError("this layer was closed; make another one")
            self._was_open = True
            await self._open_store()
            self._service = AcpService(self.agent, self.store, self._options, clock=self._clock)
            self._service.agent.start()
            if self._forget_after is not None:
                what = "the rounds over old conversations"
                self._background.loop(what, partial(self._forget, self._forget_after))
        self._users += 1
        return self

    async def _forget(self, after: float) -> None:
        while self._service is not None:
            count = await self._service.openings.forget(self._clock() - after)
            if count:
                logger.info("%d conversations were deleted: nobody used them any more", count)
            await asyncio.sleep(min(_FORGET_EVERY, after))

    async def _open_store(self) -> None:
        """Open the store. If the process before still has it, wait for that process to leave.

        An editor that is reloaded starts an agent at once, while the one before still has its
        ``grace``. For a longer time the store waits by itself.
        """
        policy = SessionPolicy(max_sessions=MAX_CONVERSATIONS)
        until = time.monotonic() + 2 * self._options.grace
        is_warned = False
        while True:
            try:
                await self.store.open(policy)
                break
            except StoreInUse as in_use:
                if time.monotonic() >= until:
                    raise
                if not is_warned:
                    logger.warning("%s; waiting for it to exit", in_use)
                    is_warned = True
            await asyncio.sleep(0.05)
        try:
            await check_is_open(self.store)
        except BaseException:
            await self.store.close()
            raise

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._users -= 1
        if self._users == 0:
            service, self._service = self._service, None
            try:
                await self._background.close()
                if service is not None:
                    await service.agent.stop()
            finally:
                await self.store.close()

    def run(self) -> None:
        """Serve the client at standard input and output, until it is gone, or SIGTERM.

        The agent's own output goes to standard error.

        Raises:
            StoreUnavailable: The store cannot be opened.
            KeyboardInterrupt: Ctrl-C, after everything was closed.
        """
        asyncio.run(self._run())

    async def _run(self) -> None:
        served = asyncio.create_task(self.serve())
        stopped_by: list[signal.Signals] = []

        def stop(number: signal.Signals) -> None:
            stopped_by.append(number)
            served.cancel()

        try:
            # SIGINT too: a process that was started with it ignored (a shell's background
            # job) would never see a KeyboardInterrupt.
            for number in (signal.SIGTERM, signal.SIGINT):
                asyncio.get_running_loop().add_signal_handler(number, stop, number)
        except NotImplementedError:
            logger.debug("no signal handlers here")  # Windows: the process just ends
        try:
            await served
        except asyncio.CancelledError:
            if not stopped_by:
                raise
        if signal.SIGINT in stopped_by:
            raise KeyboardInterrupt

    async def serve(
        self, reader: asyncio.StreamReader | None = None, writer: asyncio.StreamWriter | None = None
    ) -> None:
        """Serve one client until it is gone; its conversations then wait in the store.

        Inside ``async with layer`` several clients can be served, one after another or at
        the same time; alone it opens and closes the layer.

        Args:
            reader: The client's messages; None: standard input and output.
            writer: Messages to the client; both or neither.

        Raises:
            StoreUnavailable: The store cannot be opened.
        """
        if (reader is None) != (writer is None):
            raise ConfigurationError("serve() takes both a reader and a writer, or neither")
        async with self:
            if reader is not None and writer is not None:
                await self._serve(StreamsWire(reader, writer, self._max_message))
                return
            async with stdio_wire(self._max_message) as wire:
                await self._serve(wire)

    async def _serve(self, wire: Wire) -> None:
        service = cast(AcpService, self._service)
        link = Link(wire, service, send_buffer=self._send_buffer)
        grace = self._options.grace
        try:
            await link.run()
            # It sends no more. Its open requests are still answered, for a while.
            if link.unanswered_requests and not link.outgoing.closed:
                await asyncio.wait(link.unanswered_requests, timeout=grace)
        finally:
            await to_the_end(self._leave(link))

    async def _leave(self, link: Link) -> None:
        service, grace = cast(AcpService, self._service), self._options.grace
        await service.prompts.end_all(link)
        # Others took these over: they go on, whoever is gone.
        while others := service.prompts.others_work(link):
            await asyncio.wait(others)
        if link.unanswered_requests:
            await asyncio.wait(link.unanswered_requests, timeout=grace)
        await service.openings.client_disconnected(link)
        await link.finish(within=grace)
