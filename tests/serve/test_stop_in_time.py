"""``serve`` with its defaults stops within the 10 seconds that Docker gives it.

Whoever waits for a call that is cut gets the error -31012, over each transport and in both eras.
"""

import json
import re
import signal
import socket
from pathlib import Path

import pytest

from tests.serve.test_protocols import FIN, TEXT
from tests.serve.test_stop_of_another_server import modern_call, running_call
from tests.support.hostile import Setup, closed_by_peer
from tests.support.serving import INITIALIZE, read_lines, serving

DOCKER = 10
"""Seconds between SIGTERM and SIGKILL of ``docker stop``."""

APP = """
import time
import anyio
from mcp.server import MCPServer

mcp = MCPServer("stops")

@mcp.tool()
async def wait(seconds: float) -> str:
    with anyio.CancelScope(shield=True):
        await anyio.sleep(seconds)
    return "done"

@mcp.tool()
def block(seconds: float) -> str:
    time.sleep(seconds)
    return "done"
"""


def websocket_call(setup: Setup, name: str) -> socket.socket:
    sock = setup.websocket()
    params = {"name": name, "arguments": {"seconds": 600}}
    call = {"jsonrpc": "2.0", "id": 7, "method": "tools/call", "params": params}
    began = {"jsonrpc": "2.0", "method": "notifications/initialized"}
    ping = {"jsonrpc": "2.0", "id": 8, "method": "ping"}
    for message, answered in (
        (INITIALIZE, b'"id":1,'),
        (began, b""),
        (call, b""),
        (ping, b'"id":8,'),
    ):
        text = json.dumps(message).encode()
        mask = bytes(4)
        sock.sendall(bytes([TEXT | FIN, 0xFE]) + len(text).to_bytes(2, "big") + mask + text)
        received = b""
        while answered not in received:
            chunk = sock.recv(65_536)
            assert chunk, received
            received += chunk
    return sock


@pytest.mark.parametrize("delay", [(), ("--drain-delay", "3")], ids=["alone", "as a replica"])
def test_calls_that_ignore_their_end_are_cut_in_time(
    delay: tuple[str, ...], tmp_path: Path
) -> None:
    (tmp_path / "app.py").write_text(APP)
    with serving(tmp_path, "app.py", *delay, within=60) as process:
        found = re.search(r"http://127\.0\.0\.1:(\d+)/mcp", read_lines(process, 5))
        assert found is not None
        setup = Setup(process, int(found[1]))
        calls = [running_call(setup, 600), modern_call(setup, 600)]
        for sock in calls:
            sock.settimeout(60)
            assert sock.recv(15) == b"HTTP/1.1 200 OK"
        calls += [websocket_call(setup, name) for name in ("wait", "block")]
        setup.process.send_signal(signal.SIGTERM)
        _, said = process.communicate(timeout=DOCKER)
        assert "stopped: every connection is closed" in said, said
        assert process.returncode == 0
        for sock in setup.sockets:
            assert sock not in calls or b"-31012" in closed_by_peer(sock)
            sock.close()
