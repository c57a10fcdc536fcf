"""A message that a client sent to a scripted server, and the bytes that answer it."""

import asyncio
import json
from dataclasses import dataclass
from typing import Any

from mcp_sessions_conformance.local_server import Receive, Send
from mcp_sessions_conformance.values import KEY, SESSION, Json, as_object


@dataclass
class Got:
    """A message that a client sent."""

    message: Json
    headers: dict[str, str]
    number: int

    @property
    def method(self) -> str:
        """Its method; an answer has none."""
        return str(self.message.get("method", ""))

    @property
    def params(self) -> Json:
        """Its params."""
        return as_object(self.message.get("params"))

    @property
    def meta(self) -> Json:
        """Its ``_meta``."""
        return as_object(self.params.get("_meta"))

    @property
    def named(self) -> Json:
        """The session metadata that it carries."""
        return as_object(self.meta.get(SESSION))

    @property
    def tool(self) -> str:
        """The tool that it calls."""
        return str(self.params.get("name")) if self.method == "tools/call" else ""

    @property
    def key(self) -> Any:
        """Its request key."""
        return self.meta.get(KEY)


@dataclass
class Held:
    """A call that waits for the script."""

    got: Got
    answer: "asyncio.Future[Json]"
    """The result, or the whole message if it has an ``error``."""


async def serve_lifespan(receive: Receive, send: Send) -> None:
    """There is nothing to start or to stop."""
    while True:
        kind = (await receive())["type"]
        await send({"type": f"{kind}.complete"})
        if kind == "lifespan.shutdown":
            return


async def reply(send: Send, status: int, body: bytes) -> None:
    """Send a whole response; ``body`` is JSON."""
    headers = [(b"content-type", b"application/json")] if body else []
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


async def answer(
    send: Send, got: Got, answered: Json, connection: str | None, *, status: int = 200
) -> None:
    """Answer a request with ``result`` or ``error``; ``connection`` is a new ``Mcp-Session-Id``."""
    headers = [(b"content-type", b"application/json")]
    if connection is not None:
        headers.append((b"mcp-session-id", connection.encode()))
    body = json.dumps({"jsonrpc": "2.0", "id": got.message.get("id"), **answered}).encode()
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


async def begin_stream(send: Send) -> None:
    """Begin a response that is an event stream."""
    headers = [(b"content-type", b"text/event-stream"), (b"cache-control", b"no-cache")]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": b": hello\n\n", "more_body": True})


async def send_event(send: Send, message: Json) -> None:
    """Send a message on an event stream."""
    block = f"data: {json.dumps(message)}\n\n".encode()
    await send({"type": "http.response.body", "body": block, "more_body": True})
