"""What a command prints reaches standard output, or one line says why not."""

import os
import subprocess
import sys
from pathlib import Path

import anyio
import pytest

from mcp_sessions.cli import keys
from mcp_sessions.cli.main import main
from mcp_sessions.cli.output import OutputFailed
from mcp_sessions.policy import SessionPolicy
from mcp_sessions.stores.sqlite import SQLiteStore

APP = 'from mcp.server import MCPServer\nserver = MCPServer("a")\n'
FULL = Path("/dev/full")
STORE = "sqlite:///kept.db"
PRINTING = {
    "help": ["--help"],
    "the help of a command": ["serve", "--help"],
    "the help of a sub-command": ["sessions", "list", "--help"],
    "version": ["--version"],
    "completion": ["--print-completion", "bash"],
    "check": ["serve", "--check", "--port", "0", "app.py"],
    "key": ["keygen"],
    "a host's file": ["config", "vscode"],
    "vectors": ["conformance", "--list"],
    "keys": ["keys", "list", "--file", "keys.json"],
    "sessions": ["sessions", "list", "--store", STORE],
    "sessions as JSON": ["sessions", "list", "--json", "--store", STORE],
    "store": ["store", "check", STORE],
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "app.py").write_text(APP)
    (tmp_path / "keys.json").write_text('{"version": 1, "keys": []}')
    (tmp_path / "keys.json").chmod(0o600)

    async def made() -> None:
        store = SQLiteStore(tmp_path / "kept.db")
        await store.open(SessionPolicy())
        await store.close()

    anyio.run(made)
    return tmp_path


@pytest.mark.skipif(not FULL.exists(), reason="this system has no device that is full")
@pytest.mark.parametrize("arguments", PRINTING.values(), ids=list(PRINTING))
def test_a_full_disk_behind_the_output_is_one_line(arguments: list[str], folder: Path) -> None:
    for unbuffered in ("", "1") if arguments[0].startswith("--") else ("",):
        with FULL.open("wb") as full:
            ended = subprocess.run(
                [sys.executable, "-m", "mcp_sessions.cli", *arguments],
                cwd=folder,
                stdin=subprocess.DEVNULL,
                stdout=full,
                stderr=subprocess.PIPE,
                env={**os.environ, "PYTHONUNBUFFERED": unbuffered},
                timeout=100,
            )

        assert ended.returncode == 1
        *others, last = ended.stderr.decode().splitlines()
        assert last == "mcp-sessions: standard output cannot be written: no space left on device"
        # `config` says where its text goes.
        assert len(others) == (arguments[0] == "config")


def test_a_key_that_nobody_could_read_is_in_no_file(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It cannot be shown again, and would stay valid."""
    file = str(folder / "keys.json")

    def failing(text: str) -> None:
        raise OutputFailed(OSError(28, "No space left on device"))

    with monkeypatch.context() as patched:
        patched.setattr(keys, "out", failing)
        with pytest.raises(OutputFailed):
            keys.main(["add", "ci", "--file", file])
    capsys.readouterr()

    assert main(["keys", "list", "--file", file]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 1
