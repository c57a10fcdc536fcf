"""The stock clients of tasks, unmodified: `@modelcontextprotocol/ext-tasks`, and FastMCP's.

They call tools that know nothing of tasks, of a wrapped server and of a command.
"""

import json
import subprocess
import sys
from collections.abc import Generator
from typing import Any

import pytest

from tests.faults.test_host_keys import running
from tests.interop.environments import CACHE, HERE, node_project, python_command
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


TARGETS = {"wrapped": [str(TOOLS)], "command": ["--", sys.executable, str(TOOLS)]}
SERVE = ("-m", "mcp_sessions.cli", "serve", "--tasks", "--task-after", "0.5")


@pytest.fixture(params=TARGETS)
def url(request: pytest.FixtureRequest) -> Generator[str]:
    port = free_port()
    with running(*SERVE, "--port", str(port), *TARGETS[request.param], port=port):
        yield f"http://127.0.0.1:{port}/mcp"


def outcomes(command: list[str]) -> list[dict[str, Any]]:
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


def test_the_typescript_client_of_tasks_gets_results_answers_questions_and_cancels(
    url: str,
) -> None:
    home = HERE / "tasks_typescript"
    said = outcomes([node_project(home), str(home / "driver.mjs"), url])
    assert said == EXPECTED


@pytest.mark.parametrize("target", TARGETS)
def test_fastmcps_client_of_tasks_does_the_same_on_a_pipe(target: str) -> None:
    driver = python_command("tasks_fastmcp", CACHE / "fastmcp-tasks")
    said = outcomes([*driver, sys.executable, *SERVE, "--stdio", *TARGETS[target]])
    # It does not show which call was a task.
    assert said == [{**each, "kind": ""} for each in EXPECTED]


def test_over_http_fastmcps_client_leaves_out_the_header_of_a_poll(url: str) -> None:
    """Its release 4.1.4: the protocol wants the id in ``Mcp-Name``."""
    quick, slow = outcomes([*python_command("tasks_fastmcp", CACHE / "fastmcp-tasks"), url])
    assert quick["text"] == "at once"
    assert (slow["status"], slow["text"]) == ("refused", -32020)
