"""Drives the stock Python 1.x client by commands on stdin, one JSON object per line.

It runs in an environment of its own, where ``mcp`` is a 1.x release. A command is
``{"id", "op", "client", ...}``; its answer ``{"id", "result"}`` or ``{"id", "error"}``. In
between come events ``{"client", "event", ...}``: every message as the transport received
it, and what the client's own callbacks were called with. ``tests/interop/driver.py`` is the
other end; ``driving.mjs`` speaks the same language.
"""

# This file is checked in the project's environment, where `mcp` is a 2.x release, but runs
# in one where it is 1.x: the checker cannot know these types.
# pyright: basic, reportAttributeAccessIssue=false, reportMissingImports=false
# pyright: reportAssignmentType=false, reportCallIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false

import asyncio
import json
import logging
import sys
import threading
import traceback
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any

import anyio
import httpx
import mcp.types as types
from mcp import ClientSession, McpError
from mcp.client.streamable_http import streamable_http_client
from mcp.client.websocket import websocket_client
from mcp.shared.message import ClientMessageMetadata, SessionMessage
from pydantic import BaseModel, ConfigDict


class AnyResult(BaseModel):
    model_config = ConfigDict(extra="allow")


class AnyRequest(BaseModel):
    method: str
    params: dict[str, Any] | None = None


def emit(line: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(line) + "\n")
    sys.stdout.flush()


class Driven:
    """One client with its transport, entered and left in a task of its own."""

    def __init__(self, handle: str, command: dict[str, Any]) -> None:
        self.handle = handle
        self._command = command
        self._stop = asyncio.Event()
        self._ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._task = asyncio.create_task(self._run())
        self.session: ClientSession
        self.get_session_id: Any
        self.calls: dict[str, int] = {}

    async def opened(self) -> None:
        await asyncio.wait({self._task, self._ready}, return_when=asyncio.FIRST_COMPLETED)
        if self._task.done():
            self._task.result()

    async def close(self) -> None:
        self._stop.set()
        await self._task

    async def _run(self) -> None:
        async with self.transport(self._command) as (read, write):
            tapped_send, tapped = anyio.create_memory_object_stream[Any](0)

            async def tap() -> None:
                async with tapped_send:
                    async for item in read:
                        self._emit_message(item)
                        await tapped_send.send(item)

            tapping = asyncio.create_task(tap())
            async with ClientSession(
                tapped,
                write,
                sampling_callback=self._sample,
                elicitation_callback=self._elicit,
                list_roots_callback=self._roots,
                logging_callback=self._log,
                client_info=types.Implementation(name="python-1", version="1.0"),
            ) as self.session:
                if not self._command.get("session_id"):
                    await self.session.initialize()
                self._ready.set_result(None)
                await self._stop.wait()
            tapping.cancel()

    @asynccontextmanager
    async def transport(self, command: dict[str, Any]) -> AsyncGenerator[tuple[Any, Any]]:
        """The stock transport of the URL's scheme: what it reads, and what it writes."""
        if command["url"].startswith("ws:"):
            self.get_session_id = lambda: None
            async with websocket_client(command["url"]) as (read, write):
                yield read, write
            return
        headers: dict[str, str] = {}
        if command.get("session_id"):
            headers["mcp-session-id"] = command["session_id"]
        if command.get("protocol_version"):
            headers["mcp-protocol-version"] = command["protocol_version"]
        async with httpx.AsyncClient(headers=headers, timeout=httpx.Timeout(30, read=300)) as http:
            async with streamable_http_client(
                command["url"], http_client=http, terminate_on_close=command.get("terminate", True)
            ) as (read, write, self.get_session_id):
                yield read, write

    def _emit_message(self, item: "SessionMessage | Exception") -> None:
        if isinstance(item, Exception):
            emit({"client": self.handle, "event": "error", "text": repr(item)})
            return
        message = item.message.model_dump(by_alias=True, mode="json", exclude_none=True)
        emit({"client": self.handle, "event": "message", "message": message})

    async def _sample(self, context: Any, params: Any) -> Any:
        return types.CreateMessageResult(
            role="assistant",
            model="interop",
            content=types.TextContent(
                type="text", text=f"sampled {params.messages[0].content.text}"
            ),
        )

    async def _elicit(self, context: Any, params: Any) -> Any:
        return types.ElicitResult(
            action="accept", content={"answer": f"answer to {params.message}"}
        )

    async def _roots(self, context: Any) -> Any:
        return types.ListRootsResult(roots=[types.Root(uri="file:///interop", name="interop")])

    async def _log(self, params: Any) -> None:
        emit({"client": self.handle, "event": "log", "data": params.data})


clients: dict[str, Driven] = {}


async def connect(command: dict[str, Any]) -> Any:
    driven = Driven(command["client"], command)
    clients[driven.handle] = driven
    await driven.opened()
    return {"session_id": command.get("session_id") or driven.get_session_id()}


async def close(command: dict[str, Any]) -> Any:
    await clients.pop(command["client"]).close()
    return {}


async def call(driven: Driven, command: dict[str, Any]) -> Any:
    key = command["key"]

    async def on_progress(progress: float, total: float | None, message: str | None) -> None:
        emit({"client": driven.handle, "event": "progress", "key": key, "progress": progress})

    async def on_token(token: str) -> None:
        emit({"client": driven.handle, "event": "token", "key": key, "token": token})

    # There is no public way to learn the id of one's own request; it is the counter's next.
    driven.calls[key] = driven.session._request_id
    result = await driven.session.send_request(
        types.ClientRequest(
            types.CallToolRequest(
                params=types.CallToolRequestParams(
                    name=command["tool"], arguments=command["arguments"]
                )
            )
        ),
        types.CallToolResult,
        metadata=ClientMessageMetadata(
            resumption_token=command.get("resume_from"), on_resumption_token_update=on_token
        ),
        progress_callback=on_progress if command["progress"] else None,
    )
    return {"text": result.content[0].text, "is_error": bool(result.isError)}


async def cancel(driven: Driven, command: dict[str, Any]) -> Any:
    """Cancel a call; this SDK leaves sending the notification to its user."""
    await driven.session.send_notification(
        types.ClientNotification(
            types.CancelledNotification(
                params=types.CancelledNotificationParams(
                    requestId=driven.calls[command["key"]], reason="the user changed their mind"
                )
            )
        )
    )
    return {}


async def operate(command: dict[str, Any]) -> Any:
    """Everything a connected client can be asked to do."""
    driven = clients[command["client"]]
    session = driven.session
    match command["op"]:
        case "session_id":
            return driven.get_session_id()
        case "call":
            return await call(driven, command)
        case "cancel":
            return await cancel(driven, command)
        case "list":
            match command["what"]:
                case "tools":
                    return [tool.name for tool in (await session.list_tools()).tools]
                case "resources":
                    return [str(r.uri) for r in (await session.list_resources()).resources]
                case "templates":
                    listed = await session.list_resource_templates()
                    return [t.uriTemplate for t in listed.resourceTemplates]
                case "prompts":
                    return [prompt.name for prompt in (await session.list_prompts()).prompts]
                case what:
                    raise ValueError(f"no list of {what}")
        case "read":
            return (await session.read_resource(command["uri"])).contents[0].text
        case "prompt":
            result = await session.get_prompt(command["name"], command["arguments"])
            return result.messages[0].content.text
        case "subscribe":
            await session.subscribe_resource(command["uri"])
        case "unsubscribe":
            await session.unsubscribe_resource(command["uri"])
        case "ping":
            await session.send_ping()
        case "request":
            request = AnyRequest(method=command["method"], params=command["params"])
            result = await session.send_request(request, AnyResult)
            return result.model_dump(by_alias=True, mode="json")
        case op:
            raise ValueError(f"no operation {op}")
    return {}


async def run(command: dict[str, Any]) -> None:
    """Run one command and answer it, whatever happens."""
    try:
        match command["op"]:
            case "connect":
                result = await connect(command)
            case "close":
                result = await close(command)
            case _:
                result = await operate(command)
        emit({"id": command["id"], "result": result})
    except McpError as error:
        emit({"id": command["id"], "error": error.error.model_dump(mode="json")})
    except Exception as error:
        # The boundary to the test: whatever a command raised, the test must learn of it.
        text = "".join(traceback.format_exception(error))
        failure = {"code": None, "message": repr(error), "data": None, "stack": text}
        emit({"id": command["id"], "error": failure})


async def main() -> None:
    """Run commands until stdin ends."""
    loop = asyncio.get_running_loop()
    commands: asyncio.Queue[str] = asyncio.Queue()

    def read_commands() -> None:
        for line in sys.stdin:
            loop.call_soon_threadsafe(commands.put_nowait, line)
        loop.call_soon_threadsafe(commands.put_nowait, "")

    threading.Thread(target=read_commands, daemon=True).start()
    running: set[asyncio.Task[None]] = set()
    emit({"event": "ready"})
    while line := await commands.get():
        task = asyncio.create_task(run(json.loads(line)))
        running.add(task)
        task.add_done_callback(running.discard)


if __name__ == "__main__":
    logging.basicConfig(level=logging.WARNING, stream=sys.stderr)
    asyncio.run(main())
