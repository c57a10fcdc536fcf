"""Who gets the page: this machine, or whoever has a key."""

import base64
import subprocess
import sys
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

import httpx2
import pytest
from starlette.responses import PlainTextResponse

from mcp_sessions.access import Access
from mcp_sessions.cli.main import main
from mcp_sessions.dashboard.door import Lock, locked
from mcp_sessions.principal import Principal

pytestmark = pytest.mark.anyio


@asynccontextmanager
async def browser(
    lock: Lock | None, address: str = "127.0.0.1"
) -> AsyncGenerator[httpx2.AsyncClient]:
    app = locked(PlainTextResponse("seen"), lock)
    transport = httpx2.ASGITransport(app=app, client=(address, 4711))
    async with httpx2.AsyncClient(transport=transport, base_url="http://127.0.0.1:8090") as client:
        yield client


async def test_without_a_lock_this_machine_alone_sees_it() -> None:
    async with browser(None) as client:
        assert (await client.get("/")).text == "seen"
        for headers in ({"host": "attacker.example"}, {"x-forwarded-for": "203.0.113.9"}):
            assert (await client.get("/", headers=headers)).status_code == 403
    async with browser(None, "203.0.113.9") as client:
        assert (await client.get("/")).status_code == 403


@pytest.fixture
def keys(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> tuple[Path, str]:
    """A file of API keys, and the key in it."""
    path = tmp_path / "keys.json"
    assert main(["keys", "add", "operator", "--file", str(path)]) == 0
    return path, capsys.readouterr().out.split()[-1]


def _ignore(reason: str, address: str | None, principal: Principal) -> None:
    """Nobody audits here."""


def lock_of(path: Path) -> Lock:
    authentication = Access(api_keys=str(path)).authenticating()("")
    assert authentication is not None
    return partial(authentication.around, denied=_ignore)


async def test_with_a_lock_a_key_is_the_password(keys: tuple[Path, str]) -> None:
    path, key = keys
    async with browser(lock_of(path), "203.0.113.9") as client:

        async def status(authorization: str | None) -> int:
            headers = {} if authorization is None else {"authorization": authorization}
            return (await client.get("/", headers=headers)).status_code

        def basic(text: str) -> str:
            return f"Basic {base64.b64encode(text.encode()).decode()}"

        refused = await client.get("/")
        assert refused.headers["www-authenticate"].startswith("Basic ")
        assert await status(basic(f"anybody:{key}")) == 200
        assert await status(f"Bearer {key}") == 200
        for wrong in (None, basic("anybody:wrong"), basic(key), "Basic %%%", "Basic", "Bearer x"):
            assert await status(wrong) == 401, wrong


def test_another_host_needs_keys(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["dashboard", "--store", "sqlite:///none.db", "--host", "0.0.0.0"]) == 2
    said = capsys.readouterr().err
    assert "it needs --api-keys FILE" in said and said.count("\n") == 1


@pytest.mark.parametrize("store", ["memory://", "sqlite:///no/such/file.db"])
def test_a_store_that_nobody_else_can_read_is_refused(
    store: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["dashboard", "--store", store, "--port", "0"]) in (1, 2)
    assert capsys.readouterr().err.count("\n") == 1


def test_the_command_serves_the_page_beside_a_store(tmp_path: Path) -> None:
    make = (
        "import asyncio, sys\n"
        "from mcp_sessions import SQLiteStore, SessionPolicy\n"
        "async def main():\n"
        "    store = SQLiteStore(sys.argv[1])\n"
        "    await store.open(SessionPolicy())\n"
        "    await store.close()\n"
        "asyncio.run(main())\n"
    )
    path = tmp_path / "sessions.db"
    subprocess.run([sys.executable, "-c", make, str(path)], check=True, timeout=50)
    command = [sys.executable, "-m", "mcp_sessions.cli", "dashboard", "--port", "0"]
    with subprocess.Popen(
        [*command, "--store", f"sqlite:///{path}"], stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stderr is not None
            url = process.stderr.readline().split()[-1]
            assert "sessions" in httpx2.get(url, timeout=20).text
        finally:
            process.terminate()
            process.wait(20)
    assert process.returncode == 143
