"""deploy/nginx.conf, run before one server and before three: a session through a reverse proxy,
nothing held back, cut or refused.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import websockets.sync.client
from websockets.typing import Subprotocol

from mcp_sessions.security import mint_key
from tests.support.nginx import nginx
from tests.support.processes import free_port, wait_until_it_listens
from tests.support.redis_server import namespace, shared_redis

pytestmark = [pytest.mark.full, pytest.mark.timeout(180)]

ROOT = Path(__file__).parents[3]
ACCEPT = {"Accept": "application/json, text/event-stream", "Content-Type": "application/json"}


@pytest.fixture(
    scope="module",
    params=["one", pytest.param("replicas", marks=pytest.mark.redis)],
)
def proxied(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[str]:
    """The URL of the notes server behind nginx: of one, and of three that share a Redis."""
    folder = tmp_path_factory.mktemp("nginx")
    front, alone = free_port(), request.param == "one"
    store = "memory://" if alone else f"{shared_redis().url}?namespace={namespace()}"
    backends = [free_port() for _ in range(1 if alone else 3)]
    serve = [sys.executable, "-m", "mcp_sessions.cli", "serve", "examples/notes_server.py"]
    shared = {"NOTES_DIR": str(folder / "notes"), "MCP_SESSIONS_KEYS": mint_key()}
    processes: list[subprocess.Popen[bytes]] = []
    try:
        for port in backends:
            server = subprocess.Popen(
                [*serve, "--port", str(port), "--store", store],
                cwd=ROOT,
                env={**os.environ, **shared},
                stderr=subprocess.DEVNULL,
            )
            processes.append(server)
            wait_until_it_listens(server, port)
        with nginx(folder, backends, front):
            yield f"http://127.0.0.1:{front}/mcp"
    finally:
        for process in reversed(processes):
            process.terminate()
            process.wait(timeout=30)


def post(client: httpx.Client, url: str, message: dict[str, Any], session: str | None) -> Any:
    headers = {**ACCEPT, **({"Mcp-Session-Id": session} if session else {})}
    return client.post(url, json={"jsonrpc": "2.0", **message}, headers=headers)


def connect(client: httpx.Client, url: str) -> str:
    info = {"name": "behind nginx", "version": "1"}
    params = {"protocolVersion": "2025-11-25", "capabilities": {}, "clientInfo": info}
    answered = post(client, url, {"id": 0, "method": "initialize", "params": params}, None)
    session: str = answered.headers["mcp-session-id"]
    assert (
        post(client, url, {"method": "notifications/initialized"}, session).status_code
        == httpx.codes.ACCEPTED
    )
    return session


def call(client: httpx.Client, url: str, session: str, tool: str, **arguments: str) -> Any:
    params = {"name": tool, "arguments": arguments}
    message = {"id": 7, "method": "tools/call", "params": params}
    return post(client, url, message, session).json()["result"]


def data_lines(response: httpx.Response) -> Iterator[dict[str, Any]]:
    """The messages of an event stream, as they come."""
    for line in response.iter_lines():
        if line.startswith("data: {"):
            yield json.loads(line.removeprefix("data: "))


def test_an_event_comes_through_the_proxy_while_its_stream_is_open(proxied: str) -> None:
    """Nothing is buffered: the stream is still open when the event is read."""
    with httpx.Client(timeout=20) as client:
        session = connect(client, proxied)
        started = post(client, proxied, {"id": 1, "method": "session/start"}, session).json()
        params = {"uri": "note://proxied"}
        post(client, proxied, {"id": 2, "method": "resources/subscribe", "params": params}, session)
        headers = {"Accept": "text/event-stream", "Mcp-Session-Id": session}
        with client.stream("GET", proxied, headers=headers) as stream:
            messages = data_lines(stream)
            call(client, proxied, session, "write_note", name="proxied", text="one")
            updated = next(m for m in messages if m["method"] == "notifications/resources/updated")

    assert updated["params"]["uri"] == "note://proxied"
    assert updated["params"]["sessionEventId"] > started["result"]["sessionEventId"]


def test_a_session_is_resumed_through_the_proxy(proxied: str) -> None:
    """What was missed is there, once, on another connection."""
    with httpx.Client(timeout=20) as client:
        first = connect(client, proxied)
        started = post(client, proxied, {"id": 1, "method": "session/start"}, first).json()
        params = {"uri": "note://again"}
        post(client, proxied, {"id": 2, "method": "resources/subscribe", "params": params}, first)
        for text in ("one", "two", "three"):
            call(client, proxied, first, "write_note", name="again", text=text)
        second = connect(client, proxied)
        resume = {
            "sessionId": started["result"]["sessionId"],
            "lastSessionEventId": started["result"]["sessionEventId"],
        }
        message = {"id": 1, "method": "session/resume", "params": resume}
        resumed = post(client, proxied, message, second).json()["result"]

    assert resumed["catchup"] is True
    # The list changed once, and the note three times, which is one event.
    assert resumed["replayed"] == 2


def test_delete_and_its_404_come_through(proxied: str) -> None:
    """Statuses are the server's own."""
    with httpx.Client(timeout=20) as client:
        session = connect(client, proxied)
        headers = {"Mcp-Session-Id": session}

        assert client.delete(proxied, headers=headers).status_code == httpx.codes.OK
        assert client.delete(proxied, headers=headers).status_code == httpx.codes.NOT_FOUND


def test_a_websocket_comes_through_the_proxy(proxied: str) -> None:
    """To one server, or one replica; what is written through the others is received on it."""
    with (
        websockets.sync.client.connect(
            proxied.replace("http", "ws", 1), subprotocols=[Subprotocol("mcp")], proxy=None
        ) as socket,
        httpx.Client(timeout=20) as client,
    ):

        def ask(number: int, method: str, params: dict[str, Any]) -> dict[str, Any]:
            message = {"jsonrpc": "2.0", "id": number, "method": method, "params": params}
            socket.send(json.dumps(message))
            while True:
                received: dict[str, Any] = json.loads(socket.recv(timeout=20))
                if received.get("id") == number:
                    return received

        info = {"name": "behind nginx", "version": "1"}
        handshake = {"protocolVersion": "2025-11-25", "capabilities": {}, "clientInfo": info}
        ask(0, "initialize", handshake)
        ask(1, "session/start", {})
        ask(2, "resources/subscribe", {"uri": "note://socket"})
        session = connect(client, proxied)
        for text in ("one", "two", "three"):
            call(client, proxied, session, "write_note", name="socket", text=text)
        updates: list[str] = []
        while len(updates) < 3:
            received: dict[str, Any] = json.loads(socket.recv(timeout=20))
            if received.get("method") == "notifications/resources/updated":
                updates.append(received["params"]["uri"])
        assert updates == ["note://socket"] * 3
