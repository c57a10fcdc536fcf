"""The binding next to an HTTP server that closes by itself."""

import asyncio
import json
from typing import Any

from tests.support.raw import at_most
from tests.support.world import world

Message = dict[str, Any]


async def test_an_answer_after_the_http_server_closed_is_dropped_without_a_traceback() -> None:
    """Uvicorn closes after a frame that it cannot read, and refuses what is sent after that. Its
    refusal came before the reader learned of the close, and was an error in the log.
    """
    ping = json.dumps({"jsonrpc": "2.0", "id": 1, "method": "ping"})
    arriving: list[Message] = [
        {"type": "websocket.connect"},
        {"type": "websocket.receive", "text": ping},
    ]
    is_closed, sent = asyncio.Event(), list[str]()

    async def receive() -> Message:
        if arriving:
            return arriving.pop(0)
        await is_closed.wait()
        return {"type": "websocket.disconnect", "code": 1006}

    async def send(message: Any) -> None:
        sent.append(message["type"])
        if message["type"] == "websocket.send":
            is_closed.set()
            raise RuntimeError("Unexpected ASGI message, after sending 'websocket.close'.")

    scope: dict[str, Any] = {
        "type": "websocket",
        "asgi": {"version": "3.0", "spec_version": "2.4"},
        "http_version": "1.1",
        "scheme": "ws",
        "path": "/mcp",
        "raw_path": b"/mcp",
        "query_string": b"",
        "root_path": "",
        "headers": [(b"host", b"127.0.0.1:8000")],
        "client": ("127.0.0.1", 50_000),
        "server": ("127.0.0.1", 8_000),
        "subprotocols": ["mcp"],
    }
    async with world() as w:
        await at_most(10, w.layer_app(scope, receive, send))
    assert sent == ["websocket.accept", "websocket.send"]
