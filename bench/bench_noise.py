"""The noisy client of `bench_noisy`, a process of its own.

    python -m bench.bench_noise KIND PORT

It prepares what it needs, says ``ready``, and makes noise from each line ``go`` on its input to the
next line: one thing after the other, as fast as it is served. Then it says what it did, and what
went wrong: ``done COUNT ERRORS``. It ends with its input.
"""

from __future__ import annotations

import http.client
import itertools
import json
import os
import socket
import sys
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any

HANDSHAKE = "2025-11-25"
SESSION = "io.modelcontextprotocol/session"
URI = "note://noisy"

SUBSCRIPTIONS = 1_500
"""Sessions of the noisy client that learn of each of its updates."""

ATTACHED = 100
"""The same, on one GET stream, which it reads."""

URIS = 2_000
"""Resources that one session is subscribed to."""

BIG = 262_144
"""Bytes of a result."""


class Refused(Exception):
    """The server answered with an error."""


class Client:
    def __init__(self, port: int) -> None:
        self._port = port
        self._http = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
        self._ids = itertools.count(1)
        self._headers = {
            "accept": "application/json, text/event-stream",
            "content-type": "application/json",
            "mcp-protocol-version": HANDSHAKE,
        }

    def initialize(self) -> None:
        info = {"name": "bench", "version": "1"}
        params = {"protocolVersion": HANDSHAKE, "capabilities": {}, "clientInfo": info}
        self.ask("initialize", params)
        self._post({"jsonrpc": "2.0", "method": "notifications/initialized"})

    def wake(self) -> None:
        """Connect anew: a server closes a connection that was idle for some seconds."""
        self._http.close()

    def ask(self, method: str, params: dict[str, Any]) -> Any:
        request = {"jsonrpc": "2.0", "id": next(self._ids), "method": method, "params": params}
        status, session, body = self._post(request)
        if method == "initialize" and session is not None:
            self._headers["mcp-session-id"] = session
        if body.startswith((b"event:", b"id:", b"data:", b"retry:", b":")):
            body = [line for line in body.splitlines() if line.startswith(b"data: {")][-1][6:]
        answer = json.loads(body)
        if status != 200 or "result" not in answer:
            raise Refused(f"{method}: {status} {body[:200]!r}")
        return answer["result"]

    def call(self, tool: str, **arguments: Any) -> None:
        result = self.ask("tools/call", {"name": tool, "arguments": arguments})
        if result.get("isError"):
            raise Refused(f"{tool}: {result}")

    def _post(self, message: dict[str, Any]) -> tuple[int, str | None, bytes]:
        self._http.request("POST", "/mcp", json.dumps(message).encode(), self._headers)
        response = self._http.getresponse()
        return response.status, response.headers.get("mcp-session-id"), response.read()

    def start(self, *, attached: bool) -> None:
        """A session that is subscribed, attached to this client's GET stream or to nothing."""
        asks = self if attached else Client(self._port)
        session = asks.ask("session/start", {})["sessionId"]
        asks.ask("resources/subscribe", {"uri": URI, "_meta": {SESSION: {"sessionId": session}}})

    def raw(
        self, method: str, message: dict[str, Any] | None, *, last_event_id: str | None = None
    ) -> socket.socket:
        body = json.dumps(message).encode() if message is not None else b""
        headers = {
            **self._headers,
            "host": f"127.0.0.1:{self._port}",
            "content-length": str(len(body)),
        }
        if last_event_id is not None:
            headers["last-event-id"] = last_event_id
        lines = [f"{method} /mcp HTTP/1.1", *(f"{k}: {v}" for k, v in headers.items()), "", ""]
        connection = socket.create_connection(("127.0.0.1", self._port), timeout=30)
        connection.sendall("\r\n".join(lines).encode() + body)
        return connection

    def read_stream(self) -> None:
        connection = self.raw("GET", None)
        connection.settimeout(None)

        def read() -> None:
            while connection.recv(65_536):
                pass

        threading.Thread(target=read, daemon=True).start()

    def cut(self) -> None:
        params = {"name": "wait", "arguments": {"seconds": 5}}
        request = {"jsonrpc": "2.0", "id": next(self._ids), "method": "tools/call"}
        with self.raw("POST", {**request, "params": params}) as connection:
            # It says after a moment that it has begun.
            self._check(connection)

    def look(self) -> None:
        with self.raw("GET", None) as connection:
            self._check(connection)

    def _check(self, connection: socket.socket) -> None:
        begun = connection.recv(1_024).split(b"\r\n")[0]
        if b" 200 " not in begun:
            raise Refused(begun.decode())


def noise_of(kind: str, client: Client) -> Callable[[], None]:
    match kind:
        case "updates":
            for _ in range(SUBSCRIPTIONS):
                client.start(attached=False)
            return lambda: client.call("touch", uri=URI)
        case "attached":
            client.read_stream()
            for _ in range(ATTACHED):
                client.start(attached=True)
            return lambda: client.call("touch", uri=URI)
        case "subscribes":
            client.ask("session/start", {})
            for number in range(URIS):
                client.ask("resources/subscribe", {"uri": f"{URI}/{number}"})
            turns = itertools.cycle(("resources/subscribe", "resources/unsubscribe"))
            return lambda: client.ask(next(turns), {"uri": URI})
        case "calls":
            return lambda: client.call("echo", text="x")
        case "results":
            return lambda: client.call("big", size=BIG)
        case "gets":
            return client.look
        case "cuts":
            return client.cut
        case _:
            raise SystemExit(f"unknown noise {kind!r}")


KINDS = {
    "updates": f"each update goes to {SUBSCRIPTIONS} sessions that are not connected",
    "attached": f"each update goes to {ATTACHED} sessions on one GET stream",
    "subscribes": f"a session of {URIS} subscriptions adds one and removes it, by turns",
    "calls": "calls of a trivial tool",
    "results": f"calls with a result of {BIG} bytes",
    "gets": "GET streams are opened and dropped",
    "cuts": "clients leave calls, each of which runs for 5 s",
}


@contextmanager
def lines() -> Generator[tuple[threading.Event, threading.Event]]:
    """Yield two events, which the lines of the input set in turn: go, stop. The end sets both."""
    go, stop = threading.Event(), threading.Event()

    def read() -> None:
        for number, _ in enumerate(sys.stdin):
            (stop if number % 2 else go).set()
        stop.set()
        go.set()

    threading.Thread(target=read, daemon=True).start()
    yield go, stop


def give_way() -> None:
    """Run only when no other process wants the core. A process that is only nice may finish its
    slice of some milliseconds, while the quiet client waits.
    """
    if hasattr(os, "SCHED_IDLE"):
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    else:
        os.nice(19)


def main() -> None:
    give_way()
    client = Client(int(sys.argv[2]))
    client.initialize()
    make = noise_of(sys.argv[1], client)
    with lines() as (go, stop):
        print("ready", flush=True)
        while True:
            go.wait()
            go.clear()
            client.wake()
            count, errors = 0, 0
            while not stop.is_set():
                try:
                    make()
                    count += 1
                except (Refused, OSError, http.client.HTTPException) as failed:
                    errors += 1
                    client.wake()
                    print(repr(failed), file=sys.stderr, flush=True)
            print("done", count, errors, flush=True)
            stop.clear()


if __name__ == "__main__":
    main()
