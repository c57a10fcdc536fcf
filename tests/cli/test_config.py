"""``mcp-sessions config HOST``: what goes into the file of a host."""

import json
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest

from mcp_sessions import HTTPServer, StdioServer
from mcp_sessions.cli import config
from mcp_sessions.cli.main import main
from mcp_sessions.cli.servers_file import servers_of
from tests.house.source import ROOT

URL = "https://mcp.example.com/mcp"
BLOCK = re.compile(r"```(?:json|toml)\n(.*?)\n```", re.DOTALL)
HOSTS = pytest.mark.parametrize("host", config.HOSTS)


def printed(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(["config", *arguments]) == 0
    return capsys.readouterr().out.rstrip("\n")


@HOSTS
@pytest.mark.parametrize("bridge", [False, True])
def test_the_page_shows_what_the_command_prints(
    host: str, bridge: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    page = (ROOT / "docs/connect-your-host.md").read_text("utf-8")
    options = ["--bridge"] if bridge else []
    text = printed(capsys, host, *options, URL, "--name", "notes")
    assert text in BLOCK.findall(page)


@HOSTS
@pytest.mark.parametrize("bridge", [False, True])
def test_a_host_finds_the_server_in_its_file(
    host: str,
    bridge: bool,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Read as this project reads such a file, which is as hosts do; Codex has a format of its own.
    A name may have any characters.
    """
    program = tmp_path / "mcp-sessions"
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    name = 'my "notes"'
    options = ["--bridge"] if bridge else []
    text = printed(capsys, host, URL, "--name", name, *options)
    if host == "codex":
        entry: Any = tomllib.loads(text)["mcp_servers"][name]
        expected: Any = {"command": "mcp-sessions", "args": ["bridge", URL]}
        assert entry == (expected if bridge else {"url": URL})
        return
    file = tmp_path / "file.json"
    file.write_text(text)
    (server,) = servers_of(str(file), {}).values()
    if bridge or host == "claude-desktop":
        assert isinstance(server, StdioServer)
        assert (server.command, server.args) == ("mcp-sessions", ("bridge", URL))
    else:
        assert isinstance(server, HTTPServer) and server.url == URL
    assert list(next(iter(json.loads(text).values()))) == [name]


def test_without_a_url_it_is_the_default_of_serve(capsys: pytest.CaptureFixture[str]) -> None:
    assert '"url": "http://127.0.0.1:8000/mcp"' in printed(capsys, "cursor")


@pytest.mark.parametrize("wrong", ["example.com/mcp", "ftp://example.com"])
def test_another_address_is_one_line(wrong: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "cursor", wrong]) == 2
    assert capsys.readouterr().err.count("\n") == 1
