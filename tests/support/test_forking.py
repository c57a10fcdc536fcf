"""A program that is forked finds what it would find if Python had started it."""

import asyncio
import json
import os
import signal
import subprocess
import sys
from asyncio.subprocess import PIPE
from pathlib import Path
from typing import Any, cast

import pytest

from tests.support import forking

PROGRAM = """
import json, os, signal, sys
seen = {
    "argv": sys.argv[1:], "original": sys.orig_argv, "name": __name__, "here": os.getcwd(),
    "environment": dict(os.environ), "path": sys.path, "file": os.path.realpath(__file__),
    "files": [os.readlink(f"/proc/self/fd/{n}")[:5] for n in range(3)],
    "open": sorted(n for n in os.listdir("/proc/self/fd") if os.path.exists(f"/proc/self/fd/{n}")),
    "interrupt": signal.getsignal(signal.SIGINT) is signal.default_int_handler,
    "pipe": signal.getsignal(signal.SIGPIPE) is signal.SIG_IGN,
    "parent": os.getppid(), "leads": os.getsid(0) == os.getpid(),
    "encodings": [[f.encoding, f.errors, f.line_buffering] for f in (sys.stdin, sys.stdout)],
    "said": sys.stdin.read(),
}
print(json.dumps(seen))
sys.exit(int(sys.argv[1]))
"""


def ways() -> "list[Any]":
    """`subprocess._fork_exec` as it is here, and as Python has it."""
    here: Any = cast(Any, subprocess)._fork_exec
    if sys.platform != "linux" or os.environ.get("SESSIONS_TESTS_FORK") == "no":
        here = forking.Forking(here).start
    return [here, here.__self__.fork_exec]


@pytest.mark.parametrize("new_session", [False, True])
@pytest.mark.parametrize("program", [["-m", "tests"], ["tests/__main__.py"]])
def test_a_program_sees_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, program: list[str], new_session: bool
) -> None:
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests/__main__.py").write_text(PROGRAM)
    seen: list[Any] = []
    for way in ways():
        monkeypatch.setattr(subprocess, "_fork_exec", way)
        done = subprocess.run(
            [sys.executable, *program, "3", "--x", "\udcff"],
            cwd=tmp_path,
            env={"LANG": "C.UTF-8", "PYTHONPATH": f"{tmp_path / 'more'}:/"},
            input=b"hello",
            capture_output=True,
            timeout=40,
            start_new_session=new_session,
        )
        assert (done.returncode, done.stderr) == (3, b"")
        seen.append(json.loads(done.stdout))
    forked, started = seen
    assert forked == started
    assert forked["said"] == "hello" and forked["parent"] == os.getpid()


def test_the_sdk_is_there_already(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subprocess, "_fork_exec", ways()[0])
    monkeypatch.setattr(subprocess, "_USE_POSIX_SPAWN", False)
    (tmp_path / "looks.py").write_text("import sys\nprint('mcp' in sys.modules)\n")
    done = subprocess.run([sys.executable, tmp_path / "looks.py"], capture_output=True, timeout=40)
    assert done.stdout == b"True\n"


ENDS = """
import atexit, os, sys, threading, time
atexit.register(lambda: sys.stdout.write("last"))
print("first", end=" ")
sys.stderr.write("complains")
stopped = threading.Event()
threading.Thread(target=lambda: (stopped.wait(), sys.stdout.write("thread "))).start()
threading.Timer(0.05, stopped.set).start()
END
"""


@pytest.mark.parametrize(
    ("end", "status", "complaint"),
    [
        ("", 0, b"complains"),
        ("sys.exit(7)", 7, b"complains"),
        ("sys.exit(-1)", 255, b"complains"),
        ("sys.exit('why')", 1, b"complainswhy\n"),
    ],
)
def test_what_a_program_still_does_at_its_end_is_done(
    end: str, status: int, complaint: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its threads end, then its `atexit` functions run, and what it printed is there."""
    (tmp_path / "ends.py").write_text(ENDS.replace("END", end))
    monkeypatch.setattr(subprocess, "_USE_POSIX_SPAWN", False)
    for way in ways():
        monkeypatch.setattr(subprocess, "_fork_exec", way)
        command = [sys.executable, tmp_path / "ends.py"]
        done = subprocess.run(command, capture_output=True, timeout=40, check=False)
        assert (done.returncode, done.stdout) == (status, b"first thread last")
        assert done.stderr == complaint


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="only Linux has one")
def test_a_program_that_cannot_print_ends_as_python_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "prints.py").write_text("print('text')\n")
    monkeypatch.setattr(subprocess, "_USE_POSIX_SPAWN", False)
    for way in ways():
        monkeypatch.setattr(subprocess, "_fork_exec", way)
        with open("/dev/full", "wb") as full:
            command = [sys.executable, tmp_path / "prints.py"]
            done = subprocess.run(command, stdout=full, stderr=PIPE, timeout=40, check=False)
        assert done.returncode == 120 and b"No space left" in done.stderr


def test_signals_reach_it_and_its_end_is_reported(tmp_path: Path) -> None:
    # A shell's background jobs, and what they start, ignore Ctrl+C.
    listens = "import signal\nsignal.signal(signal.SIGINT, signal.default_int_handler)\n"
    waits = "import sys\nprint(flush=True)\nsys.stdin.read()\n"
    (tmp_path / "waits.py").write_text(listens + waits)

    async def ends_with(number: signal.Signals) -> int:
        process = await asyncio.create_subprocess_exec(
            sys.executable, tmp_path / "waits.py", stdin=PIPE, stdout=PIPE, stderr=PIPE
        )
        assert process.stdout is not None
        await process.stdout.readline()
        process.send_signal(number)
        await process.communicate()
        assert process.returncode is not None
        return process.returncode

    async def main() -> None:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGKILL):
            assert await asyncio.wait_for(ends_with(number), 40) == -number

    asyncio.run(main())


def test_its_orphans_are_not_ours(tmp_path: Path) -> None:
    """What a program leaves is nobody's zombie: the test process is asked for its own only."""
    (tmp_path / "leaves.py").write_text(
        "import subprocess\n"
        "child = subprocess.Popen(['cat'], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL)\n"
        "print(child.pid, flush=True)\n"
        "import os\nos._exit(0)\n"
    )
    done = subprocess.run([sys.executable, tmp_path / "leaves.py"], capture_output=True, timeout=40)
    with pytest.raises(ChildProcessError):
        os.waitpid(int(done.stdout), 0)


@pytest.mark.parametrize(
    ("words", "options"),
    [
        (["-c", "pass"], {}),
        (["-m", "file"], {}),
        ([], {"input": b""}),
        (["-S", "file.py"], {}),
        (["file.py"], {"env": {"PYTHONHASHSEED": "1"}}),
        (["file.py"], {"env": {"LC_ALL": "en_US.UTF-8"}}),
        (["file.py"], {"process_group": 0}),
    ],
)
def test_another_program_is_started_as_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: list[str], options: dict[str, Any]
) -> None:
    (tmp_path / "file.py").touch()
    started: list[Any] = []

    def fork_exec(*given: Any) -> int:
        started.append(given)
        return python_has(*given)

    python_has = ways()[1]
    monkeypatch.setattr(subprocess, "_fork_exec", forking.Forking(fork_exec).start)
    subprocess.run([sys.executable, *words], cwd=tmp_path, check=True, timeout=40, **options)
    assert len(started) == 1
