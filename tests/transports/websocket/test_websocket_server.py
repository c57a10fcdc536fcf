"""The binding next to an HTTP server that closes by itself."""

import asyncio
import json
from typing import Any

from tests.support.raw import at_most
from tests.support.virtual_time import cycles
from tests.support.world import world

Message = dict[str, Any]

SCOPE: Message = {
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

    async with world() as w:
        await at_most(10, w.layer_app(SCOPE, receive, send))
    assert sent == ["websocket.accept", "websocket.send"]


async def test_a_connection_that_is_accepted_while_a_drain_begins_is_closed_with_1012() -> None:
    """WSS17: who drained did not know it. Each of its requests was refused, for the whole grace."""
    async with world() as w:
        client = await w.connected()
        running = await w.waits(client.call("wait", gate="g"))
        draining: list[asyncio.Task[None]] = []
        closed: asyncio.Future[Message] = asyncio.get_running_loop().create_future()
        arriving: list[Message] = [{"type": "websocket.connect"}]

        async def receive() -> Message:
            return arriving.pop() if arriving else {**await closed, "type": "websocket.disconnect"}

        async def send(message: Any) -> None:
            if message["type"] == "websocket.accept":
                draining.append(asyncio.create_task(w.layer.drain(60)))
                await cycles()
            elif message["type"] == "websocket.close":
                closed.set_result(message)

        await at_most(10, w.layer_app(SCOPE, receive, send))
        assert closed.result()["code"] == 1012
        assert not draining[0].done()
        w.box.gate("g").go.set()
        await running.result()
        await draining[0]
