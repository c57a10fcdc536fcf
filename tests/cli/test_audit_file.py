"""``serve --audit``: where the audit goes."""

import json
import logging
import os
import re
from collections.abc import Callable, Generator
from pathlib import Path

import pytest

from mcp_sessions.cli.logs import AuditFile
from mcp_sessions.cli.main import main
from mcp_sessions.errors import ConfigurationError
from tests.cli.test_serve_in_public import Setup, here, served
from tests.support.serving import read_lines, serving

__all__ = ["here"]


@pytest.fixture
def audit() -> Generator[logging.Logger]:
    logger = logging.getLogger("mcp_sessions.audit")
    yield logger
    for handler in logger.handlers[:]:
        logger.removeHandler(handler)
        handler.close()
    logger.propagate = True
    logger.setLevel(logging.NOTSET)


def lines(path: Path) -> list[str]:
    members = map(json.loads, path.read_text().splitlines())
    return [each.get("event.name") or each["mcp.method.name"] for each in members]


def test_each_request_is_a_line_of_json(here: Path) -> None:
    """Whatever the log's level, and nowhere else; what is there stays."""
    path = here / "audit.jsonl"
    path.write_text('{"mcp.method.name": "before"}\n')
    with served(here, "app.py", "--audit", str(path), "--log-level", "error") as setup:
        setup.initialize()
    assert lines(path) == ["before", "mcp_sessions.session.started", "initialize"]
    line = json.loads(path.read_text().splitlines()[2])
    assert {"time", "mcp_sessions.outcome", "mcp.server.operation.duration"} < line.keys()
    assert not {"level", "logger", "message"} & line.keys()
    assert "mcp_sessions.audit" not in setup.said


@pytest.mark.parametrize("asked", [False, True])
def test_a_key_has_its_name_in_the_audit_if_that_is_asked_for(
    here: Path, capsys: pytest.CaptureFixture[str], asked: bool
) -> None:
    """In each record. The key, its id and its hash are in none."""
    path, keys = here / "audit.jsonl", here / "keys.json"
    assert main(["keys", "add", "ci", "--file", str(keys)]) == 0
    key = capsys.readouterr().out.strip()
    options = ("--api-keys", str(keys), "--audit", str(path))
    with served(here, "app.py", *options, *["--audit-key-names"] * asked) as setup:
        setup.initialize(Authorization=f"Bearer {key}")
    written = path.read_text()
    found = [json.loads(line).get("enduser.id") for line in written.splitlines()]
    assert found == ["ci" if asked else None] * 2
    [kept] = json.loads(keys.read_text())["keys"]
    for secret in (key, kept["id"], kept["sha256"]):
        assert secret not in written


def test_standard_output_can_be_where(here: Path) -> None:
    with serving(here, "app.py", "--audit", "-") as process:
        found = re.search(r"http://127\.0\.0\.1:(\d+)/mcp", read_lines(process, 5))
        assert found is not None and process.stdout is not None
        Setup(int(found[1])).initialize()
        assert "mcp_sessions.session.started" in process.stdout.readline()
        assert json.loads(process.stdout.readline())["mcp.method.name"] == "initialize"


def test_a_file_that_cannot_be_written_is_an_error_before_anything_is_served(
    here: Path, refused: Callable[..., str]
) -> None:
    target = str(here / "app.py")
    assert "there is no folder /no/such/dir" in refused(
        "serve", target, "--audit", "/no/such/dir/a"
    )
    assert "is a directory" in refused("serve", target, "--audit", str(here))
    os.mkfifo(here / "fifo")
    assert "--audit" in refused("serve", target, "--audit", str(here / "fifo"))
    assert "the standard output belongs to the client" in refused(
        "serve", target, "--stdio", "--audit", "-"
    )


def test_only_its_owner_may_read_a_file_that_it_makes(tmp_path: Path) -> None:
    AuditFile(str(tmp_path / "a")).close()
    assert (tmp_path / "a").stat().st_mode & 0o777 == 0o600


def write(logger: logging.Logger, method: str) -> None:
    logger.info("%s", method, extra={"mcp.method.name": method})


def test_a_full_disk_is_one_warning_and_no_request_notices(
    audit: logging.Logger, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    path = tmp_path / "audit"
    path.symlink_to("/dev/full")
    AuditFile(str(path)).install()
    for _ in range(3):
        write(audit, "a")
    assert [each.message for each in caplog.records if each.levelno == logging.WARNING] == [
        "--audit: requests are served, but not recorded: No space left on device"
    ]
    path.unlink()
    write(audit, "b")
    assert lines(path) == ["b"]
    assert caplog.messages[-1] == "--audit: requests are recorded again; 3 are missing"


def test_a_line_that_was_cut_by_a_full_disk_stands_alone(
    audit: logging.Logger,
    caplog: pytest.LogCaptureFixture,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    path = tmp_path / "audit"
    AuditFile(str(path)).install()
    whole = os.write

    def part(file: int, line: bytes) -> int:
        return whole(file, line[:10])

    monkeypatch.setattr(os, "write", part)
    write(audit, "a")
    monkeypatch.undo()
    write(audit, "b")
    torn, left = path.read_text().splitlines()
    assert len(torn) == 10 and json.loads(left)["mcp.method.name"] == "b"
    assert [each.levelno for each in caplog.records] == [logging.WARNING] * 2


def test_a_file_that_was_moved_away_is_made_anew(audit: logging.Logger, tmp_path: Path) -> None:
    path = tmp_path / "audit"
    AuditFile(str(path)).install()
    write(audit, "a")
    path.rename(tmp_path / "older")
    write(audit, "b")
    assert (lines(tmp_path / "older"), lines(path)) == (["a"], ["b"])


def test_what_an_applications_logging_disabled_is_written_down(
    audit: logging.Logger, tmp_path: Path
) -> None:
    """``dictConfig`` disables every logger that it does not name."""
    audit.disabled = True
    AuditFile(str(tmp_path / "audit")).install()
    write(audit, "a")
    assert lines(tmp_path / "audit") == ["a"]


def test_a_closed_standard_output_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    fstat = os.fstat

    def closed(file: int) -> os.stat_result:
        if file == 1:
            raise OSError(9, "bad file descriptor")
        return fstat(file)

    monkeypatch.setattr(os, "fstat", closed)
    with pytest.raises(ConfigurationError, match="bad file descriptor"):
        AuditFile("-")
