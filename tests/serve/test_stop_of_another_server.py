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
from collections.abc import Generator
from contextlib import ExitStack, contextmanager
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

UVICORN = """
from uvicorn.main import main

if __name__ == "__main__":
    main()
"""
"""What ``python -m uvicorn`` runs, as a file: `tests.support.forking` starts it in less time."""

SERVERS: dict[str, tuple[str, list[str]]] = {
    "uvicorn": (WHOLE, ["run.py", "app:app", "--no-access-log", "--fd"]),
    "h11": (WHOLE, ["run.py", "app:app", "--no-access-log", "--http", "h11", "--fd"]),
    "mounted": (MOUNTED, ["run.py", "app:app", "--no-access-log", "--fd"]),
    "behind middleware": (BEHIND, ["run.py", "app:app", "--no-access-log", "--fd"]),
    "by hand": (BY_HAND, ["app.py"]),
    "workers": (WHOLE, ["run.py", "app:app", "--workers", "2", "--fd"]),
    "reload": (WHOLE, ["run.py", "app:app", "--reload", "--fd"]),
}

STARTING_OTHERS = ("workers", "reload")


@contextmanager
def running(name: str, here: Path) -> Generator[Setup]:
    source, command = SERVERS[name]
    (here / "app.py").write_text(source)
    (here / "run.py").write_text(UVICORN)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port, fd = listener.getsockname()[1], listener.fileno()
        # What starts processes itself hands its standard input on. The others may be forked
        # (`tests.support.forking`), so they get no other descriptor.
        is_inherited = name in STARTING_OTHERS
        process = subprocess.Popen(
            [sys.executable, *command, str(fd if is_inherited else 0)],
            cwd=here,
            stdin=subprocess.DEVNULL if is_inherited else fd,
            pass_fds=[fd] if is_inherited else [],
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


def get_stream(setup: Setup) -> socket.socket:
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


def listen_stream(setup: Setup) -> socket.socket:
    method = "subscriptions/listen"
    params = {"notifications": {"toolsListChanged": True}, "_meta": envelope()}
    message = {"jsonrpc": "2.0", "id": 7, "method": method, "params": params}
    sock = setup.connect()
    fields = (f"Mcp-Protocol-Version: {MODERN}", f"Mcp-Method: {method}")
    sock.sendall(setup.post(json.dumps(message).encode(), *fields))
    return sock


def body_without_end(setup: Setup) -> socket.socket:
    sock = setup.connect()
    sock.sendall(setup.post(b"{", declared=1_000))
    return sock


def no_body(setup: Setup) -> socket.socket:
    sock = setup.connect()
    sock.sendall(setup.post(b"", declared=1_000))
    return sock


def websocket(setup: Setup) -> socket.socket:
    sock = setup.connect()
    sock.sendall(setup.upgrade())
    return sock


def stopped(setup: Setup, number: signal.Signals = signal.SIGTERM) -> str:
    """What it wrote until it ended."""
    setup.process.send_signal(number)
    said, _ = setup.process.communicate(timeout=WITHIN)
    return said


def test_uvicorn_stops_while_clients_have_streams(tmp_path: Path) -> None:
    """A call that runs on is cut after the grace. Its client gets the error -31012."""
    with running("uvicorn", tmp_path) as setup:
        streams = [get_stream(setup), listen_stream(setup), websocket(setup)]
        calls = [running_call(setup, 600.0), modern_call(setup, 600.0)]
        for sock in streams + calls:
            sock.settimeout(60)
            assert sock.recv(65_536)
        said = stopped(setup)
        assert "Application shutdown complete" in said and "Traceback" not in said, said
        for sock in streams:
            closed_by_peer(sock)
        for sock in calls:
            rest = closed_by_peer(sock)
            assert b"-31012" in rest, rest


def test_a_websocket_alone_is_a_first_request(tmp_path: Path) -> None:
    """After it the server's handlers are known to be in place (the third rule)."""
    with running("uvicorn", tmp_path) as setup:
        sock = websocket(setup)
        sock.settimeout(60)
        assert sock.recv(65_536)
        said = stopped(setup)
        assert "Application shutdown complete" in said and "Traceback" not in said, said
        closed_by_peer(sock)


def test_a_body_that_never_ends_delays_no_stop(tmp_path: Path) -> None:
    """Nor does a stream, at the same time. The servers stop together: each waits for its bodies."""
    with ExitStack() as stack:
        stopping: list[tuple[Setup, socket.socket, list[socket.socket]]] = []
        for server in ("uvicorn", "h11", "mounted", "behind middleware"):
            (tmp_path / server).mkdir()
            setup = stack.enter_context(running(server, tmp_path / server))
            stream = get_stream(setup)
            assert stream.recv(65_536).startswith(b"HTTP/1.1 200")
            stopping.append((setup, stream, [body_without_end(setup), no_body(setup)]))
        for setup, _, _ in stopping:
            setup.process.send_signal(signal.SIGTERM)
        for setup, stream, unfinished in stopping:
            said, _ = setup.process.communicate(timeout=WITHIN)
            assert "Application shutdown complete" in said and "Traceback" not in said, said
            assert closed_by_peer(stream).endswith(b"0\r\n\r\n")
            for sock in unfinished:
                answer = closed_by_peer(sock)
                # Nothing: the server stopped before it had read the headers.
                assert not answer or answer.startswith(b"HTTP/1.1 503 ")


@pytest.mark.parametrize("server", ["by hand", "workers", "reload"])
def test_each_server_stops_at_sigterm(server: str, tmp_path: Path) -> None:
    stops_with_a_stream(server, signal.SIGTERM, tmp_path)


@pytest.mark.parametrize("server", ["uvicorn", "by hand", "workers", "reload"])
def test_each_server_stops_at_sigint(server: str, tmp_path: Path) -> None:
    """The others of the test before last are uvicorn's one process, which takes both alike."""
    stops_with_a_stream(server, signal.SIGINT, tmp_path)


def stops_with_a_stream(server: str, number: signal.Signals, here: Path) -> None:
    with running(server, here) as setup:
        sock = get_stream(setup)
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
