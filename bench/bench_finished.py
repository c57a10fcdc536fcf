"""Memory of finished answers that a client can still fetch.

    python -m bench.bench_finished [CONNECTIONS]

A 2025 connection makes 20 slow calls. Each takes longer than 100 ms, so its answer is a stream. The
client reads it to its end. The layer keeps answers that the client may fetch again with
``Last-Event-ID``, and at least the newest one, however large it is. The SDK keeps none.

Rows with *results* are measured in the process, without a network. The figure is the memory that
Python allocated for one connection's answers, after garbage collection. The last column has the
growth of resident memory. An answer has the text of its result twice, as the SDK makes it.

A run may also have rows *of a process*. They are measured over sockets that the client closes, with
a server in its own process. They show how much larger the process is afterwards (*left*), and at
most meanwhile.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import re
import socket
import subprocess
import sys
import time
import tracemalloc
from collections.abc import Iterator
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import uvicorn
from mcp.server import MCPServer

from bench.bench_core import Loopback, resident
from bench.rows import Row, report
from mcp_sessions import SessionLayer

CALLS = 20
SMALL, LARGE = 512, 1_048_576
MOST = {SMALL: 35.0, LARGE: 1.2 * 1024}
"""KiB of a connection."""


def wrapped() -> MCPServer[Any]:
    server: MCPServer[Any] = MCPServer("bench", log_level="ERROR")

    @server.tool()
    async def slow(size: int) -> str:  # pyright: ignore[reportUnusedFunction]
        await asyncio.sleep(0.12)
        return "x" * size

    return server


async def grown(app: Any, size: int, count: int, *, traced: bool) -> float:
    """KiB by which each connection makes the process grow with its calls."""
    client = Loopback(app)

    def now() -> int:
        gc.collect()
        return tracemalloc.get_traced_memory()[0] if traced else resident()

    async def call(connection: bytes, number: int) -> None:
        params = {"name": "slow", "arguments": {"size": size}}
        message = {"jsonrpc": "2.0", "id": number, "method": "tools/call", "params": params}
        _, body = await client.post(message, connection)
        assert b"error" not in body[:100], body[:500]

    async def all_calls(connection: bytes) -> None:
        await asyncio.gather(*[call(connection, number) for number in range(CALLS)])

    await all_calls(await client.initialize())
    if traced:
        tracemalloc.start()
    connections = [await client.initialize() for _ in range(count)]
    for connection in connections:
        await client.post({"jsonrpc": "2.0", "id": "l", "method": "tools/list"}, connection)
    before = now()
    for connection in connections:
        await all_calls(connection)
    # The work that a request leaves after its answer is done.
    await asyncio.sleep(0.5)
    return (now() - before) / count / 1024


async def measure(kind: str, size: int, count: int, *, traced: bool) -> float:
    server = wrapped()
    if kind == "sdk":
        app = server.streamable_http_app()
        async with server.session_manager.run():
            return await grown(app, size, count, traced=traced)
    layer = SessionLayer(server)
    app = layer.asgi_app()
    async with layer.lifespan():
        return await grown(app, size, count, traced=traced)


def in_its_own_process(kind: str, size: int, count: int, how: str) -> float:
    """`measure` in a new process, in which nothing was freed before."""
    arguments = ["--one", kind, str(size), str(count), how]
    done = subprocess.run(
        [sys.executable, "-m", "bench.bench_finished", *arguments],
        check=True,
        stdout=subprocess.PIPE,
        text=True,
        timeout=200,
    )
    return float(done.stdout)


def serve(kind: str, port: int) -> None:
    server = wrapped()
    if kind == "sdk":
        uvicorn.run(server.streamable_http_app(), port=port, log_level="error")
    else:
        SessionLayer(server).run(port=port)


def over_sockets(kind: str, size: int, count: int) -> tuple[float, float]:
    """KiB of a connection by which a process is larger after its calls, and at most."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
    command = [sys.executable, "-m", "bench.bench_finished", "--serve", kind, str(port)]
    process = subprocess.Popen(command)
    try:
        until_listening(port)
        of_calls(port, connected(port), size)
        sessions = [connected(port) for _ in range(count)]
        before = status_of(process.pid, "VmRSS")
        for session in sessions:
            of_calls(port, session, size)
        after, most = status_of(process.pid, "VmRSS"), status_of(process.pid, "VmHWM")
        return (after - before) / count, (most - before) / count
    finally:
        process.kill()
        process.wait()


def until_listening(port: int) -> None:
    for _ in range(600):
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port)):
            return
        time.sleep(0.05)
    raise TimeoutError("no server")


def post(port: int, message: dict[str, Any], session: str | None) -> HTTPConnection:
    headers = {"Content-Type": "application/json", "MCP-Protocol-Version": "2025-11-25"}
    headers["Accept"] = "application/json, text/event-stream"
    if session is not None:
        headers["Mcp-Session-Id"] = session
    connection = HTTPConnection("127.0.0.1", port, timeout=60)
    connection.request("POST", "/mcp", json.dumps(message), headers)
    return connection


def connected(port: int) -> str:
    info = {"name": "bench", "version": "1"}
    params = {"protocolVersion": "2025-11-25", "capabilities": {}, "clientInfo": info}
    message = {"jsonrpc": "2.0", "id": 0, "method": "initialize", "params": params}
    with contextlib.closing(post(port, message, None)) as opened:
        response = opened.getresponse()
        response.read()
        return response.headers["Mcp-Session-Id"]


def of_calls(port: int, session: str, size: int) -> None:
    """Send all calls of a session at once, each on a connection that closes after it."""
    params = {"name": "slow", "arguments": {"size": size}}
    calls = [
        post(port, {"jsonrpc": "2.0", "id": n, "method": "tools/call", "params": params}, session)
        for n in range(1, CALLS + 1)
    ]
    for call in calls:
        with contextlib.closing(call):
            assert len(call.getresponse().read()) > size


def status_of(pid: int, member: str) -> int:
    """KiB, as Linux counts them."""
    found = re.search(rf"{member}:\s+(\d+)", Path(f"/proc/{pid}/status").read_text())
    assert found is not None
    return int(found[1])


def rows(count: int) -> Iterator[Row]:
    for size, many in ((SMALL, count), (LARGE, max(1, count // 5))):
        kept, held = (in_its_own_process("ours", size, many, how) for how in ("traced", "resident"))
        sdk = in_its_own_process("sdk", size, many, "resident")
        yield Row(
            name=f"results of {'512 B' if size == SMALL else '1 MiB'}",
            measured=kept,
            unit="KiB",
            ratio=kept * 1024 / message_size(size),
            basis="times one answer",
            most=MOST[size],
            includes=f"resident {held:,.0f} KiB, the SDK {sdk:,.0f} KiB",
        )
        ours, theirs = (over_sockets(kind, size, many) for kind in ("ours", "sdk"))
        for what, mine, other in zip(("left", "at most"), ours, theirs, strict=True):
            yield Row(
                name=f"{what}, of a process, {'512 B' if size == SMALL else '1 MiB'}",
                measured=mine,
                unit="KiB",
                ratio=other / mine,
                basis="times less than the SDK",
                includes=f"the SDK {other:,.0f} KiB",
            )


def message_size(size: int) -> int:
    """Bytes of such an answer: the text stands in it twice."""
    return 2 * size + 150


def main() -> None:
    if sys.argv[1:2] == ["--one"]:
        kind, size, count, how = sys.argv[2:]
        print(asyncio.run(measure(kind, int(size), int(count), traced=how == "traced")))
    elif sys.argv[1:2] == ["--serve"]:
        serve(sys.argv[2], int(sys.argv[3]))
    else:
        report(rows(int(sys.argv[1]) if len(sys.argv) > 1 else 50))


if __name__ == "__main__":
    main()
