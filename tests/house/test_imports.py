"""What an import loads, each in a fresh interpreter.

The MCP SDK takes over a second to import. Who does not serve does not wait for it.
"""

import subprocess
import sys
from pathlib import Path

import pytest

HEAVY = ("mcp", "mcp_types", "fastmcp", "pydantic", "starlette", "uvicorn", "anyio", "asyncio")
OURS = ("mcp_sessions", "mcp_sessions_transports")

REPORT = f"""
import sys
sys.stderr.write(" ".join(name for name in {HEAVY + OURS!r} if name in sys.modules))
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


def loaded_after(code: str, cwd: Path) -> list[str]:
    """Which of ``HEAVY`` a fresh interpreter has after running ``code``."""
    # Not in the checkout: the wheel's tests must import what is installed.
    done = subprocess.run(
        [sys.executable, "-c", f"{RUN}\n{code}\n{REPORT}"],
        cwd=cwd,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=50,
    )
    assert done.returncode == 0, done.stderr
    return (done.stderr.splitlines() or [""])[-1].split()


@pytest.mark.parametrize("code", LIGHT.values(), ids=list(LIGHT))
def test_a_small_start_loads_nothing_heavy(code: str, tmp_path: Path) -> None:
    found = loaded_after(code, tmp_path)
    # The message of a wrong option is on the same stream, before the report.
    assert not set(found) & set(HEAVY)


def test_the_whole_core_loads_neither_the_sdk_nor_an_event_loop(tmp_path: Path) -> None:
    """Architecture: core/ has no await, no clock, no SDK."""
    code = """
import importlib, pkgutil
import mcp_sessions.core
for module in pkgutil.walk_packages(mcp_sessions.core.__path__, "mcp_sessions.core."):
    importlib.import_module(module.name)
"""
    assert not set(loaded_after(code, tmp_path)) & set(HEAVY)


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
    loaded = loaded_after(code, tmp_path)
    if package == "mcp_sessions_conformance":
        assert not {"mcp", "mcp_types", "mcp_sessions", "mcp_sessions_transports"} & set(loaded)
