"""Servers that a launcher starts, as ``npx`` does: later processes start without it."""

import os
import sys
from pathlib import Path
from typing import Any

import pytest

from mcp_sessions import StdioServer
from mcp_sessions.server.upstream.external.launcher import memory_of
from tests.server.upstream.external.test_children import starts
from tests.support.children import CHILD, children_of, until
from tests.support.world import World, world

pytestmark = pytest.mark.skipif(not os.path.isdir("/proc/self/task"), reason="only Linux says it")

LAUNCHER = """#!{python} -S
import os, subprocess, sys

with open("{folder}/launched", "a") as file:
    file.write("started\\n")
{before}
env = {{**os.environ, "PATH": "{folder}/package:" + os.environ["PATH"], "ADDED": "by it"}}
sys.exit(subprocess.run(["sh", "-c", "the-server"], env=env{more}).returncode)
"""
SERVER = """#!/bin/sh
echo "$ADDED" >> {folder}/added
exec {python} -S {child}
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "package").mkdir()
    return tmp_path


def launcher(folder: Path, before: str = "", more: str = "", **options: Any) -> StdioServer:
    names = {"folder": folder, "python": sys.executable, "child": CHILD}
    for path, text in ((folder / "npx", LAUNCHER), (folder / "package" / "the-server", SERVER)):
        path.write_text(text.format(before=before, more=more, **names))
        path.chmod(0o755)
    return StdioServer(str(folder / "npx"), "-y", "a-package", title="the server a", **options)


async def works(w: World) -> None:
    assert await (await w.connected()).text("count") == "1"


def launched(folder: Path) -> int:
    return starts(folder / "launched")


def running(folder: Path) -> list[int]:
    """The launchers that run."""
    name = str(folder / "npx").encode()
    found = children_of(os.getpid())
    return [pid for pid in found if name in Path(f"/proc/{pid}/cmdline").read_bytes()]


@pytest.mark.parametrize("at_start", [True, False])
async def test_it_is_asked_once_and_no_process_of_it_is_left(folder: Path, at_start: bool) -> None:
    async with world(server=launcher(folder, try_at_start=at_start)) as w:
        await works(w)
        await works(w)
        assert launched(folder) == 1 and running(folder) == []
    said = (folder / "added").read_text().splitlines()
    assert said[-2:] == ["by it"] * 2, "each gets the environment that the launcher makes"


async def test_a_process_gets_the_variables_that_it_was_given(folder: Path) -> None:
    server = launcher(folder, env={"CALLS": str(folder / "calls")})
    async with world(server=server) as w:
        await works(w)
        await works(w)
    assert starts(folder / "calls") >= 2


async def test_a_launcher_that_stands_between_the_pipes_stays(
    folder: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mcp_sessions.server.upstream.external.launcher._INSTALLS", 1)
    between = ", stdout=subprocess.PIPE"
    copies = """
server = subprocess.Popen(["the-server"], stdout=subprocess.PIPE,
    env={**os.environ, "PATH": "FOLDER/package:" + os.environ["PATH"]})
for line in server.stdout:
    sys.stdout.buffer.write(line)
    sys.stdout.buffer.flush()
sys.exit(0)
""".replace("FOLDER", str(folder))
    server = launcher(folder, copies, between, start_timeout=2)
    async with world(server=server) as w:
        await works(w)
        await works(w)
        assert launched(folder) == 3, "once to ask it, and for each session"
        why = "the server a: each process starts through npx: it started nothing in 2 seconds"
        await until(lambda: why in caplog.text, "the reason", 30)


async def test_a_client_that_waited_for_an_installation_is_served_and_the_next_without_it(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    installs = f"""
if open("{folder}/launched").read() == "started\\n":
    while not os.path.exists("{folder}/installed"):
        import time; time.sleep(0.01)
"""
    async with world(server=launcher(folder, installs, start_timeout=3)) as w:
        await works(w)
        assert len(running(folder)) == 2, "it installs, and the client's"
        (folder / "installed").touch()
        await until(lambda: "processes start without npx" in caplog.text, "it is known", 30)
        await works(w)
        assert launched(folder) == 2


async def test_if_a_file_of_the_server_is_gone_it_starts_through_the_launcher(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with world(server=launcher(folder)) as w:
        await works(w)
        package = folder / "package"
        package.rename(folder / "other")
        (folder / "npx").write_text((folder / "npx").read_text().replace("/package:", "/other:"))
        await works(w)
        assert launched(folder) == 2
    assert f"starts through npx: {package} is gone" in caplog.text


async def test_a_helper_of_the_launcher_that_is_taken_for_the_server_refuses_no_client(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It runs with the same pipes before the server, and ends without a word."""
    helper = 'subprocess.run(["sleep", "0.3"])'
    async with world(server=launcher(folder, helper)) as w:
        await works(w)
        await works(w)
        assert launched(folder) == 3 and len(running(folder)) == 2
    assert "starts through npx: without it, a process ended" in caplog.text


async def test_a_server_that_fails_by_itself_is_no_doubt(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with world(server=launcher(folder)) as w:
        await works(w)
        (folder / "package" / "the-server").write_text("#!/bin/sh\necho no key >&2\nexit 3\n")
        with pytest.raises(AssertionError, match="no key"):
            await works(w)
        assert launched(folder) == 2, "the launcher was tried as well"
    assert "through npx" not in caplog.text


@pytest.mark.parametrize("per", ["session", "principal"])
async def test_a_variable_of_a_session_is_given_to_no_other(folder: Path, per: Any) -> None:
    """The launcher may write it into others, such as a path of its cache."""
    server = launcher(folder, env={"OWN": f"/cache/{{{per}}}"}, per=per)
    async with world(server=server) as w:
        await works(w)
        # What asks how it is started is another process, and ends by itself.
        await until(lambda: len(running(folder)) == 1, "only the session has one")


def test_the_memory_of_a_process_is_that_of_its_descendants_too() -> None:
    own = memory_of(os.getpid())
    assert own is not None and 10 * 2**20 < own < 2 * 2**30
    assert memory_of(2**22 + 1) is None, "there is none"
