"""The import contracts of ``pyproject.toml`` catch what they are there to catch.

A contract that is misspelt passes for ever. So each is broken once, in a copy.
"""

import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from tests.house.source import ROOT, modules

FOLDERS = ("", "transports", "conformance")
"""The folders of packages."""

STRAYS = {
    "imports go down only": ("mcp_sessions/core/__init__.py", "import mcp_sessions.stores"),
    "within the server, imports go down only": (
        "mcp_sessions/server/delivery/__init__.py",
        "import mcp_sessions.server.dispatch",
    ),
    "within the transports, imports go down only": (
        "transports/mcp_sessions_transports/http/__init__.py",
        "import mcp_sessions_transports.websocket",
    ),
    "bindings call no store": (
        "transports/mcp_sessions_transports/__init__.py",
        "import mcp_sessions.stores.contract",
    ),
    "the core does no I/O and reads no clock": ("mcp_sessions/core/__init__.py", "import time"),
    "few modules know the MCP SDK": (
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


def without_layer(root: Path) -> set[str]:
    """What is at the root of the packages, and in no layer of the contract about all of them.
    Import-linter itself looks for that inside one package only.
    """
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
    first = project["tool"]["importlinter"]["contracts"][0]
    layers = {name.strip() for layer in first["layers"] for name in layer.split("|")}
    names = modules(root).keys()
    found = {name for name in names if re.fullmatch(r"mcp_sessions(\.\w+|_\w+)", name)}
    return found - layers


def test_each_module_at_the_root_is_in_a_layer(copy: Path) -> None:
    assert without_layer(ROOT) == set()
    (copy / "mcp_sessions/spoilt.py").touch()
    assert without_layer(copy) == {"mcp_sessions.spoilt"}


def test_a_new_module_needs_a_layer(copy: Path) -> None:
    (copy / "mcp_sessions/server/spoilt.py").touch()
    (copy / "transports/mcp_sessions_transports/spoilt.py").touch()

    verdicts = lint_imports(copy)

    assert {contract for contract, verdict in verdicts.items() if verdict == "BROKEN"} == {
        "within the server, imports go down only",
        "within the transports, imports go down only",
    }
