"""``mcp-sessions serve``: what it says, what it refuses, and that a client can connect."""

import base64
import json
import re
import signal
import socket
import sys
from collections.abc import Callable, Generator
from contextlib import ExitStack
from pathlib import Path
from textwrap import dedent

import pytest

from mcp_sessions.cli.serve import (
    _layer,  # pyright: ignore[reportPrivateUsage]
    listening_socket,
)
from mcp_sessions.cli.serve_options import parsed
from mcp_sessions.cli.serve_several import layer_maker, layers_of
from mcp_sessions.policy import TaskPolicy
from mcp_sessions.principal import ANONYMOUS
from mcp_sessions.testing.memory_client import inside
from tests.support.serving import initialize, read_lines, serving

APP = """
    from mcp.server import MCPServer

    mcp = MCPServer("notes")
"""

LAYER = f"""
    {APP}
    from mcp_sessions import SessionLayer

    layer = SessionLayer(mcp)
"""


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Generator[Path]:
    """A directory with a server and a layer; what a command imports is forgotten."""
    (tmp_path / "bare_app.py").write_text(dedent(APP))
    (tmp_path / "layer_app.py").write_text(dedent(LAYER))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", sys.path[:])
    yield tmp_path
    for name in ("bare_app", "layer_app"):
        sys.modules.pop(name, None)


def test_a_server_is_served_with_sessions_and_said_where_and_how(here: Path) -> None:
    with serving(here, "bare_app.py:mcp") as process:
        said = read_lines(process, 5)
        found = re.search(r"^  at +(http://127\.0\.0\.1:\d+/mcp)$", said, re.M)
        assert found is not None, said
        assert said.startswith("mcp-sessions ")
        assert "serves bare_app.py:mcp\n" in said
        assert "handshake (2025-03-26, 2025-06-18, 2025-11-25), modern (2026-07-28)" in said
        assert "Streamable HTTP" in said
        assert "memory://" in said

        capabilities = initialize(found.group(1))["capabilities"]
        assert isinstance(capabilities, dict) and capabilities["sessions"] == {}

        process.send_signal(signal.SIGINT)
        assert process.wait(20) == 130
        assert process.stdout is not None and process.stderr is not None
        assert process.stdout.read() == "", "stdout is the command's result, and serve has none"
        assert "Traceback" not in process.stderr.read()


def test_sigint_ends_a_background_job_with_the_status_of_an_interrupt(here: Path) -> None:
    """A shell that is not interactive starts its background jobs with SIGINT ignored."""
    with ExitStack() as stack:
        kept = signal.signal(signal.SIGINT, signal.SIG_IGN)
        try:
            process = stack.enter_context(serving(here, "bare_app.py:mcp"))
        finally:
            signal.signal(signal.SIGINT, kept)
        read_lines(process, 5)
        process.send_signal(signal.SIGINT)
        assert process.wait(20) == 130


def test_a_layer_is_served_as_it_is_and_in_json_every_line_is_an_object(here: Path) -> None:
    with serving(here, "layer_app.py", "--log-format", "json", "--path", "/a/b") as process:
        said = json.loads(read_lines(process, 1))
        assert said["target"] == "layer_app.py"
        assert said["url"].endswith("/a/b")
        assert said["eras"]["modern"] == ["2026-07-28"]
        assert said["store"].startswith("MemoryStore")

        assert "capabilities" in initialize(said["url"])

        process.send_signal(signal.SIGTERM)
        process.wait(20)
        assert process.stderr is not None
        for line in process.stderr:
            json.loads(line)


def test_an_unknown_store_is_refused_before_the_target_is_looked_at(
    refused: Callable[..., str],
) -> None:
    line = refused("serve", "nowhere.py", "--store", "floppy://user:secret@a/b")

    assert "unknown store" in line and "floppy" in line
    assert "secret" not in line


def test_a_wrong_target_is_refused(refused: Callable[..., str], here: Path) -> None:
    (here / "empty_app.py").write_text("")

    assert "no such file: nowhere.py" in refused("serve", "nowhere.py")
    assert "has no attribute 'app'" in refused("serve", "bare_app.py:app")
    assert "has nothing to serve" in refused("serve", "empty_app.py")
    assert "is a type, not an MCP server" in refused("serve", "bare_app.py:MCPServer")


def test_a_tool_that_can_take_no_handle_is_refused(
    refused: Callable[..., str], here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In one line, before anything is served."""
    own = dedent(APP) + "@mcp.tool()\ndef pay(session: str) -> str: return session\n"
    (here / "bare_app.py").write_text(own)
    monkeypatch.setenv("MCP_SESSIONS_KEYS", "k" * 43)

    line = refused("serve", "bare_app.py", "--port", "0", "--conversations", "--handle", "pay")

    assert "the tool pay has an argument session of its own" in line


def test_a_port_in_use_is_refused(refused: Callable[..., str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]

        line = refused("serve", "bare_app.py", "--port", str(port))

    assert f"cannot listen on 127.0.0.1, port {port}: the port is in use; choose another" in line


def test_a_host_that_is_not_this_machine_is_refused(refused: Callable[..., str]) -> None:
    # 192.0.2.0/24 is for documentation: nobody has it.
    line = refused("serve", "bare_app.py", "--host", "192.0.2.1", "--port", "0", "--no-auth")

    assert "cannot listen on 192.0.2.1, port 0: this machine has no such address" in line
    assert "give --host 127.0.0.1" in line


def test_the_socket_listens_at_once_so_that_an_early_client_waits() -> None:
    with listening_socket("127.0.0.1", 0) as sock:
        with socket.create_connection(sock.getsockname(), timeout=5) as early:
            assert early.getpeername() == sock.getsockname()


def test_a_store_of_each_server_is_refused_where_there_is_one(
    here: Path, refused: Callable[..., str]
) -> None:
    """It made a file of that name."""
    line = refused("serve", "bare_app.py", "--store", "sqlite:///{server}.db")
    assert "--store: {server} stands for a server of a --config file" in line
    assert not list(here.glob("*.db"))


def test_a_store_that_is_named_by_nothing_is_refused(refused: Callable[..., str]) -> None:
    """``--store "$STORE"``, and the variable is not set: what was to be kept would be lost."""
    assert "unknown store ''" in refused("serve", "bare_app.py", "--store", "")


@pytest.mark.parametrize("readable", [True, False])
@pytest.mark.parametrize("of", ["server", "config"])
def test_a_client_can_read_its_state_if_that_is_wanted(here: Path, readable: bool, of: str) -> None:
    """Of every way to serve: a server of this process, and those of a file."""
    entry = {"command": sys.executable}
    (here / "mcp.json").write_text(json.dumps({"mcpServers": {"one": entry}}))
    what = ["bare_app.py:mcp"] if of == "server" else ["--config", "mcp.json"]
    options = parsed([*(["--readable-state"] if readable else []), *what])
    if of == "config":
        make = layer_maker(options, "memory://")
        [assembly] = layers_of(options, make).values()
    else:
        assembly = inside(_layer(options)[0])
    token = assembly.security.seal_state(
        {"colour": "blue"}, session_id="s", principal=ANONYMOUS, version=1, expires_at=2e9
    )
    parts = [base64.urlsafe_b64decode(part + "==") for part in re.split(r"[.~]", token)]
    assert any(b"blue" in part for part in parts) is readable


@pytest.mark.parametrize(
    "given", [(), ("--tasks",), ("--tasks", "--task-after", "0"), ("--tasks", "--task-tools")]
)
@pytest.mark.parametrize("of", ["server", "command", "config"])
def test_long_calls_become_tasks_if_that_is_wanted(
    here: Path, given: tuple[str, ...], of: str
) -> None:
    """Of every way to serve."""
    (here / "mcp.json").write_text(json.dumps({"mcpServers": {"one": {"command": sys.executable}}}))
    ways = {
        "server": ["bare_app.py:mcp"],
        "command": ["--", sys.executable],
        "config": ["--config", "mcp.json"],
    }
    options = parsed([*given, *ways[of]])
    if of == "config":
        make = layer_maker(options, "memory://")
        [assembly] = layers_of(options, make).values()
    else:
        assembly = inside(_layer(options)[0])
    tasks = assembly.runner.tasks
    if not given:
        assert tasks is None
    else:
        assert tasks is not None
        after = 0 if "--task-after" in given else TaskPolicy().after
        assert tasks.policy == TaskPolicy(after=after, tools="--task-tools" in given)
