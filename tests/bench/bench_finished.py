"""What 2025 connections keep of 20 slow calls, whose answers a client can still fetch.

    python -m tests.bench.bench_finished [CONNECTIONS]

In process, without a network: each call takes longer than 100 ms, so that its answer is a stream,
and is read to its end. Counted is by how much the process grows with the calls, what is garbage
collected, in two ways: what Python has allocated, and what the system says is resident. The
connection itself was there before. The SDK does the same beside it; it keeps nothing that
`Last-Event-ID` could ask for. An answer has the text of its result twice, as the SDK makes it. At
least the newest answer is kept, however large it is (HTL10).
"""

from __future__ import annotations

import asyncio
import gc
import subprocess
import sys
import tracemalloc
from collections.abc import Iterator
from typing import Any

from mcp.server import MCPServer

from mcp_sessions import SessionLayer
from tests.bench.bench_core import Loopback, resident
from tests.bench.rows import Row, report

CALLS = 20
SMALL, LARGE = 512, 1_048_576
MOST = {SMALL: 35.0, LARGE: 1.2 * 1024}
"""KiB of a connection."""


def wrapped() -> MCPServer[Any]:
    """A server whose tool takes its time."""
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
    # What a request leaves to be done after its answer is done.
    await asyncio.sleep(0.5)
    return (now() - before) / count / 1024


async def measure(kind: str, size: int, count: int, *, traced: bool) -> float:
    """One of both servers."""
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
    """`measure`, where nothing was freed before."""
    arguments = ["--one", kind, str(size), str(count), how]
    done = subprocess.run(
        [sys.executable, "-m", "tests.bench.bench_finished", *arguments],
        check=True,
        stdout=subprocess.PIPE,
        text=True,
        timeout=200,
    )
    return float(done.stdout)


def rows(count: int) -> Iterator[Row]:
    """For both sizes of results."""
    for size, many in ((SMALL, count), (LARGE, max(1, count // 5))):
        kept, held = (in_its_own_process("ours", size, many, how) for how in ("traced", "resident"))
        sdk = in_its_own_process("sdk", size, many, "resident")
        yield Row(
            name=f"results of {'512 B' if size == SMALL else '1 MiB'}",
            measured=kept,
            unit="KiB",
            ratio=kept * 1024 / message_size(size),
            beside="times one answer",
            most=MOST[size],
            includes=f"resident {held:,.0f} KiB, the SDK {sdk:,.0f} KiB",
        )


def message_size(size: int) -> int:
    """Bytes of such an answer: the text stands in it twice."""
    return 2 * size + 150


def main() -> None:
    """Measure, and print."""
    if sys.argv[1:2] == ["--one"]:
        kind, size, count, how = sys.argv[2:]
        print(asyncio.run(measure(kind, int(size), int(count), traced=how == "traced")))
    else:
        report(rows(int(sys.argv[1]) if len(sys.argv) > 1 else 50))


if __name__ == "__main__":
    main()
