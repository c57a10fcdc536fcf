"""CPU of an update for each session: on a GET stream, on a WebSocket, or not connected.

    python -m bench.bench_attached [--sessions N] [--updates N] [--stores memory,sqlite,redis]

Each session stores the update in its log. A session without a connection does nothing else
(*waiting*). A WebSocket gets the event from the log of the session. A GET stream has its own log,
into which the event is copied. One client makes one update after the other and reads all that
comes. The three ways take turns, and the median round counts.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

from websockets.exceptions import ConnectionClosed
from websockets.sync.client import connect
from websockets.typing import Subprotocol

from bench.bench_calls import ROUNDS, Server
from bench.bench_noise import HANDSHAKE, SESSION, URI, Client
from bench.rows import Row, report
from bench.stores import STORES, cpu_of, stores

WITHIN = 20.0
"""Seconds that any answer may take."""


class Socket:
    def __init__(self, port: int) -> None:
        self._socket = connect(
            f"ws://127.0.0.1:{port}/mcp", subprotocols=[Subprotocol("mcp")], compression=None
        )
        self._ids = itertools.count(1)
        self._answers: dict[int, Any] = {}
        self._answered = threading.Condition()
        threading.Thread(target=self._read, daemon=True).start()
        self.ask(
            "initialize",
            {
                "protocolVersion": HANDSHAKE,
                "capabilities": {},
                "clientInfo": {"name": "bench", "version": "1"},
            },
        )
        self._send({"jsonrpc": "2.0", "method": "notifications/initialized"})

    def ask(self, method: str, params: dict[str, Any]) -> Any:
        number = next(self._ids)
        self._send({"jsonrpc": "2.0", "id": number, "method": method, "params": params})
        with self._answered:
            if not self._answered.wait_for(lambda: number in self._answers, WITHIN):
                raise SystemExit(f"{method} was not answered within {WITHIN} s")
            answer = self._answers.pop(number)
        if "result" not in answer:
            raise SystemExit(f"{method} was refused: {answer}")
        return answer["result"]

    def start(self) -> None:
        session = self.ask("session/start", {})["sessionId"]
        self.ask("resources/subscribe", {"uri": URI, "_meta": {SESSION: {"sessionId": session}}})

    def call(self, tool: str, **arguments: Any) -> None:
        self.ask("tools/call", {"name": tool, "arguments": arguments})

    def _send(self, message: dict[str, Any]) -> None:
        self._socket.send(json.dumps(message))

    def _read(self) -> None:
        # The server's end is this one's, too.
        with suppress(ConnectionClosed):
            for text in self._socket:
                message = json.loads(text)
                if "method" not in message:
                    with self._answered:
                        self._answers[message["id"]] = message
                        self._answered.notify()


def prepared(way: str, port: int, sessions: int) -> Callable[[], None]:
    if way == "WebSocket":
        socket = Socket(port)
        for _ in range(sessions):
            socket.start()
        return lambda: socket.call("touch", uri=URI)
    client = Client(port)
    client.initialize()
    if way == "GET":
        client.read_stream()
    for _ in range(sessions):
        client.start(attached=way == "GET")
    return lambda: client.call("touch", uri=URI)


def measure(store: Callable[[str], str], sessions: int, updates: int) -> dict[str, float]:
    """Microseconds for each session and update, by the way in which it is received."""
    ways = ("waiting", "WebSocket", "GET")
    servers = {way: Server("noisy", store(way)) for way in ways}
    try:
        updating = {way: prepared(way, servers[way].port, sessions) for way in ways}
        figures: dict[str, list[float]] = {way: [] for way in ways}
        for _ in range(ROUNDS):
            for way, update in updating.items():
                before = cpu_of(servers[way].process.pid)
                for _ in range(updates):
                    update()
                spent = cpu_of(servers[way].process.pid) - before
                figures[way].append(spent * 1e6 / updates / sessions)
        return {way: statistics.median(each) for way, each in figures.items()}
    finally:
        for server in servers.values():
            server.stop()


def rows(wanted: str, sessions: int, updates: int) -> Iterator[Row]:
    with stores(wanted) as each:
        for store in each.names:
            found = measure(lambda way, store=store: each.url(store, way), sessions, updates)
            for way, figure in found.items():
                yield Row(
                    name=f"{store}, {way}",
                    measured=figure,
                    unit="µs",
                    ratio=None if way == "waiting" else figure / found["waiting"],
                    basis="times a session that waits",
                )
        yield from each.missing()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--sessions", type=int, default=100)
    parser.add_argument("--updates", type=int, default=20)
    parser.add_argument("--stores", default=STORES)
    asked = parser.parse_args()
    report(rows(asked.stores, asked.sessions, asked.updates))


if __name__ == "__main__":
    main()
