"""Cost of a poll of a task while many tasks are open.

    python -m bench.bench_tasks [TASKS]

The figure is the server CPU of one request. A poll is `tasks/get` of the 2026 era, and a ping is
`ping` of the 2025 era, at the same server in one process. They take turns: 50 of one kind, then 50
of the other. The store is in memory. The last row says how many tasks are stored when all have
ended, and their time (`ttl`) has passed.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Iterator
from typing import Any

from bench.bench_calls import HANDSHAKE, MODERN, Case, Client, Server
from bench.rows import Row, report
from bench.stores import cpu_of

OPEN = 10_000
MOST = 1.5
"""Pings that a poll may cost."""

TURN, TURNS, WARM = 50, 24, 4
TTL = 2.0
"""Seconds that an ended task is kept."""

PATIENCE = 60.0
KNOWS_TASKS: dict[str, Any] = {
    "io.modelcontextprotocol/clientCapabilities": {
        "extensions": {"io.modelcontextprotocol/tasks": {}}
    }
}


def per_request(server: Server, poller: Client, task_id: str) -> dict[str, float]:
    """Microseconds of the server's CPU of a poll, and of a ping."""
    pinger = Client(Case("", "ours", HANDSHAKE), server.port)
    spent: dict[str, list[float]] = {"tasks/get": [], "ping": []}
    for _ in range(TURNS + WARM):
        for client, method, params in (
            (poller, "tasks/get", {"taskId": task_id}),
            (pinger, "ping", {}),
        ):
            before = cpu_of(server.process.pid)
            for _ in range(TURN):
                client.send(method, dict(params))
            spent[method].append((cpu_of(server.process.pid) - before) / TURN * 1_000_000)
    return {method: statistics.median(times[WARM:]) for method, times in spent.items()}


def text_of(client: Client, tool: str) -> str:
    result = client.send("tools/call", {"name": tool, "arguments": {}})["result"]
    return result["content"][0]["text"]


def rows(most: int) -> Iterator[Row]:
    server = Server("tasks", str(TTL))
    try:
        poller = Client(Case("", "ours", MODERN), server.port, KNOWS_TASKS)
        call: dict[str, Any] = {"name": "wait", "arguments": {}}
        last = ""
        for count in (1, most):
            for _ in range(count - bool(last)):
                last = poller.send("tools/call", dict(call))["result"]["taskId"]
            spent = per_request(server, poller, last)
            poll, ping = spent["tasks/get"], spent["ping"]
            yield Row(name=f"ping, {count:,} open", measured=ping, unit="µs")
            yield Row(
                name=f"poll, {count:,} open",
                measured=poll,
                unit="µs",
                ratio=MOST * ping / poll,
                basis=f"times cheaper than {MOST} pings",
                least_ratio=1.0,
            )
        text_of(poller, "end")
        until = time.monotonic() + PATIENCE
        while (left := int(text_of(poller, "left"))) and time.monotonic() < until:
            time.sleep(0.5)
        yield Row(name="stored after their time", measured=left, unit="tasks", most=0)
    finally:
        server.stop()


if __name__ == "__main__":
    report(rows(int(sys.argv[1]) if len(sys.argv) > 1 else OPEN))
