"""Server CPU of one ``tools/call`` over HTTP, next to the SDK alone.

    python -m bench.bench_calls [CALLS]

The figure is the CPU time (user and system) of the server's process for each call of a trivial
async tool. The client's CPU is not in it. One client has one connection and makes one call at a
time. The servers take turns, and the median round counts. *JSON mode* is the SDK with JSON answers
instead of event streams. *The SDK's kernel* is the SDK's code for one request of the 2026 era,
without transport and checks.
"""

from __future__ import annotations

import http.client
import json
import statistics
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from bench.rows import Row, report
from bench.stores import cpu_of
from tests.support.processes import free_port, wait_until_it_listens

ROUNDS = 5
SESSION = "io.modelcontextprotocol/session"
REQUEST_KEY = "io.github.mcp-sessions/requestKey"
MODERN = "2026-07-28"
HANDSHAKE = "2025-11-25"
ERAS = {HANDSHAKE: "2025 era", MODERN: "2026 era"}


@dataclass(frozen=True)
class Case:
    name: str
    server: str
    version: str
    session: bool = False


CASES = [
    Case("floor (bare ASGI + orjson)", "floor", HANDSHAKE),
    Case("SDK, 2025 era", "sdk", HANDSHAKE),
    Case("SDK, 2025 era, JSON mode", "sdk-json", HANDSHAKE),
    Case("ours, 2025 era, no session", "ours", HANDSHAKE),
    Case("ours, 2025 era, in a session", "ours", HANDSHAKE, session=True),
    Case("floor, and the SDK's kernel", "kernel", MODERN),
    Case("SDK, 2026 era", "sdk", MODERN),
    Case("SDK, 2026 era, JSON mode", "sdk-json", MODERN),
    Case("ours, 2026 era, no session", "ours", MODERN),
    Case("ours, 2026 era, in a session", "ours", MODERN, session=True),
]


class Server:
    def __init__(self, kind: str, *options: str) -> None:
        self.port = free_port()
        command = [sys.executable, "-m", "bench.bench_servers", kind, str(self.port)]
        command += options
        self.process = subprocess.Popen(command)
        wait_until_it_listens(self.process, self.port)

    def cpu(self) -> float:
        """Seconds of CPU that the process used so far."""
        return cpu_of(self.process.pid)

    def stop(self) -> None:
        self.process.terminate()
        self.process.wait(timeout=20)


class Client:
    def __init__(
        self,
        case: Case,
        port: int,
        meta: Mapping[str, Any] | None = None,
        token: str | None = None,
    ) -> None:
        self._http = http.client.HTTPConnection("127.0.0.1", port)
        self._headers = {
            "accept": "application/json, text/event-stream",
            "content-type": "application/json",
            "mcp-protocol-version": case.version,
        }
        if token is not None:
            self._headers["authorization"] = f"Bearer {token}"
        self._meta: dict[str, Any] = {}
        if case.version == MODERN:
            self._meta = {
                "io.modelcontextprotocol/protocolVersion": MODERN,
                "io.modelcontextprotocol/clientCapabilities": {},
            }
        elif case.server != "floor":
            self.initialize()
        if case.session:
            answer = self.send("sessions/create" if case.version == MODERN else "session/start", {})
            if case.version == MODERN:
                self._meta[SESSION] = answer["result"]["session"]
        self._meta |= meta or {}

    def initialize(self) -> None:
        self._headers.pop("mcp-session-id", None)
        info = {"name": "bench", "version": "1"}
        params = {"protocolVersion": HANDSHAKE, "capabilities": {}, "clientInfo": info}
        self.send("initialize", params)
        self.send("notifications/initialized", None, request=False)

    def wake(self) -> None:
        """Connect anew: a server closes a connection that was idle for some seconds."""
        self._http.close()
        self.call()

    def call(self, key: str | None = None) -> None:
        params: dict[str, Any] = {"name": "echo", "arguments": {"text": "hello"}}
        if key is not None:
            params["_meta"] = {REQUEST_KEY: key}
        self.send("tools/call", params)

    def send(self, method: str, params: dict[str, Any] | None, *, request: bool = True) -> Any:
        self.put(method, params, request=request)
        return self.get(method, request=request)

    def put(self, method: str, params: dict[str, Any] | None, *, request: bool = True) -> None:
        message: dict[str, Any] = {"jsonrpc": "2.0", "method": method}
        if request:
            message["id"] = 1
        if params is not None:
            meta = {**self._meta, **params.get("_meta", {})}
            message["params"] = {**params, "_meta": meta} if meta else params
        headers = self._headers
        if self._meta:
            headers = {**headers, "mcp-method": method}
            named = params or {}
            if "name" in named or "taskId" in named:
                headers["mcp-name"] = named.get("name") or named["taskId"]
        self._http.request("POST", "/mcp", json.dumps(message).encode(), headers)

    def get(self, method: str, *, request: bool = True) -> Any:
        response = self._http.getresponse()
        body = response.read()
        if method == "initialize":
            self._headers["mcp-session-id"] = response.headers["mcp-session-id"]
        if not request:
            return None
        if body.startswith((b"event:", b"id:", b"data:")):
            lines = [line for line in body.splitlines() if line.startswith(b"data: {")]
            body = lines[-1][6:]
        answer = json.loads(body)
        if "result" not in answer:
            raise SystemExit(f"{method} was refused: {answer}")
        return answer


def measure(calls: int) -> dict[str, float]:
    """Microseconds of server CPU per call, by the name of the case: the median round."""
    servers = {kind: Server(kind) for kind in {case.server for case in CASES}}
    try:
        clients = {case: Client(case, servers[case.server].port) for case in CASES}
        for case in CASES:
            clients[case].wake()
            for _ in range(300):
                clients[case].call()
        rounds: dict[Case, list[float]] = {case: [] for case in CASES}
        for _ in range(ROUNDS):
            for case in CASES:
                clients[case].wake()
                before = servers[case.server].cpu()
                for _ in range(calls):
                    clients[case].call()
                spent = servers[case.server].cpu() - before
                rounds[case].append(spent / calls * 1_000_000)
        return {case.name: statistics.median(rounds[case]) for case in CASES}
    finally:
        for server in servers.values():
            server.stop()


def rows(calls: int) -> Iterator[Row]:
    figures = measure(calls)
    for case in CASES:
        figure = figures[case.name]
        basis = "SDK, 2026 era" if case.version == MODERN else "SDK, 2025 era"
        yield Row(
            name=case.name,
            measured=figure,
            unit="µs",
            ratio=None if case.name == basis else figures[basis] / figure,
            basis=f"times cheaper than the {basis}",
        )


def main() -> None:
    report(rows(int(sys.argv[1]) if len(sys.argv) > 1 else 1_000))


if __name__ == "__main__":
    main()
