"""A client that speaks raw ACP to a layer in this process, and an agent that follows a script."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any, cast

import acp
import anyio
from acp import schema
from mcp.types import CallToolResult, TextContent

from mcp_sessions.acp import AcpSessionLayer, Conversation, current_conversation
from mcp_sessions.stores.contract import SessionStore
from mcp_sessions.stores.memory import MemoryStore

Json = dict[str, Any]

WITHIN = 30.0
"""Seconds after which a test that waits has failed."""

ALL_CAPABILITIES: Json = {
    "fs": {"readTextFile": True, "writeTextFile": True},
    "terminal": True,
    "elicitation": {"form": {}, "url": {}},
}


class Refused(Exception):
    def __init__(self, error: Json) -> None:
        super().__init__(error)
        self.code: int = error["code"]
        self.message: str = error["message"]
        self.data: Any = error.get("data")


class RawClient:
    """A client without a library: what it is sent stands in it as it came."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self._waiting: dict[Any, asyncio.Future[Json]] = {}
        self._changed = asyncio.Condition()
        self._last_id = 0
        self.received: list[Json] = []
        """Every message, in order."""

        self.questions: list[Json] = []
        """Requests of the agent that were not answered."""

        self.strays: list[Json] = []
        """Answers to no request of ours."""

    async def run(self) -> None:
        while line := await self._reader.readline():
            message = json.loads(line)
            self.received.append(message)
            if "method" not in message:
                waiting = self._waiting.pop(message["id"], None)
                if waiting is None:
                    self.strays.append(message)
                else:
                    waiting.set_result(message)
            elif "id" in message:
                self.questions.append(message)
            async with self._changed:
                self._changed.notify_all()
        for waiting in self._waiting.values():
            waiting.cancel()
        async with self._changed:
            self._changed.notify_all()

    @property
    def last_id(self) -> int:
        return self._last_id

    @asynccontextmanager
    async def watching(self) -> AsyncGenerator[list[Json]]:
        """Answers that come meanwhile are put there, and nowhere else."""
        before, self._waiting = self._waiting, {}
        try:
            yield self.strays
        finally:
            self._waiting = before

    async def until(self, what: Callable[[], object]) -> None:
        """Wait until something that was received makes it true."""
        with anyio.fail_after(WITHIN):
            async with self._changed:
                await self._changed.wait_for(what)

    async def send_line(self, line: bytes) -> None:
        self._writer.write(line + b"\n")
        await self._writer.drain()

    async def send(self, message: Json) -> None:
        await self.send_line(json.dumps({"jsonrpc": "2.0", **message}).encode())

    async def begin(self, method: str, params: Any = None) -> asyncio.Future[Json]:
        """Send a request; its answer comes in the future."""
        self._last_id += 1
        answer = asyncio.get_running_loop().create_future()
        self._waiting[self._last_id] = answer
        await self.send({"id": self._last_id, "method": method, "params": params})
        return answer

    async def answer_to(self, method: str, params: Any = None) -> Json:
        """The whole answer to a request, result or error."""
        with anyio.fail_after(WITHIN):
            return await (await self.begin(method, params))

    async def ask(self, method: str, params: Any = None) -> Any:
        """The result of a request.

        Raises:
            Refused: It was an error.
        """
        return result_of(await self.answer_to(method, params))

    async def refusal(self, method: str, params: Any = None) -> Refused:
        answer = await self.answer_to(method, params)
        assert "error" in answer, answer
        return Refused(answer["error"])

    async def initialize(self, capabilities: Json | None = None) -> Any:
        declared = ALL_CAPABILITIES if capabilities is None else capabilities
        return await self.ask("initialize", {"protocolVersion": 1, "clientCapabilities": declared})

    async def new(self, cwd: str = "/", servers: list[Json] | None = None) -> str:
        result = await self.ask("session/new", {"cwd": cwd, "mcpServers": servers or []})
        return result["sessionId"]

    async def load(self, session_id: str, cwd: str = "/", servers: Any = None) -> Any:
        params: Json = {"sessionId": session_id, "cwd": cwd, "mcpServers": servers or []}
        return await self.ask("session/load", params)

    async def resume(self, session_id: str) -> Any:
        return await self.ask("session/resume", {"sessionId": session_id, "cwd": "/"})

    async def cancel(self, session_id: str) -> None:
        await self.send({"method": "session/cancel", "params": {"sessionId": session_id}})

    async def prompt(self, session_id: str, *texts: str) -> Any:
        return await self.ask("session/prompt", prompt(session_id, *texts))

    def updates(self, session_id: str | None = None) -> list[Json]:
        return [
            message["params"]["update"]
            for message in self.received
            if message.get("method") == "session/update"
            and session_id in (None, message["params"]["sessionId"])
        ]

    def texts(self) -> list[str]:
        return [text_of(update) for update in self.updates() if "content" in update]

    def pause(self) -> None:
        """Take nothing from the socket, until `go_on`."""
        cast("asyncio.ReadTransport", self._writer.transport).pause_reading()

    def go_on(self) -> None:
        cast("asyncio.ReadTransport", self._writer.transport).resume_reading()

    def end_input(self) -> None:
        """Say that nothing more will come, and go on reading."""
        self._writer.write_eof()

    async def close(self) -> None:
        self._writer.close()


def prompt(session_id: str, *texts: str) -> Json:
    blocks = [{"type": "text", "text": text} for text in texts]
    return {"sessionId": session_id, "prompt": blocks}


def text_of(update: Json) -> str:
    return update["content"]["text"]


def text_of_result(result: CallToolResult) -> str:
    [block] = result.content
    assert isinstance(block, TextContent)
    return block.text


def result_of(answer: Json) -> Any:
    if "error" in answer:
        raise Refused(answer["error"])
    return answer["result"]


Scene = Callable[["ScriptedAgent", str, str], Awaitable[str | None]]
"""What the agent does in a prompt: agent, its own session id, text → the stop reason."""


async def echo(agent: ScriptedAgent, session_id: str, text: str) -> str | None:
    await agent.say(session_id, f"echo {text}")
    return None


class Paused:
    """A scene that says something, waits until it is let go on, and says something else."""

    def __init__(self, before: str = "begun", after: str = "finished") -> None:
        self.before, self.after = before, after
        self.begun = asyncio.Event()
        self.go_on = asyncio.Event()
        self.was_cancelled = False

    async def __call__(self, agent: ScriptedAgent, session_id: str, text: str) -> str | None:
        await agent.say(session_id, self.before)
        self.begun.set()
        try:
            await self.go_on.wait()
        except asyncio.CancelledError:
            self.was_cancelled = True
            raise
        await agent.say(session_id, self.after)
        return "cancelled" if self.was_cancelled else None

    async def reached(self, client: RawClient, session_id: str) -> asyncio.Future[Json]:
        """Send a prompt, and return once the scene waits; the prompt's answer comes later."""
        answer = await client.begin("session/prompt", prompt(session_id, "go"))
        with anyio.fail_after(WITHIN):
            await self.begun.wait()
        return answer


class ScriptedAgent:
    """An agent with a memory as long as its process, that plays ``scene`` in each prompt."""

    def __init__(self, scene: Scene = echo) -> None:
        self.scene = scene
        self.client: Any = None
        self.calls: list[tuple[str, Json]] = []
        """Every method that was called, with its arguments."""

        self.sessions: list[str] = []
        self.conversations: list[Conversation] = []
        self.capabilities: schema.AgentCapabilities | None = schema.AgentCapabilities()

    def on_connect(self, conn: Any) -> None:
        self.client = conn

    async def say(self, session_id: str, text: str) -> None:
        await self.client.session_update(session_id, acp.update_agent_message_text(text))

    async def initialize(self, protocol_version: int, **arguments: Any) -> Any:
        self.calls.append(("initialize", {"protocol_version": protocol_version, **arguments}))
        return acp.InitializeResponse(
            protocol_version=protocol_version, agent_capabilities=self.capabilities
        )

    async def new_session(self, cwd: str, **arguments: Any) -> Any:
        self.calls.append(("new_session", {"cwd": cwd, **arguments}))
        session_id = f"own-{len(self.sessions)}"
        self.sessions.append(session_id)
        self.conversations.append(current_conversation())
        return acp.NewSessionResponse(session_id=session_id)

    async def prompt(self, session_id: str, prompt: list[Any], **arguments: Any) -> Any:
        self.calls.append(("prompt", {"session_id": session_id, "prompt": prompt, **arguments}))
        if session_id not in self.sessions:
            raise acp.RequestError.invalid_params({"unknown": session_id})
        text = " ".join(getattr(block, "text", "") for block in prompt)
        reason = await self.scene(self, session_id, text)
        return acp.PromptResponse.model_validate({"stopReason": reason or "end_turn"})


class KeptMemory(MemoryStore):
    """Memory that several layers have, one after another or at once: like several processes."""

    async def close(self) -> None: ...


@asynccontextmanager
async def client_of(layer: AcpSessionLayer) -> AsyncGenerator[RawClient]:
    """A client of the layer; it vanishes at the end, and the layer has let go of it then."""
    ours, theirs = socket.socketpair()
    reader, writer = await asyncio.open_connection(sock=theirs)
    # A small buffer of its own: a message may be larger than it.
    serving = asyncio.create_task(layer.serve(reader, writer))
    client = RawClient(*await asyncio.open_connection(sock=ours, limit=64 * 1024 * 1024))
    reading = asyncio.create_task(client.run())
    try:
        yield client
    finally:
        await client.close()
        with anyio.fail_after(WITHIN):
            await serving
        writer.close()
        await asyncio.gather(reading, return_exceptions=True)


@asynccontextmanager
async def conversation(
    agent: Any = None, store: SessionStore | None = None, **options: Any
) -> AsyncGenerator[RawClient]:
    """A client that has shaken hands with a layer of its own. MCP servers may start slowly."""
    options = {"connect_timeout": 30, **options}
    layer = AcpSessionLayer(agent or ScriptedAgent(), store=store or MemoryStore(), **options)
    async with client_of(layer) as client:
        await client.initialize()
        yield client


@asynccontextmanager
async def two_clients(
    layer: AcpSessionLayer, other: AcpSessionLayer | None = None
) -> AsyncGenerator[tuple[RawClient, RawClient]]:
    """Two that have shaken hands with a layer, or the second one with another layer."""
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(layer)
        if other is not None:
            await stack.enter_async_context(other)
        first = await stack.enter_async_context(client_of(layer))
        second = await stack.enter_async_context(client_of(other or layer))
        await first.initialize()
        await second.initialize()
        yield first, second
