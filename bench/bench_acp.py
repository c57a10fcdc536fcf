"""Loading a long conversation of an ACP agent: time and memory.

    python -m bench.bench_acp [UPDATES]

The bench records a conversation of 10,000 updates, and a small one of a tenth. For each, a new
process serves ``session/load`` to a client that only counts lines. The time is from the request to
its answer. The memory is the growth of the process's peak during the load. If memory does not
depend on the length of the conversation, it is about the same for both.
"""

from __future__ import annotations

import asyncio
import json
import resource
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from bench.rows import Row, report
from mcp_sessions.acp import AcpSessionLayer
from mcp_sessions.core.log import Draft
from mcp_sessions.core.messages import encode
from mcp_sessions.core.states import Mode
from mcp_sessions.ids import SessionId
from mcp_sessions.policy import SessionPolicy
from mcp_sessions.principal import ANONYMOUS
from mcp_sessions.stores.contract import SessionStore
from mcp_sessions.stores.memory import MemoryStore
from mcp_sessions.stores.sqlite.sqlite_store import SQLiteStore

UPDATES = 10_000
WITHIN = 60.0
STORES = ("memory", "sqlite")


class Silent:
    async def initialize(self, protocol_version: int, **_: Any) -> dict[str, Any]:
        return {"protocolVersion": protocol_version}

    async def new_session(self, **_: Any) -> dict[str, Any]:
        return {"sessionId": "own"}

    async def prompt(self, **_: Any) -> dict[str, Any]:
        return {"stopReason": "end_turn"}


def update(number: int) -> dict[str, Any]:
    """A chunk as a model streams it, but for its length, which is a paragraph's."""
    text = f"{number} " + "All work and no play makes a long conversation. " * 8
    content = {"type": "text", "text": text}
    return {"update": {"sessionUpdate": "agent_message_chunk", "content": content}}


async def record(store: SessionStore, count: int) -> SessionId:
    made = await store.create(Mode.AGENT, ANONYMOUS, peer=None, now=time.time())
    for number in range(count):
        await store.append(made.session_id, Draft(encode(update(number))), now=time.time())
    return made.session_id


class KeptMemory(MemoryStore):
    async def close(self) -> None:
        """Do nothing, so that the memory is kept."""


async def load(store: SessionStore, session_id: SessionId, count: int) -> tuple[float, int]:
    """Seconds, and KiB by which the peak of this process grew."""
    layer = AcpSessionLayer(Silent(), store=store)
    ours, theirs = socket.socketpair()
    reader, writer = await asyncio.open_connection(sock=theirs)
    serving = asyncio.create_task(layer.serve(reader, writer))
    replies, requests = await asyncio.open_connection(sock=ours)

    async def ask(method: str, params: dict[str, Any]) -> int:
        message = {"jsonrpc": "2.0", "id": 1, "method": method, "params": params}
        requests.write(json.dumps(message).encode() + b"\n")
        updates = 0
        while not (line := await replies.readline()).startswith(b'{"jsonrpc":"2.0","id":'):
            assert line, "the layer closed the connection"
            updates += 1
        assert b'"error"' not in line[:60], line
        return updates

    await ask("initialize", {"protocolVersion": 1})
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    begun = time.perf_counter()
    params: dict[str, Any] = {"sessionId": session_id, "cwd": "/", "mcpServers": []}
    shown = await ask("session/load", params)
    took = time.perf_counter() - begun
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert shown == count, f"{shown} of {count} updates came"
    requests.close()
    await serving
    writer.close()
    return took, grown


async def measure(kind: str, count: int, position: Path) -> tuple[float, int]:
    if kind == "memory":
        store: SessionStore = KeptMemory()
        await store.open(SessionPolicy())
        return await load(store, await record(store, count), count)
    path = position / f"{count}.db"
    store = SQLiteStore(path)
    await store.open(SessionPolicy())
    session_id = await record(store, count)
    await store.close()
    return await load(SQLiteStore(path), session_id, count)


def in_its_own_process(kind: str, count: int) -> tuple[float, int]:
    """`measure` in a new process, in which nothing has raised the peak before."""
    with tempfile.TemporaryDirectory(prefix="mcp-sessions-") as position:
        done = subprocess.run(
            [sys.executable, "-m", "bench.bench_acp", "--one", kind, str(count), position],
            check=True,
            capture_output=True,
            text=True,
            timeout=WITHIN,
        )
    took, grown = done.stdout.split()
    return float(took), int(grown)


def rows(count: int) -> Iterator[Row]:
    small = max(1, count // 10)
    size = len(encode(update(count)))
    for kind in STORES:
        (took, grown), (_, before) = (in_its_own_process(kind, n) for n in (count, small))
        yield Row(
            name=f"{kind}: {count:,} updates of {size} bytes",
            measured=took,
            unit="s",
            includes=f"{took / count * 1e6:.1f} µs of wall time for each update",
        )
        yield Row(
            name=f"{kind}: peak of memory",
            measured=grown / 1024,
            unit="MiB",
            includes=f"{before / 1024:.1f} MiB for {small:,} updates",
        )


def main() -> None:
    if sys.argv[1:2] == ["--one"]:
        kind, count, position = sys.argv[2:]
        print(*asyncio.run(measure(kind, int(count), Path(position))))
        return
    report(rows(int(sys.argv[1]) if len(sys.argv) > 1 else UPDATES))


if __name__ == "__main__":
    main()
