"""Log, replay, fan-out, session starts and idle memory, without a network.

    python -m bench.bench_core

Each figure is measured in its own process, so none uses memory that another one freed. A start is
one request through the whole application, with its JSON, without a socket. It is compared with the
SDK's ``initialize``, which makes a session there. Memory is the growth of the process, with
everything that it allocates. An update goes to sessions in memory that are not connected. The first
update makes their logs, and is not counted.
"""

from __future__ import annotations

import asyncio
import gc
import json
import os
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

from mcp.server import MCPServer

from bench.rows import Row, report
from mcp_sessions import SessionLayer, SessionPolicy
from mcp_sessions.core.log import EventLog, Window
from mcp_sessions.core.messages import EventTemplate
from mcp_sessions.ids import Position, SessionId
from mcp_sessions.security import mint_log_epoch, mint_session_id
from mcp_sessions_transports.http.sse import plain_frame

UPDATED = "notifications/resources/updated"


def dumps() -> float:
    """Microseconds in which the standard library writes the same event as JSON."""
    event = {"jsonrpc": "2.0", "method": UPDATED, "params": {"uri": "note://1"}}
    count = 300_000
    begun = time.perf_counter()
    for _ in range(count):
        json.dumps(event)
    return (time.perf_counter() - begun) / count * 1_000_000


def append() -> float:
    """Microseconds for one event, appended to a full window."""
    log = EventLog(mint_log_epoch(), Window(1_000, 1_048_576, 3_600))
    draft = EventTemplate(UPDATED, {"uri": "note://1"}, None).draft(mint_session_id())
    count = 300_000
    begun = time.perf_counter()
    for _ in range(count):
        log.append(draft, now=1.0)
    return (time.perf_counter() - begun) / count * 1_000_000


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
        b"".join([plain_frame(event) for event in log.replay(start, now=1.0)[0]])
    return (time.perf_counter() - begun) / rounds / 1_000 * 1_000_000


def resident() -> int:
    """Bytes of this process in memory."""
    gc.collect()
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


class Loopback:
    def __init__(self, app: Any) -> None:
        self._app = app
        self.headers = [
            (b"host", b"127.0.0.1:80"),
            (b"accept", b"application/json, text/event-stream"),
            (b"content-type", b"application/json"),
            (b"mcp-protocol-version", b"2025-11-25"),
        ]

    async def post(self, message: dict[str, Any], session: bytes | None = None) -> Any:
        sent: list[dict[str, Any]] = []
        parts = [{"type": "http.request", "body": json.dumps(message).encode(), "more_body": False}]

        async def receive() -> dict[str, Any]:
            if not parts:
                # The client stays until it is answered.
                await asyncio.Event().wait()
            return parts.pop()

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
        info = {"name": "bench", "version": "1"}
        params = {"protocolVersion": "2025-11-25", "capabilities": {}, "clientInfo": info}
        headers, _ = await self.post(
            {"jsonrpc": "2.0", "id": 0, "method": "initialize", "params": params}
        )
        return headers[b"mcp-session-id"]

    async def start(self, session: bytes | None = None) -> SessionId:
        _, body = await self.post({"jsonrpc": "2.0", "id": 1, "method": "session/start"}, session)
        return SessionId(json.loads(body)["result"]["sessionId"])


async def in_a_layer(measure: Callable[[SessionLayer, Loopback], Awaitable[float]]) -> float:
    server: MCPServer[Any] = MCPServer("bench", log_level="ERROR")
    layer = SessionLayer(server, policy=SessionPolicy(max_sessions=1_000_000))
    app = layer.asgi_app()
    async with layer.lifespan():
        return await measure(layer, Loopback(app))


async def in_the_sdk(measure: Callable[[Loopback], Awaitable[float]]) -> float:
    server: MCPServer[Any] = MCPServer("bench", log_level="ERROR")
    app = server.streamable_http_app()
    async with server.session_manager.run():
        return await measure(Loopback(app))


async def starts(layer: SessionLayer, client: Loopback) -> float:
    """Microseconds of CPU for one ``session/start``."""
    return await times(client.start)


async def initializes(client: Loopback) -> float:
    """Microseconds of CPU for one ``initialize``."""
    return await times(client.initialize)


async def times(once: Callable[[], Awaitable[object]], count: int = 2_000) -> float:
    """Microseconds of CPU of each, the least of some rounds."""
    found: list[float] = []
    for _ in range(4):
        begun = time.process_time()
        for _ in range(count):
            await once()
        found.append((time.process_time() - begun) / count * 1_000_000)
    return min(found)


async def idle(layer: SessionLayer, client: Loopback) -> float:
    """KiB per idle session."""
    await client.start()
    count, before = 10_000, resident()
    for _ in range(count):
        await client.start()
    return (resident() - before) / count / 1024


async def idle_in_the_sdk(client: Loopback) -> float:
    """KiB per idle session of the SDK."""
    await client.initialize()
    count, before = 2_000, resident()
    for _ in range(count):
        await client.initialize()
    return (resident() - before) / count / 1024


async def idle_connected(layer: SessionLayer, client: Loopback) -> float:
    """KiB per idle 2025 client: its connection, and a session on it."""
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
    await layer.notify_resource_updated("note://1")
    return await times(lambda: layer.notify_resource_updated("note://1"), 1) / count


FIGURES: dict[str, Callable[[], float]] = {
    "dumps": dumps,
    "append": append,
    "replay": replay_per_event,
    "fan-out": lambda: asyncio.run(in_a_layer(fan_out)),
    "start": lambda: asyncio.run(in_a_layer(starts)),
    "SDK's start": lambda: asyncio.run(in_the_sdk(initializes)),
    "idle": lambda: asyncio.run(in_a_layer(idle)),
    "idle connected": lambda: asyncio.run(in_a_layer(idle_connected)),
    "SDK's idle": lambda: asyncio.run(in_the_sdk(idle_in_the_sdk)),
}


def rows() -> Iterator[Row]:
    found: dict[str, float] = {}
    for name in FIGURES:
        command = [sys.executable, "-m", "bench.bench_core", name]
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=300)
        found[name] = float(done.stdout)
    json_of = "times json.dumps of the event"
    yield Row(name="json.dumps of an event", measured=found["dumps"], unit="µs")
    for name, which in (("event appended to a full log", "append"), ("event replayed", "replay")):
        ratio = found[which] / found["dumps"]
        yield Row(name=name, measured=found[which], unit="µs", ratio=ratio, basis=json_of)
    yield Row(
        name="one update to 10,000 sessions, each",
        measured=found["fan-out"],
        unit="µs",
        ratio=found["fan-out"] / found["append"],
        basis="times the append alone",
    )
    yield Row(name="SDK: initialize", measured=found["SDK's start"], unit="µs")
    yield Row(
        name="session/start",
        measured=found["start"],
        unit="µs",
        ratio=found["SDK's start"] / found["start"],
        basis="times cheaper than the SDK's initialize",
        includes=f"{1e6 / found['start']:,.0f} in a second of CPU",
    )
    yield Row(name="SDK: idle session", measured=found["SDK's idle"], unit="KiB")
    for name, which in (
        ("idle session", "idle"),
        ("idle 2025 connection with a session", "idle connected"),
    ):
        yield Row(
            name=name,
            measured=found[which],
            unit="KiB",
            ratio=found["SDK's idle"] / found[which],
            basis="times smaller than the SDK's",
        )


def main() -> None:
    if len(sys.argv) > 1:
        print(FIGURES[sys.argv[1]]())
    else:
        report(rows())


if __name__ == "__main__":
    main()
