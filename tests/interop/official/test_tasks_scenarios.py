"""The official scenarios of tasks, over tools that know nothing of tasks (SEP-2663)."""

from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.interop.official.installs import Installed
from tests.interop.official.servers import Kind, everything_server
from tests.interop.official.suites import run_scenario

pytestmark = [pytest.mark.full, pytest.mark.timeout(600)]

# `tasks-status-notifications` judges nothing in this release of the suite.
SCENARIOS = {
    "lifecycle": 9,
    "capability-negotiation": 5,
    "wire-fields": 4,
    "request-state-removal": 3,
    "mrtr-input": 4,
    "request-headers": 5,
    "dispatch-and-envelope": 9,
    "required-task-error": 3,
    "mrtr-composition": 2,
}


@pytest.mark.parametrize("kind", ["wrapped", "command", "url"])
def test_plain_tools_pass_every_check_as_tasks(
    kind: Kind, installed: Installed, tmp_path: Path
) -> None:
    with ExitStack() as stack:
        behind = None
        if kind == "url":
            behind = stack.enter_context(
                everything_server(
                    tmp_path,
                    "bare",
                    "h11",
                    log=tmp_path / "behind.log",
                    program="tasks_launcher.py",
                )
            )
        url = stack.enter_context(
            everything_server(
                tmp_path,
                kind,
                "httptools",
                log=tmp_path / "server.log",
                behind=behind,
                program="tasks_launcher.py",
            )
        )
        wrong: list[str] = []
        for name, checks in SCENARIOS.items():
            into = tmp_path / name
            into.mkdir()
            outcome = run_scenario(f"tasks-{name}", url, installed=installed, into=into)
            if outcome.count("SUCCESS") != checks or len(outcome.judged) != checks:
                wrong.append(f"{name}: not {checks} passed:\n{outcome.not_passed()}")
    assert not wrong, "\n".join(wrong)
