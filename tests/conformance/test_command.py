"""``mcp-sessions conformance`` as a user sees it."""

import builtins
import json
import os
import shlex
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from mcp_sessions.cli.main import main
from mcp_sessions_conformance.loader import load_vectors

FEW = ["--only", "start-answers-with-an-id", "--only", "sessions-are-optional"]


def test_a_good_server_is_conformant(
    server_url: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("CONFORMANCE_TOKEN", "alpha")
    out = tmp_path / "out.json"
    status = main(["conformance", server_url, *FEW, "--json", str(out)])
    printed = capsys.readouterr()
    assert status == 0, printed.out
    assert printed.out.rstrip().endswith(": conformant")
    assert "http/modern: 2 vectors" in printed.err
    document = json.loads(out.read_text())
    assert document["counts"] == {
        "passed": 4,
        "failed": 0,
        "warnings": 0,
        "notPlayed": 0,
        "notSelected": 0,
    }


def test_a_failure_is_explained(server_url: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Without its credential, nothing works."""
    status = main(["conformance", server_url, *FEW, "--era", "handshake"])
    printed = capsys.readouterr().out
    assert status == 1
    for part in (
        "FAILED  start-answers-with-an-id  (http/handshake)",
        "rule    MUST STA1, STA3, SES4: session/start answers",
        "effect  Without an id",
        "found   step 1 (open on a)",
        '"method": "initialize"',
        "2 failed, 0 warnings",
        "NOT conformant",
    ):
        assert part in printed, printed


def test_only_takes_clauses(server_url: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Every vector that proves it is played, and nothing else."""
    main(["conformance", server_url, "--only", "GAT1", "--era", "handshake"])
    printed = capsys.readouterr()
    proving = [vector for vector in load_vectors() if "GAT1" in vector.clauses]
    assert f"http/handshake: {len(proving)} vectors" in printed.err and proving


@pytest.mark.parametrize(
    ("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)], ids=["INT", "TERM"]
)
def test_a_run_that_is_broken_off_writes_what_it_has(
    number: signal.Signals, status: int, tmp_path: Path
) -> None:
    out = tmp_path / "out.json"
    with socket.create_server(("127.0.0.1", 0)) as silent:
        command = [sys.executable, "-m", "mcp_sessions.cli", "conformance", "--json", str(out)]
        command += [f"http://127.0.0.1:{silent.getsockname()[1]}/mcp", "--timeout", "0.2"]
        runner = subprocess.Popen(
            [*command, "--give-up", "0"],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            # As in a terminal: what a script starts in the background ignores Ctrl-C.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
        )
        assert runner.stderr is not None
        # The first line says that it begins, the second what was wrong with the first vector.
        for _ in range(2):
            assert runner.stderr.readline()
        runner.send_signal(number)
        printed, said = runner.communicate(timeout=30)
    assert runner.returncode == status, said
    assert "broken off" in printed and "NOT conformant" in printed
    document = json.loads(out.read_text())
    assert document["complete"] is False and document["conformant"] is False
    assert document["outcomes"]


def test_the_outcome_is_written_though_nobody_reads_the_report(tmp_path: Path) -> None:
    """As in ``mcp-sessions conformance … --json out.json | head -1``."""
    out = tmp_path / "out.json"
    command = [sys.executable, "-m", "mcp_sessions.cli", "conformance", "--json", str(out)]
    command += ["stdio:/no/such/program", "--only", "start-answers-with-an-id"]
    read, write = os.pipe()
    os.close(read)
    try:
        subprocess.run(command, stdout=write, stderr=subprocess.DEVNULL, timeout=30)
    finally:
        os.close(write)
    assert json.loads(out.read_text())["counts"]["failed"] == 2


def test_a_report_is_printed_where_only_ascii_is(tmp_path: Path) -> None:
    """It may quote a server."""
    program = "import os\nfor _ in open(0): os.write(1, b'\\xc3\\xbcn\\n')"
    command = [sys.executable, "-m", "mcp_sessions.cli", "conformance", "--timeout", "1"]
    command += [f"stdio:{shlex.join([sys.executable, '-c', program])}"]
    command += ["--only", "start-answers-with-an-id", "--era", "handshake"]
    done = subprocess.run(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env={**os.environ, "PYTHONIOENCODING": "ascii"},
        timeout=30,
    )
    assert done.returncode == 1
    assert b"NOT conformant" in done.stdout and b"\\xfcn" in done.stdout


def test_wrong_arguments_leave_no_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """An empty one looked like an outcome; one that was there stays as it was."""
    new, old = tmp_path / "new.json", tmp_path / "old.json"
    old.write_text("{}")
    for out in (new, old):
        assert main(["conformance", "http://h/mcp", "--only", "nothing", "--json", str(out)]) == 2
    assert not new.exists() and old.read_text() == "{}"


def test_nothing_played_is_not_conformant(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["conformance", "http://127.0.0.1:9/mcp", "--transport", "stdio"]
    assert main(arguments) == 1
    assert "nothing was played" in capsys.readouterr().out


def test_the_list_names_vectors_and_duties(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["conformance", "--list"]) == 0
    printed = capsys.readouterr().out
    assert "start-answers-with-an-id" in printed
    assert "state-is-echoed-exactly" in printed


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        ([], "which TARGET"),
        (["localhost:8000"], "TARGET is an http(s)://"),
        (["ftp://h/"], "TARGET is an http(s)://"),
        (["http://"], "names no host"),
        (["stdio:"], "needs a command"),
        (["stdio:'"], "cannot be read"),
        (["http://h/mcp", "--only", "nothing"], "there is no vector or clause 'nothing'"),
        (["http://h/mcp", "--suite", "nothing"], "there is no suite 'nothing'"),
        (["--client", "x", "--only", "nothing"], "there is no duty or clause 'nothing'"),
        (["http://h/mcp", "--give-up", "-1"], "a whole number"),
        (["--client", "'"], "No closing quotation"),
        (["--client", "x", "http://h/mcp"], "takes no TARGET"),
        (["--client", "x", "--suite", "client-duties"], "--client takes --only"),
        (["--client", "x", "--transport", "http"], "--client takes --only"),
        (["--client", "x", "--era", "modern"], "--client takes --only"),
        (["--client", "x", "--level", "resume"], "--client takes --only"),
        (["http://h/mcp", "--level", "some"], "must be one of resume"),
        (["http://h/mcp", "--json", "/no/such/folder/out.json"], "cannot be written"),
        (["http://h/mcp", "--timeout", "0"], "above 0"),
        (["http://h/mcp", "--transport", "carrier-pigeon"], "must be one of http"),
    ],
)
def test_what_makes_no_sense_is_one_line_and_status_2(
    arguments: list[str], part: str, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        status = main(["conformance", *arguments])
    except SystemExit as ended:
        status = ended.code
    printed = capsys.readouterr().err
    assert status == 2
    assert part in printed
    assert printed.count("\n") == 1


def test_an_empty_token_is_none(
    server_url: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a CI sets it whose secret is not there: what needs a principal is not selected."""
    monkeypatch.setenv("CONFORMANCE_TOKEN", "alpha")
    monkeypatch.setenv("CONFORMANCE_OTHER_TOKEN", "")
    only = ["--only", "a-foreign-connection-is-404", "--only", "sessions-are-optional"]
    assert main(["conformance", server_url, "--era", "handshake", *only]) == 0
    assert "it needs the credentials of two principals" in capsys.readouterr().out


def test_a_token_that_is_no_header_is_refused(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CONFORMANCE_TOKEN", "alpha\n")
    assert main(["conformance", "http://h/mcp"]) == 2
    printed = capsys.readouterr().err
    assert "a bearer token is of visible ASCII" in printed and "alpha" not in printed


def test_a_client_is_reported_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Duty by duty while it runs, and at the end what is wrong."""
    out = tmp_path / "out.json"
    command = ["--client", f'{sys.executable} -c "raise SystemExit(3)"', "--timeout", "1"]
    only = ["--only", "what-began-is-not-moved"]
    assert main(["conformance", *command, *only, "--json", str(out)]) == 1
    printed = capsys.readouterr()
    assert (
        "client: 1 duties\nclient: what-began-is-not-moved: session/start did not come"
        in printed.err
    )
    assert "FAILED  what-began-is-not-moved  (client)" in printed.out
    assert json.loads(out.read_text())["counts"] == {"passed": 0, "failed": 1, "warnings": 0}


def test_without_the_extra_it_says_what_to_install(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    real = builtins.__import__

    def without_httpx(name: str, *rest: Any, **named: Any) -> Any:
        if name == "httpx":
            raise ModuleNotFoundError("No module named 'httpx'", name="httpx")
        return real(name, *rest, **named)

    for name in [name for name in sys.modules if name.startswith("mcp_sessions_conformance")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(builtins, "__import__", without_httpx)
    assert main(["conformance", "--list"]) == 2
    assert "httpx: in a checkout, run pip install -e conformance" in capsys.readouterr().err
