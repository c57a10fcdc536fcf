"""``serve`` on an address that the network reaches: not without authentication, unless asked to."""

import json
import re
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from mcp_sessions.cli.main import main
from tests.support.children import CHILD
from tests.support.serving import read_lines, serving

COMMAND = ("--", sys.executable, "-S", CHILD)
OPEN = 'from mcp.server import MCPServer\nmcp = MCPServer("notes")\n'
LAYER = "from mcp_sessions import SessionLayer\nlayer = SessionLayer(mcp)\n"
CLOSED = """
from mcp.server import MCPServer
from mcp.server.auth.settings import AuthSettings

class Nobody:
    async def verify_token(self, token):
        return None

settings = AuthSettings(
    issuer_url="https://issuer.example",
    resource_server_url="https://server.example/mcp",
    validate_token_resource=False,
)
mcp = MCPServer("notes", auth=settings, token_verifier=Nobody())
"""
FASTMCP = """
from fastmcp import FastMCP
from fastmcp.server.auth.providers.jwt import StaticTokenVerifier

mcp = FastMCP("notes", auth=StaticTokenVerifier({}))
"""


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory with a server of each kind."""
    (tmp_path / "open.py").write_text(OPEN)
    (tmp_path / "layer.py").write_text(OPEN + LAYER)
    (tmp_path / "closed.py").write_text(CLOSED)
    (tmp_path / "closed_layer.py").write_text(CLOSED + LAYER)
    (tmp_path / "fast.py").write_text(FASTMCP)
    server = {"command": sys.executable, "args": ["-S", CHILD]}
    (tmp_path / "mcp.json").write_text(json.dumps({"mcpServers": {"one": server}}))
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.1", "myhost.example"])
@pytest.mark.parametrize(
    "target",
    [
        ("open.py",),
        ("layer.py",),
        ("http://127.0.0.1:1/mcp",),
        ("--config", "mcp.json"),
        COMMAND,
    ],
    ids=["server", "layer", "url", "config", "command"],
)
def test_a_start_is_refused_where_everybody_could_call_the_server(
    capsys: pytest.CaptureFixture[str], target: tuple[str, ...], host: str
) -> None:
    """O: one line names the ways to go on."""
    assert main(["serve", "--host", host, "--port", "0", *target]) == 2

    said = capsys.readouterr()
    assert said.out == ""
    assert re.fullmatch(r"mcp-sessions serve: --host [^\n]+\n", said.err)
    for way in (f"--host {host} ", "--api-keys FILE", "127.0.0.1", "--no-auth"):
        assert way in said.err


def test_each_worker_is_refused_too(here: Path) -> None:
    """The keeper of the workers does not load the target."""
    with serving(here, "--host", "0.0.0.0", "--workers", "2", "open.py") as process:
        assert "--no-auth" in read_lines(process, 1)
        assert process.wait(20) == 2


@pytest.mark.parametrize(
    ("arguments", "access"),
    [
        (("--host", "127.0.0.1", *COMMAND), "every program on this machine"),
        (("--host", "127.0.0.2", *COMMAND), "every program on this machine"),
        (("--host", "localhost", *COMMAND), "every program on this machine"),
        (("--stdio", *COMMAND), "the program at standard input and output"),
        (("--host", "0.0.0.0", "closed.py"), "clients with a credential"),
        (("--host", "0.0.0.0", "closed_layer.py:layer"), "clients with a credential"),
        (("--host", "0.0.0.0", "fast.py"), "clients with a credential"),
        (
            ("--host", "0.0.0.0", "--no-auth", *COMMAND),
            "every client that reaches the address (--no-auth)",
        ),
    ],
)
def test_check_says_who_may_use_it(
    capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], access: str
) -> None:
    port = () if "--stdio" in arguments else ("--port", "0")
    assert main(["serve", "--check", *port, *arguments]) == 0
    assert f"access      {access}\n" in capsys.readouterr().out


@pytest.mark.parametrize(
    "options",
    [("--api-keys", ""), ("--auth-issuer", "", "--auth-audience", "https://mcp.example/mcp")],
)
def test_an_empty_value_is_no_lock_and_is_refused(
    refused: Callable[..., str], options: tuple[str, ...]
) -> None:
    """Such as ``"$KEYS"`` of a shell that has no such variable."""
    assert f"{options[0]} is empty" in refused("serve", "--port", "0", *options, *COMMAND)


def test_check_says_that_a_start_would_be_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "--check", "--port", "0", "--host", "0.0.0.0", *COMMAND]) == 2
    said = capsys.readouterr().out
    assert "access      WRONG: --host 0.0.0.0 lets every client on the network call" in said


def test_the_variable_allows_it_as_the_option_does(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MCP_SESSIONS_NO_AUTH", "yes")
    with serving(here, "--host", "0.0.0.0", "open.py") as process:
        said = read_lines(process, 6)
        assert "http://0.0.0.0:" in said
        assert said.count("every client that reaches this server can call its tools") == 1
