"""The plugin of `tests.support.unseen` fails the test that left something, and no other."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.unseen import ROOT

HEAD = """
import asyncio, logging
import pytest
from mcp_sessions.background import Background

async def dies():
    raise RuntimeError("unseen")

KEPT = []
"""


DIED = """
def test_held():
    async def main():
        KEPT.append(asyncio.create_task(dies()))
        await asyncio.sleep(0)
    asyncio.run(main())

def test_next():
    KEPT.clear()

def test_collected():
    async def main():
        asyncio.create_task(dies())
        await asyncio.sleep(0)
        await asyncio.sleep(0)
    asyncio.run(main())

def test_taken():
    async def main():
        task = asyncio.create_task(dies())
        with pytest.raises(RuntimeError):
            await task
    asyncio.run(main())

@pytest.mark.anyio
@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_in_a_loop_of_anyio(anyio_backend):
    KEPT.append(asyncio.create_task(dies()))
    await asyncio.sleep(0)
"""

BACKGROUND = """
def fail(name):
    async def main():
        await Background().run(name, dies())
    asyncio.run(main())

def test_unexpected():
    fail("work")

@pytest.mark.fails_in_background("work")
def test_expected():
    fail("work")

@pytest.mark.fails_in_background("other work")
def test_another():
    fail("work")

@pytest.mark.fails_in_background("work")
def test_it_did_not():
    pass
"""

LEFT = """
async def forever():
    await asyncio.Event().wait()

def test_left():
    async def main():
        Background().loop("a loop", forever)
        await asyncio.sleep(0)
    asyncio.run(main())

def test_closed():
    async def main():
        background = Background()
        background.loop("a loop", forever)
        await asyncio.sleep(0)
        await background.close()
    asyncio.run(main())

def test_cancelled():
    async def main():
        asyncio.create_task(forever()).cancel()
    asyncio.run(main())

@pytest.fixture
async def holds(anyio_backend):
    background = Background()
    background.loop("a loop", forever)
    yield
    await background.close()

@pytest.fixture
async def leaks(anyio_backend):
    KEPT.append(Background())
    KEPT[-1].loop("a loop", forever)
    yield

@pytest.mark.anyio
@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_with_a_fixture(anyio_backend, holds):
    pass

@pytest.mark.anyio
@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_with_a_fixture_that_leaks(anyio_backend, leaks):
    pass
"""

SOURCES = {"died": DIED, "background": BACKGROUND, "left": LEFT}


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, str]]:
    """What pytest says of each test of each file, with this repository's plugin. One run, since
    each imports what the plugin needs.
    """
    folder = tmp_path_factory.mktemp("unseen")
    (folder / "conftest.py").write_text(
        "from tests.conftest import pytest_configure as pytest_configure\n"
    )
    for file, source in SOURCES.items():
        (folder / f"test_{file}.py").write_text(HEAD + source)
    done = subprocess.run(
        [
            sys.executable,
            *("-m", "pytest", "-q", "-rA", "-p", "no:cacheprovider", "--import-mode=importlib"),
            *("-o", "markers=fails_in_background(*work): .", "-W", "error", str(folder)),
        ],
        cwd=folder,
        env={"PYTHONPATH": f"{ROOT}:{ROOT}/transports:{ROOT}/conformance"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=50,
    )
    said: dict[str, dict[str, str]] = {file: {} for file in SOURCES}
    for line in done.stdout.splitlines():
        outcome, _, rest = line.partition(" ")
        if outcome in ("PASSED", "FAILED", "ERROR") and "::" in rest:
            path, _, name = rest.partition(" ")[0].partition("::")
            here = said[Path(path).stem.removeprefix("test_")]
            here[name] = outcome if here.get(name) in (None, "PASSED") else here[name]
    assert all(said.values()), done.stdout + done.stderr
    return said


def test_a_test_that_leaves_a_task_that_died_fails_and_the_next_one_does_not(
    outcomes: dict[str, dict[str, str]],
) -> None:
    """Whoever holds the task, and whether it is collected."""
    assert outcomes["died"] == {
        "test_held": "FAILED",
        "test_next": "PASSED",
        "test_collected": "FAILED",
        "test_taken": "PASSED",
        "test_in_a_loop_of_anyio[asyncio]": "FAILED",
    }


def test_a_test_in_which_background_work_fails_must_have_said_so(
    outcomes: dict[str, dict[str, str]],
) -> None:
    assert outcomes["background"] == {
        "test_unexpected": "FAILED",
        "test_expected": "PASSED",
        "test_another": "FAILED",
        "test_it_did_not": "FAILED",
    }


def test_a_test_that_leaves_a_task_of_ours_running_fails(
    outcomes: dict[str, dict[str, str]],
) -> None:
    assert outcomes["left"] == {
        "test_left": "FAILED",
        "test_closed": "PASSED",
        "test_cancelled": "PASSED",
        "test_with_a_fixture[asyncio]": "PASSED",
        "test_with_a_fixture_that_leaks[asyncio]": "ERROR",
    }


def test_the_plugin_is_active_here(pytestconfig: pytest.Config) -> None:
    names = [type(plugin).__name__ for plugin in pytestconfig.pluginmanager.get_plugins()]
    assert names.count("Unseen") == 1
