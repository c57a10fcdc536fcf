import asyncio
import json
from dataclasses import dataclass
from typing import Any

from mcp_sessions_conformance.local_server import Receive, Send
from mcp_sessions_conformance.peer import MODERN_VERSION
from mcp_sessions_conformance.values import EXTENSION, KEY, SESSION, Json, as_object

SUBSCRIPTION = "io.modelcontextprotocol/subscriptionId"


@dataclass
class Received:
    message: Json
    headers: dict[str, str]
    number: int

    @property
    def method(self) -> str:
        return str(self.message.get("method", ""))

    @property
    def params(self) -> Json:
        return as_object(self.message.get("params"))

    @property
    def meta(self) -> Json:
        return as_object(self.params.get("_meta"))

    @property
    def named(self) -> Json:
        return as_object(self.meta.get(SESSION))

    @property
    def tool(self) -> str:
        return str(self.params.get("name")) if self.method == "tools/call" else ""

    @property
    def is_modern(self) -> bool:
        return self.headers.get("mcp-protocol-version", "") >= "2026"

    @property
    def key(self) -> Any:
        return self.meta.get(KEY)


@dataclass
class Held:
    request: Received
    answer: "asyncio.Future[Json]"
    """The result, or the whole message if it has an ``error``."""


def as_result(instruction: Json) -> Json:
    return {"content": [{"type": "text", "text": json.dumps(instruction)}]}


def initialize_result(version: str, settings: Json | None) -> Json:
    info = {"name": "scripted", "version": "1"}
    return {"protocolVersion": version, "capabilities": capable(settings), "serverInfo": info}


def discovered(settings: Json | None) -> Json:
    return {"supportedVersions": [MODERN_VERSION], "capabilities": capable(settings)}


def capable(settings: Json | None) -> Json:
    capabilities: Json = {"tools": {}, "resources": {"subscribe": True}, "sessions": {}}
    if settings is not None:
        capabilities["extensions"] = {EXTENSION: settings}
    return capabilities


def completed(answered: Json) -> Json:
    if "result" not in answered:
        return answered
    cached = {"ttlMs": 0, "cacheScope": "private"}
    return {"result": {"resultType": "complete", **cached, **answered["result"]}}


def acknowledgement(listen: Received) -> Json:
    params: Json = {"notifications": listen.params.get("notifications", {})}
    method = "notifications/subscriptions/acknowledged"
    return on_listen({"jsonrpc": "2.0", "method": method, "params": params}, listen)


def on_listen(message: Json, listen: Received) -> Json:
    params = as_object(message.get("params"))
    meta = {**as_object(params.get("_meta")), SUBSCRIPTION: listen.message["id"]}
    return {**message, "params": {**params, "_meta": meta}}


def error(code: int, text: str, data: Any = None) -> Json:
    body: Json = {"code": code, "message": text}
    if data is not None:
        body["data"] = data
    return {"error": body}


def session_not_found(name: Any) -> Json:
    return error(-32043, "Session not found", {"sessionId": name})


def tool(name: str) -> Json:
    return {"name": name, "description": name, "inputSchema": {"type": "object"}}


async def serve_lifespan(receive: Receive, send: Send) -> None:
    while True:
        kind = (await receive())["type"]
        await send({"type": f"{kind}.complete"})
        if kind == "lifespan.shutdown":
            return


async def reply(send: Send, status: int, body: bytes) -> None:
    headers = [(b"content-type", b"application/json")] if body else []
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


async def answer(
    send: Send, request: Received, answered: Json, connection: str | None, *, status: int = 200
) -> None:
    headers = [(b"content-type", b"application/json")]
    if connection is not None:
        headers.append((b"mcp-session-id", connection.encode()))
    body = json.dumps({"jsonrpc": "2.0", "id": request.message.get("id"), **answered}).encode()
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


async def begin_stream(send: Send) -> None:
    headers = [(b"content-type", b"text/event-stream"), (b"cache-control", b"no-cache")]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": b": hello\n\n", "more_body": True})


async def send_event(send: Send, message: Json, event_id: str | None = None) -> None:
    head = "" if event_id is None else f"id: {event_id}\n"
    block = f"{head}data: {json.dumps(message)}\n\n".encode()
    await send({"type": "http.response.body", "body": block, "more_body": True})
