"""A server that an application runs stops, though a client has a stream open.

The rules are those of ``mcp_sessions.serve.lifespan``. Before, uvicorn waited for the
stream, and the stream for the server.
"""

import json
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.support.hostile import WITHIN, Setup, answer_on, closed_by_peer
from tests.support.modern import MODERN, envelope
from tests.support.serving import INITIALIZE

APP = """
import asyncio
from contextlib import asynccontextmanager
from mcp.server import MCPServer
from mcp_sessions import SessionLayer

mcp = MCPServer("stops")

@mcp.tool()
async def wait(seconds: float) -> str:
    await asyncio.sleep(seconds)
    return "done"

layer = SessionLayer(mcp)
"""

WHOLE = APP + "app = layer.asgi_app()\n"

MOUNTED = (
    APP
    + """
from starlette.applications import Starlette
app = Starlette(routes=layer.routes(), lifespan=layer.lifespan)
"""
)

BEHIND = (
    MOUNTED
    + """
from starlette.middleware.base import BaseHTTPMiddleware
async def passes(request, call_next):
    return await call_next(request)
app.add_middleware(BaseHTTPMiddleware, dispatch=passes)
"""
)

BY_HAND = (
    APP
    + """
import sys, uvicorn
app = layer.asgi_app()

async def main():
    config = uvicorn.Config(app, lifespan="off", fd=int(sys.argv[1]), access_log=False)
    async with layer.lifespan():
        await uvicorn.Server(config).serve()

asyncio.run(main())
"""
)
"""The lifespan begins before the server has its handlers in place."""

SERVERS: dict[str, tuple[str, list[str]]] = {
    "uvicorn": (WHOLE, ["-m", "uvicorn", "app:app", "--no-access-log", "--fd"]),
    "h11": (WHOLE, ["-m", "uvicorn", "app:app", "--no-access-log", "--http", "h11", "--fd"]),
    "mounted": (MOUNTED, ["-m", "uvicorn", "app:app", "--no-access-log", "--fd"]),
    "behind middleware": (BEHIND, ["-m", "uvicorn", "app:app", "--no-access-log", "--fd"]),
    "by hand": (BY_HAND, ["app.py"]),
    "workers": (WHOLE, ["-m", "uvicorn", "app:app", "--workers", "2", "--fd"]),
    "reload": (WHOLE, ["-m", "uvicorn", "app:app", "--reload", "--fd"]),
}


@contextmanager
def running(name: str, here: Path) -> Generator[Setup]:
    source, command = SERVERS[name]
    (here / "app.py").write_text(source)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        os.set_inheritable(listener.fileno(), True)
        port, fd = listener.getsockname()[1], listener.fileno()
        process = subprocess.Popen(
            [sys.executable, *command, str(fd)],
            cwd=here,
            pass_fds=[fd],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
    setup = Setup(process, port)
    try:
        yield setup
    finally:
        for sock in setup.sockets:
            sock.close()
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def session(setup: Setup, sock: socket.socket) -> str:
    """A session at the worker that has this connection."""
    sock.settimeout(60)
    sock.sendall(setup.post(json.dumps(INITIALIZE).encode()))
    head = answer_on(sock)
    found = re.search(rb"mcp-session-id: (\S+)", head)
    assert found is not None, head
    return found[1].decode()


def get_stream(setup: Setup, seconds: float) -> socket.socket:
    sock = setup.connect()
    accepts = ("Accept: text/event-stream", f"Mcp-Session-Id: {session(setup, sock)}")
    sock.sendall(setup.head("GET /mcp", *accepts))
    return sock


def running_call(setup: Setup, seconds: float) -> socket.socket:
    params = {"name": "wait", "arguments": {"seconds": seconds}}
    call = {"jsonrpc": "2.0", "id": 7, "method": "tools/call", "params": params}
    sock = setup.connect()
    sock.sendall(setup.post(json.dumps(call).encode(), f"Mcp-Session-Id: {session(setup, sock)}"))
    return sock


def modern_call(setup: Setup, seconds: float) -> socket.socket:
    method = "tools/call"
    params = {"name": "wait", "arguments": {"seconds": seconds}, "_meta": envelope()}
    message = {"jsonrpc": "2.0", "id": 7, "method": method, "params": params}
    fields = (f"Mcp-Protocol-Version: {MODERN}", f"Mcp-Method: {method}", "Mcp-Name: wait")
    sock = setup.connect()
    sock.sendall(setup.post(json.dumps(message).encode(), *fields))
    return sock


def listen_stream(setup: Setup, seconds: float) -> socket.socket:
    method = "subscriptions/listen"
    params = {"notifications": {"toolsListChanged": True}, "_meta": envelope()}
    message = {"jsonrpc": "2.0", "id": 7, "method": method, "params": params}
    sock = setup.connect()
    fields = (f"Mcp-Protocol-Version: {MODERN}", f"Mcp-Method: {method}")
    sock.sendall(setup.post(json.dumps(message).encode(), *fields))
    return sock


def body_without_end(setup: Setup, seconds: float) -> socket.socket:
    sock = setup.connect()
    sock.sendall(setup.post(b"{", declared=1_000))
    return sock


def no_body(setup: Setup, seconds: float) -> socket.socket:
    sock = setup.connect()
    sock.sendall(setup.post(b"", declared=1_000))
    return sock


def websocket(setup: Setup, seconds: float) -> socket.socket:
    sock = setup.connect()
    sock.sendall(setup.upgrade())
    return sock


OPENED: dict[str, Callable[[Setup, float], socket.socket]] = {
    "a GET stream": get_stream,
    "a listen stream": listen_stream,
    "a running call": running_call,
    "a running call of 2026": modern_call,
    "a WebSocket": websocket,
}


def stopped(setup: Setup, number: signal.Signals = signal.SIGTERM) -> str:
    """What it wrote until it ended."""
    setup.process.send_signal(number)
    said, _ = setup.process.communicate(timeout=WITHIN)
    return said


@pytest.mark.parametrize("what", OPENED)
def test_uvicorn_stops_while_a_client_has_a_stream(what: str, tmp_path: Path) -> None:
    """A call that runs on is cut after the grace. Its client gets the error -31012."""
    with running("uvicorn", tmp_path) as setup:
        sock = OPENED[what](setup, 600.0)
        sock.settimeout(60)
        assert sock.recv(65_536)
        said = stopped(setup)
        assert "Application shutdown complete" in said and "Traceback" not in said, said
        rest = closed_by_peer(sock)
        assert ("call" not in what) or b"-31012" in rest, rest


@pytest.mark.parametrize("sent", [body_without_end, no_body])
@pytest.mark.parametrize("server", ["uvicorn", "h11", "mounted", "behind middleware"])
def test_a_body_that_never_ends_delays_no_stop(
    server: str, sent: Callable[[Setup, float], socket.socket], tmp_path: Path
) -> None:
    with running(server, tmp_path) as setup:
        session(setup, setup.connect())
        sock = sent(setup, 0)
        said = stopped(setup)
        assert "Application shutdown complete" in said and "Traceback" not in said, said
        answer = closed_by_peer(sock)
        # Nothing: the server stopped before it had read the headers.
        assert not answer or answer.startswith(b"HTTP/1.1 503 ")


@pytest.mark.parametrize("server", SERVERS)
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_each_server_stops(server: str, number: signal.Signals, tmp_path: Path) -> None:
    with running(server, tmp_path) as setup:
        sock = get_stream(setup, 0)
        assert sock.recv(65_536).startswith(b"HTTP/1.1 200")
        stopped(setup, number)
        assert closed_by_peer(sock).endswith(b"0\r\n\r\n")


def test_a_call_that_ends_within_the_grace_is_answered(tmp_path: Path) -> None:
    with running("uvicorn", tmp_path) as setup:
        sock = running_call(setup, 1.0)
        sock.settimeout(60)
        received = sock.recv(65_536)
        stopped(setup)
        assert b"done" in received + closed_by_peer(sock)
