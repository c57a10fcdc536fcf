"""The resuming client and a child process, which it starts, and starts again."""

import os
import sys
from pathlib import Path

import anyio
import pytest
from mcp import Client, MCPError, StdioServerParameters
from mcp.client.stdio import stdio_client
from mcp_types import LoggingMessageNotificationParams

from mcp_sessions.client.sdk import is_outcome_unknown
from mcp_sessions.client_transport import resumable
from mcp_sessions.errors import ConfigurationError
from tests.support.resuming import MODES, QUICK, Received, text_of

SERVER = """
import os, sys
from mcp.server import MCPServer
from mcp_sessions import SessionLayer, current_session

server = MCPServer("child")

@server.tool()
def session_id() -> str:
    session = current_session(default=None)
    return session.id if session is not None and session.source == "session" else "none"

@server.tool()
async def remember() -> str:
    session = current_session()
    session.state["n"] = session.state.get("n", 0) + 1
    async with session.data.edit() as data:
        data["n"] = data.get("n", 0) + 1
    await session.notify("notifications/message", {"level": "info", "data": session.state["n"]})
    return f"{session.state['n']} {data['n']}"

@server.tool()
def process() -> str:
    return str(os.getpid())

@server.tool()
def die() -> str:
    os._exit(1)

if "bare" in sys.argv:
    server.run("stdio")
else:
    SessionLayer(server).run("stdio")
"""


@pytest.fixture
def child(tmp_path: Path) -> StdioServerParameters:
    path = tmp_path / "server.py"
    path.write_text(SERVER)
    environment = {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    return StdioServerParameters(command=sys.executable, args=[str(path)], env=environment)


async def test_a_stock_client_of_a_child_has_its_connections_session(
    child: StdioServerParameters,
) -> None:
    notified: list[object] = []

    async def logged(params: LoggingMessageNotificationParams) -> None:
        notified.append(params.data)

    with anyio.fail_after(50):
        async with Client(stdio_client(child), mode="legacy", logging_callback=logged) as client:
            said = [text_of(await client.call_tool("remember", {})) for _ in range(3)]

    assert (said, notified) == (["1 1", "2 2", "3 3"], [1, 2, 3])


@pytest.mark.parametrize("mode", MODES)
async def test_a_child_has_sessions_like_any_server(
    child: StdioServerParameters, mode: str
) -> None:
    with anyio.fail_after(50):
        async with Client(resumable(child, policy=QUICK), mode=mode) as client:
            first = text_of(await client.call_tool("session_id", {}))
            assert first == text_of(await client.call_tool("session_id", {})) != "none"


@pytest.mark.parametrize("mode", ["auto", pytest.param("legacy", marks=pytest.mark.full)])
async def test_a_child_that_died_is_started_again_and_the_call_is_not(
    child: StdioServerParameters, mode: str
) -> None:
    """KEY3."""
    received = Received()
    with anyio.fail_after(50):
        transport = resumable(child, policy=QUICK, on_resume=received.on_resume)
        async with Client(transport, mode=mode) as client:
            first = text_of(await client.call_tool("process", {}))
            with pytest.raises(MCPError) as unknown:
                await client.call_tool("die", {})
            second = text_of(await client.call_tool("process", {}))

            assert is_outcome_unknown(unknown.value)
            assert second != first
            # This child keeps its sessions in memory.
            assert (await received.outcome()).is_new_session
    for pid in (first, second):
        with pytest.raises(ProcessLookupError):
            os.kill(int(pid), 0)


async def test_a_child_without_sessions_ends_as_with_the_stock_transport(
    child: StdioServerParameters,
) -> None:
    child.args.append("bare")
    with anyio.fail_after(50):
        async with Client(resumable(child, policy=QUICK), mode="legacy") as client:
            assert text_of(await client.call_tool("process", {}))
            with pytest.raises(MCPError):
                await client.call_tool("die", {})
            with pytest.raises(MCPError):
                await client.call_tool("process", {})


@pytest.mark.parametrize(
    "nothing",
    [
        StdioServerParameters(command="/nowhere/at/all"),
        StdioServerParameters(command=sys.executable, cwd="/nowhere/at/all"),
    ],
    ids=["command", "cwd"],
)
async def test_a_child_that_cannot_be_started_fails_the_first_request_and_says_why(
    nothing: StdioServerParameters,
) -> None:
    says = r"initialize was not sent: \S+ could not be started: No such file.*: /nowhere/at/all"
    error = pytest.RaisesExc(MCPError, match=says)
    with anyio.fail_after(20), pytest.RaisesGroup(error, flatten_subgroups=True):
        async with Client(resumable(nothing, policy=QUICK), mode="legacy"):
            raise AssertionError("it connected")


async def test_a_child_takes_no_options_of_a_url(child: StdioServerParameters) -> None:
    with pytest.raises(
        ConfigurationError, match="takes no more URLs, headers, auth or http_client"
    ):
        resumable(child, headers={"X": "y"})
