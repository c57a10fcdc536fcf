"""Server CPU of one ``tools/call`` over WebSocket and over stdio.

    python -m bench.bench_duplex [CALLS]

A call over WebSocket is compared with an echo of uvicorn and Starlette, which know nothing of MCP.
A call over stdio is compared with the SDK's own server, ``MCPServer.run("stdio")``. One client has
one connection and makes one call at a time. The servers take turns, and the median round counts.
"""

from __future__ import annotations

import itertools
import json
import os
import select
import statistics
import subprocess
import sys
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

from websockets.sync.client import connect
from websockets.typing import Subprotocol

from bench.bench_calls import HANDSHAKE, MODERN, ROUNDS, SESSION, Case, Server
from bench.rows import Row, report
from bench.stores import cpu_of

WITHIN = 20.0
"""Seconds that any answer may take."""

ECHO = Case("floor (uvicorn + Starlette echo)", "echo", "")
OVER_WEBSOCKET = [
    ECHO,
    Case("ours, 2025 era, no session", "ours", HANDSHAKE),
    Case("ours, 2025 era, in a session", "ours", HANDSHAKE, session=True),
    Case("ours, 2026 era, no session", "ours", MODERN),
    Case("ours, 2026 era, in a session", "ours", MODERN, session=True),
]
SDK = {
    era: Case(f"SDK, {name} era", "sdk-stdio", era)
    for era, name in (
        (HANDSHAKE, "handshake"),
        (MODERN, "modern"),
    )
}
OVER_STDIO = [
    SDK[HANDSHAKE],
    Case("ours, 2025 era, no session", "ours-stdio", HANDSHAKE),
    Case("ours, 2025 era, in a session", "ours-stdio", HANDSHAKE, session=True),
    SDK[MODERN],
    Case("ours, 2026 era, no session", "ours-stdio", MODERN),
    Case("ours, 2026 era, in a session", "ours-stdio", MODERN, session=True),
]


def request(number: int, method: str, params: dict[str, Any]) -> str:
    return json.dumps({"jsonrpc": "2.0", "id": number, "method": method, "params": params})


class Client(ABC):
    pid: int
    """The server's."""

    def __init__(self, case: Case) -> None:
        self._case = case
        self._numbers = itertools.count(1)
        self._meta: dict[str, Any] = {}

    def begin(self) -> None:
        version = self._case.version
        if version == HANDSHAKE:
            info = {"name": "bench", "version": "1"}
            params = {"protocolVersion": HANDSHAKE, "capabilities": {}, "clientInfo": info}
            self.send("initialize", params)
            self.put('{"jsonrpc":"2.0","method":"notifications/initialized"}')
        elif version == MODERN:
            self._meta = {
                "io.modelcontextprotocol/protocolVersion": MODERN,
                "io.modelcontextprotocol/clientCapabilities": {},
            }
        if self._case.session:
            answer = self.send("sessions/create" if version == MODERN else "session/start", {})
            if version == MODERN:
                self._meta[SESSION] = answer["result"]["session"]

    def call(self) -> None:
        self.send("tools/call", {"name": "echo", "arguments": {"text": "hello"}})

    def send(self, method: str, params: dict[str, Any]) -> Any:
        number = next(self._numbers)
        if self._meta:
            params = {**params, "_meta": self._meta}
        self.put(request(number, method, params))
        while True:
            answer = json.loads(self.get())
            if answer.get("id") == number:
                break
        if "result" not in answer and self._case is not ECHO:
            raise SystemExit(f"{method} was refused: {answer}")
        return answer

    @abstractmethod
    def put(self, text: str) -> None: ...

    @abstractmethod
    def get(self) -> str | bytes: ...

    @abstractmethod
    def stop(self) -> None:
        """Close the connection."""


class WebSocketClient(Client):
    def __init__(self, case: Case, server: Server) -> None:
        super().__init__(case)
        self.pid = server.process.pid
        self._stack = ExitStack()
        self._socket = self._stack.enter_context(
            connect(
                f"ws://127.0.0.1:{server.port}/mcp",
                subprotocols=[Subprotocol("mcp")],
                compression=None,
                proxy=None,
                open_timeout=WITHIN,
            )
        )

    def put(self, text: str) -> None:
        self._socket.send(text)

    def get(self) -> str | bytes:
        return self._socket.recv(timeout=WITHIN)

    def stop(self) -> None:
        self._stack.close()


class StdioClient(Client):
    def __init__(self, case: Case) -> None:
        super().__init__(case)
        command = [sys.executable, "-m", "bench.bench_servers", case.server]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert self._process.stdin is not None and self._process.stdout is not None
        self.pid = self._process.pid
        self._in = self._process.stdin.fileno()
        self._out = self._process.stdout.fileno()
        self._rest = b""

    def put(self, text: str) -> None:
        os.write(self._in, text.encode() + b"\n")

    def get(self) -> str | bytes:
        while b"\n" not in self._rest:
            ready, _, _ = select.select([self._out], [], [], WITHIN)
            data = os.read(self._out, 65_536) if ready else b""
            if not data:
                raise SystemExit(f"no answer from {self._case.name}")
            self._rest += data
        line, _, self._rest = self._rest.partition(b"\n")
        return line

    def stop(self) -> None:
        self._process.communicate(timeout=WITHIN)


def measure(calls: int) -> dict[Case, float]:
    """Microseconds of server CPU per call: the median round."""
    with ExitStack() as stack:
        servers = {kind: Server(kind) for kind in {case.server for case in OVER_WEBSOCKET}}
        for server in servers.values():
            stack.callback(server.stop)
        clients: dict[Case, Client] = {}
        for case in (*OVER_WEBSOCKET, *OVER_STDIO):
            over_stdio = case in OVER_STDIO
            client = (
                StdioClient(case) if over_stdio else WebSocketClient(case, servers[case.server])
            )
            stack.callback(client.stop)
            client.begin()
            for _ in range(300):
                client.call()
            clients[case] = client
        rounds: dict[Case, list[float]] = {case: [] for case in clients}
        for _ in range(ROUNDS):
            for case, client in clients.items():
                before = cpu_of(client.pid)
                for _ in range(calls):
                    client.call()
                rounds[case].append((cpu_of(client.pid) - before) / calls * 1_000_000)
        return {case: statistics.median(each) for case, each in rounds.items()}


def rows(calls: int) -> Iterator[Row]:
    figures = measure(calls)
    for case in OVER_WEBSOCKET:
        yield Row(
            name=f"WebSocket: {case.name}",
            measured=figures[case],
            unit="µs",
            ratio=None if case is ECHO else figures[case] / figures[ECHO],
            basis="times the echo",
        )
    for case in OVER_STDIO:
        sdk = SDK[case.version]
        yield Row(
            name=f"stdio: {case.name}",
            measured=figures[case],
            unit="µs",
            ratio=None if case is sdk else figures[sdk] / figures[case],
            basis=f"times cheaper than the {sdk.name}",
        )


def main() -> None:
    report(rows(int(sys.argv[1]) if len(sys.argv) > 1 else 1_000))


if __name__ == "__main__":
    main()
