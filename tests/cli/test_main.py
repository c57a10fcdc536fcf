"""The command line up to the point where a server would start."""

import asyncio
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from mcp_sessions import __version__
from mcp_sessions.cli.__main__ import run
from mcp_sessions.cli.main import COMMANDS, main

ROOT = Path(__file__).parents[2]


def outcome(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int | str, str, str]:
    """Exit status, stdout and stderr of ``mcp-sessions arguments``."""
    status: int | str | None
    try:
        status = main(arguments)
    except SystemExit as stop:
        status = stop.code
    captured = capsys.readouterr()
    return status or 0, captured.out, captured.err


def test_the_help_lists_every_command(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    status, out, _ = outcome(capsys, "--help")

    assert status == 0
    for name, what in COMMANDS.items():
        assert re.search(rf"^  {name} +{what}$", out, re.M)


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_a_help_of_its_own(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = outcome(capsys, name, "--help")

    assert status == 0
    assert out.startswith(f"usage: mcp-sessions {name}")


def test_the_version_is_the_package_s(capsys: pytest.CaptureFixture[str]) -> None:
    assert outcome(capsys, "--version") == (0, f"mcp-sessions {__version__}\n", "")


def test_a_key_is_43_url_safe_characters_and_new_each_time(
    capsys: pytest.CaptureFixture[str],
) -> None:
    status, first, err = outcome(capsys, "keygen")
    _, second, _ = outcome(capsys, "keygen")

    assert (status, err) == (0, "")
    assert re.fullmatch(r"[A-Za-z0-9_-]{43}\n", first)
    assert first != second


WRONG: dict[str, tuple[list[str], str]] = {
    "no command": ([], "which command? serve"),
    "unknown command": (["server"], "not 'server'; did you mean serve?"),
    "unknown option": (["keygen", "--bits", "512"], "unrecognized arguments: --bits 512"),
    "no target": (["serve"], "no server to serve: give TARGET"),
    "port is no number": (["serve", "a:b", "--port", "http"], "--port: must be a number"),
    "port too high": (["serve", "a:b", "--port", "65536"], "from 0 to 65535, not '65536'"),
    "port negative": (["serve", "a:b", "--port=-1"], "from 0 to 65535, not '-1'"),
    "timeout is zero": (
        ["serve", "a:b", "--idle-timeout", "0"],
        "above 0, such as 30s or",
    ),
    "timeout is infinite": (["serve", "a:b", "--idle-timeout", "inf"], "above 0, such as 30s"),
    "timeout is no number": (["serve", "a:b", "--idle-timeout", "soon"], "above 0, such as 30s"),
    "a grace below zero": (["serve", "a:b", "--grace=-1"], "such as 30s, 15m or 0, not '-1'"),
    "a health check in the way": (
        ["serve", "a:b", "--path", "/x/healthz", "--health", "/x"],
        "is the path of a health check",
    ),
    "one for everything, of none": (
        ["serve", "a:b", "--per-principal"],
        "--per-principal needs --conversations",
    ),
    "ids of a platform, of no conversations": (
        ["serve", "a:b", "--platform-ids"],
        "--platform-ids needs --conversations",
    ),
    "a handle, of no conversations": (
        ["serve", "a:b", "--handle", "add"],
        "--handle needs --conversations",
    ),
    "tools of tasks, of no tasks": (
        ["serve", "a:b", "--task-tools"],
        "--task-tools needs --tasks",
    ),
    "a time of tasks, of no tasks": (
        ["serve", "a:b", "--task-after", "5"],
        "--task-after needs --tasks",
    ),
    "no events": (["serve", "a:b", "--max-events", "0"], "must be a whole number above 0"),
    "half an event": (["serve", "a:b", "--max-events", "1.5"], "above 0, not '1.5'"),
    "a rate with a unit": (
        ["serve", "a:b", "--max-requests-per-principal", "30m"],
        "must be a number above 0, not '30m'",
    ),
    "no requests": (
        ["serve", "a:b", "--max-requests-per-principal", "0"],
        "must be a number above 0, not '0'",
    ),
    "a limit without a value": (["serve", "a:b", "--max-events"], "expected one argument"),
    "the option before each limit was one": (
        ["serve", "a:b", "--limit", "max_events=5"],
        "--limit is gone: each limit is an option by its name, such as --max-events 5",
    ),
    "the same, in one word": (["serve", "a:b", "--limit=max_events=5"], "such as --max-events 5"),
    "relative path": (["serve", "a:b", "--path", "mcp"], "must be a path that begins with '/'"),
    "a query in the path": (["serve", "a:b", "--path", "/mcp?a=b"], "must be a path"),
    "unknown level": (
        ["serve", "a:b", "--log-level", "trace"],
        "must be one of debug, info, warning, error, not 'trace'",
    ),
    "unknown format": (
        ["serve", "a:b", "--log-format", "xml"],
        "text, json, not 'xml'",
    ),
}


@pytest.mark.parametrize(("arguments", "expected"), WRONG.values(), ids=list(WRONG))
def test_a_wrong_command_line_is_one_line_on_stderr_and_status_2(
    arguments: list[str], expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    status, out, err = outcome(capsys, *arguments)

    assert (status, out) == (2, "")
    assert re.fullmatch(r"mcp-sessions[^\n]*\n", err)
    assert expected in err


def test_the_command_is_also_a_module(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "mcp_sessions.cli", "--version"],
        cwd=tmp_path,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=50,
    )

    assert (done.returncode, done.stdout) == (0, f"mcp-sessions {__version__}\n")


@pytest.mark.parametrize(
    "arguments",
    [
        ("serve", "--api-key", "keys.json", "app.py"),
        ("bridge", "http://127.0.0.1:1/mcp", "--log-lev=info"),
        ("acp", "--agent", "app.py", "--log-lev", "info"),
        ("keys", "add", "ci", "--fil", "keys.json"),
        ("sessions", "list", "--js", "--store", "sqlite:///x.db"),
        ("conformance", "--lev", "http://127.0.0.1:1/mcp"),
    ],
    ids=lambda each: each[0],
)
def test_a_part_of_an_option_is_no_option(
    arguments: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    """It could mean another option with the next release."""
    with pytest.raises(SystemExit) as stopped:
        main(list(arguments))
    assert stopped.value.code == 2
    short = next(each for each in arguments if each.startswith("--") and each != "--agent")
    assert short in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "near"),
    [
        (["bridg"], "bridge"),
        (["keys", "lst"], "list"),
        (["sessions", "shw"], "show"),
        (["serve", "--prot", "1", "a.py"], "--port"),
        (["keys", "add", "me", "--expire", "90d"], "--expires"),
        (["sessions", "list", "--store", "memory://", "--idel=3"], "--idle"),
        (["bridge", "https://host/mcp", "--heder", "A: b"], "--header"),
        (["conformance", "http://host/mcp", "--suit", "replay"], "--suite"),
        (["acp", "--agent", "a.py", "--stroe", "memory://"], "--store"),
        (["serve", "a.py", "--log-level", "INFO"], "info"),
        (["serve", "a.py", "--maxevents", "4"], "--max-events"),
        (["serve", "a.py", "--max-event=4"], "--max-events"),
        (["serve", "a.py", "--store", "redis+sentinal://a/b"], "redis+sentinel://"),
        (["sessions", "list", "--store", "notes.db"], "sqlite:///notes.db"),
        (["store", "check", "/data/notes.db"], "sqlite:////data/notes.db"),
    ],
)
def test_what_is_nearly_right_gets_a_hint(
    arguments: list[str], near: str, capsys: pytest.CaptureFixture[str]
) -> None:
    status, _, err = outcome(capsys, *arguments)

    assert status == 2
    assert f"; did you mean {near}?" in err


@pytest.mark.parametrize(
    "arguments", [["conformance", "--list"], ["serve", "--check", "--port", "0", "app.py"]]
)
def test_a_reader_that_leaves_ends_the_command_without_a_word(
    arguments: list[str], tmp_path: Path
) -> None:
    """As ``| head -1`` does. The read end is closed before the first line is written."""
    (tmp_path / "app.py").write_text('from mcp.server import MCPServer\nm = MCPServer("a")\n')
    reads, writes = os.pipe()
    os.close(reads)
    try:
        ended = subprocess.run(
            [sys.executable, "-m", "mcp_sessions.cli", *arguments],
            cwd=tmp_path,
            stdout=writes,
            stderr=subprocess.PIPE,
            timeout=50,
        )
    finally:
        os.close(writes)

    assert (ended.returncode, ended.stderr) == (141, b"")


@pytest.mark.parametrize("command", ["acp", "bridge", "serve", "sessions", "store"])
def test_an_interrupt_is_one_line(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(arguments: list[str]) -> int:
        """``asyncio.run`` ends so, when SIGINT has cancelled its task."""
        raise KeyboardInterrupt

    monkeypatch.setattr(f"mcp_sessions.cli.{command}.main", interrupted)

    assert main([command]) == 130
    assert capsys.readouterr() == ("", f"mcp-sessions {command}: interrupted\n")


@pytest.mark.parametrize("ignored", [False, True], ids=["in front", "a background job"])
def test_a_sigterm_lets_the_command_clean_up(
    ignored: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A shell's background job ignores SIGINT. The system may end a copy of a store at any time."""
    done: list[str] = []

    async def work() -> None:
        try:
            signal.raise_signal(signal.SIGTERM)
            await asyncio.wait_for(asyncio.Event().wait(), 50)
        finally:
            done.append("cleaned up")

    def copy(arguments: list[str]) -> None:
        asyncio.run(work())

    monkeypatch.setattr("mcp_sessions.cli.store.main", copy)
    kept = signal.getsignal(signal.SIGTERM)
    before = signal.signal(signal.SIGINT, signal.SIG_IGN if ignored else signal.default_int_handler)
    try:
        status = main(["store"])
    finally:
        signal.signal(signal.SIGINT, before)

    assert (status, done) == (143, ["cleaned up"])
    assert capsys.readouterr() == ("", "mcp-sessions store: terminated\n")
    assert signal.getsignal(signal.SIGTERM) is kept


class Interrupting:
    """Finds the module of the commands, and is interrupted."""

    def find_spec(self, name: str, path: object = None, target: object = None) -> None:
        if name == "mcp_sessions.cli.main":
            raise KeyboardInterrupt


def test_an_interrupt_during_the_first_imports_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delitem(sys.modules, "mcp_sessions.cli.main")
    monkeypatch.setattr(sys, "meta_path", [Interrupting(), *sys.meta_path])

    assert run() == 130
    assert capsys.readouterr() == ("", "mcp-sessions: interrupted\n")


def test_nothing_that_takes_long_is_imported_before_an_interrupt_is_one_line() -> None:
    code = "import sys; import mcp_sessions.cli.__main__; print(*sys.modules)"
    found = subprocess.run(
        [sys.executable, "-S", "-c", code],
        env={"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=True,
        timeout=50,
    )

    assert not {"argparse", "logging", "typing", "dataclasses"} & set(found.stdout.split())
