"""The import contracts of ``pyproject.toml`` catch what they are there to catch.

A contract that is misspelt passes for ever. So each is broken once, in a copy.
"""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDERS = ("", "transports", "conformance")
"""The folders of packages."""

STRAYS = {
    "imports go down only": ("mcp_sessions/core/__init__.py", "import mcp_sessions.stores"),
    "within the server, imports go down only": (
        "mcp_sessions/server/delivery/__init__.py",
        "import mcp_sessions.server.dispatch",
    ),
    "bindings call no store": (
        "transports/mcp_sessions_transports/__init__.py",
        "import mcp_sessions.stores.contract",
    ),
    "the core does no I/O and reads no clock": ("mcp_sessions/core/__init__.py", "import time"),
    "only server.upstream.sdk, client.sdk, stdio.client and testing.client know the MCP SDK": (
        "mcp_sessions/stores/__init__.py",
        "import mcp",
    ),
    "the conformance runner shares nothing with what it tests": (
        "conformance/mcp_sessions_conformance/__init__.py",
        "import mcp_sessions.ids",
    ),
    "nothing needs FastMCP to be installed": (
        "transports/mcp_sessions_transports/__init__.py",
        "import fastmcp",
    ),
    "only mcp_sessions.acp knows ACP": ("mcp_sessions/client/__init__.py", "import acp"),
}


def lint_imports(root: Path) -> dict[str, str]:
    """Contract → KEPT or BROKEN, for the packages below ``root``."""
    done = subprocess.run(
        [str(Path(sys.executable).parent / "lint-imports"), "--no-cache"],
        cwd=root,
        env={"PYTHONPATH": ":".join(str(root / f) for f in FOLDERS), "COLUMNS": "200"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=50,
    )
    verdicts = re.findall(r"^(.+?) (KEPT|BROKEN)\b", done.stdout, re.M)
    assert verdicts, done.stdout + done.stderr
    return dict(verdicts)


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """The source tree, to be spoilt."""
    ignored = shutil.ignore_patterns("__pycache__")
    for folder in ("mcp_sessions", "transports", "conformance"):
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=ignored)
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    return tmp_path


def test_each_contract_catches_a_stray_import(copy: Path) -> None:
    for file, line in STRAYS.values():
        path = copy / file
        path.write_text(f"{path.read_text()}\n{line}\n")

    verdicts = lint_imports(copy)

    assert verdicts == dict.fromkeys(STRAYS, "BROKEN")
