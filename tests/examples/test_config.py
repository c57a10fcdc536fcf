"""``examples/config``: files as hosts have them, which ``serve --config`` reads."""

from pathlib import Path

import pytest

from mcp_sessions.cli.servers_file import servers_of
from mcp_sessions.external_server import HTTPServer, StdioServer

FILES = Path(__file__).parents[2] / "examples" / "config"


def test_the_servers_of_npm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    npx = tmp_path / "npx"
    npx.touch(mode=0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("HOME", "/home/me")
    everything, memory = servers_of(str(FILES / "npm.json"), {}).values()
    assert isinstance(everything, StdioServer) and everything.program == str(npx)
    assert everything.args == ("-y", "@modelcontextprotocol/server-everything")
    assert isinstance(memory, StdioServer) and memory.per == "shared"
    assert memory.env["MEMORY_FILE_PATH"] == "/home/me/memory.jsonl"


def test_a_url(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SEARCH_URL", raising=False)
    monkeypatch.setenv("SEARCH_TOKEN", "t")
    (search,) = servers_of(str(FILES / "url.json"), {}).values()
    assert isinstance(search, HTTPServer) and search.url == "http://127.0.0.1:8000/mcp"
    assert search.headers == {"Authorization": "Bearer t"}
