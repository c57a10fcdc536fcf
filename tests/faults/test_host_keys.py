"""A host is killed while its call runs, and another run of it sends the call again with its key.

The server is ``mcp-sessions serve`` in a process of its own, and so is the host. What is wrapped is
a file, a command or a URL.
"""

import json
import os
import subprocess
import sys
import time
from collections.abc import Generator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import httpx
import pytest

from mcp_sessions.cli.main import main
from tests.house.source import ROOT
from tests.support.modern import MODERN, envelope, routing_headers
from tests.support.processes import free_port, wait_until_it_listens
from tests.support.raw import Json
from tests.support.serving import INITIALIZE

pytestmark = [pytest.mark.on_network, pytest.mark.timeout(120)]

TOOLS = """
import asyncio
import os
import sys
from pathlib import Path

from mcp.server import MCPServer

mcp = MCPServer("slow")


@mcp.tool()
async def work(name: str) -> str:
    with open(os.environ["RUNS"], "a") as runs:
        runs.write(name + "\\n")
    while not Path(os.environ["RUNS"] + ".go").exists():
        await asyncio.sleep(0.02)
    return f"did {name}"


if __name__ == "__main__":
    if len(sys.argv) > 1:
        mcp.run("streamable-http", port=int(sys.argv[1]))
    else:
        mcp.run("stdio")
"""
HOST = """
import sys
import httpx

httpx.post(sys.argv[1], content=sys.stdin.buffer.read(), timeout=60, headers=[
    tuple(each.split(": ", 1)) for each in sys.argv[2:]
])
"""
"""One run of the host: it calls, and waits."""


@contextmanager
def running(*command: str, port: int, **variables: str) -> Generator[None]:
    process = subprocess.Popen(
        [sys.executable, *command],
        env={**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT}/transports", **variables},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
    )
    try:
        wait_until_it_listens(process, port)
        yield
    finally:
        process.kill()
        process.wait()


class Service:
    """A server that is served with keys of hosts, and what one user sends to it."""

    def __init__(self, url: str, user: str, runs: Path) -> None:
        self.url, self._user, self._runs = url, user, runs

    def call(self, era: str, name: str, **more: str) -> tuple[bytes, dict[str, str]]:
        """Return the body of a call, and its headers."""
        params: Json = {"name": "work", "arguments": {"name": name}}
        headers = {
            "Accept": "application/json, text/event-stream",
            "Content-Type": "application/json",
            "Authorization": f"Bearer {self._user}",
            "Idempotency-Key": "one and the same",
            **more,
        }
        if era == "modern":
            params["_meta"] = envelope()
        message: Json = {"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": params}
        if era == "modern":
            headers |= {"Mcp-Protocol-Version": MODERN, **routing_headers(message)}
        return json.dumps(message).encode(), headers

    def connected(self, era: str) -> dict[str, str]:
        """Return the headers that name a new connection."""
        if era == "modern":
            return {}
        body, headers = self.call("handshake", "")
        del headers["Idempotency-Key"]
        body = json.dumps(INITIALIZE).encode()
        answer = httpx.post(self.url, content=body, headers=headers, timeout=30)
        return {"Mcp-Session-Id": answer.headers["mcp-session-id"]}

    def answered(self, era: str, name: str = "it") -> Json:
        body, headers = self.call(era, name, **self.connected(era))
        answer = httpx.post(self.url, content=body, headers=headers, timeout=30)
        text = answer.text
        if answer.headers["content-type"].startswith("text/event-stream"):
            text = [line for line in text.splitlines() if line.startswith("data: {")][-1][6:]
        return json.loads(text)

    def cut(self, era: str) -> None:
        """Kill a host (``kill -9``) whose call runs."""
        body, headers = self.call(era, "it", **self.connected(era))
        said = [f"{name}: {value}" for name, value in headers.items()]
        host = subprocess.Popen(
            [sys.executable, "-c", HOST, self.url, *said], stdin=subprocess.PIPE
        )
        assert host.stdin is not None
        try:
            host.stdin.write(body)
            host.stdin.close()
            until = time.monotonic() + 60
            while not self.runs and time.monotonic() < until:
                time.sleep(0.02)
            assert self.runs == ["it"]
        finally:
            host.kill()
            host.wait()

    def goes_on(self) -> None:
        Path(f"{self._runs}.go").touch()

    @property
    def runs(self) -> list[str]:
        return self._runs.read_text().split() if self._runs.exists() else []


@pytest.fixture(params=["file", "command", "url"])
def service(
    request: pytest.FixtureRequest, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> Generator[Service]:
    tools, keys, runs = tmp_path / "tools.py", tmp_path / "keys.json", tmp_path / "runs"
    tools.write_text(TOOLS)
    assert main(["keys", "add", "host", "--file", str(keys)]) == 0
    user, port, behind = capsys.readouterr().out.strip(), free_port(), free_port()
    target = {
        "file": [str(tools)],
        "command": ["--env", "RUNS", "--", sys.executable, str(tools)],
        "url": [f"http://127.0.0.1:{behind}/mcp"],
    }[request.param]
    serve = ("-m", "mcp_sessions.cli", "serve", "--port", str(port), "--api-keys", str(keys))
    options = ("--store", f"sqlite:///{tmp_path / 's.db'}", "--tasks", "--task-after", "60")
    named = ("--request-key", "header:Idempotency-Key")
    with ExitStack() as stack:
        if request.param == "url":
            stack.enter_context(running(str(tools), str(behind), port=behind, RUNS=str(runs)))
        stack.enter_context(running(*serve, *options, *named, *target, port=port, RUNS=str(runs)))
        yield Service(f"http://127.0.0.1:{port}/mcp", user, runs)


@pytest.mark.parametrize("era", ["modern", pytest.param("handshake", marks=pytest.mark.full)])
def test_the_call_of_a_host_that_was_killed_is_answered_when_it_is_sent_again(
    service: Service, era: str
) -> None:
    service.cut(era)
    service.goes_on()
    for _ in range(2):
        answer = service.answered(era)
        assert answer["result"]["content"][0]["text"] == "did it"
    conflict = service.answered(era, "another")
    assert conflict["error"]["data"]["reason"] == "key_reused"
    assert service.runs == ["it"]
