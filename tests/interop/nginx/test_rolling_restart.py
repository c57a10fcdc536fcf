"""Three replicas behind the shipped nginx configuration are restarted one after the other, under
clients that call all the while: no call fails.

The counts are printed. What they say of WebSocket: a replica cannot
move a stock client, which knows of no sessions. It serves what that client asked to the end and
closes the connection with 1012; the client, as applications do, connects again. A call that
went out while the close came in is counted as ``cut``: it never ran, and is sent again.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Generator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import mcp_types as types
import pytest
import websockets
from mcp import Client
from websockets.asyncio.client import connect
from websockets.typing import Subprotocol

from mcp_sessions import resumable
from mcp_sessions.security import mint_key
from tests.support.apps import DEPRECATED
from tests.support.nginx import nginx
from tests.support.processes import free_port, wait_until_it_listens
from tests.support.store_servers import STORE_SERVERS, store_server

pytestmark = [
    pytest.mark.full,
    pytest.mark.timeout(300),
    pytest.mark.filterwarnings(DEPRECATED),
]

ROOT = Path(__file__).parents[3]
PAUSE = 0.02
"""Seconds between two calls of a client: its connections are idle and busy by turns."""

WITHIN = 60.0
"""Seconds in which a replica stops and its successor is ready."""


class Replica:
    def __init__(self, environment: dict[str, str]) -> None:
        self.port = free_port()
        self._environment = environment
        self.process = self._started()

    def _started(self) -> subprocess.Popen[bytes]:
        serve = [sys.executable, "-m", "mcp_sessions.cli", "serve", "tests/support/rolling_app.py"]
        return subprocess.Popen(
            [*serve, "--port", str(self.port), "--health", "/", "--log-level", "warning"],
            cwd=ROOT,
            env={**os.environ, **self._environment},
            stdin=subprocess.DEVNULL,
        )

    def wait_until_ready(self) -> None:
        """It may be sent requests."""
        wait_until_it_listens(self.process, self.port)
        url, until = f"http://127.0.0.1:{self.port}/readyz", time.monotonic() + WITHIN
        while not httpx.get(url, timeout=WITHIN, trust_env=False).is_success:
            assert time.monotonic() < until

    def restart(self, *, calmly: bool) -> None:
        """SIGTERM, and again when it has ended.

        Args:
            calmly: Wait until it is ready, not only until it listens.
        """
        self.process.terminate()
        assert self.process.wait(timeout=WITHIN) is not None
        self.process = self._started()
        if calmly:
            self.wait_until_ready()
        else:
            wait_until_it_listens(self.process, self.port)


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    """A line for each call that began."""
    return tmp_path / "runs"


@pytest.fixture(params=STORE_SERVERS)
def store(request: pytest.FixtureRequest) -> Generator[str]:
    """The URL of one that replicas share."""
    with store_server(request.param) as server:
        yield server.url


@pytest.fixture
def replicas(runs: Path, store: str) -> Generator[list[Replica]]:
    """Three of them, ready, on one store."""
    environment = {
        "RUNS": str(runs),
        "STORE": store,
        "MCP_SESSIONS_KEYS": mint_key(),
    }
    started = [Replica(environment) for _ in range(3)]
    try:
        for replica in started:
            replica.wait_until_ready()
        yield started
    finally:
        for replica in started:
            replica.process.kill()
            replica.process.wait(timeout=30)


class Tally:
    """What became of the calls of all clients, by kind of client."""

    def __init__(self) -> None:
        self.calls: Counter[str] = Counter()
        self.cut: Counter[str] = Counter()
        self.cut_calls: set[str] = set()
        self.failed: list[str] = []
        self.received: Counter[str] = Counter()
        self.slowest: dict[str, float] = {}
        self.ended = asyncio.Event()
        self._numbers = itertools.count()

    def new(self, kind: str) -> tuple[str, float]:
        """A call's name, and how long it takes: one in ten is running for half a second."""
        number = next(self._numbers)
        return f"{kind} {number}", 0.5 if number % 10 == 0 else 0.0

    def answered(self, kind: str, begun: float) -> None:
        self.calls[kind] += 1
        self.slowest[kind] = max(self.slowest.get(kind, 0), time.monotonic() - begun)

    def __str__(self) -> str:
        lines = [
            f"{kind:<24} {count:>6} calls, slowest {self.slowest[kind]:.2f} s"
            + (f", {self.cut[kind]} cut before they ran" if self.cut[kind] else "")
            + (f", {self.received[kind]} updates heard" if kind in self.received else "")
            for kind, count in sorted(self.calls.items())
        ]
        return "\n".join([*lines, f"{len(self.failed)} failed of {self.calls.total()}"])


async def sdk_client(kind: str, target: Any, mode: Any, tally: Tally) -> None:
    """The SDK's client, until all has ended; one that watches counts what it received."""
    watches = mode == "legacy"

    async def received(message: Any) -> None:
        if isinstance(message, types.ResourceUpdatedNotification):
            tally.received[kind] += 1

    async with Client(target, mode=mode, message_handler=received) as client:
        if watches:
            await client.session.subscribe_resource("note://watched")  # pyright: ignore[reportDeprecated]
        while not tally.ended.is_set():
            call, seconds = tally.new(kind)
            begun = time.monotonic()
            try:
                result = await client.call_tool("work", {"call": call, "seconds": seconds})
                assert not result.is_error, result
            except Exception as error:
                tally.failed.append(f"{call}: {error!r}")
            tally.answered(kind, begun)
            await asyncio.sleep(PAUSE)


async def websocket_client(kind: str, url: str, tally: Tally) -> None:
    """A client of the protocol over WebSocket, which connects again where it was closed."""
    again: str | None = None
    while not tally.ended.is_set():
        async with connect(url, subprotocols=[Subprotocol("mcp")], proxy=None) as socket:
            numbers = itertools.count()

            async def ask(method: str, params: dict[str, Any]) -> dict[str, Any]:
                number = next(numbers)  # noqa: B023
                message = {"jsonrpc": "2.0", "id": number, "method": method, "params": params}
                await socket.send(json.dumps(message))
                while True:
                    answer: dict[str, Any] = json.loads(await socket.recv())
                    if answer.get("id") == number:
                        return answer

            call, seconds = again or "", 0.0
            try:
                info = {"name": "stock", "version": "1"}
                hello = {"protocolVersion": "2025-11-25", "capabilities": {}, "clientInfo": info}
                await ask("initialize", hello)
                await socket.send('{"jsonrpc":"2.0","method":"notifications/initialized"}')
                while not tally.ended.is_set():
                    if again is None:
                        call, seconds = tally.new(kind)
                    begun, again = time.monotonic(), call
                    arguments = {"call": call, "seconds": seconds}
                    answer = await ask("tools/call", {"name": "work", "arguments": arguments})
                    if "error" in answer or answer["result"].get("isError"):
                        tally.failed.append(f"{call}: {answer}")
                    again = None
                    tally.answered(kind, begun)
                    await asyncio.sleep(PAUSE)
            except websockets.ConnectionClosed as closed:
                if closed.rcvd is None or closed.rcvd.code != 1012:
                    tally.failed.append(f"{kind}: {closed!r}")
                # The library raises before it sends, if it knows of the close by then.
                if again is not None and closed.rcvd_then_sent is False:
                    tally.cut[kind] += 1
                    tally.cut_calls.add(call)


@asynccontextmanager
async def calling(url: str, tally: Tally) -> AsyncGenerator[None]:
    """Clients of every kind, until the block ends."""
    socket = url.replace("http", "ws", 1)
    async with asyncio.TaskGroup() as clients:
        for number in (1, 2):
            for kind, target, mode in (
                ("stock handshake", url, "legacy"),
                ("stock modern", url, "2026-07-28"),
                ("resumable handshake", resumable(url), "legacy"),
                ("resumable modern", resumable(url), "2026-07-28"),
                ("resumable WebSocket", resumable(socket), "legacy"),
            ):
                clients.create_task(sdk_client(f"{kind} {number}", target, mode, tally))
            clients.create_task(websocket_client(f"stock WebSocket {number}", socket, tally))
        try:
            yield
        finally:
            tally.ended.set()


@pytest.mark.parametrize("calmly", [True, False], ids=["calmly", "quickly"])
async def test_no_call_fails_while_the_replicas_are_restarted(
    replicas: list[Replica],
    runs: Path,
    tmp_path: Path,
    record_property: Callable[[str, object], None],
    calmly: bool,
) -> None:
    """Stock clients of both eras and resuming ones, over HTTP with its GET streams and over
    WebSocket; each call runs once, and who watches learns of what happens on any replica.
    """
    front, tally = free_port(), Tally()
    url = f"http://127.0.0.1:{front}/mcp"
    with nginx(tmp_path, [replica.port for replica in replicas], front):
        async with calling(url, tally):
            for replica in replicas:
                await asyncio.to_thread(replica.restart, calmly=calmly)
            watching = [kind for kind in tally.calls if "modern" not in kind]
            watching = [kind for kind in watching if "stock WebSocket" not in kind]
            async with asyncio.timeout(WITHIN), Client(url, mode="legacy") as client:
                # Streams that were cut open again within the ten seconds of `retry`.
                while any(tally.received[kind] == 0 for kind in watching):
                    await client.call_tool("touch", {"call": "touched"})
                    await asyncio.sleep(0.2)

    record_property("counts", str(tally))
    began = Counter(line for line in runs.read_text().splitlines() if line != "touched")
    assert tally.failed == []
    assert [call for call, count in began.items() if count > 1] == []
    assert len(began) == tally.calls.total()
