"""The modules that an import loads in a fresh interpreter.

The MCP SDK takes over a second to import. A program that does not serve does not wait for it.
"""

import subprocess
import sys
from pathlib import Path

import pytest

# Each module of a package is imported first and alone: some hundred starts' worth of work.
pytestmark = pytest.mark.timeout(160)

HEAVY = ("mcp", "mcp_types", "fastmcp", "pydantic", "starlette", "uvicorn", "anyio", "asyncio")
OURS = ("mcp_sessions", "mcp_sessions_transports")

REPORT = f"""
import sys
sys.stderr.write("\\nloaded: " + " ".join(n for n in {HEAVY + OURS!r} if n in sys.modules) + "\\n")
"""

LIGHT = {
    "the package": "import mcp_sessions",
    "an error class": "from mcp_sessions import SessionNotFound",
    "the policy": "from mcp_sessions import SessionPolicy",
    "--version": "from mcp_sessions.cli.main import main; run(main, ['--version'])",
    "--help": "from mcp_sessions.cli.main import main; run(main, ['--help'])",
    "serve --help": "from mcp_sessions.cli.main import main; run(main, ['serve', '--help'])",
    "a wrong option": "from mcp_sessions.cli.main import main; run(main, ['serve', '--port', 'x'])",
    "bridge --help": "from mcp_sessions.cli.main import main; run(main, ['bridge', '--help'])",
    "conformance --help": "from mcp_sessions.cli.main import main; run(main, "
    "['conformance', '--help'])",
    "a jar": "from mcp_sessions import FileJar",
    "keygen": "from mcp_sessions.cli.main import main; run(main, ['keygen'])",
}

RUN = """
def run(main, arguments):
    try:
        main(arguments)
    except SystemExit:
        pass
"""


def loaded_after(*codes: str, cwd: Path) -> list[set[str]]:
    """Which of ``HEAVY`` a fresh interpreter has after running each of ``codes`` in turn."""
    # Not in the checkout: the wheel's tests must import what is installed.
    done = subprocess.run(
        [sys.executable, "-c", "\n".join([RUN, *(f"{code}\n{REPORT}" for code in codes)])],
        cwd=cwd,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=150,
    )
    assert done.returncode == 0, done.stderr
    # The message of a wrong option is on the same stream.
    reports = [line for line in done.stderr.splitlines() if line.startswith("loaded:")]
    assert len(reports) == len(codes), done.stderr
    return [set(line.split()[1:]) for line in reports]


def test_a_small_start_loads_nothing_heavy(tmp_path: Path) -> None:
    """What one of them loads stays loaded: the first that has it is the one."""
    loaded = loaded_after(*LIGHT.values(), cwd=tmp_path)
    heavy = {name: found & set(HEAVY) for name, found in zip(LIGHT, loaded, strict=True)}
    assert not any(heavy.values()), heavy


def test_the_whole_core_loads_neither_the_sdk_nor_an_event_loop(tmp_path: Path) -> None:
    """Architecture: core/ has no await, no clock, no SDK."""
    code = """
import importlib, pkgutil
import mcp_sessions.core
for module in pkgutil.walk_packages(mcp_sessions.core.__path__, "mcp_sessions.core."):
    importlib.import_module(module.name)
"""
    assert not loaded_after(code, cwd=tmp_path)[0] & set(HEAVY)


@pytest.mark.parametrize(
    "package", ["mcp_sessions", "mcp_sessions_transports", "mcp_sessions_conformance"]
)
def test_a_root_package_can_be_imported_first_and_alone(package: str, tmp_path: Path) -> None:
    """No import works only because another one came before it."""
    code = f"""
import importlib, pkgutil
root = importlib.import_module({package!r})
for module in pkgutil.walk_packages(root.__path__, {package + "."!r}):
    if not module.name.endswith("__main__"):
        importlib.import_module(module.name)
"""
    (loaded,) = loaded_after(code, cwd=tmp_path)
    if package == "mcp_sessions_conformance":
        assert not {"mcp", "mcp_types", "mcp_sessions", "mcp_sessions_transports"} & loaded
