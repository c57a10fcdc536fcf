"""Log, replay, fan-out, session starts and idle memory: in process, no network.

python -m tests.bench.bench_core
"""

from __future__ import annotations

import asyncio
import gc
import json
import os
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from typing import Any

from mcp.server import MCPServer

from mcp_sessions import SessionLayer, SessionPolicy
from mcp_sessions.core.log import EventLog, Window
from mcp_sessions.core.messages import EventTemplate
from mcp_sessions.ids import Position, SessionId
from mcp_sessions.security import mint_log_epoch, mint_session_id
from mcp_sessions_transports.http.sse import plain_frame

UPDATED = "notifications/resources/updated"


def appends_per_second() -> float:
    """Events appended to a full window, per second."""
    log = EventLog(mint_log_epoch(), Window(1_000, 1_048_576, 3_600))
    draft = EventTemplate(UPDATED, {"uri": "note://1"}, None).draft(mint_session_id())
    count = 300_000
    begun = time.perf_counter()
    for _ in range(count):
        log.append(draft, now=1.0)
    return count / (time.perf_counter() - begun)


def replay_per_event() -> float:
    """Microseconds per event: read 1,000 events and write them as one SSE chunk."""
    log = EventLog(mint_log_epoch(), Window(1_000, 10_000_000, 3_600))
    session_id = mint_session_id()
    for number in range(1_000):
        template = EventTemplate(UPDATED, {"uri": f"note://{number}"}, None)
        log.append(template.draft(session_id), now=1.0)
    start = Position(log.log_epoch, 0)
    rounds = 200
    begun = time.perf_counter()
    for _ in range(rounds):
        b"".join([plain_frame(event) for event in log.since(start, now=1.0)])
    return (time.perf_counter() - begun) / rounds / 1_000 * 1_000_000


def resident() -> int:
    """Bytes of this process in memory."""
    gc.collect()
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


class Loopback:
    """Calls an ASGI application without a network."""

    def __init__(self, app: Any) -> None:
        self._app = app
        self.headers = [
            (b"host", b"127.0.0.1:80"),
            (b"accept", b"application/json, text/event-stream"),
            (b"content-type", b"application/json"),
            (b"mcp-protocol-version", b"2025-11-25"),
        ]

    async def post(self, message: dict[str, Any], session: bytes | None = None) -> Any:
        """The start of the response and its decoded body."""
        sent: list[dict[str, Any]] = []
        body = json.dumps(message).encode()

        async def receive() -> dict[str, Any]:
            return {"type": "http.request", "body": body, "more_body": False}

        async def send(part: dict[str, Any]) -> None:
            sent.append(part)

        headers = [*self.headers, (b"mcp-session-id", session)] if session else self.headers
        scope = {
            "type": "http",
            "method": "POST",
            "path": "/mcp",
            "root_path": "",
            "query_string": b"",
            "headers": headers,
        }
        await self._app(scope, receive, send)
        return dict(sent[0]["headers"]), sent[1]["body"]

    async def initialize(self) -> bytes:
        """Open a transport session; its id."""
        info = {"name": "bench", "version": "1"}
        params = {"protocolVersion": "2025-11-25", "capabilities": {}, "clientInfo": info}
        headers, _ = await self.post(
            {"jsonrpc": "2.0", "id": 0, "method": "initialize", "params": params}
        )
        return headers[b"mcp-session-id"]

    async def start(self, session: bytes | None = None) -> SessionId:
        """``session/start``; the new session's id."""
        _, body = await self.post({"jsonrpc": "2.0", "id": 1, "method": "session/start"}, session)
        return SessionId(json.loads(body)["result"]["sessionId"])


async def in_a_layer(measure: Callable[[SessionLayer, Loopback], Awaitable[float]]) -> float:
    """Run one measurement in a layer of its own."""
    server: MCPServer[Any] = MCPServer("bench", log_level="ERROR")
    layer = SessionLayer(server, policy=SessionPolicy(max_sessions=1_000_000))
    app = layer.asgi_app()
    async with layer.lifespan():
        return await measure(layer, Loopback(app))


async def starts(layer: SessionLayer, client: Loopback) -> float:
    """``session/start`` answered per second of CPU."""
    count = 5_000
    begun = time.process_time()
    for _ in range(count):
        await client.start()
    return count / (time.process_time() - begun)


async def idle(layer: SessionLayer, client: Loopback) -> float:
    """KiB per idle protocol-mode session."""
    await client.start()
    count, before = 10_000, resident()
    for _ in range(count):
        await client.start()
    return (resident() - before) / count / 1024


async def idle_connected(layer: SessionLayer, client: Loopback) -> float:
    """KiB per idle client: a transport session with a protocol-mode session on it."""
    await client.start(await client.initialize())
    count, before = 5_000, resident()
    for _ in range(count):
        await client.start(await client.initialize())
    return (resident() - before) / count / 1024


async def fan_out(layer: SessionLayer, client: Loopback) -> float:
    """Microseconds per session: one update to 10,000 subscribed sessions."""
    count = 10_000
    for _ in range(count):
        await layer.store.subscribe(await client.start(), "note://1")
    begun = time.process_time()
    await layer.notify_resource_updated("note://1")
    return (time.process_time() - begun) / count * 1_000_000


FIGURES: dict[str, tuple[str, Callable[[], float]]] = {
    "log appends": ("{:12,.0f} /s", appends_per_second),
    "replay, per event": ("{:12.2f} µs", replay_per_event),
    "fan-out to 10,000, per session": (
        "{:12.2f} µs",
        lambda: asyncio.run(in_a_layer(fan_out)),
    ),
    "session starts, per CPU second": (
        "{:12,.0f} /s",
        lambda: asyncio.run(in_a_layer(starts)),
    ),
    "idle session": ("{:12.2f} KiB", lambda: asyncio.run(in_a_layer(idle))),
    "idle connection with a session": (
        "{:12.2f} KiB",
        lambda: asyncio.run(in_a_layer(idle_connected)),
    ),
}


def main() -> None:
    """Measure and print: each figure in a process of its own, so that none borrows the
    memory that another one freed.
    """
    if len(sys.argv) > 1:
        print(FIGURES[sys.argv[1]][1]())
        return
    for name, (shape, _) in FIGURES.items():
        command = [sys.executable, "-m", "tests.bench.bench_core", name]
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=300)
        print(f"{name:<34} {shape.format(float(done.stdout))}")


if __name__ == "__main__":
    main()
