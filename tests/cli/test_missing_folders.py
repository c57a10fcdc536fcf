"""A file in a folder that is not there: the error names the folder."""

from collections.abc import Callable
from pathlib import Path

import pytest

from mcp_sessions import ConfigurationError, FileJar

APP = 'from mcp.server import MCPServer\nmcp = MCPServer("notes")\n'


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "app.py").write_text(APP)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    "arguments",
    [
        ("serve", "app.py", "--port", "0", "--store", "sqlite:///nowhere/a.db"),
        ("serve", "app.py", "--port", "0", "--audit", "nowhere/audit.jsonl"),
        ("serve", "app.py", "--port", "0", "--api-keys", "nowhere/keys.json"),
        ("serve", "app.py", "--port", "0", "--ssl-certfile", "nowhere/cert.pem"),
        ("serve", "nowhere/app.py"),
        ("serve", "--config", "nowhere/mcp.json"),
        ("keys", "add", "ci", "--file", "nowhere/keys.json"),
        ("keys", "list", "--file", "nowhere/keys.json"),
        ("sessions", "list", "--store", "sqlite:///nowhere/a.db"),
        ("bridge", "http://127.0.0.1:1/mcp", "--jar", "nowhere/jar"),
        ("acp", "--agent", "nowhere/agent.py"),
        ("conformance", "http://127.0.0.1:1/mcp", "--json", "nowhere/out.json"),
    ],
    ids=lambda arguments: " ".join(arguments[:1] + arguments[-2:]),
)
def test_a_folder_that_is_missing_is_named(
    refused: Callable[..., str], here: Path, arguments: tuple[str, ...]
) -> None:
    assert f"there is no folder {here / 'nowhere'}" in refused(*arguments)


def test_a_jar_names_it_too(here: Path) -> None:
    with pytest.raises(ConfigurationError, match=f"there is no folder {here / 'nowhere'}"):
        FileJar("nowhere/jar.json")
