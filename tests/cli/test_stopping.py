"""SIGTERM: what is announced, what is still served, and what happens to each connection."""

import http.client
import json
import re
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from textwrap import dedent
from typing import Any, ClassVar

import pytest

from tests.support.serving import INITIALIZE, read_lines, serving

APP = """
    import anyio
    from mcp.server import MCPServer
    from mcp.server.mcpserver import Context
    from pydantic import BaseModel

    mcp = MCPServer("stopping")

    class Answer(BaseModel):
        text: str

    @mcp.tool()
    async def gate(name: str, ctx: Context) -> str:
        await ctx.report_progress(1)
        while not await anyio.Path(name).exists():
            await anyio.sleep(0.01)
        return "through"

    @mcp.tool()
    async def ask(ctx: Context) -> str:
        answer = await ctx.elicit("what?", Answer)
        return answer.data.text
"""

JSON = {"Content-Type": "application/json", "Accept": "application/json, text/event-stream"}
WITHIN = 30.0


@pytest.fixture(autouse=True)
def here(tmp_path: Path) -> Generator[Path]:
    """A directory with a server; every connection is closed afterwards."""
    (tmp_path / "app.py").write_text(dedent(APP))
    yield tmp_path
    while Kept.all_of_them:
        kept = Kept.all_of_them.pop()
        for response in kept.responses:
            response.close()
        kept.connection.close()


@contextmanager
def served(here: Path, *arguments: str) -> Generator[tuple[subprocess.Popen[str], int]]:
    with serving(here, "app.py", "--health", "/", *arguments) as process:
        found = re.search(r"http://127\.0\.0\.1:(\d+)/mcp", read_lines(process, 5))
        assert found is not None
        yield process, int(found[1])


class Kept:
    all_of_them: ClassVar[list["Kept"]] = []

    def __init__(self, port: int) -> None:
        self.all_of_them.append(self)
        self.responses: list[http.client.HTTPResponse] = []
        self.connection = http.client.HTTPConnection("127.0.0.1", port, timeout=WITHIN)
        self.session: str | None = None

    def send(self, message: dict[str, Any]) -> None:
        """A POST, whose response is not read yet."""
        headers = {**JSON, **({"Mcp-Session-Id": self.session} if self.session else {})}
        body = json.dumps({"jsonrpc": "2.0", **message})
        self.connection.request("POST", "/mcp", body, headers)

    def post(self, message: dict[str, Any]) -> http.client.HTTPResponse:
        self.send(message)
        answer = self.response()
        answer.read()
        return answer

    def response(self) -> http.client.HTTPResponse:
        answer = self.connection.getresponse()
        self.responses.append(answer)
        return answer

    def initialize(self) -> "Kept":
        answer = self.post(
            {**INITIALIZE, "params": {**PARAMS, "capabilities": {"elicitation": {}}}}
        )
        self.session = answer.getheader("mcp-session-id")
        assert self.session is not None
        return self

    def is_closed(self) -> bool:
        """Whether the server closes it, with nothing said."""
        assert self.connection.sock is not None
        self.connection.sock.settimeout(WITHIN)
        return self.connection.sock.recv(1) == b""


PARAMS: dict[str, Any] = INITIALIZE["params"]
PING: dict[str, Any] = {"id": 7, "method": "ping"}


def get(port: int, path: str) -> tuple[int, str | None]:
    """Status and ``Connection`` of an answer, on a connection of its own."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=WITHIN)
    try:
        connection.request("GET", path)
        answer = connection.getresponse()
        return answer.status, answer.getheader("connection")
    finally:
        connection.close()


def until(condition: Callable[[], bool]) -> None:
    """Wait for something that nobody tells of."""
    end = time.monotonic() + WITHIN
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


def refuses(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), timeout=WITHIN).close()
    except ConnectionRefusedError:
        return True
    return False


def test_in_the_delay_everything_is_served_and_each_response_is_the_last_of_its_connection(
    here: Path,
) -> None:
    """A client learns that it should send no more requests, and none is refused before that: on new
    connections and on kept ones.
    """
    with served(here, "--drain-delay", "600") as (process, port):
        used, idle = Kept(port).initialize(), Kept(port).initialize()
        process.terminate()
        until(lambda: get(port, "/readyz")[0] == 503)

        assert get(port, "/healthz") == (200, "close")
        answer = used.post(PING)
        assert (answer.status, answer.getheader("connection")) == (200, "close")
        assert Kept(port).initialize().session is not None
        assert idle.connection.sock is not None

        # Ctrl-C has no delay: what is idle is closed, and the process ends.
        process.send_signal(signal.SIGINT)
        assert idle.is_closed()
        process.wait(WITHIN)


def test_after_it_the_listener_is_closed_and_what_runs_is_served_to_its_end(here: Path) -> None:
    """So that who connects is refused, and may safely try another server; what is idle is
    closed; the response that runs is the last of its connection.
    """
    with served(here, "--drain-delay", "0", "--store", "memory://") as (process, port):
        running = Kept(port)
        idle = Kept(port).initialize()
        # Of the modern era: nothing is asked on a connection of its own.
        running.connection.request(
            "POST",
            "/mcp",
            json.dumps(MODERN_CALL),
            {**JSON, "Mcp-Protocol-Version": "2026-07-28", "Mcp-Method": "tools/call",
             "Mcp-Name": "gate"},
        )  # fmt: skip
        answer = running.response()
        assert answer.status == 200
        process.terminate()

        until(lambda: refuses(port))
        assert idle.is_closed()
        (here / "open").touch()
        assert b'"through"' in answer.read()
        process.wait(WITHIN)


@pytest.mark.parametrize("first", [signal.SIGINT, signal.SIGTERM])
def test_interrupted_again_it_ends_what_runs_at_once(here: Path, first: signal.Signals) -> None:
    """The waiting client gets an answer, and nothing is left in the log that looks like a
    defect.
    """
    with served(here, "--drain-delay", "0", "--grace", "600") as (process, port):
        running = Kept(port).initialize()
        arguments = {"name": "never"}
        running.send(
            {"id": 1, "method": "tools/call", "params": {"name": "gate", "arguments": arguments}}
        )
        stream = running.response()
        process.send_signal(first)
        until(lambda: get(port, "/readyz")[0] == 503)

        process.send_signal(signal.SIGINT)
        assert _next(stream)["error"]["code"] == -31012
        process.wait(WITHIN)
        assert process.stderr is not None
        said = process.stderr.read()
        assert "interrupted again" in said and "Traceback" not in said


def test_a_new_connection_gets_the_time_to_ask(here: Path) -> None:
    """It was accepted before the listener was closed: whoever made it was not refused, and
    cannot know whether what it sends is served.
    """
    with served(here, "--drain-delay", "0") as (process, port):
        connections = [Kept(port) for _ in range(20)]
        for kept in connections:
            kept.connection.connect()
        process.terminate()
        until(lambda: refuses(port))

        for kept in connections:
            kept.send({**INITIALIZE})
        assert [kept.response().status for kept in connections] == [200] * 20


def test_alone_it_listens_on_while_a_call_may_wait_for_its_client(here: Path) -> None:
    """The client answers on a connection of its own, and no other process could take that."""
    with served(here, "--drain-delay", "0") as (process, port):
        asking, answering = Kept(port).initialize(), Kept(port)
        answering.session = asking.session
        asking.send({"id": 1, "method": "tools/call", "params": {"name": "ask", "arguments": {}}})
        stream = asking.response()
        question = _next(stream)
        assert question["method"] == "elicitation/create"
        process.terminate()
        until(lambda: get(port, "/readyz")[0] == 503)

        assert answering.post({**PING}).status == 503
        result = {"action": "accept", "content": {"text": "heard"}}
        answer = Kept(port)
        answer.session = asking.session
        assert answer.post({"id": question["id"], "result": result}).status == 202
        assert _next(stream)["result"]["content"][0]["text"] == "heard"
        process.wait(WITHIN)


MODERN_CALL = {
    "jsonrpc": "2.0",
    "id": 1,
    "method": "tools/call",
    "params": {
        "name": "gate",
        "arguments": {"name": "open"},
        "_meta": {
            "progressToken": 1,
            "io.modelcontextprotocol/protocolVersion": "2026-07-28",
            "io.modelcontextprotocol/clientCapabilities": {},
            "io.modelcontextprotocol/clientInfo": {"name": "test", "version": "1"},
        },
    },
}


def _next(stream: http.client.HTTPResponse) -> dict[str, Any]:
    while True:
        line = stream.readline()
        assert line, "the stream ended"
        if line.startswith(b"data: {"):
            return json.loads(line.removeprefix(b"data: "))
