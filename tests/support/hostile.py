"""Clients that mean no good, on plain sockets, and what they do to a server in its own process."""

import base64
import os
import re
import socket
import ssl
import subprocess
import time
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from tests.support.serving import read_lines, serving

WITHIN = 20.0
"""Seconds in which what has to come comes."""

APP = """
from mcp.server import MCPServer

mcp = MCPServer("bounds")

@mcp.tool()
async def large(size: int) -> str:
    return "x" * size
"""


class Setup:
    def __init__(
        self, process: "subprocess.Popen[str]", port: int, trusts: ssl.SSLContext | None = None
    ) -> None:
        self.process = process
        self.port = port
        self.trusts = trusts
        self.sockets: list[socket.socket] = []

    def connect(self, *, receive_buffer: int | None = None) -> socket.socket:
        """A connection, which is closed with the server."""
        sock = socket.socket()
        if receive_buffer is not None:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        sock.settimeout(WITHIN)
        sock.connect(("127.0.0.1", self.port))
        self.sockets.append(sock)
        return sock

    def websocket(self) -> socket.socket:
        sock = self.connect()
        sock.sendall(self.upgrade())
        answer = sock.recv(4_096)
        assert answer.startswith(b"HTTP/1.1 101"), answer
        return sock

    def upgrade(self, *fields: str) -> bytes:
        return self.head(
            "GET /mcp",
            "Upgrade: websocket",
            "Connection: Upgrade",
            f"Sec-WebSocket-Key: {base64.b64encode(os.urandom(16)).decode()}",
            "Sec-WebSocket-Version: 13",
            "Sec-WebSocket-Protocol: mcp",
            *fields,
        )

    def head(self, line: str, *fields: str) -> bytes:
        lines = [f"{line} HTTP/1.1", f"Host: 127.0.0.1:{self.port}", *fields]
        return "".join(f"{each}\r\n" for each in [*lines, ""]).encode()

    def post(self, body: bytes, *fields: str, declared: int | None = None) -> bytes:
        return (
            self.head(
                "POST /mcp",
                "Content-Type: application/json",
                "Accept: application/json, text/event-stream",
                f"Content-Length: {len(body) if declared is None else declared}",
                *fields,
            )
            + body
        )

    def status(self, sent: bytes) -> bytes:
        """The status with which a new connection is answered."""
        sock = self.connect()
        try:
            if self.trusts is not None:
                sock = self.trusts.wrap_socket(sock, server_hostname="127.0.0.1")
            sock.sendall(sent)
            return sock.recv(65_536).partition(b"\r\n")[0].removeprefix(b"HTTP/1.1 ")
        finally:
            sock.close()

    def health(self) -> float:
        """Seconds that a health check takes."""
        began = time.monotonic()
        assert self.status(self.head("GET /healthz")) == b"200 OK"
        return time.monotonic() - began

    def resident(self) -> float:
        """MiB that it has in memory."""
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        found = re.search(r"VmRSS:\s+(\d+)", status)
        assert found is not None
        return int(found[1]) / 1024

    def descriptors(self) -> int:
        return len(os.listdir(f"/proc/{self.process.pid}/fd"))

    def log(self) -> str:
        """What it logged until now; it is gone afterwards."""
        self.process.terminate()
        _, rest = self.process.communicate(timeout=WITHIN)
        return rest


def closed_by_peer(sock: socket.socket) -> bytes:
    received = bytearray()
    try:
        while chunk := sock.recv(65_536):
            received += chunk
    except ConnectionResetError:
        pass
    return bytes(received)


def answer_on(sock: socket.socket) -> bytes:
    received = b""
    while True:
        head, end, body = received.partition(b"\r\n\r\n")
        found = re.search(rb"content-length: (\d+)", head)
        if end and found is not None and len(body) >= int(found[1]):
            return received
        chunk = sock.recv(65_536)
        assert chunk, received
        received += chunk


@contextmanager
def hostile(
    here: Path,
    *arguments: str,
    descriptors: int | None = None,
    within: float = 60.0,
    trusts: ssl.SSLContext | None = None,
) -> Generator[Setup]:
    """A server in a process of its own.

    Args:
        trusts: What its clients trust, if the arguments name a certificate.
    """
    (here / "app.py").write_text(APP)
    with serving(
        here, "app.py", "--health", "/", *arguments, descriptors=descriptors, within=within
    ) as process:
        found = re.search(r"https?://127\.0\.0\.1:(\d+)/mcp", read_lines(process, 5))
        assert found is not None
        setup = Setup(process, int(found[1]), trusts)
        try:
            yield setup
        finally:
            for sock in setup.sockets:
                sock.close()
