"""The page of each store: its commands are run, as a reader runs them."""

import os
from collections.abc import Generator
from pathlib import Path

import pytest

from tests.docs.tutorial import Reader, path_of_this_python
from tests.support.postgres_server import PostgresServer, postgres_server
from tests.support.processes import free_port
from tests.support.redis_server import binary

ROOT = Path(__file__).parents[2]
SERVER = 'from mcp.server import MCPServer\nmcp = MCPServer("notes")\n'


def reader(folder: Path, **environment: str) -> Reader:
    (folder / "server.py").write_text(SERVER, "utf-8")
    path = f"{folder / 'bin'}{os.pathsep}{path_of_this_python()}"
    given = {"PATH": path, "MCP_SESSIONS_PORT": str(free_port()), "MCP_SESSIONS_KEYS": ""}
    environment = {**given, **environment}
    del environment["MCP_SESSIONS_KEYS"]
    return Reader(folder, environment)


def page(name: str) -> str:
    return (ROOT / "docs" / f"{name}.md").read_text("utf-8")


@pytest.mark.full
@pytest.mark.timeout(240)
def test_the_commands_of_the_page_of_sqlite(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("MCP_SESSIONS_KEYS", raising=False)
    reader(tmp_path).expect_what_it_says(page("sqlite"))


@pytest.mark.full
@pytest.mark.redis
@pytest.mark.timeout(300)
def test_the_commands_of_the_page_of_redis(tmp_path: Path) -> None:
    """Without a Redis, a Valkey has its names."""
    does = reader(tmp_path)
    (tmp_path / "bin").mkdir()
    server = Path(binary())
    for name in ("server", "cli"):
        program = server.with_name(server.name.replace("server", name))
        (tmp_path / "bin" / f"redis-{name}").symlink_to(program)
    does.expect_what_it_says(page("redis"))


@pytest.fixture
def postgres() -> Generator[PostgresServer]:
    with postgres_server() as server:
        yield server


@pytest.mark.full
@pytest.mark.postgres
@pytest.mark.timeout(300)
def test_the_commands_of_the_page_of_postgres(postgres: PostgresServer, tmp_path: Path) -> None:
    """What the page calls localhost is the server of the tests."""
    does = reader(tmp_path, PGHOST="127.0.0.1", PGPORT=str(postgres.port), PGUSER="sessions")
    does.expect_what_it_says(page("postgres"))
