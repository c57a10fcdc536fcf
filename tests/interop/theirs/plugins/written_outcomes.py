"""A pytest plugin: what became of each test, as JSON in the file that an option names.

Loaded into the run of somebody else's tests; needs nothing but pytest.
"""

import json
from pathlib import Path
from typing import Any

import pytest

TAIL = 1_500
"""Characters kept of what a test says about its failure."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--outcomes", default=None, help="a JSON file: test → outcome")


@pytest.hookimpl(trylast=True)
def pytest_configure(config: pytest.Config) -> None:
    """Not in a worker of xdist: all reports come to who distributes."""
    path = config.getoption("--outcomes")
    if path is not None and not hasattr(config, "workerinput"):
        config.pluginmanager.register(_Outcomes(Path(path)))


class _Outcomes:
    def __init__(self, path: Path) -> None:
        self._path = path
        self._outcomes: dict[str, dict[str, str]] = {}
        self._connected: list[str] = []
        """The tests that a plugin has seen to connect."""

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self._note(report.nodeid or "collection", "error", report.longreprtext)
        elif report.skipped:
            self._note(report.nodeid, "skipped", report.longreprtext)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "teardown" and ("connected", True) in map(tuple, report.user_properties):
            self._connected.append(report.nodeid)
        is_expected = hasattr(report, "wasxfail")
        if report.when == "call" and (report.passed or (report.skipped and is_expected)):
            self._note(report.nodeid, "passed", "")
        elif report.skipped:
            self._note(report.nodeid, "skipped", report.longreprtext)
        elif report.failed:
            # Also where its set-up or tear-down fails.
            self._note(report.nodeid, "failed", report.longreprtext)

    def _note(self, test: str, outcome: str, text: str) -> None:
        known = self._outcomes.get(test)
        if known is None or known["outcome"] == "passed":
            self._outcomes[test] = {"outcome": outcome, "text": text[-TAIL:]}

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        content: dict[str, Any] = {"outcomes": self._outcomes, "connected": self._connected}
        self._path.write_text(json.dumps(content), "utf-8")
