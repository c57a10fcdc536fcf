"""``serve --workers N``: one port, several processes, kept and drained."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from tests.support.children import CHILD, children_of
from tests.support.redis_server import namespace, shared_redis
from tests.support.serving import read_lines, serving

APP = """
import os
from mcp.server import MCPServer
from starlette.requests import Request
from starlette.responses import PlainTextResponse

mcp = MCPServer("workers")

@mcp.custom_route("/who", methods=["GET"])
async def who(request: Request) -> PlainTextResponse:
    return PlainTextResponse(str(os.getpid()))
"""
WITHIN = 40.0


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "app.py").write_text(APP)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@contextmanager
def served(here: Path) -> Generator[tuple["subprocess.Popen[str]", str]]:
    """Two workers on one Redis, and their URL."""
    store = f"{shared_redis().url}?namespace={namespace()}"
    with serving(
        here, "app.py", "--workers", "2", "--store", store, "--drain-delay", "0"
    ) as keeper:
        found = re.search(r"(http://127\.0\.0\.1:\d+)/mcp", read_lines(keeper, 5))
        assert found is not None
        yield keeper, found[1]


def who(url: str) -> int:
    """The process that serves a request on a connection of its own."""
    return int(httpx.get(f"{url}/who", timeout=WITHIN, trust_env=False, verify=False).text)


def until(condition: Callable[[], bool]) -> None:
    """Wait for something that nobody tells of."""
    end = time.monotonic() + WITHIN
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


def is_gone(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return True
    return False


@pytest.mark.redis
def test_workers_share_a_port_and_one_that_dies_is_replaced(here: Path) -> None:
    with served(here) as (keeper, url):
        seen: set[int] = set()
        until(lambda: seen.add(who(url)) or len(seen) >= 2)
        assert len(seen) == 2 and keeper.pid not in seen
        killed = min(seen)
        os.kill(killed, signal.SIGKILL)
        until(lambda: seen.add(who(url)) or len(seen) >= 3)

        keeper.terminate()
        assert keeper.wait(WITHIN) == 0
        for process in seen:
            until(lambda: is_gone(process))  # noqa: B023
        with pytest.raises(httpx.ConnectError):
            who(url)
        assert keeper.stderr is not None
        assert len(re.findall(r"worker \d exited with status -9", keeper.stderr.read())) == 1


@pytest.mark.redis
def test_a_reload_does_not_end_a_worker_that_starts(here: Path) -> None:
    """It reads the file again when it serves."""
    file, namespaces = here / "servers.json", f"{namespace()}-{{server}}"
    entry = {"command": sys.executable, "args": ["-S", CHILD]}
    file.write_text(json.dumps({"mcpServers": {"one": entry}}))
    store = f"{shared_redis().url}?namespace={namespaces}"
    given = ("--config", str(file), "--lazy", "--workers", "2", "--store", store)
    with serving(here, *given, "--drain-delay", "0", within=120) as keeper:
        found = re.search(r"(http://127\.0\.0\.1:\d+)/one", read_lines(keeper, 5))
        assert found is not None
        until(lambda: len(children_of(keeper.pid)) == 2)
        kept, killed = children_of(keeper.pid)
        os.kill(killed, signal.SIGKILL)
        until(lambda: any(each not in (kept, killed) for each in children_of(keeper.pid)))
        # The first one may come before the new worker has loaded anything.
        keeper.send_signal(signal.SIGHUP)
        started = next(each for each in children_of(keeper.pid) if each not in (kept, killed))
        os.kill(kept, signal.SIGKILL)
        until(lambda: httpx.get(f"{found[1]}/", trust_env=False, timeout=WITHIN).status_code == 404)
        assert started in children_of(keeper.pid)
        keeper.terminate()
        assert keeper.wait(WITHIN) == 0
        assert keeper.stderr is not None
        assert re.findall(r"exited with status (-?\d+)", keeper.stderr.read()) == ["-9", "-9"]


@pytest.mark.redis
def test_workers_do_not_outlive_their_keeper(here: Path) -> None:
    """Killed, it can pass nothing on."""
    with served(here) as (keeper, url):
        seen: set[int] = set()
        until(lambda: seen.add(who(url)) or len(seen) >= 2)
        keeper.kill()
        keeper.wait(WITHIN)
        until(lambda: all(map(is_gone, seen)))
        assert len(seen) >= 2


@pytest.mark.parametrize("store", ["memory://", "sqlite:///sessions.db"])
def test_a_store_of_one_process_is_refused(here: Path, store: str) -> None:
    """Each worker would have sessions of its own."""
    with serving(here, "app.py", "--workers", "2", "--store", store) as keeper:
        assert keeper.wait(WITHIN) == 2
        assert keeper.stderr is not None
        said = keeper.stderr.read()

    assert said.count("\n") == 1 and "--workers: the processes do not share the store" in said


@pytest.mark.redis
@pytest.mark.parametrize("by", ["option", "code"])
def test_an_encrypted_store_needs_keys_that_outlive_the_workers(
    here: Path, by: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The keeper makes a key for them, which ends with it. Nobody could read the store then."""
    monkeypatch.delenv("MCP_SESSIONS_KEYS", raising=False)
    if by == "code":
        layer = (
            "from mcp_sessions import SessionLayer\nlayer = SessionLayer(mcp, encrypt_store=True)"
        )
        store = f"store={shared_redis().url + '?namespace=' + namespace()!r}"
        code = f"{APP}\n{layer.replace('encrypt_store', store + ', encrypt_store')}\n"
        (here / "app.py").write_text(code)
        arguments = ["app.py:layer"]
    else:
        url = f"{shared_redis().url}?namespace={namespace()}"
        arguments = ["app.py", "--store", url, "--encrypt-store"]
    with serving(here, *arguments, "--workers", "2") as keeper:
        assert keeper.wait(WITHIN) == 2
        assert keeper.stderr is not None
        said = keeper.stderr.read()
    assert said.count("\n") == 1 and "an encrypted store needs keys that outlive the" in said


def test_one_pipe_is_not_for_several_processes(refused: Callable[..., str]) -> None:
    assert "--workers: --stdio needs one process" in refused(
        "serve", "app.py", "--workers", "2", "--stdio"
    )
