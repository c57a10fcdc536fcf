"""Who gets the page: this machine, or whoever has a key."""

import base64
import subprocess
import sys
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx2
import pytest
from starlette.responses import PlainTextResponse

from mcp_sessions.access import Access
from mcp_sessions.authentication.credential import OPERATOR
from mcp_sessions.cli.main import main
from mcp_sessions.dashboard.access_control import (
    HEADERS,
    Guard,
    application_guard,
    guarded,
    loopback_guard,
    operator_guard,
)
from mcp_sessions.principal import Principal


@asynccontextmanager
async def browser(guard: Guard, address: str = "127.0.0.1") -> AsyncGenerator[httpx2.AsyncClient]:
    app = guarded(PlainTextResponse("seen"), guard)
    transport = httpx2.ASGITransport(app=app, client=(address, 4711))
    async with httpx2.AsyncClient(transport=transport, base_url="http://127.0.0.1:8090") as client:
        yield client


async def test_without_authentication_this_machine_alone_sees_it() -> None:
    async with browser(loopback_guard) as client:
        assert (await client.get("/")).text == "seen"
        for headers in ({"host": "attacker.example"}, {"x-forwarded-for": "203.0.113.9"}):
            assert (await client.get("/", headers=headers)).status_code == 403
    async with browser(loopback_guard, "203.0.113.9") as client:
        assert (await client.get("/")).status_code == 403


@dataclass
class Keys:
    path: Path
    operator: str
    user: str
    """Opens the endpoint, and not the page."""


@pytest.fixture
def keys(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Keys:
    """A file of two API keys."""
    path = tmp_path / "keys.json"

    def added(*arguments: str) -> str:
        assert main(["keys", "add", *arguments, "--file", str(path)]) == 0
        return capsys.readouterr().out.split()[-1]

    return Keys(path, added("ops", "--scope", OPERATOR), added("user", "--scope", "operator"))


def _ignore(reason: str, address: str | None, principal: Principal) -> None:
    """Nobody audits here."""


def guard(keys: Keys) -> Guard:
    authentication = Access(api_keys=str(keys.path)).authenticating()("")
    assert authentication is not None
    return operator_guard(authentication, _ignore)


async def test_with_authentication_a_key_is_the_password(keys: Keys) -> None:
    key = keys.operator
    async with browser(guard(keys), "203.0.113.9") as client:

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


async def test_a_key_that_is_no_operators_does_not_open_the_page(keys: Keys) -> None:
    """It is good for the endpoint, where its owner sees the own sessions alone. The page has those
    of all principals.
    """
    async with browser(guard(keys), "203.0.113.9") as client:
        for address in ("/", "/sessions", "/live/now", "/static/app.css", "/session/abcd/end"):
            answer = await client.get(address, auth=("user", keys.user))
            assert answer.status_code == 403 and OPERATOR in answer.text, address
        assert (await client.post("/find", auth=("user", keys.user))).status_code == 403


async def test_a_refusal_has_the_strict_headers(keys: Keys) -> None:
    def no(request: object) -> bool:
        return False

    seen = PlainTextResponse("seen")
    all_of_them = (
        guarded(seen, loopback_guard),
        guarded(seen, guard(keys)),
        guarded(seen, application_guard(no)),
    )
    for page, status in zip(all_of_them, (403, 401, 403), strict=True):
        transport = httpx2.ASGITransport(app=page, client=("203.0.113.9", 4711))
        async with httpx2.AsyncClient(transport=transport, base_url="http://x.example") as client:
            answer = await client.get("/")
            assert answer.status_code == status
            assert {name: answer.headers[name] for name in HEADERS} == dict(HEADERS)


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
