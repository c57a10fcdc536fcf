"""One server file that asks: each client gets the same results, whatever serves the file.

It runs as an ``MCPServer``, with FastMCP, and as a command behind ``mcp-sessions serve``.
"""

import os
import subprocess
import sys
from collections.abc import Callable, Generator
from typing import Any, Literal, cast

import anyio
import mcp_types as types
import pytest
from mcp import Client
from mcp.shared.exceptions import MCPError

from mcp_sessions import SessionLayer, resumable
from tests.interop.clients import ClientKind
from tests.interop.driver import Driver
from tests.interop.modern import Mode, TypeScript2
from tests.support.apps import DEPRECATED
from tests.support.asking import TOOLS, fastmcp_server, mcp_server
from tests.support.processes import ROOT, free_port, wait_until_it_listens
from tests.support.resuming import QUICK, text_of
from tests.support.servers import serve

pytestmark = [
    pytest.mark.layer_only,
    pytest.mark.timeout(180),
    pytest.mark.filterwarnings(DEPRECATED),
    # One client of each era.
    pytest.mark.by_command("stock-2025", "stock-2026"),
]

Kind = Literal["MCPServer", "FastMCP", "command"]
KINDS: tuple[Kind, ...] = ("MCPServer", "FastMCP", "command")


# What a command's questions are is of tests/server/upstream/external. Each client of these begins
# a process there.
@pytest.fixture(
    scope="module",
    params=[
        pytest.param(kind, marks=[pytest.mark.full] if kind == "command" else []) for kind in KINDS
    ],
)
def address(request: pytest.FixtureRequest) -> Generator[str]:
    """Where the server file is served: host and port."""
    if request.param == "command":
        yield from _command()
        return
    server = {"MCPServer": mcp_server, "FastMCP": fastmcp_server}[request.param]()
    with serve(SessionLayer(server).asgi_app()) as running:
        yield f"{running.host}:{running.port}"


def _command() -> Generator[str]:
    port = free_port()
    command = [
        sys.executable, "-m", "mcp_sessions.cli", "serve", "--port", str(port),
        "--log-level", "error", "--", sys.executable, "-m", "tests.support.asking",
    ]  # fmt: skip
    paths = f"{ROOT}:{ROOT}/transports"
    process = subprocess.Popen(command, env={**os.environ, "PYTHONPATH": paths}, cwd=ROOT)
    try:
        wait_until_it_listens(process, port)
        yield f"127.0.0.1:{port}"
    finally:
        process.terminate()
        try:
            process.wait(20)
        finally:
            process.kill()


class User:
    """Answers questions of each kind, and notes them."""

    def __init__(self, action: Literal["accept", "decline", "cancel"] = "accept") -> None:
        self.action: Any = action
        self.asked: list[str] = []

    async def elicit(self, context: Any, params: Any) -> types.ElicitResult:
        self.asked.append(params.message)
        content: Any = {"answer": f"<{params.message}>"}
        accepts_form = self.action == "accept" and params.mode != "url"
        return types.ElicitResult(action=self.action, content=content if accepts_form else None)

    async def sample(self, context: Any, params: Any) -> types.CreateMessageResult:
        text = types.TextContent(text=f"you said {params.messages[0].content.text}")
        return types.CreateMessageResult(role="assistant", content=text, model="none")

    async def roots(self, context: Any) -> types.ListRootsResult:
        return types.ListRootsResult(roots=[types.Root(uri=cast(Any, "file:///here"))])

    def callbacks(self) -> Any:
        return {
            "elicitation_callback": self.elicit,
            "sampling_callback": self.sample,
            "list_roots_callback": self.roots,
        }


CLIENTS: dict[str, tuple[str, str | None]] = {
    "stock-2025": ("legacy", None),
    "stock-2026": ("2026-07-28", None),
    "stock-auto": ("auto", None),
    "resumable-http-2025": ("legacy", "http"),
    "resumable-http-2026": ("2026-07-28", "http"),
    "resumable-websocket-2025": ("legacy", "ws"),
    "resumable-websocket-2026": ("2026-07-28", "ws"),
}
"""A name → the mode of the SDK's client, and the scheme of ``resumable()``. None: without it."""


def client_of(name: str, address: str, **callbacks: Any) -> Client:
    mode, scheme = CLIENTS[name]
    url = f"{scheme or 'http'}://{address}/mcp"
    server: Any = url if scheme is None else resumable(url, policy=QUICK)
    return Client(server, mode=cast(Any, mode), **callbacks)


@pytest.mark.parametrize("name", CLIENTS)
async def test_each_client_gets_the_same_results(address: str, name: str) -> None:
    user = User()
    with anyio.fail_after(60):
        async with client_of(name, address, **user.callbacks()) as client:
            results = [text_of(await client.call_tool(tool, {})) for tool in TOOLS]
    assert results == [
        "accept: <how many?>",
        "you said hello",
        "file:///here",
        "accept",
        "accept: <one?> and accept: <two?>",
    ]
    assert user.asked[:2] == ["how many?", "sign in"] and sorted(user.asked[2:]) == ["one?", "two?"]


@pytest.mark.by_command("stock-2026")
@pytest.mark.parametrize("name", ["stock-2025", "stock-2026", "resumable-websocket-2026"])
@pytest.mark.parametrize("action", ["decline", "cancel"])
async def test_a_user_may_decline_or_cancel(address: str, name: str, action: Any) -> None:
    user = User(action)
    with anyio.fail_after(60):
        async with client_of(name, address, **user.callbacks()) as client:
            results = [text_of(await client.call_tool(tool, {})) for tool in ("ask", "visit")]
    assert results == [action, action]


@pytest.mark.by_command("stock-2025")
@pytest.mark.parametrize("name", ["stock-2025", "stock-2026", "resumable-websocket-2026"])
async def test_a_client_that_declared_nothing_is_not_asked(address: str, name: str) -> None:
    """The tool gets an error, which names no user's answer, and the call ends."""
    with anyio.fail_after(60):
        async with client_of(name, address) as client:
            for tool in ("ask", "sample", "roots"):
                try:
                    result = await client.call_tool(tool, {})
                except MCPError as failed:
                    assert failed.error.code < 0
                else:
                    assert result.is_error and "accept" not in text_of(result)


@pytest.mark.full
@pytest.mark.parametrize("mode", ["auto", "2026-07-28", "legacy"])
async def test_the_typescript_client_gets_the_same_results(
    address: str, driver_of: Callable[[ClientKind], Driver], mode: Mode
) -> None:
    driver = await anyio.to_thread.run_sync(driver_of, "typescript-2")
    with anyio.fail_after(60):
        async with TypeScript2.open(driver, f"http://{address}/mcp", mode) as client:
            results = [await client.call(tool, {}) for tool in ("ask", "sample", "roots")]
            assert client.errors == ()
    assert results == ["accept: answer to how many?", "sampled hello", "file:///interop"]
    assert client.asked == ("how many?",)
