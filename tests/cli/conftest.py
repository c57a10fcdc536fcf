"""What the tests of the command share."""

import re
from collections.abc import Callable

import pytest

from mcp_sessions.cli import logs
from mcp_sessions.cli.main import main


@pytest.fixture(autouse=True)
def logs_are_pytests(monkeypatch: pytest.MonkeyPatch) -> None:
    """The command configures the logs of its process; this process is pytest's."""

    def nothing(**_: object) -> None: ...

    monkeypatch.setattr(logs, "configure", nothing)


@pytest.fixture
def refused(capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Runs a command that is refused: the one line on stderr."""

    def run(*arguments: str) -> str:
        try:
            status = main([*arguments])
        except SystemExit as ended:
            status = ended.code
        said = capsys.readouterr()
        assert status == 2 and said.out == ""
        assert re.fullmatch(rf"mcp-sessions {arguments[0]}[^:\n]*: [^\n]+\n", said.err), said.err
        return said.err

    return run
