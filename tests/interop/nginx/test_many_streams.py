"""deploy/nginx.conf with more streams than the default of nginx allows."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.support.nginx import nginx
from tests.support.processes import free_port, wait_until_it_listens

pytestmark = [pytest.mark.full, pytest.mark.timeout(300)]

SERVER = """
from mcp.server import MCPServer
from mcp_sessions import SessionLayer, current_session

mcp = MCPServer("many")


@mcp.tool()
async def announce() -> str:
    await current_session().notify("notifications/tools/list_changed")
    return "done"


layer = SessionLayer(mcp)
"""
STREAMS = 1_100
"""More than nginx holds with 1,024 connections of a worker: 512, since each takes two."""

AT_ONCE = 16
CLIENT = {"name": "one of many", "version": "1"}
BEGIN: dict[str, Any] = {"protocolVersion": "2025-11-25", "capabilities": {}, "clientInfo": CLIENT}
CALL: dict[str, Any] = {"name": "announce", "arguments": {}}
EVENT = b"notifications/tools/list_changed"


def test_more_than_a_thousand_streams_stay_open_and_each_gets_its_events(
    tmp_path: Path,
) -> None:
    (tmp_path / "many.py").write_text(SERVER)
    front, back = free_port(), free_port()
    with open(tmp_path / "log", "wb") as log:
        command = (sys.executable, "-m", "mcp_sessions.cli", "serve", str(tmp_path / "many.py"))
        server = subprocess.Popen([*command, "--port", str(back)], stderr=log)
        try:
            wait_until_it_listens(server, back)
            with nginx(tmp_path, [back], front):
                asyncio.run(hold(front))
        finally:
            server.terminate()
            server.wait(timeout=30)
    said = (tmp_path / "said").read_text()
    assert "worker_connections are not enough" not in said and "Too many open files" not in said


async def hold(port: int) -> None:
    """Open the streams, and let some get an event while all others are open."""
    turns = asyncio.Semaphore(AT_ONCE)

    async def begin() -> Stream:
        async with turns, asyncio.timeout(60):
            return await opened(port)

    streams = await asyncio.gather(*(begin() for _ in range(STREAMS)))
    try:
        for each in (streams[0], streams[STREAMS // 2], streams[-1]):
            caller = Stream(*await asyncio.open_connection("127.0.0.1", port), each.session)
            await caller.post("tools/call", CALL)
            caller.writer.close()
            async with asyncio.timeout(30):
                while EVENT not in await each.line():
                    pass
        assert not any(each.reader.at_eof() for each in streams)
    finally:
        for each in streams:
            each.writer.close()


@dataclass
class Stream:
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    session: str = ""

    async def send(self, verb: str, body: bytes = b"") -> dict[str, str]:
        """Send a request, and return the headers of its answer, which is 200."""
        lines = [f"{verb} /mcp HTTP/1.1", "Host: 127.0.0.1", f"Content-Length: {len(body)}"]
        lines += ["Accept: application/json, text/event-stream", "Content-Type: application/json"]
        lines += [f"Mcp-Session-Id: {self.session}"] if self.session else []
        self.writer.write("\r\n".join([*lines, "", ""]).encode() + body)
        status, *fields = (await self.reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
        assert status.startswith("HTTP/1.1 200 "), status
        pairs = (field.partition(":") for field in fields)
        return {name.lower(): value.strip() for name, _, value in pairs}

    async def post(self, method: str, params: dict[str, Any]) -> dict[str, str]:
        """Send a request of MCP, and read its answer to the end."""
        message = {"jsonrpc": "2.0", "id": 1, "method": method, "params": params}
        headers = await self.send("POST", json.dumps(message).encode())
        if "content-length" in headers:
            await self.reader.readexactly(int(headers["content-length"]))
        else:
            await self.reader.readuntil(b"\r\n0\r\n\r\n")
        return headers

    async def line(self) -> bytes:
        line = await self.reader.readline()
        assert line, "the stream ended"
        return line


async def opened(port: int) -> Stream:
    stream = Stream(*await asyncio.open_connection("127.0.0.1", port))
    stream.session = (await stream.post("initialize", BEGIN))["mcp-session-id"]
    await stream.send("GET")
    return stream
