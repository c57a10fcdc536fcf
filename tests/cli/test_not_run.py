"""``serve`` of a file that would serve by itself: refused in one line, before anything listens."""

import os
import subprocess
import sys
from collections.abc import Generator
from pathlib import Path

import pytest
import uvicorn

from mcp_sessions.cli.targets import load_target
from mcp_sessions.errors import ConfigurationError
from mcp_sessions.server.upstream.sdk import is_server

HEADS = {
    "mcp": 'from mcp.server import MCPServer\nmcp = MCPServer("notes")\n',
    "fastmcp": 'from fastmcp import FastMCP\nmcp = FastMCP("notes")\n',
    "layer": "from mcp.server import MCPServer\nfrom mcp_sessions import SessionLayer\n"
    'mcp = MCPServer("notes")\nlayer = SessionLayer(mcp)\n',
}

RUNS = [
    ("mcp", 'mcp.run("streamable-http", port=0)'),
    ("mcp", "import anyio; anyio.run(mcp.run_stdio_async)"),
    ("mcp", "import uvicorn; uvicorn.run(mcp.streamable_http_app(), port=0)"),
    ("mcp", "try:\n    mcp.run()\nexcept BaseException:\n    pass"),
    ("fastmcp", "mcp.run()"),
    ("fastmcp", 'import asyncio; asyncio.run(mcp.run_async("http", port=0))'),
    ("layer", 'layer.run("http", port=0)'),
    ("layer", 'layer.run("stdio")'),
]


ADVICE = "put that under if __name__ == '__main__', and serve will run it with sessions"


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Generator[Path]:
    """The current directory; what is imported from it is forgotten."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", sys.path[:])
    yield tmp_path
    sys.modules.pop("app", None)


def refusal(here: Path, code: str, target: str) -> str:
    """Why a file with that code is not served."""
    (here / "app.py").write_text(code)
    with pytest.raises(ConfigurationError) as refused:
        load_target(target, kinds=(is_server,))
    return str(refused.value)


@pytest.mark.parametrize(("kind", "run"), RUNS)
def test_a_file_that_serves_when_it_is_imported_is_refused(here: Path, kind: str, run: str) -> None:
    """It would be served without sessions, where its own arguments say, in silence."""
    serve, stdin, environment = uvicorn.Server.serve, sys.stdin, dict(os.environ)
    code = HEADS[kind] + run + "\n"

    position = "" if "except" in run else f" ({here}/app.py, line {code.count(chr(10))})"
    assert refusal(here, code, "app.py") == (
        f"app.py runs a server when it is imported{position}: {ADVICE}"
    )
    assert (uvicorn.Server.serve, sys.stdin) == (serve, stdin)
    assert os.environ == environment


def test_a_module_that_serves_when_it_is_imported_is_refused(here: Path) -> None:
    """Named with dots it is loaded in another way."""
    said = refusal(here, HEADS["mcp"] + "mcp.run()\n", "app:mcp")

    assert said == f"app runs a server when it is imported ({here}/app.py, line 3): {ADVICE}"


def test_what_a_file_does_in_addition_to_serving_it_may_do(here: Path) -> None:
    """An event loop of its own, to set itself up, and a question about the terminal; what goes
    wrong then is said as ever.
    """
    code = (
        "import asyncio, sys\n"
        "async def set_up(): sys.stdin.isatty()\n"
        "asyncio.run(set_up())\n"
        "raise LookupError('set up')\n"
    )

    assert refusal(here, code, "app.py").startswith(
        "app.py cannot be imported: LookupError: set up ("
    )


def test_the_command_says_so_in_one_line_and_ends(here: Path) -> None:
    """FastMCP's banner and its log of where it serves are not said."""
    (here / "app.py").write_text(HEADS["fastmcp"] + 'mcp.run(transport="http", port=0)\n')
    ended = subprocess.run(
        [sys.executable, "-m", "mcp_sessions.cli", "serve", "app.py", "--port", "0"],
        cwd=here,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=40,
        check=False,
    )

    assert (ended.returncode, ended.stdout) == (2, "")
    assert ended.stderr == (
        f"mcp-sessions serve: app.py runs a server when it is imported ({here}/app.py, line 3): "
        f"{ADVICE}\n"
    )
