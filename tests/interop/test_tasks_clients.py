"""The stock clients of tasks, unmodified: `@modelcontextprotocol/ext-tasks`, and FastMCP's.

They call tools that know nothing of tasks, of a wrapped server and of a command.
"""

import json
import subprocess
import sys
from collections.abc import Generator
from pathlib import Path

import pytest

from tests.faults.test_host_keys import running
from tests.interop.environments import (
    HERE,
    node_project,
)
from tests.support.processes import free_port

pytestmark = [pytest.mark.full, pytest.mark.timeout(600)]

TOOLS = HERE / "tasks_tools.py"
EXPECTED = [
    {"tool": "quick", "kind": "immediate", "status": "completed", "text": "at once"},
    {"tool": "slow", "kind": "task", "status": "completed", "text": "in the end"},
    {
        "tool": "ask_two",
        "kind": "task",
        "status": "completed",
        "text": "answer to one, answer to two",
    },
    {"tool": "endless", "kind": "task", "status": "cancelled", "text": None},
]


@pytest.fixture(params=["wrapped", "command"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> Generator[str]:
    port = free_port()
    target = [str(TOOLS)] if request.param == "wrapped" else ["--", sys.executable, str(TOOLS)]
    options = ("--port", str(port), "--tasks", "--task-after", "0.5")
    with running("-m", "mcp_sessions.cli", "serve", *options, *target, port=port):
        yield f"http://127.0.0.1:{port}/mcp"


def outcomes(command: list[str]) -> list[object]:
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


def test_the_typescript_client_of_tasks_gets_results_answers_questions_and_cancels(
    url: str,
) -> None:
    home = HERE / "typescript_tasks"
    said = outcomes([node_project(home), str(home / "driver.mjs"), url])
    assert said == EXPECTED
